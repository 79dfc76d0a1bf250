"""Prediction of throughput and latency from measured durations of batches. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from remora_tools.deciders.explaining import Curve
from remora_tools.deciders.network_simulation import Offered, Station, simulate_network
from remora_tools.tuning import Goal, Load, LoadResult, Plan, Runtime, Settings, System

_REQUESTS = 400
_LESS = 0.8
"""Part of the present value below which a time is replaced, because all simulations are then repeated."""
_ROUNDS = 4
"""Requests of a simulation: at least this many answers for each connection."""


class Costs:
    """Measured durations of batches by model and runtime."""

    def __init__(self, models: int) -> None:
        self._points: list[dict[Runtime, dict[int, float]]] = [{} for _ in range(models)]
        self._cores: list[dict[Runtime, float]] = [{} for _ in range(models)]
        self._curves: dict[tuple[int, Runtime], Curve] = {}

    def add(self, model: int, runtime: Runtime, points: Mapping[int, float], cores: float) -> None:
        """Add the durations in nanoseconds by rows, and the processors that were in use."""
        self._points[model].setdefault(runtime, {}).update({rows: max(ns, 1.0) for rows, ns in points.items()})
        if points:
            known = self._cores[model].get(runtime, 0.0)
            self._cores[model][runtime] = max(known, cores)
        self._curves.clear()

    def known(self, model: int, runtime: Runtime) -> bool:
        """Return True if a batch of this model was measured with this runtime."""
        return bool(self._points[model].get(runtime))

    def curve(self, model: int, runtime: Runtime) -> Curve:
        """Return the duration by rows.

        Sizes that were measured with another runtime alone have the other's shape.
        """
        key = (model, runtime)
        if key not in self._curves:
            self._curves[key] = Curve(self._completed(model, runtime))
        return self._curves[key]

    def _completed(self, model: int, runtime: Runtime) -> Mapping[int, float]:
        own = self._points[model].get(runtime, {})
        full = max(self._points[model].values(), key=len, default={})
        if not full:
            return own or {1: 1.0}
        if not own:
            return full
        shape, scaled = Curve(full), dict(own)
        for rows in full:
            nearest = min(own, key=lambda size: abs(math.log(size / rows)))
            scaled.setdefault(rows, full[rows] * own[nearest] / shape(nearest))
        return scaled

    def cores(self, model: int, runtime: Runtime) -> float:
        """Return the processors that a batch uses."""
        found = self._cores[model]
        return found.get(runtime, max(found.values(), default=1.0))


class Predictor:
    """Throughput and latency of plans by simulation, corrected by the nearest measured plans."""

    def __init__(self, system: System, goal: Goal, costs: Costs) -> None:
        self._system = system
        self._goal = goal
        self._costs = costs
        self.front_ns = 0.0
        self._measured: dict[tuple[Plan, Load], tuple[float, float]] = {}
        self._simulated: dict[tuple[Plan, Load], tuple[float, float]] = {}
        self._ratios: dict[tuple[Plan, Load], tuple[float, float]] = {}

    def raw(self, plan: Plan, load: Load) -> tuple[float, float]:
        """Return the simulated rate per second and latency in nanoseconds."""
        key = (plan, load)
        if key not in self._simulated:
            requests = max(_REQUESTS, _ROUNDS * load.connections)
            offered = Offered(load.connections, load.rate_per_s, requests, self._system.rows, self.front_ns)
            found = simulate_network(self._stations(plan), self._system.routes, offered, cores=self._system.cores)
            worst = max((percentile(each, self._goal.slo.percent) for each in found.latencies_ns), default=0.0)
            self._simulated[key] = (found.rate_per_s, worst)
        return self._simulated[key]

    def expect(self, plan: Plan, load: Load) -> tuple[float, float]:
        """Return the corrected rate per second and latency in nanoseconds."""
        rate, latency = self.raw(plan, load)
        rate_ratio, latency_ratio = self.correction(plan, load)
        return rate * rate_ratio, latency * latency_ratio

    def learn(self, plan: Plan, load: Load, rate: float, latency: float) -> None:
        """Add a measurement."""
        self._measured[plan, load] = (rate, latency)
        self._compare(plan, load)

    def limit_front(self, result: LoadResult) -> None:
        """Lower the time of a request outside of the models to the event loop's under load.

        A single request waits for threads to wake, and for other work of the machine, which limits no throughput.
        """
        front_ns = result.front / result.rate_per_s * 1e9 if result.rate_per_s else 0.0
        if 0 < front_ns < _LESS * self.front_ns:
            self.front_ns = front_ns
            self._simulated.clear()
            for plan, load in self._measured:
                self._compare(plan, load)

    def _compare(self, plan: Plan, load: Load) -> None:
        rate, latency = self._measured[plan, load]
        raw_rate, raw_latency = self.raw(plan, load)
        if raw_rate and raw_latency and rate and latency:
            self._ratios[plan, load] = (rate / raw_rate, latency / raw_latency)

    def correction(self, plan: Plan, load: Load | None = None) -> tuple[float, float]:
        """Return measured / simulated of the nearest measurements, for rate and latency."""
        if not self._ratios:
            return 1.0, 1.0
        far = {key: distance(plan, key[0]) + (_load_distance(load, key[1]) if load else 0.0) for key in self._ratios}
        least = min(far.values())
        near = [self._ratios[key] for key, value in far.items() if value == least]
        rate, latency = (math.exp(sum(math.log(each[n]) for each in near) / len(near)) for n in (0, 1))
        return rate, latency

    def bound(self, plan: Plan) -> float:
        """Return a rate per second that no simulation of the plan exceeds by much, at no cost."""
        visits = [sum(route.count(model) for route in self._system.routes) for model in range(len(plan))]
        lowest = math.inf
        for model, settings in enumerate(plan):
            rows = max(settings.batch, self._system.rows)
            curve = self._costs.curve(model, settings.runtime)
            cores = self._costs.cores(model, settings.runtime)
            slots = min(settings.instances, self._system.cores / cores if cores else math.inf)
            capacity = slots * rows / self._system.rows / curve(rows) * 1e9
            lowest = min(lowest, capacity * len(self._system.routes) / max(visits[model], 1))
        return min(lowest, 1e9 / self.front_ns) if self.front_ns else lowest

    def floor_ns(self, plan: Plan) -> float:
        """Return the duration of the batches of a request that waits for nothing."""
        return max(
            sum(self._costs.curve(model, plan[model].runtime)(self._system.rows) for model in route)
            for route in self._system.routes
        )

    def _stations(self, plan: Plan) -> list[Station]:
        return [
            Station(
                settings.policy,
                self._costs.curve(model, settings.runtime),
                settings.instances,
                self._costs.cores(model, settings.runtime),
            )
            for model, settings in enumerate(plan)
        ]


def distance(one: Plan, other: Plan) -> float:
    """Return how different two plans are; instances and runtimes count most."""
    return sum(_distance(a, b) for a, b in zip(one, other, strict=True))


def _distance(one: Settings, other: Settings) -> float:
    return (
        abs(math.log2(one.batch / other.batch))
        + 4.0 * (one.instances != other.instances)
        + 8.0 * (one.runtime != other.runtime)
        + 1.0 * ((one.delay_us > 0) != (other.delay_us > 0))
        + 0.5 * (one.delay_us != other.delay_us)
        + 2.0 * (one.dynamic != other.dynamic)
    )


def _load_distance(one: Load, other: Load) -> float:
    """Return how different two loads of the same kind are."""
    return 0.5 * abs(math.log2(one.connections / other.connections)) if one.connections and other.connections else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of the values, 0 without values."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)] if ordered else 0.0
