"""Server in closed form, for tests of `remora tune`: it answers trials without a simulation, a clock or a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

from remora_tools.deciders.objective import Slo
from remora_tools.tuning import (
    CostResult,
    CostTrial,
    Goal,
    Load,
    LoadResult,
    ModelSpace,
    Plan,
    Point,
    Refused,
    Result,
    Runtime,
    Settings,
    System,
    Trial,
)
from remora_tools.tuning.candidates import batch_sizes, ladder, rounded_us, slots_of, with_batch

CORES = 4


@dataclass
class Formula:
    """A model whose batches take ``fixed_ns`` and ``row_ns`` for each row.

    ``parallel`` is the part of the work that threads divide, ``cores`` the processors that one thread keeps busy (0 for
    a model that sleeps), ``front_ns`` the time of a request in the event loop, ``noise`` the spread of a measurement.
    """

    fixed_ns: float
    row_ns: float
    parallel: float = 0.0
    cores: float = 1.0
    front_ns: float = 20_000.0
    noise: float = 0.0
    instance_bytes: int = 100 << 20
    tail: float = 1.3
    limit: int = 64
    seed: int = 0
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def system(self, present: Settings | None = None) -> System:
        """Return the search space: batches up to ``limit``, instances and threads up to CORES."""
        present = present or Settings(8, True, (), 0, 1, Runtime(CORES if self.parallel else 0))
        slots = slots_of(present, CORES, self.parallel > 0, ())
        return System((ModelSpace("m", present, batch_sizes(self.limit), slots),), ((0,),), CORES, 1, self.limit)

    def batch_ns(self, runtime: Runtime, rows: float) -> float:
        """Return the duration of a batch that runs alone."""
        threads = max(runtime.threads, 1)
        return (self.fixed_ns + self.row_ns * rows) * (1 - self.parallel + self.parallel / threads)

    def exact(self, plan: Plan, load: Load) -> tuple[float, float]:
        """Return rate per second and latency in nanoseconds without noise."""
        (settings,) = plan
        batch, instances = settings.batch, settings.instances
        slower = max(instances * self._in_use(settings.runtime) / CORES, 1.0)
        if load.rate_per_s:
            return self._open(settings, load.rate_per_s, slower)
        rows = max(1.0, min(batch, load.connections / instances))
        wait_ns = settings.delay_us * 1000.0 if load.connections < batch * instances else 0.0
        cycle_ns = self.batch_ns(settings.runtime, rows) * slower + wait_ns
        rate = min(min(instances, load.connections) * rows / cycle_ns, 1 / self.front_ns) * 1e9
        return rate, self.tail * max(load.connections / rate * 1e9, cycle_ns + self.front_ns)

    def _in_use(self, runtime: Runtime) -> float:
        return self.cores * (1 + (max(runtime.threads, 1) - 1) * self.parallel)

    def _open(self, settings: Settings, rate: float, slower: float) -> tuple[float, float]:
        most = min(settings.instances * settings.batch / (self.batch_ns(settings.runtime, settings.batch) * slower),
                   1 / self.front_ns) * 1e9  # fmt: skip
        busy = rate / most
        if busy >= 1:
            return most, 1e10
        rows = max(1.0, settings.batch * busy)
        return rate, self.tail * (self.batch_ns(settings.runtime, rows) * slower / (1 - busy) + settings.delay_us * 500)

    def run(self, trial: Trial) -> Result:
        """Carry out a trial."""
        self.trials.append(trial)
        (settings,) = trial.plan
        memory = self.instance_bytes * settings.instances
        if isinstance(trial, CostTrial):
            if trial.rows > max(settings.limit, 1):
                return Refused(f"batch {trial.rows} exceeds {settings.limit}", 0.1)
            ns = self.batch_ns(settings.runtime, trial.rows) * self._jitter()
            return CostResult([{trial.rows: ns}], self._in_use(settings.runtime), self.front_ns, memory, 0.2)
        rate, latency = self.exact(trial.plan, trial.load)
        return LoadResult(rate * self._jitter(), latency * self._jitter(), memory, trial.seconds)

    def _jitter(self) -> float:
        return math.exp(self._random.gauss(0.0, self.noise)) if self.noise else 1.0

    def grid(self, system: System) -> list[Plan]:
        """Return all plans of batch sizes, delays, instances and threads, without regard to their costs."""
        (space,) = system.models
        found: dict[Plan, None] = {system.present: None}
        for instances, runtime in space.slots:
            for batch in space.batches:
                for part in (0.0, 0.5, 1.0) if batch > 1 else (0.0,):
                    delay_us = rounded_us(part * self.batch_ns(runtime, batch))
                    settings = with_batch(space.present, batch, delay_us)
                    found[(settings._replace(instances=instances, runtime=runtime),)] = None
        return list(found)

    def best_rate(self, plan: Plan, slo: Slo) -> float:
        """Return the highest rate of a plan within the objective, 0 if none holds it."""
        held = [self.exact(plan, Load(count)) for count in ladder(math.inf)]
        return max((rate for rate, latency in held if latency <= slo.limit_ns), default=0.0)


def goal_of(limit_ms: float, rate: float = 0.0, memory: int = 0, budget_s: float = 1e6) -> Goal:
    """Return the goal of a p99 in milliseconds."""
    return Goal(Slo(99.0, round(limit_ms * 1e6)), rate, memory, budget_s)


def plan_of(point: Point | None) -> Plan:
    """Return the plan of a point that must be there."""
    assert point is not None
    return point.plan
