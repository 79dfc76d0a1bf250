"""The pod of a server on Kubernetes, and the objects that run it, made from facts. Pure.

`remora manifests` prints these objects, `remora deploy` applies them, and the files in `infra/kubernetes` are written
from them. The chart in `infra/helm` has the pod a second time, as a template; a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Object = dict[str, Any]

CONTAINER = "remora"
KSERVE_CONTAINER = "kserve-container"
"""Name by which KServe finds the container of a runtime."""
FORMAT = "remora"
"""Model format of the runtimes; KServe's own runtimes keep theirs."""
DRAIN_S = 30
"""Time for running requests of a Deployment's pod after SIGTERM."""
_PAUSE_S = 5
"""Time in which the endpoints of a Service forget a pod."""
FULL_PERCENT = 70
"""Use of a replica, in percent, at which another replica is started."""
REQUEST_S = 300
"""Time limit of a request on Knative."""
_DRAIN_MARGIN_S = 10
_PORT = 8080
SCRAPED_PORT = "user-port"
"""Knative gives the port this name and refuses one in the manifest; in Standard mode the manifest has it."""
_USER = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
"""The image names a numeric user; without a number here clusters such as OpenShift's may choose another one."""
_MODELS = "/models"
GPU = "nvidia.com/gpu"
"""Resource of a whole GPU, and taint of the nodes that have GPUs."""
_REQUIRED_GPU = {"REMORA_REQUIRE_GPU": "true"}
_GPU_START_S = 900
"""Least time limit of a start on a GPU, whose node may have to come first."""
LIVENESS = {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6}
"""A busy server may answer late; its process is replaced after a minute without an answer."""


KSERVE_SECRET = (
    "KServe's storage initializer reads the secrets of the service account; pass --service-account, and attach the "
    "secret to it"
)
"""Why a predictor takes no secret with credentials."""


class Mode(StrEnum):
    """Deployment modes of KServe."""

    KNATIVE = "Knative"
    STANDARD = "Standard"


_EXIT_S = {Mode.KNATIVE: REQUEST_S - _DRAIN_MARGIN_S, Mode.STANDARD: 20}
"""Below the grace of a pod: that of KServe's revisions (300 s), and that of Kubernetes (30 s) in Standard mode."""


@dataclass(frozen=True, slots=True)
class Pod:
    """Facts of a pod.

    Attributes:
        image: container image.
        location: model repository; "" where the platform brings the models, or a claim has them.
        claim: persistent volume claim with the models; "" for none.
        cpu, memory, gpus: resources, requested and limited alike; ``cpu`` is "" for none of them.
        gpu_resource: name of the GPU resource, such as ``nvidia.com/mig-1g.10gb``.
        account: service account with the rights to read the models.
        secret: secret with credentials of the storage, as variables.
        optional_secret: True if the secret need not exist.
        environ: environment of the server.
        node_labels: labels of the nodes; empty for any node.
        tolerations: tolerations beside that of GPUs.
        tolerates_gpus: False for clusters whose nodes with GPUs have no taint.
    """

    image: str
    location: str = ""
    claim: str = ""
    cpu: str = "2"
    memory: str = "4Gi"
    gpus: int = 0
    gpu_resource: str = GPU
    account: str = ""
    secret: str = ""
    optional_secret: bool = False
    environ: tuple[tuple[str, str], ...] = ()
    node_labels: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Mapping[str, str], ...] = ()
    tolerates_gpus: bool = True

    @property
    def resources(self) -> Object | None:
        """Equal requests and limits, or None."""
        if not self.cpu:
            return None
        size = {"cpu": self.cpu, "memory": self.memory}
        if self.gpus:
            size[self.gpu_resource] = str(self.gpus)
        return {"requests": size, "limits": dict(size)}

    @property
    def placement(self) -> Object:
        """Account, node labels and tolerations."""
        tolerates = self.gpus and self.tolerates_gpus
        gpu = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}] if tolerates else []
        return _present(
            serviceAccountName=self.account,
            nodeSelector=dict(self.node_labels),
            tolerations=[*gpu, *map(dict, self.tolerations)],
        )


@dataclass(frozen=True, slots=True)
class Scaling:
    """Limits of the replicas and of their load.

    Attributes:
        least, most: limits of the replicas.
        concurrency: requests in flight per replica.
        start_s: time limit for image and models to be ready.
        idle_s: time that Knative retains the last replica without requests; 0 for the cluster's.
        batch: largest batch and instances of the busiest model, the source of ``concurrency``; None if unknown.
    """

    least: int = 0
    most: int = 4
    concurrency: int = 16
    start_s: int = 600
    idle_s: int = 0
    batch: tuple[int, int] | None = None

    @property
    def annotations(self) -> dict[str, str]:
        """The numbers that scaling is computed from."""
        if self.batch is None:
            return {}
        rows, instances = self.batch
        return {"remora.dev/max-batch-size": str(rows), "remora.dev/instances": str(instances)}


