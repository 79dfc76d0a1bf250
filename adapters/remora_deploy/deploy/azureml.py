"""Deployment to Azure ML: an online endpoint with a deployment for each version.

A new deployment gets no traffic until it is provisioned and has answered the golden request, which a header sends to
it. The version before is deleted afterwards unless it shares the traffic; a rollback creates it again from the model's
version, whose properties have the settings of its deployment.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from urllib.parse import urlencode, urlsplit

from remora.api.system import fetch
from remora.system.install_advice import install_command
from remora.system.json_text import read_json
from remora_deploy.deploy import versions
from remora_deploy.deploy.azureml_documents import Settings, check_mirror, settings_of
from remora_deploy.deploy.golden import Golden, golden_step
from remora_deploy.deploy.images import Needs, image_check, pinned
from remora_deploy.deploy.plan import (
    GONE,
    Call,
    CallError,
    Check,
    Kept,
    Progress,
    Read,
    RefusedError,
    State,
    Step,
    advice,
    after_all,
    desired,
    find,
)
from remora_deploy.deploy.programs import body_of
from remora_deploy.deploy.rest import LIMITS, RestCalls, rest, service_call
from remora_deploy.deploy.shares import Shares, check_share, main_of, split

_HOST = "management.azure.com"
_API = "2024-04-01"
_NAME = re.compile(r"[a-z][a-z0-9-]{1,30}[a-z0-9]")
_ACTION = "Microsoft.MachineLearningServices/workspaces/onlineEndpoints/write"
_WAITING = ("Creating", "Updating", "Deleting", "Scaling")
_SCOPE = "https://management.azure.com/.default"
_USER = "00000000-0000-0000-0000-000000000000"
"""User of a registry's token."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Desired state: the settings, and the shares of the traffic.

    ``traffic`` is the percentage for the new version, ``mirror`` that of copied requests, whose answers are dropped.
    ``sized`` is False if no number of instances was requested, so that a new version gets as many as run.
    """

    settings: Settings
    traffic: int = 100
    mirror: int = 0
    golden: Golden | None = None
    sized: bool = True

    @property
    def is_trial(self) -> bool:
        """True for a share or copies beside the version that serves."""
        return self.traffic != 100 or self.mirror > 0

    def check(self) -> None:
        """Raise ValueError for values that the platform would refuse."""
        check_share(self.traffic)
        check_mirror(self.mirror, shared=self.traffic != 100)
        if self.settings.count < 1:
            raise ValueError(f"--instances={self.settings.count}: a managed deployment has at least one instance")
        if not 0 <= self.settings.capture_share <= 100:
            raise ValueError(f"--capture-percent={self.settings.capture_share}: expected 0 to 100 percent")


@dataclass(frozen=True, slots=True)
class Workspace:
    """A workspace of Azure ML."""

    subscription: str
    group: str
    name: str
    location: str = ""

    @property
    def path(self) -> str:
        """The workspace's resource path."""
        group = f"/subscriptions/{self.subscription}/resourceGroups/{self.group}"
        return f"{group}/providers/Microsoft.MachineLearningServices/workspaces/{self.name}"

    def flags(self) -> str:
        """Return the flags of `remora deploy` for this workspace."""
        return f" --subscription {self.subscription} --resource-group {self.group} --workspace {self.name}"


