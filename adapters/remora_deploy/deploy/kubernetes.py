"""Parts of deployments to Kubernetes: kubectl's calls, checks, and the flags of replicas."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from remora_deploy.deploy import plan
from remora_deploy.deploy.golden import Golden
from remora_deploy.deploy.images import Needs, image_check, pinned
from remora_deploy.deploy.plan import Call, Check, Kept, Kind, Progress, Read, State, Step, find
from remora_deploy.deploy.programs import Programs, command, http
from remora_deploy.deploy.shares import check_replicas, check_share, limits_of
from remora_deploy.deploy.uploads import Source, source_of
from remora_deploy.deploy.versions import History, history_of, texts_of
from remora_deploy.pod import CONTAINER, GPU, Pod, Scaling, start_limit

MANAGER = "remora"
_ANNOTATIONS = "remora.dev/"
"""Prefix of the annotations that retain what served before."""
NEW: frozenset[Kind] = frozenset({"missing"})
"""Kinds for an object that a controller has not created yet."""
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
"""Pattern that leaves room for a digest within the 63 characters of a label."""
_SCHEMES = ("s3://", "gs://", "az://", "https://")
_LOG_LINES = 200
_MOST = 4
_LONGEST_IDLE_S = 3600


@dataclass(frozen=True, slots=True)
class Place:
    """Cluster and namespace. ``context`` is kubectl's, "" for the current one."""

    namespace: str = "default"
    context: str = ""

    def kubectl(self, *words: str, text: str = "", name: str = "") -> Call:
        """Return a call of kubectl in the namespace."""
        where = ["--namespace", self.namespace]
        if self.context:
            where += ["--context", self.context]
        return command("kubectl", [*words, *where], text, name)

    def get(self, kind: str, name: str) -> Call:
        """Return the read of an object; a missing one raises CallError."""
        return self.kubectl("get", kind, name, "--output=json", name=name)

    def list(self, kind: str, selector: str) -> Call:
        """Return the read of the objects with a label."""
        return self.kubectl("get", kind, f"--selector={selector}", "--output=json", name=selector)

    def apply(self, document: Mapping[str, Any]) -> Call:
        """Return the server-side apply of an object."""
        name = str(find(document, "metadata.name", ""))
        flags = ("--server-side", "--force-conflicts", f"--field-manager={MANAGER}", "--output=json")
        return self.kubectl("apply", *flags, "--filename=-", text=json.dumps(document), name=name)

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> Call:
        """Return a merge patch of an object."""
        words = ("patch", kind, name, "--type=merge", f"--patch={json.dumps(change)}", "--output=json")
        return self.kubectl(*words, f"--field-manager={MANAGER}", name=name)

    def delete(self, kind: str, name: str) -> Call:
        """Return the deletion of an object, which waits until it is gone."""
        return self.kubectl("delete", kind, name, "--ignore-not-found", "--wait=true", name=name)

    def flags(self) -> str:
        """Return the flags of `remora deploy` for this place."""
        context = f" --context {self.context}" if self.context else ""
        return f" --namespace {self.namespace}{context}"


@dataclass(frozen=True, slots=True)
class Replicas:
    """Desired replicas.

    Attributes:
        pod: the pod of each.
        source: the models.
        scaling: limits of the replicas.
        traffic: percentage of the requests for the new version; 100 replaces the current one.
        golden: request that a new version must answer before it gets traffic.
        requested: limits that the user gave, None for those of what serves.
    """

    pod: Pod
    source: Source
    scaling: Scaling
    traffic: int = 100
    golden: Golden | None = None
    requested: tuple[int | None, int | None] = (None, None)

    def sized(self, least: object, most: object) -> Replicas:
        """Return the replicas with the limits of what serves, where none were requested."""
        now = [default if each is None else int(str(each))
               for each, default in ((least, self.scaling.least), (most, self.scaling.most))]  # fmt: skip
        limits = limits_of(self.requested, (now[0], now[1]))
        return replace(self, scaling=replace(self.scaling, least=limits[0], most=limits[1]))

    def check(self) -> None:
        """Raise ValueError for values that a cluster would refuse."""
        check_replicas(self.scaling.least, self.scaling.most)
        check_share(self.traffic)
        if self.pod.gpus < 0 or self.scaling.concurrency < 1:
            raise ValueError("--gpus and --concurrency: expected positive numbers")

    def pinned(self, found: State) -> Replicas:
        """Return the replicas with the image's digest."""
        return replace(self, pod=replace(self.pod, image=pinned(self.pod.image, found)))


