"""Deployment to Vertex AI: a model with versions, and an endpoint that serves them.

An endpoint has no address for a single version, so the golden request follows the change of traffic, and the version
before stays deployed until it has passed. A rollback deploys the earlier version of the model again.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remora.system.url_secrets import shown_place
from remora_deploy.deploy import google, versions
from remora_deploy.deploy.golden import Golden, golden_step
from remora_deploy.deploy.google import operation_step
from remora_deploy.deploy.images import Needs, pinned
from remora_deploy.deploy.plan import (
    GONE,
    Call,
    Check,
    Kept,
    Read,
    RefusedError,
    State,
    Step,
    after_all,
    desired,
    digest_of,
    find,
)
from remora_deploy.deploy.programs import body_of
from remora_deploy.deploy.rest import rest
from remora_deploy.deploy.shares import check_share, limits_of, split
from remora_deploy.deploy.uploads import Source, source_of, upload_steps
from remora_deploy.pod import with_required_gpu

add_place, connect = google.add_place, google.connect
_API = "aiplatform.googleapis.com"
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,48}[a-z0-9])?")
_PERMISSIONS = ("aiplatform.models.upload", "aiplatform.endpoints.create", "aiplatform.endpoints.deploy")
_TABLE = re.compile(r"bq://[\w:-]+\.\w+\.\w+")
_CAPTURE = "predictRequestResponseLoggingConfig"
_LABEL = "remora-version"
_LIMIT_S = 5400.0
"""Deployments with GPUs take up to an hour."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Desired state of an endpoint.

    Attributes:
        image: container image in Artifact Registry.
        source: the models in Google Cloud Storage.
        machine: machine type.
        accelerator: GPU type, such as NVIDIA_L4; "" for none.
        accelerators: GPUs per replica.
        least, most: limits of the replicas.
        account: service account of the replicas; "" for the default.
        environ: environment of the server.
        traffic: percentage of the requests for the new version; 100 replaces the current one.
        capture: BigQuery table of captured requests and answers, as bq://PROJECT.DATASET.TABLE; "" for none.
        capture_share: percentage of the requests that are captured.
        requested: limits that the user gave, None for those of what serves.
    """

    image: str
    source: Source
    machine: str = "n1-standard-4"
    accelerator: str = ""
    accelerators: int = 1
    least: int = 1
    most: int = 1
    account: str = ""
    environ: tuple[tuple[str, str], ...] = ()
    traffic: int = 100
    golden: Golden | None = None
    capture: str = ""
    capture_share: int = 100
    requested: tuple[int | None, int | None] = (None, None)

    def check(self) -> None:
        """Raise ValueError for values that the platform would refuse."""
        if not 1 <= self.least <= self.most:
            raise ValueError(f"--min={self.least} --max={self.most}: at least one replica, and the maximum not below")
        check_share(self.traffic)
        if self.capture and not _TABLE.fullmatch(self.capture):
            raise ValueError(f"--capture={shown_place(self.capture)}: expected bq://PROJECT.DATASET.TABLE")
        if not 1 <= self.capture_share <= 100:
            raise ValueError(f"--capture-percent={self.capture_share}: expected 1 to 100 percent")


@dataclass(frozen=True, slots=True)
class Vertex:
    """A Vertex AI endpoint, as a `Platform`."""

    name: str
    project: str
    region: str
    wanted: Wanted | None = None
    title: str = "Vertex AI"

    def checks(self) -> Sequence[Check]:
        """Return the checks before a deployment."""
        wanted = self._wanted()
        gpu = wanted.accelerator.lower()
        metric = f"custom_model_serving_{gpu}_gpus" if gpu else "custom_model_serving_cpus"
        api = google.Api(_API, _PERMISSIONS, metric, wanted.least)
        needs = Needs("container", gpu=bool(gpu))
        return google.checks(self.project, self.region, api, wanted.image, needs, wanted.source, wanted.account)

    def settled(self, found: State) -> Vertex:
        """Return the deployment with the image's digest."""
        wanted = self._wanted()
        return replace(self, wanted=replace(wanted, image=pinned(wanted.image, found)))

    def reads(self) -> Sequence[Read]:
        """Return the reads of the endpoint and the model's versions."""
        return [
            Read("endpoint", lambda _: self._rest("GET", self._endpoint)),
            Read("versions", lambda _: self._rest("GET", f"{self._model}:listVersions", pageSize="100")),
        ]

    def settle(self, state: State) -> Sequence[Step]:
        """Return no step: Vertex AI refuses a change while another one is in progress."""
        return ()

    def steps(self, state: State) -> Sequence[Step]:
        """Return the steps to the desired state."""
        wanted = self._wanted()
        steps: list[Step] = list(upload_steps(wanted.source))
        digest = self._digest(wanted)
        history, before = self._history(state), self.shares(state)
        known = self._versions(state).get(digest, "")
        version = known or str(Kept("upload-result", "response.modelVersionId"))
        stable = versions.stable_of(history, before, version)
        if wanted.traffic != 100 and not stable:
            raise RefusedError(f"--traffic needs an endpoint that serves another version; {self.name} does not")
        observed = history.observed(before)
        record = versions.after(history, before, version, wanted.traffic)
        steps += self._create(wanted, digest, state, record)
        if before and observed != history:
            steps += self._record(state, observed, history)
        steps += self._serve(wanted, digest, version, stable, state)
        ids = self._ids(state)
        if wanted.traffic == 100:  # because any version may answer otherwise
            ask = self._ask(state, wanted.golden.body if wanted.golden else b"", fresh=state["endpoint"] is None)
            steps += golden_step(wanted.golden, ask, body_of)
        if state["endpoint"] is not None and record != observed:
            steps += self._record(state, record, observed)
        if wanted.traffic == 100:
            new = ids.get(version, str(Kept("deploy-result", "response.deployedModel.id")))
            drops = [each for other, each in ids.items() if other != version]
            for at, each in enumerate(drops):
                steps += after_all(self._drop(each, {new: 100}, f"drop-{at}"))
            steps += self._end_size(wanted, new, self._limits_for(wanted, version, state))
        return steps

    def _serve(self, wanted: Wanted, digest: str, version: str, stable: str, state: State) -> list[Step]:
        """Return the steps that deploy a version, if it is not, and divide the traffic."""
        ids, shares = self._ids(state), self._split_of(state)
        limits = self._limits_for(wanted, version, state)
        if version not in ids:
            split_of = {"0": wanted.traffic if stable else 100}
            if wanted.traffic != 100:
                split_of[ids[stable]] = 100 - wanted.traffic
            sized = replace(wanted, least=limits[0], most=limits[1])
            return self._deploy_version(sized, digest, version, split_of, shares)
        steps = self._resize(ids[version], limits) if limits != self._limits(ids[version], state) else []
        final = split(ids.get(stable, ""), ids[version], wanted.traffic)
        serving = {key: share for key, share in shares.items() if share}
        return [*steps, self._split(final, shares)] if serving != final else steps

    def _record(self, state: State, history: versions.History, before: versions.History) -> list[Step]:
        """Return the step that writes a history into the endpoint's labels."""

        def patch(found: versions.History) -> Call:
            labels = {**find(state, "endpoint.labels", {}), **versions.texts_of(found)}
            return self._rest("PATCH", self._endpoint, {"labels": labels}, updateMask="labels")

        return [Step("traffic", patch(history), undo=(Step("traffic", patch(before)),))]

    def _history(self, state: State) -> versions.History:
        """Return what the endpoint's labels retain."""
        return versions.history_of(find(state, "endpoint.labels", {}))

    # -- replicas ----------------------------------------------------------------------------------------------------

    def _running(self, state: State) -> int:
        """Return the replicas of the version with most requests."""
        main = self._main(state)
        least = int(find(main or {}, "dedicatedResources.minReplicaCount", 1))
        return max(least, int(find(main, "status.availableReplicaCount", least))) if main else 0

    def _main(self, state: State) -> Any:
        """Return what is deployed with most requests, None without any."""
        split = self._split_of(state)
        return max(self._deployed(state), key=lambda each: split.get(str(each["id"]), 0), default=None)

    def _limits(self, deployed: str, state: State) -> tuple[int, int]:
        """Return the limits of a deployed version's replicas."""
        found: Any = next((each for each in self._deployed(state) if str(each["id"]) == deployed), {})
        least = int(find(found, "dedicatedResources.minReplicaCount", 1))
        return least, int(find(found, "dedicatedResources.maxReplicaCount", least))

    def _limits_for(self, wanted: Wanted, version: str, state: State) -> tuple[int, int]:
        """Return the limits with which a version begins: at least the replicas that it replaces."""
        deployed = self._ids(state).get(version, "")
        least, most = self._limits(deployed, state) if deployed else (wanted.least, wanted.most)
        if wanted.traffic == 100 and versions.alone(self.shares(state)) != version:
            least = max(least, self._running(state))
        return least, max(least, most)

    def _resize(self, deployed: str, limits: tuple[int, int]) -> list[Step]:
        """Return the steps that change the limits of a deployed version's replicas."""
        resources = {"minReplicaCount": limits[0], "maxReplicaCount": limits[1]}
        body = {
            "deployedModel": {"id": deployed, "dedicatedResources": resources},
            "updateMask": "dedicatedResources.minReplicaCount,dedicatedResources.maxReplicaCount",
        }
        call = self._rest("POST", f"{self._endpoint}:mutateDeployedModel", body)
        return [Step("deploy", call, keep="resize"), self._operation("resize")]

    def _end_size(self, wanted: Wanted, deployed: str, begun: tuple[int, int]) -> list[Step]:
        """Return the steps to the requested limits, once a version has taken the load over."""
        limits = (wanted.least, wanted.most)
        return after_all(self._resize(deployed, limits)) if begun != limits else []

    def sized(self, state: State) -> Vertex:
        """Return the deployment with the limits of what serves, where none were requested."""
        wanted = self._wanted()
        main = self._main(state)
        now = self._limits(str(main["id"]), state) if main else (1, 1)
        least, most = limits_of(wanted.requested, now)
        return replace(self, wanted=replace(wanted, least=least, most=most))

    def _create(self, wanted: Wanted, digest: str, state: State, record: versions.History) -> list[Step]:
        """Return the steps that create the model's version and the endpoint, if they do not exist."""
        steps: list[Step] = []
        if digest not in self._versions(state):
            model = {"displayName": self.name, "labels": {_LABEL: digest}, **self._container(wanted)}
            body: dict[str, Any] = {"model": model, "modelId": self.name}
            undo: tuple[Step, ...]
            if state["versions"] is None:
                gone = self._rest("DELETE", self._model)
            else:
                body = {"model": model, "parentModel": self._model.partition("/v1/")[2]}
                gone = self._rest(
                    "DELETE", f"{self._model}@{Kept('upload-result', 'response.modelVersionId')}:deleteVersion"
                )
            undo = (Step("clean", gone, accepts=GONE, keep="unload"), self._operation("unload"))
            upload = self._rest("POST", f"{self._parent}/models:upload", body)
            steps += [Step("deploy", upload, keep="upload", undo=undo), self._operation("upload")]
        if state["endpoint"] is None:
            endpoint = {"displayName": self.name, "labels": versions.texts_of(record), **self._captured(wanted)}
            create = self._rest("POST", f"{self._parent}/endpoints", endpoint, endpointId=self.name)
            delete = Step("clean", self._rest("DELETE", self._endpoint), accepts=GONE, keep="unmake")
            undo = (delete, self._operation("unmake"))
            steps += [Step("deploy", create, keep="create", undo=undo), self._operation("create")]
        elif self._captured(wanted) != self._captured(self._capture_of(state)):
            steps.append(self._capture(wanted, self._capture_of(state)))
        return steps

    def _captured(self, wanted: Wanted) -> dict[str, Any]:
        """Return the part of an endpoint's document that captures requests and answers."""
        if not wanted.capture:
            return {}
        destination = {"outputUri": wanted.capture}
        rate = wanted.capture_share / 100
        return {_CAPTURE: {"enabled": True, "samplingRate": rate, "bigqueryDestination": destination}}

    def _capture_of(self, state: State) -> Wanted:
        """Return what the endpoint captures, as the part of a desired state."""
        found = find(state, f"endpoint.{_CAPTURE}", {})
        if not found.get("enabled"):
            return Wanted("", Source(""))
        table, rate = find(found, "bigqueryDestination.outputUri", ""), found.get("samplingRate", 1.0)
        return Wanted("", Source(""), capture=table, capture_share=round(100 * rate))

    def _capture(self, wanted: Wanted, before: Wanted) -> Step:
        """Return the step that captures what is desired, or nothing."""

        def patch(target: Wanted) -> Call:
            body = self._captured(target) or {_CAPTURE: {"enabled": False}}
            return self._rest("PATCH", self._endpoint, body, updateMask=_CAPTURE)

        return Step("deploy", patch(wanted), undo=(Step("deploy", patch(before)),))

    def _deploy_version(
        self, wanted: Wanted, digest: str, version: str, split: Mapping[str, int], before: Mapping[str, int]
    ) -> list[Step]:
        machine: dict[str, Any] = {"machineType": wanted.machine}
        if wanted.accelerator:
            machine |= {"acceleratorType": wanted.accelerator, "acceleratorCount": wanted.accelerators}
        limits = {"minReplicaCount": wanted.least, "maxReplicaCount": wanted.most}
        model: dict[str, Any] = {
            "model": f"{self._model.partition('/v1/')[2]}@{version}",
            "displayName": f"{self.name}-{digest}",
            "dedicatedResources": {"machineSpec": machine, **limits},
        }
        if wanted.account:
            model["serviceAccount"] = wanted.account
        call = self._rest(
            "POST", f"{self._endpoint}:deployModel", {"deployedModel": model, "trafficSplit": dict(split)}
        )
        new = str(Kept("deploy-result", "response.deployedModel.id"))
        undo = tuple(self._drop(new, dict(before), "undeploy"))
        split_back = (self._split(before, before),) if any(before.values()) else ()
        wait = replace(self._operation("deploy"), undo=(*split_back, *undo))
        return [Step("deploy", call, keep="deploy"), wait]

    def _drop(self, deployed: str, split: Mapping[str, int], name: str) -> list[Step]:
        """Return the steps that undeploy a version; the traffic goes to the others."""
        body: dict[str, Any] = {"deployedModelId": deployed}
        if any(split.values()):
            body["trafficSplit"] = dict(split)
        call = self._rest("POST", f"{self._endpoint}:undeployModel", body)
        return [Step("clean", call, accepts=GONE, keep=name), self._operation(name)]

    def _split(self, split: Mapping[str, int], before: Mapping[str, int]) -> Step:
        call = self._rest("PATCH", self._endpoint, {"trafficSplit": dict(split)}, updateMask="trafficSplit")
        back = self._rest("PATCH", self._endpoint, {"trafficSplit": dict(before)}, updateMask="trafficSplit")
        return Step("traffic", call, undo=(Step("traffic", back),))

    def _container(self, wanted: Wanted) -> dict[str, Any]:
        variables = with_required_gpu(dict(wanted.environ), gpu=bool(wanted.accelerator))
        spec = {
            "imageUri": wanted.image,
            "command": ["python", "-m", "remora_adapters.vertex"],
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "ports": [{"containerPort": 8080}],
            "predictRoute": "/predict",
            "healthRoute": "/health",
        }
        return {"artifactUri": wanted.source.location.rstrip("/"), "containerSpec": spec}

    # -- the other commands ------------------------------------------------------------------------------------------

    def differences(self, state: State) -> Sequence[str]:
        """Return how the endpoint differs from the desired state."""
        wanted = self._wanted()
        version = self._versions(state).get(self._digest(wanted), "")
        return versions.differences(self._history(state), self.shares(state), version, wanted.traffic)

    def shares(self, state: State) -> dict[str, int]:
        """Return the percentage of each version of the model."""
        split = self._split_of(state)
        found = {self._version_of(each, state): split.get(str(each["id"]), 0) for each in self._deployed(state)}
        return {version: share for version, share in found.items() if share}

    def status(self, state: State) -> Sequence[str]:
        """Return the endpoint's state in lines."""
        if state["endpoint"] is None:
            return []
        shares = self._split_of(state)
        lines = [f"{self.name}: {len(shares)} deployed"]
        for each in self._deployed(state):
            resources = find(each, "dedicatedResources", {})
            machine = find(resources, "machineSpec.machineType", "?")
            lines.append(
                f"version {each.get('modelVersionId', '?')}: {shares.get(str(each['id']), 0)} percent, {machine}, "
                f"{resources.get('minReplicaCount', '?')} to {resources.get('maxReplicaCount', '?')} replicas"
            )
        return [*lines, versions.rollback_line(self.target, state)]

    def reason(self, state: State) -> str:
        """Return nothing: the operation has the reason."""
        return ""

    def logs(self, state: State, lines: int) -> Sequence[Call]:
        """Return the read of the endpoint's log entries."""
        if state["endpoint"] is None:
            return []
        number = str(find(state, "endpoint.name", self.name)).rpartition("/")[2]
        kind = 'resource.type="aiplatform.googleapis.com/Endpoint"'
        condition = f'{kind} AND resource.labels.endpoint_id="{number}"'
        return [google.log_call(self.project, condition, lines)]

    def log_text(self, answer: Any) -> str:
        """Return the text of log entries, the newest last."""
        return google.log_text(answer)

    def ask(self, state: State, body: bytes) -> Call:
        """Return the request by rawPredict, at the endpoint's own DNS name if it has one."""
        return self._ask(state, body)

    def _ask(self, state: State, body: bytes, *, fresh: bool = False) -> Call:
        dns = "" if fresh else str(find(state, "endpoint.dedicatedEndpointDns", ""))
        call = self._rest("POST", f"{self._endpoint}:rawPredict", body)
        return call._replace(target=dns or call.target, arguments={**call.arguments, "raw": True})

    def answer_of(self, answer: Any) -> bytes:
        """Return the body of a response."""
        return body_of(answer)

    def target(self, state: State) -> str:
        """Return the version that a rollback returns to. Raises RefusedError."""
        history, shares = self._history(state), self.shares(state)
        known = set(self._versions(state).values())
        return history.target(self.name, shares, trial=history.is_left(self._ids(state), shares), existing=known)

    def rollback(self, state: State) -> Sequence[Step]:
        """Return the steps to the version that served alone before, with the replicas that run now."""
        target, split = self.target(state), self._split_of(state)
        before = self._history(state)
        gone = [self._version_of(each, state) for each in self._deployed(state)]
        record = before.observed(self.shares(state)).rolled_back(target, gone)
        ids = self._ids(state)
        new = ids.get(target, str(Kept("deploy-result", "response.deployedModel.id")))
        size: list[Step] = []
        steps = self._record(state, record, before) if record != before else []
        if target in ids:
            others = dict.fromkeys((each for each in split if each != new), 0)
            steps += [self._split({new: 100, **others}, split)] if split.get(new) != 100 else []
        else:
            digests = {version: digest for digest, version in self._versions(state).items()}
            wanted = _resources_of(self._main(state))
            begun = self._limits_for(wanted, target, state)
            sized = replace(wanted, least=begun[0], most=begun[1])
            steps += self._deploy_version(sized, digests[target], target, {"0": 100}, split)
            size = self._end_size(wanted, new, begun)
        for at, each in enumerate(each for each in split if each != new):
            steps += after_all(self._drop(each, {new: 100}, f"drop-{at}"))
        return [*steps, *size]

    def undeploy(self, state: State) -> Sequence[Step]:
        """Return the steps that delete the endpoint and the model."""
        steps: list[Step] = []
        for at, each in enumerate(self._deployed(state)):
            steps += self._drop(str(each["id"]), {}, f"drop-{at}")
        if state["endpoint"] is not None:
            steps += [Step("clean", self._rest("DELETE", self._endpoint), keep="delete"), self._operation("delete")]
        if state["versions"] is not None:
            steps += [Step("clean", self._rest("DELETE", self._model), keep="forget"), self._operation("forget")]
        return steps

    def advice(self, state: State) -> Sequence[tuple[str, str]]:
        """Return the commands that follow a deployment."""
        wanted = self._wanted()
        gpus = f" with {wanted.accelerators} {wanted.accelerator}" if wanted.accelerator else ""
        cost = f"{wanted.least} to {wanted.most} x {wanted.machine}{gpus}, until it is removed"
        return google.next_commands("vertex", self.name, self.project, self.region, cost)

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _parent(self) -> str:
        return f"/v1/projects/{self.project}/locations/{self.region}"

    @property
    def _model(self) -> str:
        return f"{self._parent}/models/{self.name}"

    @property
    def _endpoint(self) -> str:
        return f"{self._parent}/endpoints/{self.name}"

    def _wanted(self) -> Wanted:
        return desired(self.wanted, self.name)

    def _rest(self, method: str, path: str, body: Any = None, **query: str) -> Call:
        return rest(method, f"{self.region}-{_API}", path, body, self.name, **query)

    def _operation(self, name: str) -> Step:
        return operation_step(f"{self.region}-{_API}", "v1", name, limit_s=_LIMIT_S)

    def _digest(self, wanted: Wanted) -> str:
        return digest_of(self._container(wanted))

    def _deployed(self, state: State) -> list[Any]:
        return list(find(state, "endpoint.deployedModels", []))

    def _digest_of(self, deployed: Any) -> str:
        return str(deployed.get("displayName", "")).removeprefix(f"{self.name}-")

    def _ids(self, state: State) -> dict[str, str]:
        """Return the deployments' ids by the version of the model."""
        return {self._version_of(each, state): str(each["id"]) for each in self._deployed(state)}

    def _version_of(self, deployed: Any, state: State) -> str:
        """Return the version of the model that is deployed."""
        known = str(deployed.get("modelVersionId") or "")
        return known or self._versions(state).get(self._digest_of(deployed), "")

    def _split_of(self, state: State) -> dict[str, int]:
        """Return the share of each deployed version, by the deployment's id."""
        split = find(state, "endpoint.trafficSplit", {})
        return {str(each["id"]): int(split.get(str(each["id"]), 0)) for each in self._deployed(state)}

    def _versions(self, state: State) -> dict[str, str]:
        """Return the model's versions by the digest in their label."""
        found = find(state, "versions.models", [])
        return {each["labels"][_LABEL]: str(each["versionId"]) for each in found if _LABEL in each.get("labels", {})}


