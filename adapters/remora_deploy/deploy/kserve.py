"""Deployment to KServe: an InferenceService, and a ServingRuntime for each image.

In the mode Knative a new version gets no traffic until it is ready and has answered the golden request at its tag's
URL. In the mode Standard Kubernetes replaces pods as new ones get ready. Annotations retain the predictors of the
versions that served, so that a rollback needs no other storage.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remora.system.json_text import read_json
from remora_deploy.deploy import kubernetes, versions
from remora_deploy.deploy.golden import Golden, golden_step
from remora_deploy.deploy.kubernetes import Place, Replicas, condition
from remora_deploy.deploy.plan import (
    GONE,
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
from remora_deploy.deploy.uploads import upload_steps
from remora_deploy.pod import (
    KSERVE_CONTAINER,
    KSERVE_SECRET,
    Mode,
    Scaling,
    inference_service,
    kserve_predictor,
    kserve_runtime,
    start_limit,
)

_KIND = "inferenceservices.serving.kserve.io"
_RUNTIME = "servingruntimes.serving.kserve.io"
_MODE = "serving.kserve.io/deploymentMode"
_TAGS = "serving.kserve.io/enable-tag-routing"
_PREDICTORS = "remora.dev/predictors"
_VERSION = "remora.dev/version"
_FAILED = ("BlockedByFailedLoad", "InvalidSpec")
_INSTALL = "install KServe: infra/knative-gpu/install.sh"
_SHARE = "canaryTrafficPercent"


@dataclass(frozen=True, slots=True)
class KServe:
    """An InferenceService, as a `Platform`."""

    name: str
    place: Place
    mode: Mode = Mode.KNATIVE
    path: str = ""
    gateway: str = ""
    replicas: Replicas | None = None
    title: str = "KServe"

    def checks(self) -> Sequence[Check]:
        """Return the checks before a deployment."""
        pod = self._replicas().pod
        checks = kubernetes.cluster_checks(self.place, pod, _KIND, _KIND, _INSTALL)
        return [*checks, *(kubernetes.feature_check(self.place, pod) if self.mode is Mode.KNATIVE else [])]

    def settled(self, found: State) -> KServe:
        """Return the deployment with the image's digest."""
        return replace(self, replicas=self._replicas().pinned(found))

    def reads(self) -> Sequence[Read]:
        """Return the reads of the InferenceService, its runtimes and pods."""
        label = f"serving.kserve.io/inferenceservice={self.name}"
        return [
            Read("service", lambda _: self.place.get(_KIND, self.name)),
            Read("runtimes", lambda _: self.place.list(_RUNTIME, f"remora.dev/service={self.name}")),
            kubernetes.pods_read(self.place, label),
        ]

    def settle(self, state: State) -> Sequence[Step]:
        """Return no step: an InferenceService may be changed at any time."""
        return ()

    def sized(self, state: State) -> KServe:
        """Return the deployment with the limits of what serves, where none were requested."""
        now = [find(state, f"service.spec.predictor.{key}") for key in ("minReplicas", "maxReplicas")]
        return replace(self, replicas=self._replicas().sized(*now))

    def steps(self, state: State) -> Sequence[Step]:
        """Return the steps to the desired state."""
        replicas = self._replicas()
        steps: list[Step] = list(upload_steps(replicas.source))
        version, serving = self._version(replicas), self._serving(state)
        exists = state["service"] is not None
        if replicas.traffic != 100 and (not exists or self.mode is not Mode.KNATIVE):
            raise RefusedError(f"--traffic needs the mode Knative and a service that serves; {self.name} has not both")
        history, shares = kubernetes.history(state["service"]), self._shares(state)
        if replicas.traffic != 100 and versions.alone(shares) == version:
            raise RefusedError(f"--traffic needs a service that serves another version; {self.name} has none")
        record = versions.after(history, shares, version, replicas.traffic)
        share = find(state, f"service.spec.predictor.{_SHARE}", 100)
        body = replicas.golden.body if replicas.golden else b""
        if exists and version == serving and share == replicas.traffic and record == history:
            return [
                *steps,
                self._wait(replicas.scaling.start_s),
                *golden_step(replicas.golden, self.ask(state, body), body_of),
            ]
        steps += self._runtime_steps(replicas, state)
        trial = exists and self.mode is Mode.KNATIVE
        documents = self._documents(state, record, replicas)
        document = self._document(replicas, history.observed(shares) if trial else record, documents)
        if trial:
            document["spec"]["predictor"][_SHARE] = 0
        if version != serving:
            steps.append(Step("deploy", self.place.apply(document), undo=self._undo(state)))
        steps.append(self._wait(replicas.scaling.start_s))
        steps.append(kubernetes.route_step(self.place, _KIND, self.name, lambda answer: self._url(answer, trial)))
        url, host = kubernetes.ROUTE
        steps += golden_step(replicas.golden, self._request(url, body, host), body_of)
        if trial:
            change = self._change(None if replicas.traffic == 100 else replicas.traffic, record, documents)
            back = self._change(share if version == serving else 0, history, self._retained(state))
            patch = self.place.patch(_KIND, self.name, change)
            steps.append(Step("traffic", patch, undo=(Step("traffic", self.place.patch(_KIND, self.name, back)),)))
            steps.append(self._wait(replicas.scaling.start_s, share=replicas.traffic))
        return steps

    def _change(self, share: int | None, history: versions.History, documents: Mapping[str, Any]) -> dict[str, Any]:
        """Return the change of the newest version's share, with the history that results."""
        annotations = {**kubernetes.record(history), _PREDICTORS: json.dumps(documents)}
        return {"metadata": {"annotations": annotations}, "spec": {"predictor": {_SHARE: share}}}

    def _runtime_steps(self, replicas: Replicas, state: State) -> list[Step]:
        """Return the step that creates the image's runtime, if it does not exist."""
        runtime = self._runtime(replicas)
        name = runtime["metadata"]["name"]
        if name in [find(each, "metadata.name") for each in find(state, "runtimes.items", [])]:
            return []
        drop = Step("clean", self.place.delete(_RUNTIME, name), accepts=GONE)
        return [Step("deploy", self.place.apply(runtime), undo=(drop,))]

    def _undo(self, state: State) -> tuple[Step, ...]:
        before = state["service"]
        if before is None:
            return (Step("deploy", self.place.delete(_KIND, self.name)),)
        # The patch is needed too, because an apply leaves a share that a patch has set.
        share = {"spec": {"predictor": {_SHARE: find(before, f"spec.predictor.{_SHARE}")}}}
        return (
            Step("deploy", self.place.apply(_restored(before))),
            Step("deploy", self.place.patch(_KIND, self.name, share)),
            self._wait(self._replicas().scaling.start_s),
        )

    def _runtime(self, replicas: Replicas) -> dict[str, Any]:
        """Return the runtime, which is named by a digest of itself."""
        labels = {"remora.dev/service": self.name}
        runtime = kserve_runtime({"namespace": self.place.namespace, "labels": labels}, replicas.pod, self.mode)
        runtime["metadata"]["name"] = f"{self.name}-{digest_of(runtime['spec'])}"
        return runtime

    def _predictor(self, replicas: Replicas) -> dict[str, Any]:
        pod, scaling = replicas.pod, replicas.scaling
        if self.mode is Mode.STANDARD:
            scaling = replace(scaling, least=max(scaling.least, 1))
        runtime = self._runtime(replicas)["metadata"]["name"]
        return kserve_predictor(replace(pod, location=pod.location.rstrip("/")), scaling, self.mode, runtime)

    def _version(self, replicas: Replicas) -> str:
        return digest_of(self._predictor(replicas))

    def _document(self, replicas: Replicas, history: versions.History, documents: Mapping[str, Any]) -> dict[str, Any]:
        return self._service(self._version(replicas), self._predictor(replicas), self.mode, history, documents)

    def _service(
        self,
        version: str,
        predictor: Mapping[str, Any],
        mode: Mode,
        history: versions.History,
        documents: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the InferenceService, whose annotations retain what served before."""
        annotations = {_VERSION: version, **kubernetes.record(history), _PREDICTORS: json.dumps(documents)}
        if mode is Mode.KNATIVE:
            annotations[_TAGS] = "true"
        metadata = {"name": self.name, "namespace": self.place.namespace, "annotations": annotations}
        return inference_service(metadata, predictor, mode)

    def _documents(self, state: State, history: versions.History, replicas: Replicas) -> dict[str, Any]:
        """Return the predictors of the versions that a history names, by version."""
        known = {**self._retained(state), self._version(replicas): self._predictor(replicas)}
        return {each.version: known[each.version] for each in history.served if each.version in known}

    def _retained(self, state: State) -> dict[str, Any]:
        """Return the predictors that the annotations retain, and that of the version that serves."""
        text = find(state, "service.metadata.annotations", {}).get(_PREDICTORS, "{}")
        try:
            found = read_json(text)
        except ValueError:
            found = {}
        now = find(state, "service.spec.predictor")
        if now is not None:
            found[self._serving(state)] = {key: value for key, value in now.items() if key != _SHARE}
        return dict(found)

    def _wait(self, start_s: int, share: int | None = None) -> Step:
        """Return the step that waits until the newest version is ready and has its share."""

        def until(answer: Any) -> Progress:
            status, reason = condition(answer)
            if reason == "waiting for the controller":
                return Progress(False, reason)
            failure = find(answer, "status.modelStatus", {})
            if failure.get("transitionStatus") in _FAILED:
                detail = find(failure, "lastFailureInfo.message", "") or failure["transitionStatus"]
                return Progress(failure=f"the new version is not ready: {detail}")
            component = find(answer, "status.components.predictor", {})
            newest = component.get("latestReadyRevision") == component.get("latestCreatedRevision")
            done = status == "True" and newest and failure.get("transitionStatus", "UpToDate") == "UpToDate"
            if done and share is not None and _newest_share(answer) != share:
                return Progress(False, "moving traffic")
            return Progress(done, "ready" if done else reason or "starting")

        return Step("deploy", self.place.get(_KIND, self.name), until, every_s=3.0, limit_s=float(start_s))

    # -- the other commands ------------------------------------------------------------------------------------------

    def differences(self, state: State) -> Sequence[str]:
        """Return how the InferenceService differs from the desired state."""
        replicas = self._replicas()
        history = kubernetes.history(state["service"])
        return versions.differences(history, self.shares(state), self._version(replicas), replicas.traffic)

    def shares(self, state: State) -> dict[str, int]:
        """Return the percentage of each version, as the InferenceService's status has it."""
        return self._divided(state, _newest_share(state["service"]))

    def _shares(self, state: State) -> dict[str, int]:
        """Return the share of each version in the InferenceService's specification."""
        return self._divided(state, find(state, f"service.spec.predictor.{_SHARE}", 100))

    def _divided(self, state: State, newest: int) -> dict[str, int]:
        """Return the shares, of which that of the newest version is known."""
        version = self._serving(state)
        if not version:
            return {}
        history = kubernetes.history(state["service"])
        stable = next((each.version for each in reversed(history.served) if each.version != version), "")
        found = {stable or "an earlier version": 100 - newest, version: newest}
        return {name: share for name, share in found.items() if share}

    def status(self, state: State) -> Sequence[str]:
        """Return the InferenceService's state in lines."""
        if state["service"] is None:
            return []
        status, reason = condition(state["service"])
        share = find(state, f"service.spec.predictor.{_SHARE}", 100)
        return [
            f"{self.name}: {'Ready' if status == 'True' else f'not ready: {reason}'}",
            f"model: {find(state, 'service.spec.predictor.model.storageUri', 'none')}, {share} percent",
            f"url: {find(state, 'service.status.url', 'none')}",
            versions.rollback_line(self.target, state),
        ]

    def reason(self, state: State) -> str:
        """Return the reason of the model's or a pod's failure."""
        message = find(state, "service.status.modelStatus.lastFailureInfo.message", "")
        return str(message) or kubernetes.pod_reason(state)

    def logs(self, state: State, lines: int) -> Sequence[Call]:
        """Return the read of the pods' logs."""
        label = f"serving.kserve.io/inferenceservice={self.name}"
        return kubernetes.log_calls(self.place, label, lines, KSERVE_CONTAINER)

    def log_text(self, answer: Any) -> str:
        """Return the text of the logs."""
        return str(answer)

    def ask(self, state: State, body: bytes) -> Call:
        """Return the request to the service's URL."""
        return self._request(str(find(state, "service.status.url", "")), body)

    def answer_of(self, answer: Any) -> bytes:
        """Return the body of a response."""
        return body_of(answer)

    def target(self, state: State) -> str:
        """Return the version that a rollback returns to. Raises RefusedError."""
        history = kubernetes.history(state["service"])
        return history.target(self.name, self._shares(state), existing=self._retained(state))

    def rollback(self, state: State) -> Sequence[Step]:
        """Return the steps to the version that served alone before, which a share leaves in place."""
        target, shares = self.target(state), self._shares(state)
        history = kubernetes.history(state["service"]).observed(shares).rolled_back(target, shares)
        retained = self._retained(state)
        documents = {each.version: retained[each.version] for each in history.served if each.version in retained}
        mode = Mode(find(state, "service.metadata.annotations", {}).get(_MODE, Mode.KNATIVE))
        document = self._service(target, retained[target], mode, history, documents)
        steps = [Step("traffic", self.place.apply(document))]
        if find(state, f"service.spec.predictor.{_SHARE}") is not None:  # because an apply leaves what a patch has set
            change = {"spec": {"predictor": {_SHARE: None}}}
            steps.append(Step("traffic", self.place.patch(_KIND, self.name, change)))
        return [*steps, self._wait(start_limit(Scaling().start_s, gpus=1), share=100)]  # because it may need a GPU

    def undeploy(self, state: State) -> Sequence[Step]:
        """Return the steps that delete the InferenceService and its runtimes."""
        steps = [] if state["service"] is None else [Step("clean", self.place.delete(_KIND, self.name))]
        names = [str(find(each, "metadata.name")) for each in find(state, "runtimes.items", [])]
        return [*steps, *(Step("clean", self.place.delete(_RUNTIME, name), accepts=GONE) for name in names)]

    def advice(self, state: State) -> Sequence[tuple[str, str]]:
        """Return the commands that follow a deployment."""
        return kubernetes.advice("kserve", self.name, self.place, self._replicas())

    # -- parts -------------------------------------------------------------------------------------------------------

    def _replicas(self) -> Replicas:
        return desired(self.replicas, self.name)

    def _request(self, url: str, body: bytes, host: Any = "") -> Call:
        return kubernetes.request_call(url, kubernetes.path_of(self.name, self.path), body, self.gateway, host)

    def _serving(self, state: State) -> str:
        return str(find(state, "service.metadata.annotations", {}).get(_VERSION, ""))

    def _url(self, service: Any, trial: bool) -> str:
        if not trial:
            return str(find(service, "status.url", ""))
        targets = find(service, "status.components.predictor.traffic", [])
        return next((str(each["url"]) for each in targets if each.get("tag") == "latest" and each.get("url")), "")


def _newest_share(service: Any) -> int:
    """Return the percentage of the newest revision; 100 where the mode has no shares."""
    targets = find(service or {}, "status.components.predictor.traffic", [])
    if not any(each.get("percent") for each in targets):
        return 100
    return sum(int(each.get("percent") or 0) for each in targets if each.get("latestRevision"))


def _restored(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object as it was, without what the cluster sets."""
    metadata = {key: find(before, f"metadata.{key}") for key in ("name", "namespace", "labels", "annotations")}
    spec = before["spec"]
    kind = {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService"}
    return {**kind, "metadata": {key: value for key, value in metadata.items() if value}, "spec": spec}


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the flags that identify the cluster, and those of requests."""
    kubernetes.add_place(parser)
    kubernetes.add_request_flags(parser)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a deployment."""
    kubernetes.add_pod_flags(parser, least=0)
    parser.add_argument(
        "--mode",
        choices=[str(each) for each in Mode],
        default=str(Mode.KNATIVE),
        help="KServe's deployment mode (default %(default)s)",
    )


def build(options: argparse.Namespace, golden: Golden | None) -> KServe:
    """Return the InferenceService of parsed options. Raises ValueError."""
    replicas = kubernetes.replicas_of(options, golden)
    if replicas.pod.secret:
        raise ValueError(f"--storage-secret: {KSERVE_SECRET}")
    return replace(find_service(options), replicas=replicas, mode=Mode(options.mode))


def find_service(options: argparse.Namespace) -> KServe:
    """Return an InferenceService by its name, without a desired state. Raises ValueError."""
    place = kubernetes.place_of(options)
    return KServe(options.name, place, path=options.path, gateway=options.gateway)


connect = kubernetes.connect