def cluster_checks(place: Place, pod: Pod, crd: str, resource: str, install: str) -> list[Check]:
    """Return the checks of cluster, rights, definitions, quota, nodes, accounts and image."""
    namespace = place.namespace
    can = ("auth", "can-i", "create", resource)
    checks = [
        Check(
            "cluster",
            place.kubectl("get", "--raw", "/version"),
            cure="kubectl config get-contexts; then pass --context, or log in to the cluster",
        ),
        Check(
            f"namespace {namespace}",
            place.kubectl("get", "namespace", namespace, "--output=json"),
            cure=f"kubectl create namespace {namespace}",
        ),
        Check(
            f"right to create {resource}",
            place.kubectl(*can),
            lambda answer: "" if str(answer).strip().startswith("yes") else "it is denied",
            cure=f"kubectl create rolebinding remora-deploy --namespace {namespace} --clusterrole edit --user USER",
        ),
    ]
    if crd:
        definition = place.kubectl("get", "crd", crd, "--output=name")
        # Definitions belong to the cluster, which the rights of a namespace do not read.
        absent = "the cluster has no such kind"
        checks.append(Check(f"definition {crd}", definition, cure=install, needed=False, absent=absent))
    checks += [
        Check(
            "quota",
            place.kubectl("get", "resourcequota", "--output=json"),
            lambda answer: quota_problem(answer, pod),
            cure=f"kubectl edit resourcequota --namespace {namespace}, or ask for less by --cpu, --memory, --gpus",
            needed=False,
            absent="",
        ),
        Check(
            "nodes",
            place.kubectl("get", "nodes", "--output=json"),
            lambda answer: node_problem(answer, pod),
            cure="add nodes with the GPU and its device plugin: kubectl get nodes -o wide",
            needed=False,
            absent="",
        ),
    ]
    for kind, name in (("serviceaccount", pod.account), ("secret", pod.secret)):
        if name:
            cure = f"kubectl create {kind}{' generic' if kind == 'secret' else ''} {name} --namespace {namespace} ..."
            checks.append(Check(f"{kind} {name}", place.kubectl("get", kind, name, "--output=name"), cure=cure))
    return [*checks, image_check(pod.image, Needs("container", gpu=pod.gpus > 0))]


def feature_check(place: Place, pod: Pod) -> list[Check]:
    """Return the check that Knative accepts the fields of a pod's placement."""
    features = [
        f"kubernetes.podspec-{each.lower()}" for each in ("tolerations", "nodeSelector") if pod.placement.get(each)
    ]
    if not features:
        return []

    def judge(answer: Any) -> str:
        known = find(answer, "data", {})
        lost = [each for each in features if known.get(each) not in ("enabled", "allowed")]
        return f"Knative refuses the pod's fields: {', '.join(lost)} are not enabled" if lost else ""

    words = ["get", "configmap", "config-features", "--namespace=knative-serving", "--output=json"]
    patch = json.dumps({"data": dict.fromkeys(features, "enabled")})
    return [
        Check(
            "Knative's features",
            command("kubectl", [*words, *([f"--context={place.context}"] if place.context else [])]),
            judge,
            cure=f"kubectl patch configmap config-features --namespace knative-serving --patch '{patch}'; or pass "
            "--no-tolerations, if the nodes with GPUs have no taint",
            needed=False,
            absent="",
        )
    ]


def quota_problem(answer: Any, pod: Pod) -> str:
    """Return which quota of the namespace a pod exceeds, or ""."""
    wanted = {"requests.cpu": pod.cpu, "requests.memory": pod.memory, f"requests.{pod.gpu_resource}": str(pod.gpus)}
    wanted |= {"limits.cpu": pod.cpu, "limits.memory": pod.memory, "pods": "1"}
    for quota in find(answer, "items", []):
        hard, used = find(quota, "status.hard", {}), find(quota, "status.used", {})
        for key, amount in wanted.items():
            if key in hard and quantity(used.get(key, "0")) + quantity(amount) > quantity(hard[key]):
                return f"{amount} of {key} exceed the quota: {used.get(key, '0')} of {hard[key]} are used"
    return ""