@dataclass(frozen=True, slots=True)
class AzureMl:
    """An online endpoint, as a `Platform`."""

    name: str
    workspace: Workspace
    path: str = ""
    wanted: Wanted | None = None
    title: str = "Azure ML"

    def checks(self) -> Sequence[Check]:
        """Return the checks before a deployment."""
        settings = self._wanted().settings
        subscription = f"/subscriptions/{self.workspace.subscription}"
        permissions = f"{self.workspace.path}/providers/Microsoft.Authorization/permissions"
        usages = f"{subscription}/providers/Microsoft.MachineLearningServices/locations/{self._location()}/usages"
        where = f"--resource-group {self.workspace.group} --workspace-name {self.workspace.name}"
        return [
            Check(
                f"workspace {self.workspace.name}",
                self._rest("GET", self.workspace.path),
                cure=f"az login; az account set --subscription {self.workspace.subscription}; "
                f"az ml workspace show {where}",
                keep="workspace",
            ),
            Check(
                "right to create endpoints",
                self._rest("GET", permissions, api="2022-04-01"),
                lambda answer: "" if _may(answer, _ACTION) else f"denied: {_ACTION}",
                cure='az role assignment create --assignee YOU --role "AzureML Data Scientist" '
                f"--scope {self.workspace.path}",
                needed=False,  # because that role itself does not read permissions
            ),
            Check(
                f"quota of {settings.instance}",
                self._rest("GET", usages),
                lambda answer: _quota_problem(answer, settings),
                cure="az ml compute list-usage --location LOCATION; request a quota in the portal, or --instance-type",
                needed=False,
                absent="",
            ),
            image_check(settings.image, Needs("azureml", gpu=settings.gpu)),
        ]

    def settled(self, found: State) -> AzureMl:
        """Return the deployment with the image's digest and the workspace's location."""
        wanted = self._wanted()
        settings = replace(wanted.settings, image=pinned(wanted.settings.image, found))
        workspace = replace(self.workspace, location=str(find(found, "workspace.location", "")))
        return replace(self, workspace=workspace, wanted=replace(wanted, settings=settings))

    def reads(self) -> Sequence[Read]:
        """Return the reads of the endpoint, its deployments and the model's versions."""
        return [
            Read("endpoint", lambda _: self._rest("GET", self._endpoint)),
            Read(
                "deployments", lambda s: self._rest("GET", f"{self._endpoint}/deployments") if s["endpoint"] else None
            ),
            Read("versions", lambda _: self._rest("GET", f"{self._model}/versions")),
            Read(
                "keys",
                lambda s: self._rest("POST", f"{self._endpoint}/listKeys") if s["endpoint"] else None,
                needed=False,
            ),
        ]

    def settle(self, state: State) -> Sequence[Step]:
        """Wait for a change in progress."""
        names = [str(each["name"]) for each in self._deployments(state) if _state_of(each) in _WAITING]
        busy = _state_of(state["endpoint"] or {}) in _WAITING
        steps = [self._wait(self._endpoint, fails=False)] if busy else []
        return [*steps, *(self._wait(f"{self._endpoint}/deployments/{name}", fails=False) for name in names)]

    def sized(self, state: State) -> AzureMl:
        """Return the deployment with as many instances as run, where no number was requested."""
        wanted = self._wanted()
        if wanted.sized or wanted.is_trial:
            return self
        count = max(self._running(state), wanted.settings.count)
        return replace(self, wanted=replace(wanted, settings=replace(wanted.settings, count=count)))

    def steps(self, state: State) -> Sequence[Step]:
        """Return the steps to the desired state."""
        wanted = self._wanted()
        version = wanted.settings.digest
        name = self._deployment(version)
        history, shares = self._history(state), self.shares(state)
        stable = versions.stable_of(history, shares, version)
        if wanted.is_trial and not stable:
            raise RefusedError(f"--traffic and --mirror need another version that serves; {self.name} has none")
        steps = self._create_endpoint(state)
        existing = {str(each["name"]): each for each in self._deployments(state)}
        if name not in existing or _state_of(existing[name]) != "Succeeded":
            steps += self._create(wanted.settings, name, state)
        else:
            steps += self._resize(wanted, existing[name], state)
        body = wanted.golden.body if wanted.golden else b""
        steps += [self._keys(), *golden_step(wanted.golden, self._trial(state, name, body), body_of)]
        percent = 0 if wanted.mirror else wanted.traffic
        final = {self._deployment(each): share for each, share in split(stable, version, percent).items() if share}
        mirror = {name: wanted.mirror} if wanted.mirror else {}
        record = versions.after(history, shares, version, percent, wanted.settings.count)
        if self._traffic(state) != final or self._mirror(state) != mirror or record != history:
            steps += self._move(final, mirror, record, state)
        if not wanted.is_trial:
            steps += after_all([step for each in existing if each != name for step in self._delete(each)])
        return steps

    def _resize(self, wanted: Wanted, deployment: Mapping[str, Any], state: State) -> list[Step]:
        """Return the steps that give an existing deployment the instances that it needs."""
        now = int(find(deployment, "sku.capacity", 1))
        count = wanted.settings.count if wanted.sized else max(now, wanted.settings.count)
        if count == now:
            return []
        path = f"{self._endpoint}/deployments/{deployment['name']}"
        version, environment = (
            f"{kind}/versions/{wanted.settings.digest}" for kind in (self._model, self._environment)
        )

        def put(capacity: int) -> Call:
            settings = replace(wanted.settings, count=capacity)
            return self._rest("PUT", path, settings.deployment(self._location(), version, environment))

        undo = (Step("deploy", put(now)), self._wait(path))
        return [Step("deploy", put(count), undo=undo), self._wait(path)]

    def _create_endpoint(self, state: State) -> list[Step]:
        if state["endpoint"] is not None:
            return []
        delete = Step("clean", self._rest("DELETE", self._endpoint), accepts=GONE)
        undo = (delete, self._wait(self._endpoint, gone=True))
        create = Step("deploy", self._rest("PUT", self._endpoint, self._document()), undo=undo)
        return [create, self._wait(self._endpoint)]

    def _create(self, settings: Settings, name: str, state: State) -> list[Step]:
        """Return the steps that register the model's version and create its deployment."""
        steps: list[Step] = []
        version = f"{self._model}/versions/{settings.digest}"
        environment = f"{self._environment}/versions/{settings.digest}"
        if settings.digest not in self._versions(state):
            for path, document in ((environment, settings.environment()), (version, settings.model_version())):
                drop = Step("clean", self._rest("DELETE", path), accepts=GONE)
                steps.append(Step("deploy", self._rest("PUT", path, {"properties": document}), undo=(drop,)))
        path = f"{self._endpoint}/deployments/{name}"
        document = settings.deployment(self._location(), version, environment)
        call = self._rest("PUT", path, document)
        return [*steps, Step("deploy", call, undo=tuple(self._delete(name))), self._wait(path)]

    def _delete(self, name: str) -> list[Step]:
        path = f"{self._endpoint}/deployments/{name}"
        return [Step("clean", self._rest("DELETE", path), accepts=GONE), self._wait(path, gone=True)]

    def _move(self, final: Shares, mirror: Shares, record: versions.History, state: State) -> list[Step]:
        """Return the steps that change the shares of the endpoint, whose tags retain the history."""

        def put(shares: Shares, copies: Shares, history: versions.History) -> Call:
            body = self._document(traffic=dict(shares), mirrorTraffic=dict(copies))
            tags = {**find(state, "endpoint.tags", {}), **versions.texts_of(history)}
            return self._rest("PUT", self._endpoint, {**body, "tags": tags})

        back = put(self._traffic(state), self._mirror(state), self._history(state))
        undo = (Step("traffic", back), self._wait(self._endpoint))
        return [Step("traffic", put(final, mirror, record), undo=undo), self._wait(self._endpoint)]

    def _document(self, **properties: Any) -> dict[str, Any]:
        properties["authMode"] = "Key"
        return {"location": self._location(), "identity": {"type": "SystemAssigned"}, "properties": properties}

    def _wait(self, path: str, *, gone: bool = False, fails: bool = True) -> Step:
        """Return the step that waits until a resource is provisioned or gone."""

        def until(answer: Any) -> Progress:
            if answer is None:
                return Progress(gone, "deleted" if gone else "waiting for it to appear")
            status = _state_of(answer)
            if gone or status in _WAITING:
                return Progress(False, status)
            detail = find(answer, "properties.provisioningError.message", "") or find(answer, "error.message", "")
            failure = f"provisioning ended as {status}: {detail or 'see the log'}"
            return Progress(failure=failure if fails and status != "Succeeded" else "", text=status)

        return Step("deploy", self._rest("GET", path), until, accepts=GONE, every_s=10.0, limit_s=5400.0)

    # -- the other commands ------------------------------------------------------------------------------------------

    def differences(self, state: State) -> Sequence[str]:
        """Return how the endpoint differs from the desired state."""
        wanted = self._wanted()
        version = wanted.settings.digest
        if wanted.mirror:
            copies = self._mirror(state).get(self._deployment(version), 0)
            lost = (
                [] if copies == wanted.mirror else [f"{version} gets copies of {copies} percent, not {wanted.mirror}"]
            )
            return lost + versions.differences(self._history(state), self.shares(state), version, 0)
        return versions.differences(self._history(state), self.shares(state), version, wanted.traffic)

    def shares(self, state: State) -> dict[str, int]:
        """Return the percentage of each version."""
        return {name.removeprefix("v-"): share for name, share in self._traffic(state).items()}

    def status(self, state: State) -> Sequence[str]:
        """Return the endpoint's state in lines."""
        if state["endpoint"] is None:
            return []
        shares, copies = self._traffic(state), self._mirror(state)
        lines = [f"{self.name}: {_state_of(state['endpoint'])}"]
        for each in self._deployments(state):
            name, instance = str(each["name"]), find(each, "properties.instanceType", "?")
            share = f"{shares.get(name, 0)} percent" + (f", copies of {copies[name]}" if name in copies else "")
            lines.append(
                f"deployment {name}: {_state_of(each)}, {find(each, 'sku.capacity', '?')} x {instance}, {share}"
            )
        lines.append(f"url: {find(state, 'endpoint.properties.scoringUri', 'none')}")
        return [*lines, versions.rollback_line(self.target, state)]

    def reason(self, state: State) -> str:
        """Return Azure's reason for a failed deployment."""
        failed = (each for each in self._deployments(state) if _state_of(each) == "Failed")
        return str(find(next(failed, {}), "properties.provisioningError.message", ""))

    def logs(self, state: State, lines: int) -> Sequence[Call]:
        """Return the reads of the deployments' logs."""
        body = {"containerType": "InferenceServer", "tail": lines}
        names = [str(each["name"]) for each in self._deployments(state)]
        return [self._rest("POST", f"{self._endpoint}/deployments/{name}/getLogs", body) for name in names]

    def log_text(self, answer: Any) -> str:
        """Return the text of a log."""
        return str(answer.get("content", "")) if isinstance(answer, Mapping) else ""

    def ask(self, state: State, body: bytes) -> Call:
        """Return the request to the scoring URI."""
        return self._request(state, body, find(state, "keys.primaryKey", ""), "")

    def answer_of(self, answer: Any) -> bytes:
        """Return the body of a response."""
        return body_of(answer)

    def target(self, state: State) -> str:
        """Return the version that a rollback returns to. Raises RefusedError."""
        history = self._history(state)
        known = {*self._versions(state), *self.shares(state)}
        deployed = [str(each["name"]).removeprefix("v-") for each in self._deployments(state)]
        trial = bool(self._mirror(state)) or history.is_left(deployed, self.shares(state))
        return history.target(self.name, self.shares(state), trial=trial, existing=known)

    def rollback(self, state: State) -> Sequence[Step]:
        """Return the steps to the version that served alone before, with the instances that run now."""
        target = self.target(state)
        name = self._deployment(target)
        history = self._history(state).observed(self.shares(state), self._running(state))
        names = [str(each["name"]) for each in self._deployments(state)]
        record = history.rolled_back(target, [each.removeprefix("v-") for each in names])
        steps: list[Step] = []
        if name not in names:
            settings = self._versions(state)[target]
            count = max(self._running(state), history.entry(target).instances or settings.count)
            steps += self._create(replace(settings, count=count), name, state)
        steps += self._move({name: 100}, {}, record, state)
        return [*steps, *after_all([step for each in names if each != name for step in self._delete(each)])]

    def undeploy(self, state: State) -> Sequence[Step]:
        """Return the steps that delete the endpoint and the model's versions."""
        steps: list[Step] = []
        if state["endpoint"] is not None:
            delete = Step("clean", self._rest("DELETE", self._endpoint), accepts=GONE)
            steps += [delete, self._wait(self._endpoint, gone=True)]
        names = self._versions(state)
        versions = [f"{kind}/versions/{each}" for each in names for kind in (self._model, self._environment)]
        return [*steps, *(Step("clean", self._rest("DELETE", each), accepts=GONE) for each in versions)]

    def advice(self, state: State) -> Sequence[tuple[str, str]]:
        """Return the commands that follow a deployment."""
        settings = self._wanted().settings
        cost = f"{settings.count} x {settings.instance} for each deployment, until it is removed"
        return advice(f"azureml {self.name}{self.workspace.flags()}", cost)

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _endpoint(self) -> str:
        return f"{self.workspace.path}/onlineEndpoints/{self.name}"

    @property
    def _model(self) -> str:
        return f"{self.workspace.path}/models/{self.name}"

    @property
    def _environment(self) -> str:
        return f"{self.workspace.path}/environments/{self.name}"

    def _location(self) -> str:
        return self.workspace.location or "LOCATION"

    def _wanted(self) -> Wanted:
        return desired(self.wanted, self.name)

    def _rest(self, method: str, path: str, body: Any = None, api: str = _API) -> Call:
        return rest(method, _HOST, path, body, self.name, **{"api-version": api})

    def _deployment(self, digest: str) -> str:
        return f"v-{digest}"

    def _keys(self) -> Step:
        """Return the step that reads the endpoint's address and key."""
        return Step("golden request", self._rest("POST", f"{self._endpoint}/listKeys"), keep="keys")

    def _trial(self, state: State, name: str, body: bytes) -> Call:
        """Return the request to one deployment, whatever its share."""
        return self._request(state, body, Kept("keys", "primaryKey"), name)

    def _request(self, state: State, body: bytes, key: Any, deployment: str) -> Call:
        default = f"https://{self.name}.{self._location()}.inference.ml.azure.com/"
        address = urlsplit(str(find(state, "endpoint.properties.scoringUri", default)))
        headers = {"azureml-model-deployment": deployment} if deployment else {}
        path = self.path or f"/v2/models/{self.name}/infer"
        url = f"{address.scheme}://{address.netloc}"
        return service_call(url, path, body, key=key, headers=headers)

    def _deployments(self, state: State) -> list[Any]:
        return list(find(state, "deployments.value", []))

    def _traffic(self, state: State) -> dict[str, int]:
        """Return the percentage of each deployment that gets requests."""
        return {str(k): int(v) for k, v in find(state, "endpoint.properties.traffic", {}).items() if v}

    def _running(self, state: State) -> int:
        """Return the instances of the deployment with most requests."""
        main = main_of(self._traffic(state))
        found: Any = next((each for each in self._deployments(state) if str(each["name"]) == main), {})
        return int(find(found, "sku.capacity", 0))

    def _history(self, state: State) -> versions.History:
        """Return what the endpoint's tags retain."""
        return versions.history_of(find(state, "endpoint.tags", {}))

    def _mirror(self, state: State) -> dict[str, int]:
        return {str(name): int(share) for name, share in find(state, "endpoint.properties.mirrorTraffic", {}).items()}

    def _versions(self, state: State) -> dict[str, Settings]:
        """Return the settings of the model's versions."""
        found = {str(each["name"]): settings_of(each) for each in find(state, "versions.value", [])}
        return {name: settings for name, settings in found.items() if settings}


