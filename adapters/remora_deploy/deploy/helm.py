"""Deployment to plain Kubernetes by Helm: a release of remora's chart.

Kubernetes replaces pods as new ones get ready. Helm retains the revisions of a release with descriptions, which are
the history of what served.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from remora_deploy.deploy import kubernetes, versions
from remora_deploy.deploy.golden import Golden, golden_step
from remora_deploy.deploy.images import parse_image
from remora_deploy.deploy.kubernetes import Place, Replicas
from remora_deploy.deploy.plan import Call, Check, Read, RefusedError, State, Step, desired, digest_of, find
from remora_deploy.deploy.programs import Programs, body_of, command, http
from remora_deploy.deploy.uploads import upload_steps
from remora_deploy.pod import secret_variables

_CHART = "infra/helm/remora"
_PORT = 8000
_RESOURCE = "deployments.apps"
_PENDING = "pending-"
_SERVING = ("deployed", "superseded")
_HISTORY = 10
_BACK_S = 600
"""Least time limit of a rollback."""
_DESCRIPTION = "remora "
"""Begin of a revision's description, which ends with the digest of its values."""
_ROLLBACK = re.compile(r"Rollback to (\d+)")
"""Helm's own description of a revision that a rollback made."""


@dataclass(frozen=True, slots=True)
class Release:
    """A release of the chart, as a `Platform`."""

    name: str
    place: Place
    chart: str = _CHART
    settings: tuple[str, ...] = ()
    path: str = ""
    gateway: str = ""
    replicas: Replicas | None = None
    title: str = "Helm"

    def checks(self) -> Sequence[Check]:
        """Return the checks before a deployment."""
        chart = Check(
            f"chart {self.chart}",
            command("helm", ["show", "chart", self.chart], name=self.chart),
            cure="pass --chart with the chart's folder, archive or oci:// location",
        )
        return [*kubernetes.cluster_checks(self.place, self._replicas().pod, "", _RESOURCE, ""), chart]

    def settled(self, found: State) -> Release:
        """Return the deployment with the image's digest."""
        return replace(self, replicas=self._replicas().pinned(found))

    def reads(self) -> Sequence[Read]:
        """Return the reads of the release, its values, revisions and pods."""
        return [
            Read("release", lambda _: self._helm("status", "--output=json")),
            Read("values", lambda state: state["release"] and self._helm("get", "values", "--output=json")),
            Read(
                "history",
                lambda state: state["release"] and self._helm("history", f"--max={_HISTORY}", "--output=json"),
            ),
            Read("deployments", lambda _: self.place.list("deployments", self._label), needed=False),
            Read("back", self._values_back),
            kubernetes.pods_read(self.place, self._label),
        ]

    def _values_back(self, state: State) -> Call | None:
        """Return the read of the values that a rollback returns to, None without any."""
        try:
            revision = self._revision_back(state)
        except RefusedError:
            return None
        return self._helm("get", "values", f"--revision={revision}", "--output=json")

    def settle(self, state: State) -> Sequence[Step]:
        """Return the step that ends an interrupted change, which Helm would refuse to continue."""
        status = str(find(state, "release.info.status", ""))
        if not status.startswith(_PENDING):
            return ()
        return (Step("deploy", self._back(state)),)

    def sized(self, state: State) -> Release:
        """Return the deployment with the replicas that run, where none were requested."""
        now = self._running(state) or find(state, "values.replicas")
        return replace(self, replicas=self._replicas().sized(now, None))

    def steps(self, state: State) -> Sequence[Step]:
        """Return the steps to the desired state."""
        replicas = self._replicas()
        steps: list[Step] = list(upload_steps(replicas.source))
        if not self._is_deployed(state) or not self._is_same(state):
            words = [
                "upgrade",
                self.name,
                self.chart,
                "--install",
                "--values=-",
                "--wait",
                f"--timeout={replicas.scaling.start_s}s",
            ]
            words += [f"--description={_DESCRIPTION}{self._version(replicas)}"]
            words += [f"--history-max={_HISTORY}", *(f"--set={each}" for each in self.settings), *self._where()]
            call = command("helm", words, json.dumps(self._values(replicas)), self.name)
            undo = (Step("deploy", self._back(state)),)
            steps.append(Step("deploy", call, undo=undo, retries=frozenset({"busy"})))
        ask = self.ask(state, replicas.golden.body if replicas.golden else b"")
        return [*steps, *golden_step(replicas.golden, ask, body_of)]

    def _version(self, replicas: Replicas) -> str:
        """Return the digest of all values but the number of replicas."""
        values = {key: value for key, value in self._values(replicas).items() if key != "replicas"}
        return digest_of([values, self.settings])

    def _is_same(self, state: State) -> bool:
        """Return True if the release has the desired values."""
        replicas = self._replicas()
        wanted, found = self._values(replicas), dict(find(state, "values", {}))
        if replicas.requested[0] is None:
            found["replicas"] = wanted["replicas"]
        return wanted == found

    def _values(self, replicas: Replicas) -> dict[str, Any]:
        """Return the chart's values."""
        pod = replicas.pod
        image = parse_image(pod.image)
        by_digest = image.reference.startswith("sha256:")
        repository = pod.image.partition("@")[0]
        head, slash, tail = repository.rpartition("/")
        values: dict[str, Any] = {
            "image": {
                "repository": f"{head}{slash}{tail.partition(':')[0]}",
                "tag": "" if by_digest else image.reference,
                "digest": image.reference if by_digest else "",
            },
            "models": {"uri": pod.location, "claim": ""},
            "environment": [{"name": name, "value": value} for name, value in pod.environ],
            "replicas": max(replicas.scaling.least, 1),
            "gpu": {"count": pod.gpus, "resource": pod.gpu_resource},
            "resources": {"cpu": pod.cpu, "memory": pod.memory},
            "startupSeconds": replicas.scaling.start_s,
        }
        if pod.secret:
            values["envFrom"] = [secret_variables(pod.secret)]
        if pod.account:
            values["serviceAccount"] = {"create": False, "name": pod.account}
        return values

    # -- the other commands ------------------------------------------------------------------------------------------

    def differences(self, state: State) -> Sequence[str]:
        """Return how the release differs from the desired state."""
        found = []
        if not self._is_deployed(state):
            found.append(f"the release is {find(state, 'release.info.status', 'missing')}")
        if not self._is_same(state) and not self.settings:
            found.append("its values are not the requested ones")
        return found + versions.different(self.shares(state), {self._version(self._replicas()): 100})

    def shares(self, state: State) -> dict[str, int]:
        """Return all requests for the version that is deployed."""
        serving = self._last_deployed(state)
        return {self._origin(serving, state): 100} if serving and self._is_deployed(state) else {}

    def status(self, state: State) -> Sequence[str]:
        """Return the release's state in lines."""
        if state["release"] is None:
            return []
        pods = find(state, "pods.items", [])
        ready = sum(
            any(
                each.get("type") == "Ready" and each.get("status") == "True"
                for each in find(pod, "status.conditions", [])
            )
            for pod in pods
        )
        return [
            f"{self.name}: {find(state, 'release.info.status')}, revision {find(state, 'release.version')}",
            f"model: {find(state, 'values.models.uri', 'none')}",
            f"pods: {ready} of {len(pods)} are ready",
            versions.rollback_line(self.target, state),
        ]

    def reason(self, state: State) -> str:
        """Return why a pod does not start."""
        return kubernetes.pod_reason(state)

    def logs(self, state: State, lines: int) -> Sequence[Call]:
        """Return the read of the pods' logs."""
        return kubernetes.log_calls(self.place, self._label, lines)

    def log_text(self, answer: Any) -> str:
        """Return the text of the logs."""
        return str(answer)

    def ask(self, state: State, body: bytes) -> Call:
        """Return the request through the API server's proxy, or to the ingress."""
        path = kubernetes.path_of(self.name, self.path)
        if self.gateway:
            return http("POST", f"{self.gateway.rstrip('/')}{path}", body)
        proxy = f"/api/v1/namespaces/{self.place.namespace}/services/http:{self.name}:{_PORT}/proxy{path}"
        return self.place.kubectl("create", f"--raw={proxy}", "--filename=-", text=body.decode("utf-8", "replace"))

    def answer_of(self, answer: Any) -> bytes:
        """Return the body of a response."""
        return body_of(answer)

    def target(self, state: State) -> str:
        """Return the revision that a rollback returns to. Raises RefusedError."""
        origins = {self._origin(str(each["revision"]), state) for each in self._revisions(state)}
        return self._history(state).target(self.name, self.shares(state), existing=origins)

    def rollback(self, state: State) -> Sequence[Step]:
        """Return the steps to the revision that served before, with the replicas that run now."""
        steps = [Step("traffic", self._rollback(self._revision_back(state), state))]
        running = self._running(state)
        if running > find(state, "back.replicas", running):
            scale = self.place.kubectl("scale", "deployment", self.name, f"--replicas={running}", name=self.name)
            steps.append(Step("traffic", scale, extra=True))
        return steps

    def _revision_back(self, state: State) -> str:
        """Return the newest revision of the version that a rollback returns to. Raises RefusedError."""
        target = self.target(state)
        found = (str(each["revision"]) for each in self._revisions(state))
        return next(each for each in found if self._origin(each, state) == target)

    def _running(self, state: State) -> int:
        """Return the replicas that the Deployment has, which scaling or a user has set."""
        return max((int(find(each, "spec.replicas", 0)) for each in find(state, "deployments.items", [])), default=0)

    def undeploy(self, state: State) -> Sequence[Step]:
        """Return the step that uninstalls the release."""
        return [] if state["release"] is None else [Step("clean", self._helm("uninstall", "--wait"))]

    def advice(self, state: State) -> Sequence[tuple[str, str]]:
        """Return the commands that follow a deployment."""
        return kubernetes.advice("helm", self.name, self.place, self._replicas())

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return f"app.kubernetes.io/instance={self.name}"

    def _replicas(self) -> Replicas:
        return desired(self.replicas, self.name)

    def _where(self) -> list[str]:
        where = [f"--namespace={self.place.namespace}"]
        return [*where, f"--kube-context={self.place.context}"] if self.place.context else where

    def _helm(self, *words: str) -> Call:
        """Return a call of Helm on the release, whose name follows the sub-commands."""
        plain = 2 if words[0] == "get" else 1
        return command("helm", [*words[:plain], self.name, *words[plain:], *self._where()], name=self.name)

    def _back(self, state: State) -> Call:
        """Return the call that returns to what was deployed last, or removes the release."""
        last = self._last_deployed(state)
        return self._rollback(last, state) if last else self._helm("uninstall", "--wait")

    def _rollback(self, revision: str, state: State) -> Call:
        """Return the rollback to a revision, with as much time as its pods may take to start."""
        starts = (int(find(state, f"{each}.startupSeconds", 0)) for each in ("values", "back"))
        return self._helm("rollback", revision, "--wait", f"--timeout={max(_BACK_S, *starts)}s")

    def _is_deployed(self, state: State) -> bool:
        return bool(find(state, "release.info.status") == "deployed")

    def _revisions(self, state: State) -> list[Any]:
        """Return the revisions that have served, newest first."""
        found = [each for each in state.get("history") or [] if each.get("status") in _SERVING]
        return sorted(found, key=lambda each: -int(each["revision"]))

    def _last_deployed(self, state: State) -> str:
        found = self._revisions(state)
        serving = [each for each in found if each["status"] == "deployed"]
        return str((serving or found)[0]["revision"]) if found else ""

    def _origin(self, revision: str, state: State) -> str:
        """Return the version of a revision, by its description and those that it returned to."""
        described = {str(each["revision"]): str(each.get("description", "")) for each in state.get("history") or []}
        while match := _ROLLBACK.fullmatch(described.get(revision, "")):
            if int(match[1]) >= int(revision):
                break
            revision = match[1]
        text = described.get(revision, "")
        return text.removeprefix(_DESCRIPTION) if text.startswith(_DESCRIPTION) else revision

    def _is_back(self, revision: str, state: State) -> bool:
        found = (each for each in state.get("history") or [] if str(each["revision"]) == revision)
        return any(_ROLLBACK.fullmatch(str(each.get("description", ""))) for each in found)

    def _history(self, state: State) -> versions.History:
        """Return what served before, by the revisions that Helm retains."""
        found = versions.History()
        for each in reversed(self._revisions(state)):
            revision = str(each["revision"])
            origin = self._origin(revision, state)
            back = self._is_back(revision, state) and found.last not in ("", origin)
            found = found.rolled_back(origin, [found.last]) if back else found.deployed(origin)
        return found


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the flags that identify the cluster, and those of requests."""
    kubernetes.add_place(parser)
    kubernetes.add_request_flags(parser)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a deployment."""
    kubernetes.add_pod_flags(parser, least=2)
    parser.add_argument(
        "--chart", default=_CHART, metavar="CHART", help="folder, archive or oci:// (default %(default)s)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further value; repeatable")


def build(options: argparse.Namespace, golden: Golden | None) -> Release:
    """Return the release of parsed options. Raises ValueError."""
    replicas = kubernetes.replicas_of(options, golden)
    if replicas.traffic != 100:
        raise ValueError("--traffic: a release replaces its pods; use Knative or KServe for shares of the traffic")
    return replace(find_service(options), replicas=replicas, chart=options.chart, settings=tuple(options.set))


def find_service(options: argparse.Namespace) -> Release:
    """Return a release by its name, without a desired state. Raises ValueError."""
    return Release(options.name, kubernetes.place_of(options), path=options.path, gateway=options.gateway)


def connect(options: argparse.Namespace) -> Programs:
    """Return the connection. Raises RefusedError without Helm or kubectl."""
    return Programs("helm", "kubectl")
