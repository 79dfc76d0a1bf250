"""Measurements that deployment files are computed from."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from remora.system.url_secrets import shown_place
from remora_deploy.pod import FULL_PERCENT, GPU

if TYPE_CHECKING:
    from remora.options import EngineOptions
    from remora.proto.model_config_pb2 import ModelConfig
    from remora.traffic.releases import Release

MOST_IN_POD = 1000
"""Knative's default limit of concurrent requests per pod."""
MOST_TASKS = 10_000
"""Cloud Run's limit of the tasks of a job."""
_MIB = 1 << 20
_QUARTER_GIB = 256
_ROOM = 2.0
"""Factor for the memory under load over that after startup."""


_CUDA_MIB = 4096
"""Main memory of a process that uses CUDA, whose libraries and context take 1 to 4 GiB."""
_GPU_START_S = 300
"""Least time limit of a start with a GPU."""
_SLOW_MIB_PER_S = 10
"""Bandwidth to a bucket on a bad day, a tenth of the usual one."""
SPOT = {
    "eks": {"eks.amazonaws.com/capacityType": "SPOT"},
    "gke": {"cloud.google.com/gke-spot": "true"},
    "aks": {"kubernetes.azure.com/scalesetpriority": "spot"},
}
"""Node labels of spot capacity by cluster."""
TASK = "{task}"
"""Placeholder for the number of a job's task in names of files."""
_ON_GPU = ("onnxruntime", "pytorch", "tensorrt", "tensorflow")
"""Backends that use a GPU when their instance groups leave the choice to them."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the operator chose; the defaults follow from the measurements.

    Attributes:
        gpus: GPUs of each replica; 0 for those that the models require.
        gpu_resource: Kubernetes' name of a GPU, a MIG profile or a share of a GPU.
        least, most: limits of the replica count; None for the platform's default.
        service_account: account of the pods or the service.
        secret: Kubernetes secret whose keys become environment variables, such as the keys of a bucket.
        namespace: Kubernetes namespace.
        mode: KServe's deployment mode.
        spot: cluster whose spot nodes the pods use; "" for any node.
        instance: instance or machine type.
        port_name: ``http1`` for REST or ``h2c`` for gRPC, on Knative and Cloud Run.
        canary: percentage of the traffic for the new revision; None for all.
        release: release whose versions become revisions; None for one version.
        monitoring: True for a PodMonitor and a PrometheusRule.
        prometheus: address of the Prometheus that KEDA scales by; "" without KEDA.
        job: URLs of the input and the output of a scoring job in place of a service; empty for a service.
        tasks: parallel tasks of the job, each with files of its number.
    """

    gpus: int = 0
    gpu_resource: str = GPU
    least: int | None = None
    most: int | None = None
    service_account: str = ""
    secret: str = ""
    namespace: str = ""
    mode: str = "knative"
    spot: str = ""
    instance: str = ""
    port_name: str = "http1"
    canary: int | None = None
    release: Release | None = None
    monitoring: bool = False
    prometheus: str = ""
    job: tuple[str, ...] = ()
    tasks: int = 1

    def check(self) -> None:
        """Raise ValueError for values that contradict each other."""
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError(f"--min-replicas {self.least} is more than --max-replicas {self.most}")
        if self.most == 0:
            raise ValueError("--max-replicas 0: expected at least 1")
        if self.canary is not None and not 0 <= self.canary <= 100:
            raise ValueError(f"--canary {self.canary}: expected a percentage")
        if self.canary is not None and self.release is not None:
            raise ValueError("--canary and --release exclude each other: the release has weights")
        if not 1 <= self.tasks <= MOST_TASKS:
            raise ValueError(f"--tasks {self.tasks}: expected 1 to {MOST_TASKS}")
        if self.tasks > 1 and not self.job:
            raise ValueError("--tasks needs --job")
        for place in self.job:
            if "://" not in place:
                raise ValueError(
                    f"--job {shown_place(place)}: expected a URL such as s3://bucket/in.csv, which the job can reach"
                )
            if (self.tasks > 1) != (TASK in place):
                raise ValueError(
                    f"--job {shown_place(place)}: expected {TASK} in both names with --tasks, and in neither without"
                )


