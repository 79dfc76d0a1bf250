"""Measurements that deployment files are computed from."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

MOST_IN_POD = 1000
"""Knative's default limit of concurrent requests per pod."""
_MIB = 1 << 20
_QUARTER_GIB = 256
_ROOM = 2.0
"""Factor for the memory under load over that after startup."""


class Model(NamedTuple):
    """Largest batch (0 without batching), instance count and GPU use of a model."""

    name: str
    max_batch_size: int
    instances: int
    gpu: bool


class Facts(NamedTuple):
    """All inputs of the renderers.

    ``load_s`` is the time until all models were ready on this machine, ``memory_mib`` the memory of the process then.
    ``location`` is where the deployment finds the models, ``image`` the container image.
    """

    name: str
    image: str
    location: str
    models: tuple[Model, ...]
    load_s: float
    memory_mib: int

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
        """True if any model uses a GPU."""
        return any(model.gpu for model in self.models)

    @property
    def patience_s(self) -> int:
        """Startup timeout in seconds, ten times the load time here and at least a minute.

        Other machines are slower, and models may have to be downloaded.
        """
        return max(60, math.ceil(10 * self.load_s))

    @property
    def memory(self) -> int:
        """Memory request in MiB, twice the measured memory in quarters of a GiB."""
        return max(2 * _QUARTER_GIB, math.ceil(self.memory_mib * _ROOM / _QUARTER_GIB) * _QUARTER_GIB)


def measure(paths: Sequence[str], name: str, image: str, location: str) -> Facts:
    """Load the models and measure them. Raises RemoraError if a model fails to load."""
    from remora.engine import Engine  # because the command line imports this module for the platform names
    from remora.options import EngineOptions
    from remora.proto.model_config_pb2 import ModelInstanceGroup

    begin = time.monotonic()
    with Engine(options=EngineOptions(paths=tuple(paths))) as engine:
        load_s = time.monotonic() - begin
        models = tuple(
            Model(
                model.name,
                model.config.max_batch_size,
                sum(max(group.count, 1) for group in model.config.instance_group) or 1,
                any(group.kind == ModelInstanceGroup.KIND_GPU for group in model.config.instance_group),
            )
            for model in engine.models()
        )
        return Facts(name, image, location, models, load_s, _resident_mib())


def _resident_mib() -> int:
    """Return the memory of this process in MiB, or 0 where unavailable."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 // _MIB
    except OSError:
        return 0