def node_problem(answer: Any, pod: Pod) -> str:
    """Return why no node can run a pod, or ""."""
    nodes = find(answer, "items", [])
    if not nodes:
        return ""  # nodes are added on demand
    architectures = {find(node, "status.nodeInfo.architecture", "amd64") for node in nodes}
    if "amd64" not in architectures:
        return f"the nodes are {', '.join(sorted(architectures))}, and the image is for amd64"
    if pod.gpus and not any(quantity(find(n, "status.allocatable", {}).get(pod.gpu_resource, "0")) for n in nodes):
        return f"no node offers {pod.gpu_resource}"
    return ""


_UNITS = {
    "m": 1e-3,
    "": 1.0,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def quantity(text: object) -> float:
    """Return the number of a Kubernetes quantity; 0 for an unreadable one."""
    match = re.fullmatch(r"([0-9.]+)([mkMGT]|[KMGT]i)?", str(text))
    return float(match[1]) * _UNITS[match[2] or ""] if match else 0.0


def condition(item: Any, kind: str = "Ready") -> tuple[str, str]:
    """Return status and reason of a condition; "Unknown" for an older generation."""
    seen = find(item, "status.observedGeneration", 0)
    if seen < find(item, "metadata.generation", 0):
        return "Unknown", "waiting for the controller"
    for each in find(item, "status.conditions", []):
        if each.get("type") == kind:
            text = ": ".join(filter(None, (each.get("reason", ""), each.get("message", ""))))
            return str(each.get("status", "Unknown")), text
    return "Unknown", "no condition yet"


def history(service: Any) -> History:
    """Return what the annotations of an object retain."""
    return history_of(find(service or {}, "metadata.annotations", {}), _ANNOTATIONS)


def record(found: History) -> dict[str, str]:
    """Return the annotations that retain a history; none for an empty one."""
    return texts_of(found, _ANNOTATIONS) if found.served else {}


def annotated(found: History) -> dict[str, Any]:
    """Return the part of an object's metadata that retains a history."""
    return {"annotations": record(found)} if found.served else {}


def pods_read(place: Place, selector: str) -> Read:
    """Return the read of a service's pods, as ``pods``."""
    return Read("pods", lambda _: place.list("pods", selector), needed=False)


def pod_reason(state: State) -> str:
    """Return why a pod does not start, by its containers' states."""
    for pod in find(state, "pods.items", []):
        for status in find(pod, "status.containerStatuses", []):
            waiting = find(status, "state.waiting") or find(status, "lastState.terminated") or {}
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing", "Completed"):
                return ": ".join(filter(None, (waiting["reason"], waiting.get("message", ""))))
    return ""


def log_calls(place: Place, selector: str, lines: int, container: str = CONTAINER) -> list[Call]:
    """Return the read of the last lines of a service's pods."""
    words = ("logs", f"--selector={selector}", f"--container={container}", f"--tail={min(lines, _LOG_LINES)}")
    return [place.kubectl(*words, "--ignore-errors", name=selector)]


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the flags that identify the cluster and namespace."""
    parser.add_argument("--namespace", default="default", metavar="NAME", help="namespace (default %(default)s)")
    parser.add_argument("--context", default="", metavar="NAME", help="kubectl's context (default: the current one)")


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of requests to a service."""
    parser.add_argument("--path", default="", metavar="PATH", help="path of requests (default /v2/models/NAME/infer)")
    parser.add_argument(
        "--gateway", default="", metavar="URL", help="ingress gateway, if the service's name has no DNS"
    )


def add_pod_flags(parser: argparse.ArgumentParser, least: int) -> None:
    """Add the flags of a pod."""
    add = parser.add_argument
    add("--cpu", default="2", metavar="N", help="processors (default %(default)s)")
    add("--memory", default="4Gi", metavar="SIZE", help="memory (default %(default)s)")
    add("--gpus", type=int, default=0, metavar="N", help="GPUs of a replica (default 0)")
    add("--no-tolerations", action="store_true", help="for clusters whose nodes with GPUs have no taint")
    add("--gpu-resource", default=GPU, metavar="NAME", help="resource of a GPU, such as a MIG profile")
    parser.set_defaults(limits=(least, _MOST))
    add("--min", type=int, metavar="N", help=f"least replicas (default: as what serves, {least} for a new service)")
    add("--max", type=int, metavar="N", help=f"most replicas (default: as what serves, {_MOST} for a new service)")
    add("--concurrency", type=int, default=16, metavar="N", help="requests in flight per replica (default 16)")
    add("--service-account", default="", metavar="NAME", help="service account that may read the models")
    add("--storage-secret", default="", metavar="NAME", help="secret with credentials of the storage, as variables")
    add("--startup-timeout", type=int, default=600, metavar="S", help="time limit of the start, in seconds")
    add("--traffic", type=int, default=100, metavar="PERCENT", help="share of the new version beside the current one")


def place_of(options: argparse.Namespace) -> Place:
    """Return the place of parsed options. Raises ValueError for an invalid name."""
    for word in (options.name, options.namespace):
        if not _NAME.fullmatch(word):
            raise ValueError(f"{word}: expected at most 40 lower-case letters, digits and hyphens")
    return Place(options.namespace, options.context)


def replicas_of(options: argparse.Namespace, golden: Golden | None) -> Replicas:
    """Return the replicas of parsed options. Raises ValueError."""
    schemes = [each for each in _SCHEMES if (options.bucket or options.model).startswith(each)]
    if "://" not in options.model and not options.bucket:
        raise ValueError(f"{options.model or '--model'}: a pod reads a location, not this machine; pass --bucket too")
    if not schemes:
        raise ValueError(f"{options.bucket or options.model}: expected one of {', '.join(_SCHEMES)}")
    source = source_of(options.model, options.bucket, options.name, schemes[0])
    pod = Pod(
        options.image,
        source.location,
        cpu=options.cpu,
        memory=options.memory,
        gpus=options.gpus,
        gpu_resource=options.gpu_resource,
        account=options.service_account,
        secret=options.storage_secret,
        environ=options.environ,
        tolerates_gpus=not options.no_tolerations,
    )
    requested = (options.min, options.max)
    start_s = start_limit(options.startup_timeout, options.gpus)
    idle_s = min(start_s, _LONGEST_IDLE_S)  # because a replica that goes sooner costs more than one that stays
    scaling = Scaling(*limits_of(requested, options.limits), options.concurrency, start_s, idle_s)
    replicas = Replicas(pod, source, scaling, options.traffic, golden, requested)
    replicas.check()
    return replicas


def path_of(name: str, path: str) -> str:
    """Return the path of inference requests."""
    return path or f"/v2/models/{name}/infer"


def request_call(url: str, path: str, body: bytes, gateway: str, host: Any = "") -> Call:
    """Return the request to a URL, or with its host to the gateway."""
    if gateway:
        return http("POST", f"{gateway.rstrip('/')}{path}", body, {"Host": host or urlsplit(url).netloc})
    return http("POST", f"{url}{path}", body)


def route_step(place: Place, kind: str, name: str, url_of: Callable[[Any], str]) -> Step:
    """Return the step that waits for a URL in an object and keeps it as ``route``."""
    return Step(
        "deploy",
        place.get(kind, name),
        lambda answer: Progress(bool(url_of(answer)), "waiting for the route"),
        keep="route",
        every_s=2.0,
        limit_s=300.0,
        pick=lambda answer: {"url": url_of(answer), "host": urlsplit(url_of(answer)).netloc},
    )


ROUTE = (str(Kept("route", "url")), Kept("route", "host"))
"""URL and host that `route_step` keeps."""


def advice(platform: str, name: str, place: Place, replicas: Replicas) -> list[tuple[str, str]]:
    """Return the commands that follow a deployment."""
    pod, scaling = replicas.pod, replicas.scaling
    size = f"{pod.cpu} processors, {pod.memory}" + (f", {pod.gpus} GPUs" if pod.gpus else "")
    cost = f"{scaling.least} to {scaling.most} replicas of {size}, at the price of the cluster's nodes"
    return plan.advice(f"{platform} {name}{place.flags()}", cost)


def connect(options: argparse.Namespace) -> Programs:
    """Return the connection. Raises RefusedError without kubectl."""
    return Programs("kubectl")
