"""What deployment files are computed from: the models' batches and instances, and what loading them took here."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

MOST_IN_POD = 1000
"""Knative admits no more requests at a time to a pod, unless a cluster's operator says otherwise."""
_MIB = 1 << 20
_QUARTER_GIB = 256
_ROOM = 2.0
"""A process takes more under load than when it has just started."""


class Model(NamedTuple):
    """A model: its largest batch (0 without batching), how many instances, whether any is on a GPU."""

    name: str
    max_batch_size: int
    instances: int
    gpu: bool


class Facts(NamedTuple):
    """All of it.

    ``load_s`` is the time until all models were ready on this machine, ``memory_mib`` what the process then had.
    ``location`` is where the deployment finds the models, ``image`` what it runs.
    """

    name: str
    image: str
    location: str
    models: tuple[Model, ...]
    load_s: float
    memory_mib: int

    @property
    def busiest(self) -> Model:
        """The model that can use the most requests at a time."""
        return max(self.models, key=lambda model: max(model.max_batch_size, 1) * model.instances)

    @property
    def concurrency(self) -> int:
        """Requests at a time that keep the busiest model busy: a batch runs while the next one fills."""
        return 2 * max(self.busiest.max_batch_size, 1) * self.busiest.instances

    @property
    def gpu(self) -> bool:
        """Whether any model wants a GPU."""
        return any(model.gpu for model in self.models)

    @property
    def patience_s(self) -> int:
        """How long a start may take before something is wrong: ten times the time here, since other machines are slower
        and models may have to be fetched; a minute at least."""
        return max(60, math.ceil(10 * self.load_s))

    @property
    def memory(self) -> int:
        """Memory to ask for, in MiB: twice what was taken, in quarters of a GiB."""
        return max(2 * _QUARTER_GIB, math.ceil(self.memory_mib * _ROOM / _QUARTER_GIB) * _QUARTER_GIB)


def measure(paths: Sequence[str], name: str, image: str, location: str) -> Facts:
    """Load the models and look at them. Raises RemoraError when one cannot be loaded."""
    from remora.engine import Engine  # every command line imports this module for the names of the platforms
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
    """Memory of this process, in MiB; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 // _MIB
    except OSError:
        return 0
