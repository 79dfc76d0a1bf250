"""Settings that `remora tune` searches, its goal, and the trials and results of the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from remora.config import BatchPolicy
from remora_tools.deciders.objective import Slo


class Runtime(NamedTuple):
    """How a model's library runs.

    ``threads`` are those of an operator, 0 without such a setting; ``provider`` is the accelerator, "" without one.
    """

    threads: int = 0
    provider: str = ""


class Settings(NamedTuple):
    """The tuned settings of one model.

    ``limit`` is max_batch_size. ``preferred`` are the preferred batch sizes, which may be empty. Without ``dynamic``
    each request runs alone.
    """

    limit: int = 0
    dynamic: bool = False
    preferred: tuple[int, ...] = ()
    delay_us: int = 0
    instances: int = 1
    runtime: Runtime = Runtime()

    @property
    def batch(self) -> int:
        """The number of rows that a batch of single rows should reach."""
        return max(self.preferred, default=self.limit) if self.dynamic and self.limit else 1

    @property
    def policy(self) -> BatchPolicy:
        """The policy of a queue with these settings."""
        return BatchPolicy(self.limit, self.dynamic, self.preferred, self.delay_us * 1000)


def describe(settings: Settings, field: str = "") -> str:
    """Return one field of the settings, or all of them, in words."""
    batch = f"batches of {settings.batch}" if settings.batch > 1 else "no batching"
    delay = f"delay {settings.delay_us} us"
    count = f"{settings.instances} instance{'s' if settings.instances > 1 else ''}"
    runtime = ", ".join(
        (
            [f"{settings.runtime.threads} thread{'s' if settings.runtime.threads > 1 else ''}"]
            if settings.runtime.threads
            else []
        )
        + ([settings.runtime.provider] if settings.runtime.provider else [])
    )
    words = {"batch": batch, "delay_us": delay, "instances": count, "runtime": runtime or "the default runtime"}
    if field:
        return words[field]
    return ", ".join([batch, *([delay] if settings.delay_us else []), count, *([runtime] if runtime else [])])


Plan = tuple[Settings, ...]
"""The settings of all tuned models, in the order of `System.models`."""


class Goal(NamedTuple):
    """What the search optimises.

    With ``rate_per_s`` the least instances and memory that hold the objective at this rate; without it the highest
    throughput that holds it. ``memory_bytes`` 0 means no limit.
    """

    slo: Slo
    rate_per_s: float = 0.0
    memory_bytes: int = 0
    budget_s: float = 120.0
    window_s: float = 1.0


class ModelSpace(NamedTuple):
    """The candidates for one model.

    ``batches`` are the batch sizes to try; a model that cannot batch, or whose batching must stay, has none.
    ``slots`` are (instances, runtime) pairs.
    """

    name: str
    present: Settings
    batches: tuple[int, ...]
    slots: tuple[tuple[int, Runtime], ...]


class System(NamedTuple):
    """The models that are tuned together.

    ``routes`` are the models (by index) that a request to each target visits. ``rows`` is the batch size of a request,
    ``most_rows`` the largest one that all targets accept.
    """

    models: tuple[ModelSpace, ...]
    routes: tuple[tuple[int, ...], ...]
    cores: int
    rows: int = 1
    most_rows: int = 1

    @property
    def present(self) -> Plan:
        """The present settings."""
        return tuple(model.present for model in self.models)


class Load(NamedTuple):
    """A load: connections of a closed loop, or requests per second of an open loop."""

    connections: int = 0
    rate_per_s: float = 0.0

    def text(self) -> str:
        """Return the load for a table."""
        if self.rate_per_s:
            return f"{self.rate_per_s:g}/s"
        return f"{self.connections} connection{'' if self.connections == 1 else 's'}"


class CostTrial(NamedTuple):
    """Run requests of ``rows`` rows one at a time to measure the duration of a batch."""

    plan: Plan
    rows: int


class LoadTrial(NamedTuple):
    """Measure a plan under a load for about ``seconds``, with the latency at ``percent``."""

    plan: Plan
    load: Load
    seconds: float
    percent: float = 99.0


Trial = CostTrial | LoadTrial


class CostResult(NamedTuple):
    """Durations of batches in nanoseconds by rows, for each model.

    ``cores`` is the number of processors in use meanwhile, ``front_ns`` the time of a request outside of the models,
    ``memory_bytes`` the resident memory of all models, ``spent_s`` the duration of the trial.
    """

    costs: Sequence[Mapping[int, float]]
    cores: float
    front_ns: float
    memory_bytes: int
    spent_s: float


class LoadResult(NamedTuple):
    """Throughput and latency under a load.

    ``latency_ns`` is the objective's percentile of the slowest target. ``front`` is the share of a processor
    that the event loop used.
    """

    rate_per_s: float
    latency_ns: float
    memory_bytes: int
    spent_s: float
    failures: int = 0
    front: float = 0.0


class Refused(NamedTuple):
    """A plan that cannot run, and the reason."""

    reason: str
    spent_s: float


Result = CostResult | LoadResult | Refused


class Point(NamedTuple):
    """A measured plan: its load and the medians of its measurements."""

    plan: Plan
    load: Load
    rate_per_s: float
    latency_ns: float
    memory_bytes: int = 0
    measurements: int = 1


class Decision(NamedTuple):
    """The end of a search.

    ``best`` is the plan to use, or the closest one if none ``holds`` the objective; None without any measurement.
    ``present`` are the present settings, if they were measured. ``why`` are sentences.
    """

    best: Point | None
    present: Point | None
    holds: bool
    why: tuple[str, ...]
