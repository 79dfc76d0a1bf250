"""Deployment to Knative Serving: a Service with one revision for each version.

A new revision gets no traffic until it is ready and has answered the golden request at its tag's URL.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remora_deploy.deploy import kubernetes, versions
from remora_deploy.deploy.golden import Golden, golden_step
from remora_deploy.deploy.kubernetes import Place, Replicas, condition
from remora_deploy.deploy.plan import (
    ANY,
    Call,
    Check,
    Progress,
    Read,
    RefusedError,
    State,
    Step,
    desired,
    digest_of,
    find,
)
from remora_deploy.deploy.programs import body_of
from remora_deploy.deploy.shares import Shares, main_of, shares_of, shown, split, tagged
from remora_deploy.deploy.uploads import upload_steps
from remora_deploy.pod import knative_service

_TAG = "candidate"
_KIND = "services.serving.knative.dev"
_REVISION = "revisions.serving.knative.dev"
_REVISION_KEY = "revisionName"
_INSTALL = "install Knative Serving: infra/knative-gpu/install.sh"


@dataclass(frozen=True, slots=True)
class Knative:
    """A Knative Service, as a `Platform`."""

    name: str
    place: Place
    path: str = ""
    gateway: str = ""
    replicas: Replicas | None = None
    title: str = "Knative"

    def checks(self) -> Sequence[Check]:
        """Return the checks before a deployment."""
        pod = self._replicas().pod
        checks = kubernetes.cluster_checks(self.place, pod, _KIND, _KIND, _INSTALL)
        return [*checks, *kubernetes.feature_check(self.place, pod)]

    def settled(self, found: State) -> Knative:
        """Return the deployment with the image's digest."""
        return replace(self, replicas=self._replicas().pinned(found))

    def reads(self) -> Sequence[Read]:
        """Return the reads of the Service, its revisions and pods."""
        label = f"serving.knative.dev/service={self.name}"
        return [
            Read("service", lambda _: self.place.get(_KIND, self.name)),
            Read("revisions", lambda _: self.place.list(_REVISION, label)),
            kubernetes.pods_read(self.place, label),
        ]

    def settle(self, state: State) -> Sequence[Step]:
        """Return no step: a Service may be changed at any time."""
        return ()

    def sized(self, state: State) -> Knative:
        """Return the deployment with the limits of what serves, where none were requested."""
        main = main_of(self._shares(state))
        revisions = {find(each, "metadata.name"): each for each in find(state, "revisions.items", [])}
        found = find(revisions.get(main, {}), "metadata.annotations", {})
        now = [found.get(f"autoscaling.knative.dev/{key}-scale") for key in ("min", "max")]
        return replace(self, replicas=self._replicas().sized(*now))

    def steps(self, state: State) -> Sequence[Step]:
        """Return the steps to the desired state."""
        replicas = self._replicas()
        steps: list[Step] = list(upload_steps(replicas.source))
        service = self._document(replicas)
        revision = service["spec"]["template"]["metadata"]["name"]
        shares = self._shares(state)
        history = kubernetes.history(state["service"])
        stable = versions.stable_of(history, shares, revision)
        if replicas.traffic != 100 and not stable:
            raise RefusedError(f"--traffic needs a service that serves another version; {self.name} has none")
        final = split(stable, revision, replicas.traffic)
        record = versions.after(history, shares, revision, replicas.traffic)
        is_recorded = record == history.observed(shares)  # what serves alone is known without a record
        if shares == final and state["service"] is not None and self._is_ready(state) and is_recorded:
            return [*steps, *golden_step(replicas.golden, self.ask(state, self._golden_body()), body_of)]
        waiting = shares if stable else {revision: 100}
        targets = find(state, "service.spec.traffic", [])
        is_tagged = any(each.get(_REVISION_KEY) == revision and each.get("tag") == _TAG for each in targets)
        if shares != waiting or revision not in self._revisions(state) or not is_tagged:
            service["spec"]["traffic"] = _targets(waiting, revision)
            service["metadata"] |= kubernetes.annotated(history)
            steps.append(Step("deploy", self.place.apply(service), undo=self._undo(state, revision)))
        steps.append(self._wait_revision(revision, replicas.scaling.start_s))
        steps.append(kubernetes.route_step(self.place, _KIND, self.name, self._tag_url))
        url, host = kubernetes.ROUTE
        steps += golden_step(replicas.golden, self._request(url, self._golden_body(), host), body_of)
        if final != waiting or (stable and not is_recorded):
            change = _change(_targets(final, revision), record)
            back = _change(_targets(waiting, revision), history)
            patch = self.place.patch(_KIND, self.name, change)
            steps.append(Step("traffic", patch, undo=(Step("traffic", self.place.patch(_KIND, self.name, back)),)))
        steps.append(self._wait_service(final))
        return steps

    def _undo(self, state: State, revision: str) -> tuple[Step, ...]:
        """Return the steps that restore the Service, or delete a new one."""
        earlier = state["service"]
        if earlier is None:
            return (Step("deploy", self.place.delete(_KIND, self.name)),)
        metadata = {key: find(earlier, f"metadata.{key}") for key in ("name", "namespace", "labels")}
        metadata["annotations"] = kubernetes.record(kubernetes.history(earlier))
        old = {
            "apiVersion": "serving.knative.dev/v1",
            "kind": "Service",
            "metadata": {key: value for key, value in metadata.items() if value},
            "spec": earlier["spec"],
        }
        drop = Step("clean", self.place.delete(_REVISION, revision))
        keep = revision in self._revisions(state)
        return (Step("deploy", self.place.apply(old)), *(() if keep else (drop,)))

    def _document(self, replicas: Replicas) -> dict[str, Any]:
        """Return the Service, whose revision is named by a digest of its template."""
        metadata = {"name": self.name, "namespace": self.place.namespace}
        service = knative_service(metadata, replicas.pod, replicas.scaling)
        template = service["spec"]["template"]
        template["metadata"]["name"] = f"{self.name}-{digest_of(template)}"
        return service

    def _wait_revision(self, revision: str, startup_s: int) -> Step:
        """Return the step that waits until a revision is ready, or gives Knative's reason."""

        def until(answer: Any) -> Progress:
            if answer is None:
                return Progress(False, "waiting for the revision")
            status, reason = condition(answer)
            if status == "False":
                return Progress(failure=f"revision {revision} is not ready: {reason}")
            return Progress(status == "True", "ready" if status == "True" else reason or "starting")

        get = self.place.get(_REVISION, revision)
        return Step("deploy", get, until, accepts=kubernetes.NEW, limit_s=float(startup_s), every_s=3.0)

    def _wait_service(self, shares: Shares) -> Step:
        def until(answer: Any) -> Progress:
            status, reason = condition(answer)
            if status == "False":
                return Progress(failure=f"the service is not ready: {reason}")
            same = shares_of(find(answer, "status.traffic", []), _REVISION_KEY) == dict(shares)
            return Progress(status == "True" and same, "serves" if same else "moving traffic")

        return Step("traffic", self.place.get(_KIND, self.name), until, every_s=2.0, limit_s=600.0)

    # -- the other commands ------------------------------------------------------------------------------------------

    def differences(self, state: State) -> Sequence[str]:
        """Return how the traffic differs from the desired one."""
        replicas = self._replicas()
        revision = self._document(replicas)["spec"]["template"]["metadata"]["name"]
        return versions.differences(
            kubernetes.history(state["service"]), self.shares(state), revision, replicas.traffic
        )

    def shares(self, state: State) -> dict[str, int]:
        """Return the percentage of each revision, as the Service's status has it."""
        return shares_of(find(state, "service.status.traffic", []), _REVISION_KEY, self._latest(state))

    def status(self, state: State) -> Sequence[str]:
        """Return the Service's state in lines."""
        if state["service"] is None:
            return []
        status, reason = condition(state["service"])
        return [
            f"{self.name}: {'Ready' if status == 'True' else f'not ready: {reason}'}",
            f"traffic: {shown(self._shares(state))}",
            f"url: {find(state, 'service.status.url', 'none')}",
            versions.rollback_line(self.target, state),
        ]

    def reason(self, state: State) -> str:
        """Return why a pod does not start."""
        return kubernetes.pod_reason(state)

    def logs(self, state: State, lines: int) -> Sequence[Call]:
        """Return the read of the pods' logs."""
        return kubernetes.log_calls(self.place, f"serving.knative.dev/service={self.name}", lines)

    def log_text(self, answer: Any) -> str:
        """Return the text of the logs."""
        return str(answer)

    def ask(self, state: State, body: bytes) -> Call:
        """Return the request to the Service's URL."""
        return self._request(str(find(state, "service.status.url", "")), body)

    def answer_of(self, answer: Any) -> bytes:
        """Return the body of a response."""
        return body_of(answer)

    def target(self, state: State) -> str:
        """Return the revision that a rollback returns to. Raises RefusedError."""
        history = kubernetes.history(state["service"])
        return history.target(self.name, self._shares(state), existing=self._revisions(state))

    def rollback(self, state: State) -> Sequence[Step]:
        """Return the steps to the revision that served alone before.

        A request at its tag starts a pod before the traffic moves, because a revision without a share has none.
        """
        target, shares = self.target(state), self._shares(state)
        history = kubernetes.history(state["service"])
        final = history.observed(shares).rolled_back(target, shares)
        steps: list[Step] = []
        if not shares.get(target):
            change = {"spec": {"traffic": _targets(shares, target)}}
            steps.append(Step("traffic", self.place.patch(_KIND, self.name, change)))
            steps.append(kubernetes.route_step(self.place, _KIND, self.name, self._tag_url))
            steps.append(self._wake())
        change = _change([{_REVISION_KEY: target, "percent": 100}], final)
        return [*steps, Step("traffic", self.place.patch(_KIND, self.name, change)), self._wait_service({target: 100})]

    def undeploy(self, state: State) -> Sequence[Step]:
        """Return the step that deletes the Service with its revisions."""
        return [] if state["service"] is None else [Step("clean", self.place.delete(_KIND, self.name))]

    def advice(self, state: State) -> Sequence[tuple[str, str]]:
        """Return the commands that follow a deployment."""
        replicas = self._replicas()
        return kubernetes.advice("knative", self.name, self.place, replicas)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _replicas(self) -> Replicas:
        return desired(self.replicas, self.name)

    def _golden_body(self) -> bytes:
        golden = self._replicas().golden
        return golden.body if golden else b""

    def _request(self, url: str, body: bytes, host: Any = "") -> Call:
        return kubernetes.request_call(url, kubernetes.path_of(self.name, self.path), body, self.gateway, host)

    def _is_ready(self, state: State) -> bool:
        return condition(state["service"])[0] == "True"

    def _tag_url(self, service: Any) -> str:
        if condition(service)[1] == "waiting for the controller":
            return ""
        targets = find(service, "status.traffic", [])
        return next((str(each["url"]) for each in targets if each.get("tag") == _TAG and each.get("url")), "")

    def _wake(self) -> Step:
        """Return the step that asks a revision for its health, which starts a pod of it."""
        url, host = kubernetes.ROUTE
        call = kubernetes.request_call(url, "/v2/health/ready", b"", self.gateway, host)
        return Step("traffic", call._replace(operation="GET"), accepts=ANY)

    def _latest(self, state: State) -> str:
        return str(find(state, "service.status.latestReadyRevisionName", ""))

    def _shares(self, state: State) -> dict[str, int]:
        """Return the share of each revision in the Service's specification."""
        return shares_of(find(state, "service.spec.traffic", []), _REVISION_KEY, self._latest(state))

    def _revisions(self, state: State) -> list[str]:
        """Return the names of the revisions."""
        return [str(find(each, "metadata.name")) for each in find(state, "revisions.items", [])]


def _change(targets: Sequence[Mapping[str, Any]], history: versions.History) -> dict[str, Any]:
    """Return the change of the traffic, with the history that results."""
    return {"metadata": {"annotations": kubernetes.record(history)}, "spec": {"traffic": list(targets)}}


def _targets(shares: Shares, revision: str) -> list[dict[str, Any]]:
    return tagged(shares, _REVISION_KEY, revision, _TAG)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the flags that identify the cluster, and those of requests."""
    kubernetes.add_place(parser)
    kubernetes.add_request_flags(parser)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a deployment."""
    kubernetes.add_pod_flags(parser, least=0)


def build(options: argparse.Namespace, golden: Golden | None) -> Knative:
    """Return the Service of parsed options. Raises ValueError."""
    return replace(find_service(options), replicas=kubernetes.replicas_of(options, golden))


def find_service(options: argparse.Namespace) -> Knative:
    """Return a Service by its name, without a desired state. Raises ValueError."""
    return Knative(options.name, kubernetes.place_of(options), options.path, options.gateway)


connect = kubernetes.connect