class Model(NamedTuple):
    """Largest batch (0 without batching), instance count and GPU use of a model."""

    name: str
    max_batch_size: int
    instances: int
    gpu: bool


class Facts(NamedTuple):
    """All inputs of the renderers.

    ``load_s`` is the time until all models were ready on this machine, ``memory_mib`` the memory of the process then.
    ``location`` is where the deployment finds the models, ``image`` the container image, and ``weights_mib`` the size
    of the models' files.
    """

    name: str
    image: str
    location: str
    models: tuple[Model, ...]
    load_s: float
    memory_mib: int
    choices: Choices = Choices()
    weights_mib: int = 0

    @property
    def busiest(self) -> Model:
        """The model that can use the most concurrent requests."""
        return max(self.models, key=lambda model: max(model.max_batch_size, 1) * model.instances)

    @property
    def concurrency(self) -> int:
        """Concurrent requests that fill one batch of the busiest model while another runs."""
        return 2 * max(self.busiest.max_batch_size, 1) * self.busiest.instances

    @property
    def gpu(self) -> bool:
        """True if any model uses a GPU, or GPUs are chosen."""
        return self.gpus > 0

    @property
    def gpus(self) -> int:
        """GPUs of each replica."""
        return self.choices.gpus or int(any(model.gpu for model in self.models))

    def replicas(self, least: int, most: int) -> tuple[int, int]:
        """Return the limits of the replica count, the chosen ones in place of a platform's defaults."""
        chosen = self.choices
        high = max(most, chosen.least or 0) if chosen.most is None else chosen.most
        return min(least, high) if chosen.least is None else chosen.least, high

    def reasons(self) -> dict[str, str]:
        """Return the comments that all Kubernetes manifests share, by field name."""
        rows, model = max(self.busiest.max_batch_size, 1), self.busiest
        return {
            "containerConcurrency": f"Two batches of {rows} for each of {model.instances} instances of "
            f"'{model.name}': one runs while the next fills. {MOST_IN_POD} are the most.",
            "resources": self.memory_reason,
            "livenessProbe": "Alive as soon as the port is open, so a slow load is not restarted.",
            "autoscaling.knative.dev/target-utilization-percentage": f"Another pod comes at {FULL_PERCENT} % of "
            "containerConcurrency: the rest is room until it is there.",
            "autoscaling.knative.dev/scale-to-zero-pod-retention-period": "Ten times as long as a start may take "
            f"({self.measured_s} s): going sooner costs more than staying.",
            "serving.knative.dev/progress-deadline": f"Loading took {self.load_s:.2f} s on the machine that wrote "
            "this; images and models must come as well.",
        }

    @property
    def patience_s(self) -> int:
        """Startup timeout in seconds, ten times the load time here and at least a minute.

        Other machines are slower, and models may have to be downloaded. With GPUs it is at least five minutes, because
        the measurement has neither the start of the driver nor the way of the weights to the GPU.
        """
        return max(_GPU_START_S if self.gpu else 0, self.measured_s)

    @property
    def measured_s(self) -> int:
        """Ten times the load time here, and at least a minute."""
        return max(60, math.ceil(10 * self.load_s))

    @property
    def download_s(self) -> int:
        """Time limit of a download of the models, in seconds, at a tenth of a usual bandwidth."""
        return max(60, math.ceil(self.weights_mib / _SLOW_MIB_PER_S))

    @property
    def memory(self) -> int:
        """Memory request in MiB, twice the measured memory in quarters of a GiB.

        With GPUs it is at least 4 GiB and the weights, because CUDA takes main memory that a processor does not.
        """
        least = _CUDA_MIB + self.weights_mib if self.gpu else 2 * _QUARTER_GIB
        return math.ceil(max(least, self.memory_mib * _ROOM) / _QUARTER_GIB) * _QUARTER_GIB

    @property
    def memory_reason(self) -> str:
        """Comment on the memory."""
        measured = f"The process had {self.memory_mib} MiB with all models loaded; twice that, in quarters of a GiB."
        if not self.gpu:
            return measured
        return f"{measured} Measured without a GPU: at least {_CUDA_MIB // 1024} GiB for CUDA, and the weights."