def _state_of(resource: Mapping[str, Any]) -> str:
    return str(find(resource, "properties.provisioningState", ""))


def _may(answer: Any, action: str) -> bool:
    """Return True if a permission allows an action that it does not except."""

    def matches(pattern: str) -> bool:
        return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), action, re.IGNORECASE) is not None

    return any(
        any(matches(each) for each in permission.get("actions", []))
        and not any(matches(each) for each in permission.get("notActions", []))
        for permission in answer.get("value", [])
    )


def _quota_problem(answer: Any, settings: Settings) -> str:
    """Return why the quota of an instance type's family is too small, or ""."""
    family = re.sub(r"\d+", "", settings.instance).replace("_", "").lower()
    for each in answer.get("value", []):
        name = str(find(each, "name.value", "")).replace("_", "").lower()
        if name.startswith(family) and each.get("limit", -1) >= 0:
            left = each["limit"] - each.get("currentValue", 0)
            if left < settings.count:
                return f"{left} of the quota {find(each, 'name.value')} are left"
    return ""


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the flags that identify the workspace, and those of requests."""
    parser.add_argument("--subscription", required=True, metavar="ID", help="subscription")
    parser.add_argument("--resource-group", required=True, metavar="NAME", help="resource group")
    parser.add_argument("--workspace", required=True, metavar="NAME", help="workspace")
    parser.add_argument("--path", default="", metavar="PATH", help="path of requests (default /v2/models/NAME/infer)")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a deployment."""
    add = parser.add_argument
    add("--instance-type", default="Standard_F4s_v2", metavar="TYPE", help="type (default %(default)s)")
    add("--instances", type=int, metavar="N", help="instances (default: as many as run, 1 for a new endpoint)")
    add("--concurrency", type=int, default=16, metavar="N", help="requests in flight per instance (default 16)")
    add("--startup-timeout", type=int, default=600, metavar="S", help="time limit of the start, in seconds")
    add("--traffic", type=int, default=100, metavar="PERCENT", help="share of the new version beside the current one")
    add("--mirror", type=int, default=0, metavar="PERCENT", help="requests copied to the new version")
    add("--capture-percent", type=int, default=0, metavar="PERCENT", help="requests and answers to capture (default 0)")