def _resources_of(deployed: Any) -> Wanted:
    """Return the resources of a deployed version, for its replacement."""
    resources = find(deployed, "dedicatedResources", {})
    machine = find(resources, "machineSpec", {})
    return Wanted(
        "",
        Source(""),
        str(machine.get("machineType", "n1-standard-4")),
        str(machine.get("acceleratorType", "")),
        int(machine.get("acceleratorCount", 1)),
        int(resources.get("minReplicaCount", 1)),
        int(resources.get("maxReplicaCount", 1)),
        str(deployed.get("serviceAccount", "")),
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a deployment."""
    google.add_size(parser, "replicas", 1, 1)
    add = parser.add_argument
    add("--machine-type", default="n1-standard-4", metavar="TYPE", help="machine type (default %(default)s)")
    add("--accelerator", default="", metavar="TYPE", help="GPU type, such as NVIDIA_L4")
    add("--accelerators", type=int, default=1, metavar="N", help="GPUs per replica (default 1)")
    add("--capture", default="", metavar="TABLE", help="capture requests and answers in bq://PROJECT.DATASET.TABLE")
    add("--capture-percent", type=int, default=100, metavar="PERCENT", help="captured share (default 100)")


def build(options: argparse.Namespace, golden: Golden | None) -> Vertex:
    """Return the endpoint of parsed options. Raises ValueError."""
    wanted = Wanted(
        options.image,
        source_of(options.model, options.bucket, options.name, "gs://"),
        options.machine_type,
        options.accelerator,
        options.accelerators,
        *limits_of((options.min, options.max), (1, 1)),
        options.service_account,
        options.environ,
        options.traffic,
        golden,
        options.capture,
        options.capture_percent,
        (options.min, options.max),
    )
    wanted.check()
    return replace(find_service(options), wanted=wanted)


def find_service(options: argparse.Namespace) -> Vertex:
    """Return an endpoint by its name, without a desired state. Raises ValueError."""
    if not _NAME.fullmatch(options.name):
        raise ValueError(f"{options.name}: expected at most 50 lower-case letters, digits and hyphens")
    return Vertex(options.name, options.project, options.region)