def measure(paths: Sequence[str], name: str, image: str, location: str, choices: Choices = Choices()) -> Facts:
    """Load the models and measure them. Raises RemoraError if a model fails to load.

    With GPUs chosen, models that require one are loaded on the processor, so that a machine without GPUs can describe
    a service with them.
    """
    from remora.api.http import with_workers
    from remora.api.system import usage_with_children
    from remora.engine import Engine  # because the command line imports this module for the platform names
    from remora.options import EngineOptions

    begin = time.monotonic()
    mode = "explicit" if choices.gpus else "none"
    options = with_workers(EngineOptions(paths=tuple(paths), model_control_mode=mode))
    with Engine(options=options) as engine:
        written = _written(options, choices.gpus) if choices.gpus else {}
        # Models before ensembles, which would load them as they are written.
        for model in sorted(written, key=lambda each: written[each].HasField("ensemble_scheduling")):
            engine.load(model, _on_processor(written[model]))
        load_s = time.monotonic() - begin
        models = tuple(_model(model.config, written.get(model.name), choices.gpus) for model in engine.models())
        resident_mib = usage_with_children().resident_bytes // _MIB
        return Facts(name, image, location, models, load_s, resident_mib, choices, _size_mib(paths, resident_mib))


def _size_mib(paths: Sequence[str], resident_mib: int) -> int:
    """Return the size of the models' files in MiB; for a bucket the memory of the process."""
    if any("://" in each for each in paths):
        return resident_mib
    files = (file for each in paths for file in ([Path(each)] if Path(each).is_file() else Path(each).rglob("*")))
    return math.ceil(sum(file.stat().st_size for file in files if file.is_file()) / _MIB)


def _written(options: EngineOptions, gpus: int) -> Mapping[str, ModelConfig]:
    """Return the configurations of all models as written, for a machine with GPUs."""
    from remora.api.models import ModelLoader, Planner, open_repositories
    from remora.api.storage import Catalog
    from remora.system.clock import SystemClock

    loader = ModelLoader(options, SystemClock(), gpus=range(gpus))
    catalog = Catalog(open_repositories(options, loader.ledger))
    catalog.scan()
    planner = Planner(catalog, loader)
    return {model: planner.plan(model, {}).config for model in catalog.models()}


def _on_processor(config: ModelConfig) -> str | None:
    """Return the configuration as JSON with its GPU groups on the processor, or None."""
    from google.protobuf.json_format import MessageToJson

    from remora.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup

    groups = [group for group in config.instance_group if group.kind == ModelInstanceGroup.KIND_GPU or group.gpus]
    if not groups:
        return None
    changed = ModelConfig()
    changed.CopyFrom(config)
    for group in changed.instance_group:
        group.kind = ModelInstanceGroup.KIND_CPU
        group.ClearField("gpus")
    return MessageToJson(changed, preserving_proto_field_name=True)


def _model(loaded: ModelConfig, written: ModelConfig | None, gpus: int) -> Model:
    """Return a model's row, on the GPUs that it would use if ``gpus`` are chosen."""
    from remora.proto.model_config_pb2 import ModelInstanceGroup

    kinds = ModelInstanceGroup
    instances = sum(max(group.count, 1) for group in loaded.instance_group) or 1
    on_gpu = any(group.kind == kinds.KIND_GPU for group in loaded.instance_group)
    if written is None:
        return Model(loaded.name, loaded.max_batch_size, instances, on_gpu)
    groups = [*written.instance_group] or [ModelInstanceGroup()]
    automatic = loaded.backend in _ON_GPU
    placed = [each for each in groups if each.kind == kinds.KIND_GPU or (each.kind == kinds.KIND_AUTO and automatic)]
    if not placed:
        return Model(loaded.name, loaded.max_batch_size, instances, gpu=False)
    count = sum(max(each.count, 1) * (len(each.gpus) or gpus) for each in placed)
    return Model(loaded.name, loaded.max_batch_size, count, gpu=True)