def start_limit(start_s: int, gpus: int) -> int:
    """Return the time limit of a start, which is longer where a node with GPUs may have to come."""
    return max(start_s, _GPU_START_S) if gpus else start_s


def with_required_gpu(environ: Mapping[str, str], *, gpu: bool) -> dict[str, str]:
    """Return the environment of a server, which with GPUs is ready only while a model uses one.

    A value that the user gave wins.
    """
    return {**(_REQUIRED_GPU if gpu else {}), **environ}


def load_target(concurrency: int) -> int:
    """Return the requests in flight per replica at which another replica is started."""
    return max(1, concurrency * FULL_PERCENT // 100)


def deployment(metadata: Mapping[str, Any], pod: Pod, scaling: Scaling, replicas: int | None) -> Object:
    """Return the Deployment, with the labels of ``metadata`` on its pods.

    With ``replicas`` None an autoscaler sets the number.
    """
    labels = dict(metadata["labels"])
    container = _container(
        pod,
        args=[f"--model-repository={_MODELS if pod.claim else pod.location}", f"--exit-timeout-secs={DRAIN_S}"],
        env=_env(dict(pod.environ)),
        ports=[
            {"name": "http", "containerPort": 8000},
            {"name": "grpc", "containerPort": 8001},
            {"name": "metrics", "containerPort": 8002},
        ],
        probes={
            "startupProbe": {
                **_get("ready", "http"),
                "periodSeconds": 1,
                "timeoutSeconds": 1,
                "failureThreshold": scaling.start_s,
            },
            **_probes("http", periodSeconds=5, timeoutSeconds=2),
            "lifecycle": {"preStop": {"sleep": {"seconds": _PAUSE_S}}},
        },
    )
    more = {"automountServiceAccountToken": False, "terminationGracePeriodSeconds": DRAIN_S + 3 * _PAUSE_S}
    surge = {"maxUnavailable": 1, "maxSurge": 0} if pod.gpus else {"maxUnavailable": 0, "maxSurge": 1}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _present(**metadata, annotations=scaling.annotations),
        "spec": _present(
            replicas=replicas,
            selector={"matchLabels": labels},
            strategy={"rollingUpdate": surge},
            template={"metadata": {"labels": labels}, "spec": _spec(pod, container, more)},
        ),
    }


def knative_service(metadata: Mapping[str, Any], pod: Pod, scaling: Scaling, port_name: str = "http1") -> Object:
    """Return the Knative Service, without the name of its revision and shares of the traffic."""
    numbers = {
        "class": "kpa.autoscaling.knative.dev",
        "metric": "concurrency",
        "target-utilization-percentage": str(FULL_PERCENT),
        "min-scale": str(scaling.least),
        "max-scale": str(scaling.most),
        "initial-scale": str(max(1, scaling.least)),
    }
    if scaling.idle_s:
        numbers["scale-to-zero-pod-retention-period"] = f"{scaling.idle_s}s"
    annotations = scaling.annotations | {f"autoscaling.knative.dev/{key}": value for key, value in numbers.items()}
    annotations["serving.knative.dev/progress-deadline"] = f"{scaling.start_s}s"
    container = _container(
        pod,
        command=["python", "-m", "remora_adapters.knative"],
        args=[f"--exit-timeout-secs={REQUEST_S - _DRAIN_MARGIN_S}"],
        env=_env({"REMORA_MODEL_REPOSITORY": pod.location, **dict(pod.environ)}),
        ports=[{"name": port_name, "containerPort": _PORT}],
        probes=_probes(None),
    )
    more = {"containerConcurrency": scaling.concurrency, "timeoutSeconds": REQUEST_S}
    return {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": _present(**metadata),
        "spec": {"template": {"metadata": {"annotations": annotations}, "spec": _spec(pod, container, more)}},
    }


def kserve_runtime(
    metadata: Mapping[str, Any],
    pod: Pod,
    mode: Mode,
    formats: Sequence[Mapping[str, str]] = ({"name": FORMAT, "version": "1"},),
    kind: str = "ServingRuntime",
) -> Object:
    """Return the ServingRuntime, or the ClusterServingRuntime by its kind."""
    port = _present(name="" if mode is Mode.KNATIVE else SCRAPED_PORT, containerPort=_PORT, protocol="TCP")
    container = _container(
        pod,
        name=KSERVE_CONTAINER,
        command=["python", "-m", "remora_adapters.kserve"],
        args=["--model-name={{.Name}}", f"--exit-timeout-secs={_EXIT_S[mode]}"],
        env=_env(dict(pod.environ)),
        ports=[port],
        probes=_probes(_PORT, periodSeconds=2, timeoutSeconds=2),
    )
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": kind,
        "metadata": _present(**metadata),
        "spec": {
            "annotations": {"prometheus.kserve.io/port": str(_PORT), "prometheus.kserve.io/path": "/metrics"},
            "supportedModelFormats": [dict(each) for each in formats],
            "protocolVersions": ["v1", "v2", "grpc-v2"],
            "containers": [container],
            "volumes": _volumes(pod),
        },
    }


