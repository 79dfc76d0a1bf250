"""Deployment to KServe: an InferenceService, and a ServingRuntime for each image.

In the mode Knative a new version gets no traffic until it is ready and has answered the golden request at its tag's
URL. In the mode Standard Kubernetes replaces pods as new ones get ready. The version before is retained as an
annotation, so that a rollback needs no other storage.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remora.system.json_text import read_json
from remora_deploy.deploy import kubernetes
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
)

_KIND = "inferenceservices.serving.kserve.io"
_RUNTIME = "servingruntimes.serving.kserve.io"
_MODE = "serving.kserve.io/deploymentMode"
_TAGS = "serving.kserve.io/enable-tag-routing"
_PREVIOUS = "remora.dev/previous"
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
        return kubernetes.cluster_checks(self.place, self._replicas().pod, _KIND, _KIND, _INSTALL)

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

    def steps(self, state: State) -> Sequence[Step]:
        """Return the steps to the desired state."""
        replicas = self._replicas()
        steps: list[Step] = list(upload_steps(replicas.source))
        version, serving = self._version(replicas), self._serving(state)
        exists = state["service"] is not None
        if replicas.traffic != 100 and (not exists or self.mode is not Mode.KNATIVE):
            raise RefusedError(f"--traffic needs the mode Knative and a service that serves; {self.name} has not both")
        share = find(state, f"service.spec.predictor.{_SHARE}", 100)
        body = replicas.golden.body if replicas.golden else b""
        if exists and version == serving and share == replicas.traffic:
            return [
                *steps,
                self._wait(replicas.scaling.start_s),
                *golden_step(replicas.golden, self.ask(state, body), body_of),
            ]
        steps += self._runtime_steps(replicas, state)
        trial = exists and self.mode is Mode.KNATIVE
        document = self._document(replicas, state)
        if trial:
            document["spec"]["predictor"][_SHARE] = 0
        if version != serving:
            steps.append(Step("deploy", self.place.apply(document), undo=self._undo(state)))
        steps.append(self._wait(replicas.scaling.start_s, trial=trial))
        steps.append(kubernetes.route_step(self.place, _KIND, self.name, lambda answer: self._url(answer, trial)))
        url, host = kubernetes.ROUTE
        steps += golden_step(replicas.golden, self._request(url, body, host), body_of)
        if trial:
            change = {"spec": {"predictor": {_SHARE: None if replicas.traffic == 100 else replicas.traffic}}}
            back = {"spec": {"predictor": {_SHARE: 0}}}
            patch = self.place.patch(_KIND, self.name, change)
            steps.append(Step("traffic", patch, undo=(Step("traffic", self.place.patch(_KIND, self.name, back)),)))
            steps.append(self._wait(replicas.scaling.start_s))
        return steps

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
        return (Step("deploy", self.place.apply(_restored(before))), self._wait(self._replicas().scaling.start_s))

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

    def _document(self, replicas: Replicas, state: State) -> dict[str, Any]:
        annotations = {_VERSION: self._version(replicas)}
        if self.mode is Mode.KNATIVE:
            annotations[_TAGS] = "true"
        before = find(state, "service.spec.predictor")
        if before is not None and self._serving(state) != annotations[_VERSION]:
            serves = {"predictor": {key: value for key, value in before.items() if key != _SHARE}}
            annotations[_PREVIOUS] = json.dumps({"version": self._serving(state), **serves})
        metadata = {"name": self.name, "namespace": self.place.namespace, "annotations": annotations}
        return inference_service(metadata, self._predictor(replicas), self.mode)

    def _wait(self, start_s: int, *, trial: bool = False) -> Step:
        """Return the step that waits until the InferenceService is ready with its newest version."""

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
            return Progress(done, "ready" if done else reason or "starting")

        return Step("deploy", self.place.get(_KIND, self.name), until, every_s=3.0, limit_s=float(start_s))

    # -- the other commands ------------------------------------------------------------------------------------------

    def differences(self, state: State) -> Sequence[str]:
        """Return how the InferenceService differs from the desired state."""
        replicas = self._replicas()
        found = []
        if self._serving(state) != self._version(replicas):
            found.append(f"version {self._serving(state) or 'none'} serves, not {self._version(replicas)}")
        share = find(state, f"service.spec.predictor.{_SHARE}", 100)
        if share != replicas.traffic:
            found.append(f"it gets {share} percent, not {replicas.traffic}")
        return found

    def status(self, state: State) -> Sequence[str]:
        """Return the InferenceService's state in lines."""
        if state["service"] is None:
            return []
        status, reason = condition(state["service"])
        share = find(state, f"service.spec.predictor.{_SHARE}", 100)
        previous = self._previous(state)
        return [
            f"{self.name}: {'Ready' if status == 'True' else f'not ready: {reason}'}",
            f"model: {find(state, 'service.spec.predictor.model.storageUri', 'none')}, {share} percent",
            f"url: {find(state, 'service.status.url', 'none')}",
            f"rollback: {previous.get('version', 'no earlier version')}",
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

    def rollback(self, state: State) -> Sequence[Step]:
        """Return the steps to the version before, which a share leaves in place."""
        previous = self._previous(state)
        if not previous:
            raise RefusedError(f"{self.name} has no earlier version to return to")
        annotations = {key: find(state, "service.metadata.annotations", {}).get(key) for key in (_MODE, _TAGS)}
        document = {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": {
                "name": self.name,
                "namespace": self.place.namespace,
                "annotations": {**{k: v for k, v in annotations.items() if v}, _VERSION: previous["version"]},
            },
            "spec": {"predictor": previous["predictor"]},
        }
        until = self._wait(Scaling().start_s)
        return [Step("traffic", self.place.apply(document)), until]

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

    def _previous(self, state: State) -> Mapping[str, Any]:
        text = find(state, "service.metadata.annotations", {}).get(_PREVIOUS, "{}")
        try:
            found: Mapping[str, Any] = read_json(text)
        except ValueError:
            return {}
        return found if {"version", "predictor"} <= found.keys() else {}

    def _url(self, service: Any, trial: bool) -> str:
        if not trial:
            return str(find(service, "status.url", ""))
        targets = find(service, "status.components.predictor.traffic", [])
        return next((str(each["url"]) for each in targets if each.get("tag") == "latest" and each.get("url")), "")


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
