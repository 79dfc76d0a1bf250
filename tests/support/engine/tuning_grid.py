"""Grid of all settings at all loads, the yardstick of `remora tune`, without windows that can hardly have the best.

The grid leaves out a (plan, load) pair if one of these rules excludes it from being the best one. The candidates are
those of `settings_of`, which has none whose batch or delay takes longer than the limit.

1. Capacity. No instance answers more than ``rows / duration`` of its best batch size, measured alone. A plan whose
   capacity is below the best rate so far is left out.
2. Little's law, from below. ``c`` requests in flight take at least their batches' duration each, so that at most
   ``c / duration`` are answered. A load for which this is below the best rate so far is left out.
3. Heuristic: Little's law, from above. The mean latency of ``c`` requests in flight is at least ``c / capacity``. A
   load for which this exceeds the limit is left out. A p99 may be below the mean if a few requests take very long.
4. Heuristic: latency grows with the load. The loads above one with a mean latency beyond the limit, or above two in
   succession with a p99 beyond twice the limit, are left out.
5. Heuristic: saturation. If ``c`` is four times the rows that fit into all instances, each instance always has a full
   batch waiting. If the last doubling added less than 5 % as well, the loads above add to the latency alone.

Rules 1 to 3 have a margin of 1.5 for the noise of the durations, and the grid reports the largest factor by which a
measured rate has exceeded its bound. A factor above the margin means that the bounds did not hold. A grid without
bounds has none of these rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from remora_tools.deciders.explaining import Curve
from remora_tools.deciders.objective import Slo
from remora_tools.tuning import (
    CostResult,
    CostTrial,
    Load,
    LoadResult,
    LoadTrial,
    Plan,
    Point,
    Result,
    Runtime,
    Settings,
    System,
    Trial,
)
from remora_tools.tuning.candidates import ladder, settings_of

MARGIN = 1.5
SATURATED, GROWTH = 4, 1.05
SWEEPS = 2
LARGEST = 128


@dataclass
class Found:
    """The result of a grid.

    ``windows`` were measured in ``spent_s``; ``skipped`` ones were left out, those far beyond the limit not counted.
    ``exceeded`` is the largest measured rate as a part of its bound.
    """

    best: Point | None = None
    plans: int = 0
    windows: int = 0
    skipped: int = 0
    spent_s: float = 0.0
    exceeded: float = 0.0

    @property
    def whole_s(self) -> float:
        """Low estimate of the seconds that a grid without bounds takes: skipped windows last as long as the others."""
        return self.spent_s * (1 + self.skipped / self.windows) if self.windows else 0.0


class Grid:
    """Measure all plans of a system at all loads.

    Of several models each is varied with the best settings of the others so far, the slowest first, twice over.

    Args:
        system: the models and their candidates.
        slo: the objective.
        window_s: duration of a measurement.
        run: carries out a trial.
        bounded: False measures what the bounds exclude, too.
    """

    def __init__(
        self, system: System, slo: Slo, window_s: float, run: Callable[[Trial], Result], *, bounded: bool = True
    ) -> None:
        self._system = system
        self._slo = slo
        self._window_s = window_s
        self._run = run
        self._bounded = bounded
        self._costs: list[dict[Runtime, dict[int, float]]] = []
        self._known: dict[tuple[Plan, Load], Result] = {}
        self._skipped: set[tuple[Plan, Load]] = set()
        self._found = Found()

    def measure(self) -> Found:
        """Return the best point that holds the objective, and what it took."""
        system, found = self._system, self._found
        self._costs = [self._durations(model) for model in range(len(system.models))]
        base = system.present
        for _ in range(SWEEPS if len(system.models) > 1 else 1):
            for model in sorted(range(len(base)), key=lambda model: self._capacity_of(model, base[model])):
                plans = [(*base[:model], each, *base[model + 1 :]) for each in self._candidates(model)]
                for plan in sorted(plans, key=self._capacity, reverse=True):
                    found.plans += 1
                    self._measure_plan(plan)
                base = found.best.plan if found.best is not None else base
        found.skipped = len(self._skipped.difference(self._known))
        return found

    # -- bounds -------------------------------------------------------------------------------------------------------

    def _durations(self, model: int) -> dict[Runtime, dict[int, float]]:
        """Return the duration of a batch that runs alone, by runtime and rows."""
        system, found = self._system, {}
        space = system.models[model]
        rows = [1 << power for power in range(LARGEST.bit_length()) if 1 << power <= max((*space.batches, 1))]
        for runtime in dict.fromkeys(runtime for _, runtime in space.slots):
            known: dict[int, float] = {}
            sizes = [size for size in rows if size <= system.most_rows]
            for size in (*sizes, *sizes):  # twice, because a disturbed duration would make its bounds too low
                plan = tuple(
                    each._replace(limit=max(each.limit, size)) if other.batches else each
                    for each, other in zip(system.present, system.models, strict=True)
                )
                settings = plan[model]._replace(runtime=runtime)
                result = self._run(CostTrial((*plan[:model], settings, *plan[model + 1 :]), size))
                if isinstance(result, CostResult):
                    known |= {rows: min(ns, known.get(rows, ns)) for rows, ns in result.costs[model].items()}
            found[runtime] = known or {1: 1.0}
        return found

    def _candidates(self, model: int) -> list[Settings]:
        curves = {runtime: Curve(known) for runtime, known in self._costs[model].items()}
        return settings_of(self._system.models[model], lambda runtime, rows: curves[runtime](rows), self._slo.limit_ns)

    def _capacity_of(self, model: int, settings: Settings) -> float:
        """Return the requests per second, over all routes, that the instances of a model permit at most."""
        known = self._costs[model][settings.runtime]
        rates = [rows / ns for rows, ns in known.items() if rows <= settings.batch]
        if settings.batch > max(known):  # a larger batch takes no less time than the largest measured one
            rates.append(settings.batch / known[max(known)])
        routes = self._system.routes  # which get the requests in turn
        visits = sum(route.count(model) for route in routes)
        return settings.instances * max(rates, default=math.inf) * 1e9 * len(routes) / max(visits, 1)

    def _capacity(self, plan: Plan) -> float:
        return min(self._capacity_of(model, settings) for model, settings in enumerate(plan))

    def _bound(self, plan: Plan, connections: int) -> float:
        """Return the rate that a plan has at most at a load."""
        least = [min(self._costs[model][settings.runtime].values()) for model, settings in enumerate(plan)]
        alone_ns = min(sum(least[model] for model in route) for route in self._system.routes)
        return min(self._capacity(plan), connections / alone_ns * 1e9)

    # -- measurements -------------------------------------------------------------------------------------------------

    def _measure_plan(self, plan: Plan) -> None:
        found, limit_s = self._found, self._slo.limit_ns / 1e9
        rates: list[float] = []
        beyond, ended = 0, False
        for connections in ladder(math.inf):
            bound, best = self._bound(plan, connections), found.best.rate_per_s if found.best is not None else 0.0
            late = connections / self._capacity(plan) > MARGIN * limit_s
            if self._bounded and (ended or late or bound * MARGIN < best):
                # Loads count up to the limit alone, so that the estimate is rather low.
                if connections <= limit_s * (2 * max(rates) if rates else min(bound, best)):
                    self._skipped.add((plan, Load(connections)))
                continue
            result = self._at(plan, Load(connections))
            if not isinstance(result, LoadResult):
                return
            found.exceeded = max(found.exceeded, result.rate_per_s / bound)
            beyond = beyond + 1 if result.latency_ns > 2 * self._slo.limit_ns else 0
            ended = beyond == 2 or connections > result.rate_per_s * limit_s
            held = sum(settings.instances * settings.batch for settings in plan)
            if self._bounded and connections >= SATURATED * held and rates:
                ended = ended or result.rate_per_s < GROWTH * max(rates)
            rates.append(result.rate_per_s)

    def _at(self, plan: Plan, load: Load) -> Result:
        found = self._found
        if (plan, load) in self._known:
            return self._known[plan, load]
        result = self._run(LoadTrial(plan, load, self._window_s, self._slo.percent))
        self._known[plan, load] = result
        found.windows += 1
        found.spent_s += result.spent_s
        if not isinstance(result, LoadResult) or result.failures or result.latency_ns > self._slo.limit_ns:
            return result
        if found.best is None or result.rate_per_s > found.best.rate_per_s:
            found.best = Point(plan, load, result.rate_per_s, result.latency_ns)
        return result
