"""Deployment to Google Cloud Run: a service with one revision for each version.

A new revision gets no traffic until it is ready and has answered the golden request at its tag's URL.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remora_deploy.deploy import google, versions
from remora_deploy.deploy.golden import Golden, golden_step
from remora_deploy.deploy.google import operation_step
from remora_deploy.deploy.images import Needs, pinned
from remora_deploy.deploy.plan import (
    GONE,
    Call,
    Check,
    Kept,
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
from remora_deploy.deploy.rest import rest, service_call
from remora_deploy.deploy.shares import (
    Shares,
    check_replicas,
    check_share,
    limits_of,
    main_of,
    shares_of,
    shown,
    split,
    tagged,
)
from remora_deploy.deploy.uploads import Source, source_of, upload_steps
from remora_deploy.pod import with_required_gpu

add_place, connect = google.add_place, google.connect
_HOST = "run.googleapis.com"
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
_TAG = "candidate"
_BY_REVISION = "TRAFFIC_TARGET_ALLOCATION_TYPE_REVISION"
_PERMISSIONS = ("run.services.create", "run.services.update", "iam.serviceAccounts.actAs")
_CUDA = {"nvidia-l4": 12, "nvidia-rtx-pro-6000": 13}
"""CUDA of the driver that the platform has for a GPU: 535 and 580, which cannot be chosen."""
_GPU_CPUS = {"nvidia-l4": ("4", "16Gi"), "nvidia-rtx-pro-6000": ("20", "80Gi")}
_LIMITS = (0, 4)
"""Limits of the instances of a new service."""
_STARTUP_S = 240
"""Most time of a start that the platform allows."""
_MODELS = "REMORA_MODEL_REPOSITORY"
_ANNOTATIONS = "remora.dev/"
"""Prefix of the annotations that retain what served before."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Desired state of a service.

    Attributes:
        image: container image in Artifact Registry.
        source: the models in Google Cloud Storage.
        cpu, memory: resources of an instance.
        gpu: GPU type, "" for none.
        least, most: limits of the instances.
        concurrency: requests in flight per instance.
        account: service account; "" for the project's default.
        environ: environment of the server.
        traffic: percentage of the requests for the new revision; 100 replaces the current one.
        requested: limits that the user gave, None for those of what serves.
    """

    image: str
    source: Source
    cpu: str = "2"
    memory: str = "4Gi"
    gpu: str = ""
    least: int = 0
    most: int = 4
    concurrency: int = 16
    account: str = ""
    environ: tuple[tuple[str, str], ...] = ()
    traffic: int = 100
    golden: Golden | None = None
    requested: tuple[int | None, int | None] = (None, None)

    def check(self) -> None:
        """Raise ValueError for values that the platform would refuse."""
        check_replicas(self.least, self.most)
        check_share(self.traffic)
        if self.gpu and self.gpu not in _CUDA:
            raise ValueError(f"--gpu={self.gpu}: expected one of {', '.join(_CUDA)}")
        if not 1 <= self.concurrency <= 1000:
            raise ValueError(f"--concurrency={self.concurrency}: expected 1 to 1000")


@dataclass(frozen=True, slots=True)
class CloudRun:
    """A Cloud Run service, as a `Platform`."""

    name: str
    project: str
    region: str
    path: str = ""
    wanted: Wanted | None = None
    title: str = "Cloud Run"

    def checks(self) -> Sequence[Check]:
        """Return the checks before a deployment."""
        wanted = self._wanted()
        metric = "nvidia" if wanted.gpu else "cpu_allocation"
        needs = Needs("container", gpu=bool(wanted.gpu), cuda=_CUDA.get(wanted.gpu, 0))
        api = google.Api(_HOST, _PERMISSIONS, metric)
        return google.checks(self.project, self.region, api, wanted.image, needs, wanted.source, wanted.account)

    def settled(self, found: State) -> CloudRun:
        """Return the deployment with the image's digest."""
        wanted = self._wanted()
        return replace(self, wanted=replace(wanted, image=pinned(wanted.image, found)))

    def reads(self) -> Sequence[Read]:
        """Return the reads of the service and its revisions."""
        revisions = rest("GET", _HOST, f"{self._path}/revisions", pageSize="100")
        return [
            Read("service", lambda _: rest("GET", _HOST, self._path)),
            Read("revisions", lambda state: revisions if state["service"] else None),
        ]

    def settle(self, state: State) -> Sequence[Step]:
        """Wait for a change in progress."""
        if not find(state, "service.reconciling"):
            return ()
        until = lambda answer: Progress(not answer.get("reconciling"), "an earlier change")  # noqa: E731
        return (Step("deploy", rest("GET", _HOST, self._path), until),)

    def sized(self, state: State) -> CloudRun:
        """Return the deployment with the limits of what serves, where none were requested."""
        wanted = self._wanted()
        main = main_of(self._shares(state))
        revisions = find(state, "revisions.revisions", [])
        scaling = find(
            next((each for each in revisions if str(each.get("name", "")).endswith(f"/{main}")), {}), "scaling", {}
        )
        now = int(scaling.get("minInstanceCount", _LIMITS[0])), int(scaling.get("maxInstanceCount", _LIMITS[1]))
        least, most = limits_of(wanted.requested, now)
        return replace(self, wanted=replace(wanted, least=least, most=most))

    def steps(self, state: State) -> Sequence[Step]:
        """Return the steps to the desired state."""
        wanted = self._wanted()
        steps: list[Step] = list(upload_steps(wanted.source))
        template = self._template(wanted)
        revision = template["revision"]
        shares = self._shares(state)
        history = self._history(state)
        stable = versions.stable_of(history, shares, revision)
        if wanted.traffic != 100 and not stable:
            raise RefusedError(f"--traffic needs a service that serves another version; {self.name} has none")
        final = split(stable, revision, wanted.traffic)
        record = versions.after(history, shares, revision, wanted.traffic)
        body = wanted.golden.body if wanted.golden else b""
        if shares == final and self._is_ready(state) and record == history:
            return [*steps, *golden_step(wanted.golden, self.ask(state, body), body_of)]
        waiting = shares if stable else {revision: 100}
        with_tag = {each.get("revision") for each in find(state, "service.traffic", []) if each.get("tag") == _TAG}
        if shares != waiting or revision not in with_tag or revision not in self._revisions(state):
            service: dict[str, Any] = {"template": template, "traffic": _targets(waiting, revision)}
            if not stable:
                service["annotations"] = self._annotations(state, record)
            steps += self._change(service, revision, state)
        steps += [self._tagged(), *golden_step(wanted.golden, self._request(Kept("route", "url"), body), body_of)]
        if final != waiting or (stable and record != history):
            steps += self._move(
                self._traffic(state, _targets(final, revision), record),
                self._traffic(state, _targets(waiting, revision), history),
            )
        return steps

    def _traffic(self, state: State, targets: Sequence[Any], history: versions.History) -> dict[str, Any]:
        """Return the change of the traffic, with the history that results."""
        return {"traffic": list(targets), "annotations": self._annotations(state, history)}

    def _annotations(self, state: State, history: versions.History) -> dict[str, str]:
        return {**find(state, "service.annotations", {}), **versions.texts_of(history, _ANNOTATIONS)}

    def _history(self, state: State) -> versions.History:
        """Return what the service's annotations retain."""
        return versions.history_of(find(state, "service.annotations", {}), _ANNOTATIONS)

    def _change(self, service: Mapping[str, Any], revision: str, state: State) -> list[Step]:
        """Return the steps that create or update the service, and take that back on failure."""
        earlier = state["service"]
        if earlier is None:
            delete = (Step("deploy", rest("DELETE", _HOST, self._path, name=self.name), accepts=GONE, keep="undo"),)
            undo: tuple[Step, ...] = (*delete, operation_step(_HOST, "v2", "undo"))
            parent, _, _ = self._path.rpartition("/")
            call = rest("POST", _HOST, parent, dict(service), self.name, serviceId=self.name)
        else:
            old = {key: earlier[key] for key in ("template", "traffic", "annotations") if key in earlier}
            back = rest("PATCH", _HOST, self._path, old, self.name, updateMask="template,traffic,annotations")
            undo = (Step("deploy", back, keep="undo"), operation_step(_HOST, "v2", "undo"))
            if revision not in self._revisions(state):
                drop = rest("DELETE", _HOST, f"{self._path}/revisions/{revision}", name=revision)
                undo = (*undo, Step("clean", drop, accepts=GONE))
            call = rest("PATCH", _HOST, self._path, dict(service), self.name, updateMask=",".join(service))
        return [
            Step("deploy", call, keep="change", undo=undo),
            operation_step(_HOST, "v2", "change"),
            self._wait(),
        ]

    def _move(self, traffic: Mapping[str, Any], before: Mapping[str, Any]) -> list[Step]:
        """Return the steps that change the shares of the traffic."""

        def change(body: Mapping[str, Any], name: str) -> tuple[Step, Step]:
            call = rest("PATCH", _HOST, self._path, dict(body), self.name, updateMask="traffic,annotations")
            return Step("traffic", call, keep=name), operation_step(_HOST, "v2", name, "traffic")

        step, wait = change(traffic, "move")
        return [replace(step, undo=change(before, "unmove")), wait, self._wait()]

    def _template(self, wanted: Wanted) -> dict[str, Any]:
        """Return the template of a revision, which is named by its digest."""
        cpu, memory = _GPU_CPUS.get(wanted.gpu, (wanted.cpu, wanted.memory))
        limits = {"cpu": cpu, "memory": memory}
        variables = {_MODELS: wanted.source.location, **with_required_gpu(dict(wanted.environ), gpu=bool(wanted.gpu))}
        if wanted.gpu:
            limits["nvidia.com/gpu"] = "1"
        probe = {"path": "/v2/health/ready", "port": 8080}
        container = {
            "image": wanted.image,
            "command": ["python"],
            "args": ["-m", "remora_adapters.cloud_run"],
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "resources": {"limits": limits, "cpuIdle": not wanted.gpu, "startupCpuBoost": True},
            "ports": [{"name": "http1", "containerPort": 8080}],
            "startupProbe": {"httpGet": probe, "periodSeconds": 2, "failureThreshold": _STARTUP_S // 2},
        }
        template: dict[str, Any] = {
            "containers": [container],
            "scaling": {"minInstanceCount": wanted.least, "maxInstanceCount": wanted.most},
            "maxInstanceRequestConcurrency": wanted.concurrency,
            "timeout": "300s",
        }
        if wanted.account:
            template["serviceAccount"] = wanted.account
        if wanted.gpu:
            template |= {"nodeSelector": {"accelerator": wanted.gpu}, "gpuZonalRedundancyDisabled": True}
        return {"revision": f"{self.name}-{digest_of(template)}", **template}

    def _wait(self) -> Step:
        """Return the step that waits until the service is ready."""

        def until(answer: Any) -> Progress:
            state = find(answer, "terminalCondition.state", "")
            if state == "CONDITION_FAILED":
                return Progress(failure=f"the service is not ready: {find(answer, 'terminalCondition.message', '')}")
            return Progress(state == "CONDITION_SUCCEEDED" and not answer.get("reconciling"), "starting")

        return Step("deploy", rest("GET", _HOST, self._path), until, limit_s=900.0)

    def _tagged(self) -> Step:
        """Return the step that waits for the URL of the candidate."""

        def url(answer: Any) -> str:
            found = find(answer, "trafficStatuses", [])
            return next((str(each["uri"]) for each in found if each.get("tag") == _TAG and each.get("uri")), "")

        until = lambda answer: Progress(bool(url(answer)), "waiting for the route")  # noqa: E731
        call = rest("GET", _HOST, self._path)
        return Step("deploy", call, until, limit_s=300.0, keep="route", pick=lambda answer: {"url": url(answer)})

    # -- the other commands ------------------------------------------------------------------------------------------

    def differences(self, state: State) -> Sequence[str]:
        """Return how the traffic differs from the desired one."""
        wanted = self._wanted()
        revision = self._template(wanted)["revision"]
        return versions.differences(self._history(state), self.shares(state), revision, wanted.traffic)

    def shares(self, state: State) -> dict[str, int]:
        """Return the percentage of each revision, as the service's status has it."""
        return shares_of(find(state, "service.trafficStatuses", []), "revision", self._latest(state))

    def status(self, state: State) -> Sequence[str]:
        """Return the service's state in lines."""
        if state["service"] is None:
            return []
        ready = "Ready" if self._is_ready(state) else f"not ready: {self.reason(state)}"
        return [
            f"{self.name}: {ready}",
            f"traffic: {shown(self._shares(state))}",
            f"url: {find(state, 'service.uri', 'none')}",
            versions.rollback_line(self.target, state),
        ]

    def reason(self, state: State) -> str:
        """Return Cloud Run's reason for a failure."""
        for each in find(state, "revisions.revisions", []):
            for one in each.get("conditions", []):
                if one.get("state") == "CONDITION_FAILED":
                    return str(one.get("message", ""))
        return str(find(state, "service.terminalCondition.message", ""))

    def logs(self, state: State, lines: int) -> Sequence[Call]:
        """Return the read of the service's log entries."""
        return [self._log(lines)] if state["service"] else []

    def _log(self, lines: int) -> Call:
        labels = f'resource.labels.service_name="{self.name}" AND resource.labels.location="{self.region}"'
        return google.log_call(self.project, f'resource.type="cloud_run_revision" AND {labels}', lines)

    def log_text(self, answer: Any) -> str:
        """Return the text of log entries, the newest last."""
        return google.log_text(answer)

    def ask(self, state: State, body: bytes) -> Call:
        """Return the request to the service's URL, with an identity token."""
        return self._request(find(state, "service.uri", ""), body)

    def answer_of(self, answer: Any) -> bytes:
        """Return the body of a response."""
        return body_of(answer)

    def target(self, state: State) -> str:
        """Return the revision that a rollback returns to. Raises RefusedError."""
        return self._history(state).target(self.name, self._shares(state), existing=self._revisions(state))

    def rollback(self, state: State) -> Sequence[Step]:
        """Return the steps to the revision that served alone before."""
        target, shares = self.target(state), self._shares(state)
        final = self._history(state).observed(shares).rolled_back(target, shares)
        targets = [{"type": _BY_REVISION, "revision": target, "percent": 100}]
        return self._move(self._traffic(state, targets, final), {})

    def undeploy(self, state: State) -> Sequence[Step]:
        """Return the steps that delete the service with its revisions."""
        if state["service"] is None:
            return []
        delete = Step("clean", rest("DELETE", _HOST, self._path, name=self.name), keep="delete")
        return [delete, operation_step(_HOST, "v2", "delete", "clean")]

    def advice(self, state: State) -> Sequence[tuple[str, str]]:
        """Return the commands that follow a deployment."""
        wanted = self._wanted()
        idle = "nothing while idle" if not wanted.least else f"{wanted.least} instances while idle"
        return google.next_commands("cloud-run", self.name, self.project, self.region, f"by instance time, {idle}")

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> str:
        return f"/v2/projects/{self.project}/locations/{self.region}/services/{self.name}"

    def _wanted(self) -> Wanted:
        return desired(self.wanted, self.name)

    def _request(self, url: Any, body: bytes) -> Call:
        path = self.path or f"/v2/models/{self.name}/infer"
        return service_call(url, path, body)

    def _is_ready(self, state: State) -> bool:
        return bool(find(state, "service.terminalCondition.state") == "CONDITION_SUCCEEDED")

    def _latest(self, state: State) -> str:
        return str(find(state, "service.latestReadyRevision", "")).rpartition("/")[2]

    def _shares(self, state: State) -> dict[str, int]:
        """Return the share of each revision in the service's specification."""
        return shares_of(find(state, "service.traffic", []), "revision", self._latest(state))

    def _revisions(self, state: State) -> list[str]:
        """Return the names of the revisions."""
        return [str(each.get("name", "")).rpartition("/")[2] for each in find(state, "revisions.revisions", [])]


def _targets(shares: Shares, revision: str) -> list[dict[str, Any]]:
    return tagged(shares, "revision", revision, _TAG, type=_BY_REVISION)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a deployment."""
    google.add_size(parser, "instances", *_LIMITS)
    add = parser.add_argument
    add("--cpu", default="2", metavar="N", help="processors (default %(default)s)")
    add("--memory", default="4Gi", metavar="SIZE", help="memory, with the weights twice (default %(default)s)")
    add("--gpu", default="", metavar="TYPE", help=f"GPU: {', '.join(_CUDA)}")
    add("--concurrency", type=int, default=16, metavar="N", help="requests in flight per instance (default 16)")
    add("--path", default="", metavar="PATH", help="path of the golden request (default /v2/models/NAME/infer)")


def build(options: argparse.Namespace, golden: Golden | None) -> CloudRun:
    """Return the service of parsed options. Raises ValueError."""
    wanted = Wanted(
        options.image,
        source_of(options.model, options.bucket, options.name, "gs://"),
        options.cpu,
        options.memory,
        options.gpu,
        *limits_of((options.min, options.max), _LIMITS),
        options.concurrency,
        options.service_account,
        options.environ,
        options.traffic,
        golden,
        (options.min, options.max),
    )
    wanted.check()
    return replace(find_service(options), wanted=wanted, path=options.path)


def find_service(options: argparse.Namespace) -> CloudRun:
    """Return a service by its name, without a desired state. Raises ValueError."""
    if not _NAME.fullmatch(options.name):
        raise ValueError(f"{options.name}: expected at most 40 lower-case letters, digits and hyphens")
    return CloudRun(options.name, options.project, options.region)