def build(options: argparse.Namespace, golden: Golden | None) -> AzureMl:
    """Return the endpoint of parsed options. Raises ValueError."""
    if not options.model.startswith(("azureml://", "azureml:", "https://")):
        raise ValueError(
            f"--model={options.model}: expected a location that the workspace reads, such as "
            "azureml://datastores/workspaceblobstore/paths/models/digits"
        )
    settings = Settings(
        options.image,
        options.model,
        options.instance_type,
        1 if options.instances is None else options.instances,
        options.concurrency,
        options.startup_timeout,
        options.environ,
        options.capture_percent,
    )
    wanted = Wanted(settings, options.traffic, options.mirror, golden, options.instances is not None)
    wanted.check()
    return replace(find_service(options), wanted=wanted)


def find_service(options: argparse.Namespace) -> AzureMl:
    """Return an endpoint by its name, without a desired state. Raises ValueError."""
    if not _NAME.fullmatch(options.name):
        raise ValueError(f"{options.name}: expected 3 to 32 lower-case letters, digits and hyphens")
    workspace = Workspace(options.subscription, options.resource_group, options.workspace)
    return AzureMl(options.name, workspace, options.path)


def connect(options: argparse.Namespace) -> RestCalls:
    """Return the connection. Raises RefusedError without the SDK."""
    try:
        failure = import_module("azure.core.exceptions").AzureError
        credential = import_module("azure.identity").DefaultAzureCredential()
    except ImportError:
        raise RefusedError(f"needs azure-identity: {install_command('deploy-azure')}") from None

    def token(audience: str) -> str:
        try:
            return str(credential.get_token(audience or _SCOPE).token)
        except failure as error:
            raise CallError("denied", f"{' '.join(str(error).split())[:300]}: az login") from error

    def registry(host: str) -> tuple[str, str] | None:
        if not host.endswith(".azurecr.io"):
            return None
        fields = {"grant_type": "access_token", "service": host, "access_token": token("")}
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        try:
            answer = fetch(f"https://{host}/oauth2/exchange", LIMITS, body=urlencode(fields).encode(), headers=form)
            return _USER, str(read_json(answer.body)["refresh_token"])
        except (OSError, ValueError, KeyError) as error:
            raise CallError("denied", f"{host} refuses the login: az acr login --name {host}") from error

    return RestCalls(token, registry)