def kserve_predictor(
    pod: Pod, scaling: Scaling, mode: Mode, runtime: str, model_format: Mapping[str, str] | None = None
) -> Object:
    """Return the predictor of an InferenceService, whose container the runtime has."""
    found: Object = {"minReplicas": scaling.least, "maxReplicas": scaling.most}
    if mode is Mode.KNATIVE:
        found |= {
            "scaleMetric": "concurrency",
            "scaleTarget": load_target(scaling.concurrency),
            "containerConcurrency": scaling.concurrency,
        }
    else:
        found |= {"scaleMetric": "cpu", "scaleTarget": FULL_PERCENT}
    model = {
        "runtime": runtime,
        "modelFormat": dict(model_format or {"name": FORMAT}),
        "protocolVersion": "v2",
        "storageUri": pod.location,
    }
    return {**found, **pod.placement, "model": model}


def inference_service(metadata: Mapping[str, Any], predictor: Mapping[str, Any], mode: Mode) -> Object:
    """Return the InferenceService of a predictor."""
    annotations = {"serving.kserve.io/deploymentMode": str(mode), **metadata.get("annotations", {})}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": _present(**{**metadata, "annotations": annotations}),
        "spec": {"predictor": dict(predictor)},
    }


def job(metadata: Mapping[str, Any], pod: Pod, words: Sequence[str], spec: Mapping[str, Any]) -> Object:
    """Return the Job that runs Python with arguments.

    ``spec`` has the fields beside its template.
    """
    container = _present(
        name="score",
        image=pod.image,
        command=["python"],
        args=list(words),
        envFrom=_env_from(pod),
        securityContext=_security(pod),
        resources=pod.resources,
        volumeMounts=_mounts(pod),
    )
    more = {"automountServiceAccountToken": False, "restartPolicy": "OnFailure"}
    template = {"metadata": {"labels": metadata["labels"]}, "spec": _spec(pod, container, more)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _present(**metadata),
        "spec": {**spec, "template": template},
    }


def _container(
    pod: Pod,
    *,
    args: list[str],
    env: list[Object],
    ports: list[Object],
    probes: Mapping[str, Any],
    name: str = CONTAINER,
    command: Sequence[str] = (),
) -> Object:
    """Return the container of a server."""
    return _present(
        name=name,
        image=pod.image,
        command=list(command),
        args=[*args, *(["--require-gpu"] if pod.gpus and _REQUIRED_GPU.keys().isdisjoint(dict(pod.environ)) else [])],
        env=env,
        envFrom=_env_from(pod),
        ports=ports,
        securityContext=_security(pod),
        resources=pod.resources,
        **probes,
        volumeMounts=_mounts(pod),
    )


def _spec(pod: Pod, container: Object, more: Mapping[str, Any]) -> Object:
    """Return the pod's specification around a container."""
    # The group lets the server read a claim; without one the container's context is enough.
    group = {"fsGroup": 10001, "fsGroupChangePolicy": "OnRootMismatch"}
    return _present(
        **pod.placement,
        **more,
        securityContext={**_USER, **group} if pod.claim else None,
        containers=[container],
        volumes=_volumes(pod),
    )


def _security(pod: Pod) -> Object:
    """Return the context of a container without any rights; the pod of a claim has the user."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        **({} if pod.claim else _USER),
    }


def _get(state: str, port: int | str | None) -> Object:
    return {"httpGet": _present(path=f"/v2/health/{state}", port=port)}


def _probes(port: int | str | None, **readiness: int) -> Object:
    """Return readiness and liveness probes; without a port the platform sets it."""
    return {
        "readinessProbe": {**_get("ready", port), **readiness},
        "livenessProbe": {**_get("live", port), **LIVENESS},
    }


def _env(variables: Mapping[str, str]) -> list[Object]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def _env_from(pod: Pod) -> list[Object]:
    return [secret_variables(pod.secret, optional=pod.optional_secret)] if pod.secret else []


def secret_variables(name: str, *, optional: bool = False) -> Object:
    """Return the source of variables that a secret is."""
    return {"secretRef": _present(name=name, optional=optional or None)}


def _mounts(pod: Pod) -> list[Object]:
    models = [{"name": "models", "mountPath": _MODELS, "readOnly": True}] if pod.claim else []
    return [*models, {"name": "scratch", "mountPath": "/tmp"}]


def _volumes(pod: Pod) -> list[Object]:
    claim = {"claimName": pod.claim, "readOnly": True}
    models = [{"name": "models", "persistentVolumeClaim": claim}] if pod.claim else []
    return [*models, {"name": "scratch", "emptyDir": {}}]


def _present(**fields: Any) -> Object:
    """Return the fields that have a value."""
    return {key: value for key, value in fields.items() if value is not None and value not in ("", [], {})}
