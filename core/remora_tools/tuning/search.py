"""Search of `remora tune`: which trial comes next, and which plan is the best. Pure.

1. The duration of a batch is measured at a few sizes, for each runtime.
2. All candidates are simulated with these durations. The most promising ones are measured, and each measurement
   corrects the predictions of the plans near it, until no prediction exceeds the best measurement.
3. The best plan is measured in turn with simpler ones. Only a difference beyond the spread counts.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from statistics import median

from remora_tools.deciders.pairs import verdict
from remora_tools.tuning import (
    CostResult,
    CostTrial,
    Decision,
    Goal,
    Load,
    LoadResult,
    LoadTrial,
    Plan,
    Point,
    Refused,
    Result,
    Runtime,
    Settings,
    System,
    Trial,
    describe,
)
from remora_tools.tuning.candidates import changed, complexity, is_neighbour, ladder, reverted, settings_of
from remora_tools.tuning.prediction import Costs, Predictor

_SIZES = (1, 4, 16, 64, 256)
_GAIN = 1.03
"""A candidate is measured if its prediction exceeds the best measurement by this factor."""
_HELD_RATE = 0.97
"""Part of the offered rate that must be answered."""
_CLOSE = 0.1
"""Difference from the limit, as a part of it, below which a latency is measured again."""
_FAR = 0.5
"""Part of the limit below which a simulated latency makes a measured one beyond the limit doubtful."""
_MOST_PLANS = 10
_MOST_NEIGHBOURS = 8
_MOST_STEPS = 6
_MOST_CONNECTIONS = ladder(math.inf)[-1]
_LEAST_PAIRS, _MOST_PAIRS = 3, 5
_EXPLORING = 0.7
"""Part of the budget after which no further plan is tried."""
_SWEEPS = 2
_MOST_SIMULATED = 60
"""Plans that are simulated at most to choose the next one."""

Steps = Generator[Trial, Result, None]


class _Memory:
    """Memory of the present plan, 0 before its measurement, and of an instance of each model."""

    def __init__(self, system: System) -> None:
        self._present = system.present
        self._instance_bytes = [0] * len(system.models)
        self.present_bytes = 0

    def record_instance(self, model: int, measured_bytes: int) -> None:
        """Take the memory of an instance from a measurement with one more than the present plan."""
        self._instance_bytes[model] = max(measured_bytes - self.present_bytes, 0)

    def bytes_of(self, plan: Plan) -> int:
        """Return the memory that a plan is expected to take."""
        more = zip(plan, self._present, self._instance_bytes, strict=True)
        return self.present_bytes + sum((new.instances - old.instances) * size for new, old, size in more)


class Search:
    """State of a search. `next_trial` and `record` alternate; `decision` is valid at any time."""

    def __init__(self, system: System, goal: Goal) -> None:
        self._system = system
        self._goal = goal
        self._costs = Costs(len(system.models))
        self._predictor = Predictor(system, goal, self._costs)
        self._results: dict[tuple[Plan, Load], list[LoadResult]] = {}
        self._refused: dict[Plan, str] = {}
        self._memory = _Memory(system)
        self._chosen: Plan | None = None
        self._plans: list[Plan] = []
        self._spent_s = 0.0
        self._steps = self._run()
        self._trial: Trial | None = next(self._steps, None)

    # -- the interface ------------------------------------------------------------------------------------------------

    def next_trial(self) -> Trial | None:
        """Return the trial to carry out, or None at the end of the search."""
        return self._trial

    @property
    def spent_s(self) -> float:
        """The seconds of the budget that the trials have used."""
        return self._spent_s

    def record(self, result: Result) -> None:
        """Add the result of the trial."""
        self._spent_s += result.spent_s
        try:
            self._trial = self._steps.send(result)
        except StopIteration:
            self._trial = None

    def points(self) -> list[Point]:
        """Return what was measured under load, with medians."""
        return [self._point(plan, load) for plan, load in self._results]

    def decision(self) -> Decision:
        """Return the best plan so far."""
        best = self._best()
        if self._chosen is not None:
            best = self._best_of(self._chosen) or best
        present = self._best_of(self._system.present) or self._closest(self._system.present)
        if best is None:
            closest = self._closest()
            return Decision(closest, present, False, self._why_not(closest))
        return Decision(best, present, True, self._why(best))

    # -- the course ---------------------------------------------------------------------------------------------------

    def _run(self) -> Steps:
        yield from self._measure_costs()
        self._plans = self._candidates()
        yield from self._measure(self._system.present)
        for _ in range(_MOST_PLANS):
            chosen = self._promising() if self._time_left(_EXPLORING) else None
            if chosen is None:
                break
            yield from self._measure(chosen)
        if not self._goal.rate_per_s:
            yield from self._measure_neighbours()
        yield from self._finals()

    def _time_left(self, part: float = 1.0) -> bool:
        return self._spent_s + self._goal.window_s < part * self._goal.budget_s

    # -- durations of batches -----------------------------------------------------------------------------------------

    def _measure_costs(self) -> Steps:
        system = self._system
        rows = system.rows
        largest = max((max(model.batches) for model in system.models if model.batches), default=1)
        sizes = [size * rows for size in _SIZES if size == 1 or size * rows <= min(largest, system.most_rows)]
        done = []
        for size in sizes:
            result = yield CostTrial(self._roomy(system.present, size), size)
            if not isinstance(result, CostResult):
                break
            done.append(size)
            self._learn_costs(system.present, result)
            if not self._memory.present_bytes:
                self._memory.present_bytes = result.memory_bytes
                self._predictor.front_ns = result.front_ns
            too_long = sum(max(costs.values(), default=0.0) for costs in result.costs) > self._goal.slo.limit_ns
            if too_long or not self._time_left(_EXPLORING / 2):
                break  # larger batches take even longer
        some = sorted({rows, *done[-2:-1]})
        for model, space in enumerate(system.models):
            for runtime in dict.fromkeys(runtime for _, runtime in space.slots):
                if self._costs.known(model, runtime) or not self._time_left(_EXPLORING / 2):
                    continue
                instances = next(count for count, each in space.slots if each == runtime)
                settings = space.present._replace(instances=instances, runtime=runtime)
                yield from self._measure_runtime(model, settings, some)
            if self._goal.memory_bytes and len({count for count, _ in space.slots}) > 1:
                yield from self._measure_memory(model)

    def _measure_runtime(self, model: int, settings: Settings, sizes: Sequence[int]) -> Steps:
        plan = _replaced(self._system.present, model, settings)
        for size in sizes:
            result = yield CostTrial(self._roomy(plan, size), size)
            if not isinstance(result, CostResult):
                self._refused[plan] = result.reason if isinstance(result, Refused) else ""
                return
            self._learn_costs(plan, result)

    def _measure_memory(self, model: int) -> Steps:
        settings = self._system.present[model]
        plan = _replaced(self._system.present, model, settings._replace(instances=settings.instances + 1))
        result = yield CostTrial(plan, self._system.rows)
        if isinstance(result, CostResult):
            self._memory.record_instance(model, result.memory_bytes)

    def _learn_costs(self, plan: Plan, result: CostResult) -> None:
        for model, settings in enumerate(plan):
            self._costs.add(model, settings.runtime, result.costs[model], result.cores)

    def _roomy(self, plan: Plan, rows: int) -> Plan:
        """Return the plan with models that accept that many rows."""
        return tuple(
            each._replace(limit=max(each.limit, rows)) if space.batches else each
            for each, space in zip(plan, self._system.models, strict=True)
        )

    # -- candidates ---------------------------------------------------------------------------------------------------

    def _candidates(self) -> list[Plan]:
        """Return all plans of a single model, or those near the best predicted one of several."""
        present, limit_ns = self._system.present, self._goal.slo.limit_ns
        spaces = []
        for model, space in enumerate(self._system.models):
            known = [slot for slot in space.slots if self._costs.known(model, slot[1])]
            spaces.append(settings_of(space._replace(slots=tuple(known)), partial(self._cost, model), limit_ns))
        if len(spaces) == 1:
            return [(settings,) for settings in spaces[0]]
        found, best = {present: None}, present
        for _ in range(_SWEEPS):
            for model, several in enumerate(spaces):
                plans = [_replaced(best, model, settings) for settings in several]
                found |= dict.fromkeys(plans)
                best = self._rank(plans)[0]
        return list(found)

    def _cost(self, model: int, runtime: Runtime, rows: int) -> float:
        return self._costs.curve(model, runtime)(rows)

    def _rank(self, plans: Sequence[Plan]) -> list[Plan]:
        """Sort plans by a bound of their throughput, simpler ones first among almost equal ones."""
        return sorted(
            plans, key=lambda plan: (-round(math.log(self._predictor.bound(plan)) * 20), complexity(plan, plans[0]))
        )

    def _open_plans(self) -> Iterable[Plan]:
        known = self._measured() | self._refused.keys()
        limit = self._goal.memory_bytes
        for plan in self._plans:
            if plan not in known and not (limit and self._memory.bytes_of(plan) > limit):
                yield plan

    def _promising(self) -> Plan | None:
        """Return the plan to measure next, or None if none promises to be better."""
        return self._promising_cost() if self._goal.rate_per_s else self._promising_rate()

    def _promising_rate(self) -> Plan | None:
        best = self._best()
        most = best.rate_per_s * _GAIN if best else 0.0
        chosen = None
        bounds = {
            plan: self._predictor.bound(plan) * self._predictor.correction(plan)[0] for plan in self._open_plans()
        }
        ordered = sorted(bounds, key=lambda each: (-bounds[each], complexity(each, self._system.present)))
        for plan in ordered[:_MOST_SIMULATED]:
            if bounds[plan] <= most:
                break
            rate, _ = self._foreseen(plan)
            if rate > most:
                chosen, most = plan, rate
        if chosen is None and best is None and len(self._measured()) < _MOST_STEPS:
            return min(self._open_plans(), key=lambda plan: self._predictor.expect(plan, Load(1))[1], default=None)
        return chosen

    def _promising_cost(self) -> Plan | None:
        load = Load(0, self._goal.rate_per_s)
        best = self._best()
        plans = list(self._open_plans())
        if best is not None:
            plans = [plan for plan in plans if self._price(plan) < self._price(best.plan)]
        plans.sort(key=lambda plan: (self._price(plan), -self._predictor.bound(plan)))
        able = [
            plan
            for plan in plans
            if self._predictor.bound(plan) * self._predictor.correction(plan)[0] > self._goal.rate_per_s
        ]
        for plan in able[:_MOST_SIMULATED]:
            rate, latency = self._predictor.expect(plan, load)
            if rate >= _HELD_RATE * self._goal.rate_per_s and latency <= self._goal.slo.limit_ns:
                return plan
        if best is not None or len(self._measured()) >= _MOST_STEPS:
            return None
        return max(plans, key=self._predictor.bound, default=None)

    def _price(self, plan: Plan) -> tuple[float, ...]:
        """Return what a plan takes: instances, memory, and its distance from the present one."""
        instances = sum(each.instances for each in plan)
        return (instances, self._memory.bytes_of(plan), *complexity(plan, self._system.present))

    def _foreseen(self, plan: Plan) -> tuple[float, int]:
        """Return the highest predicted rate that holds the objective, and its connections."""
        limit_ns = self._goal.slo.limit_ns
        if self._predictor.floor_ns(plan) * self._predictor.correction(plan)[1] > limit_ns:
            return 0.0, 1
        # By Little's law no more requests can be in flight than are answered within the limit.
        steps = ladder(2 * self._predictor.bound(plan) * limit_ns / 1e9)
        low, high = -1, len(steps)
        while high - low > 1:
            middle = (low + high) // 2
            if self._predictor.expect(plan, Load(steps[middle]))[1] <= limit_ns:
                low = middle
            else:
                high = middle
        if low < 0:
            return 0.0, 1
        rates = {steps[at]: self._predictor.expect(plan, Load(steps[at]))[0] for at in range(max(low - 1, 0), low + 1)}
        most = max(rates.values())
        return most, min(count for count, rate in rates.items() if rate * _GAIN >= most)

    def _neighbours(self, best: Point) -> list[Plan]:
        """Return the plans one step from the best one, the most promising first.

        Delays are tried at the best batch size alone, because a wrong delay would hide what a step is worth.
        """
        near = [plan for plan in self._open_plans() if is_neighbour(plan, best.plan)]
        rates = {
            plan: self._predictor.expect(plan, best.load)[0]
            for plan in near
            if changed(plan, best.plan)[0][1] == "delay_us" or not plan[changed(plan, best.plan)[0][0]].delay_us
        }
        return sorted(rates, key=lambda plan: -rates[plan])

    # -- measurements under load --------------------------------------------------------------------------------------

    def _measure(self, plan: Plan, connections: int = 0) -> Steps:
        """Measure a plan at its best load, from ``connections`` or the predicted number on."""
        if self._goal.rate_per_s:
            yield from self._at(plan, Load(0, self._goal.rate_per_s))
            return
        connections = connections or self._foreseen(plan)[1]
        tried: dict[int, Point] = {}
        while len(tried) < _MOST_STEPS and (self._time_left() or not self._results):
            load = Load(connections)
            yield from self._at(plan, load)
            while plan not in self._refused and self._is_unsure(plan, load):
                yield from self._at(plan, load)
            if plan in self._refused:
                return
            tried[connections] = self._point(plan, load)
            following = self._next_connections(plan, connections, tried)
            if following is None:
                return
            connections = following

    def _is_unsure(self, plan: Plan, load: Load) -> bool:
        """Return True if one more measurement might decide whether the objective is held.

        The latency is close to the limit, or beyond it although the simulation is far below: a disturbance may be the
        reason.
        """
        point, limit_ns = self._point(plan, load), self._goal.slo.limit_ns
        close = abs(point.latency_ns / limit_ns - 1) < _CLOSE
        doubtful = limit_ns < point.latency_ns < math.inf and self._predictor.raw(plan, load)[1] < _FAR * limit_ns
        return (close or doubtful) and point.measurements < _LEAST_PAIRS and self._time_left()

    def _measure_neighbours(self) -> Steps:
        """Step from the best plan to a better neighbour while there is one."""
        best = self._best()
        while best is not None:
            before = best.plan
            for plan in self._neighbours(best)[:_MOST_NEIGHBOURS]:
                if not self._time_left(_EXPLORING):
                    return
                yield from self._measure(plan, best.load.connections)
            best = self._best()
            if best is None or best.plan == before:
                return

    def _next_connections(self, plan: Plan, connections: int, tried: dict[int, Point]) -> int | None:
        """Return the load to measure next, or None if the last one decides."""
        point, best, limit_ns = tried[connections], self._best(), self._goal.slo.limit_ns
        if not self._holds(point):
            held = max((count for count, each in tried.items() if self._holds(each)), default=0)
            hopeless = best is not None and best.plan != plan and point.rate_per_s < best.rate_per_s
            fewer = [count for count in ladder(connections - 1) if held < count < connections]
            if not fewer or hopeless:
                return None
            # Above saturation latency grows in proportion to the requests in flight.
            return max(
                (count for count in fewer if count * point.latency_ns <= connections * limit_ns), default=fewer[0]
            )
        missed = min((count for count, each in tried.items() if not self._holds(each)), default=2 * _MOST_CONNECTIONS)
        more = 2 * connections
        if more >= missed or more > _MOST_CONNECTIONS:
            return None
        before = max((count for count in tried if count < connections), default=0)
        if before and point.rate_per_s < _GAIN * tried[before].rate_per_s:
            return None  # throughput has ceased to grow
        room = self._predictor.expect(plan, Load(more))
        grows = room[0] > _GAIN * point.rate_per_s or 2 * point.latency_ns <= limit_ns
        return more if grows else None

    def _at(self, plan: Plan, load: Load) -> Steps:
        result = yield LoadTrial(plan, load, self._goal.window_s, self._goal.slo.percent)
        if isinstance(result, Refused):
            self._refused[plan] = result.reason
        elif isinstance(result, LoadResult):
            self._results.setdefault((plan, load), []).append(result)
            self._predictor.limit_front(result)
            self._predictor.learn(plan, load, result.rate_per_s, result.latency_ns)

    # -- the last comparison ------------------------------------------------------------------------------------------

    def _finals(self) -> Steps:
        """Compare the best plan with simpler ones, in pairs of measurements that follow each other."""
        best = self._best()
        if best is None:
            return
        if self._goal.rate_per_s:
            yield from self._confirm()
            return
        self._chosen = best.plan
        for rival in self._rivals(best):
            ratios: list[float] = []
            while len(ratios) < _MOST_PAIRS and self._time_left():
                pair = (best, rival) if len(ratios) % 2 else (rival, best)
                for each in pair:
                    yield from self._at(each.plan, each.load)
                newest = [self._results[each.plan, each.load][-1].rate_per_s for each in (best, rival)]
                ratios.append(newest[0] / newest[1] if newest[1] else math.inf)
                if len(ratios) >= _LEAST_PAIRS and verdict(ratios) > 0:
                    break
            if ratios and verdict(ratios) <= 0 and self._best_of(rival.plan) is not None:
                self._chosen = rival.plan
                return

    def _rivals(self, best: Point) -> list[Point]:
        """Return the simpler plans that might be as good, the simplest first."""
        present = self._system.present
        found: dict[Plan, Point] = {}
        for plan in dict.fromkeys(plan for plan, _ in self._results):
            point = self._best_of(plan)
            simpler = complexity(plan, present) < complexity(best.plan, present)
            if point and simpler and point.rate_per_s * 1.1 > best.rate_per_s:
                found[plan] = point
        return sorted(found.values(), key=lambda point: complexity(point.plan, present))[:2]

    def _confirm(self) -> Steps:
        """Repeat the measurement of the cheapest plan, and go on with the next one if it was luck."""
        while (best := self._best()) is not None and self._time_left():
            if len(self._results[best.plan, best.load]) >= _LEAST_PAIRS:
                return
            yield from self._at(best.plan, best.load)

    # -- points -------------------------------------------------------------------------------------------------------

    def _measured(self) -> set[Plan]:
        """Return the plans that were measured under load."""
        return {plan for plan, _ in self._results}

    def _point(self, plan: Plan, load: Load) -> Point:
        results = self._results[plan, load]
        failed = any(each.failures for each in results)
        return Point(
            plan,
            load,
            median(each.rate_per_s for each in results),
            math.inf if failed else median(each.latency_ns for each in results),
            results[-1].memory_bytes,
            len(results),
        )

    def _holds(self, point: Point) -> bool:
        goal = self._goal
        if goal.rate_per_s and point.rate_per_s < _HELD_RATE * goal.rate_per_s:
            return False
        if goal.memory_bytes and point.memory_bytes > goal.memory_bytes:
            return False
        return point.latency_ns <= goal.slo.limit_ns

    def _better(self, points: Iterable[Point]) -> Point | None:
        held = [point for point in points if self._holds(point)]
        if self._goal.rate_per_s:
            return min(held, key=lambda point: self._price(point.plan), default=None)
        return max(held, key=lambda point: point.rate_per_s, default=None)

    def _best(self) -> Point | None:
        return self._better(self.points())

    def _best_of(self, plan: Plan) -> Point | None:
        return self._better(point for point in self.points() if point.plan == plan)

    def _closest(self, plan: Plan | None = None) -> Point | None:
        """Return the point that misses the objective by least."""
        points = [point for point in self.points() if plan is None or point.plan == plan]
        wanted = self._goal.rate_per_s

        def miss(point: Point) -> tuple[float, float]:
            return (max(wanted - point.rate_per_s, 0.0) if wanted else 0.0, point.latency_ns)

        return min(points, key=miss, default=None)

    # -- reasons ------------------------------------------------------------------------------------------------------

    def _why(self, best: Point) -> tuple[str, ...]:
        present = self._system.present
        if best.plan == present:
            return (
                f"no other configuration was better by more than the spread of the measurements; "
                f"{len(self._measured())} were measured, {len(self._plans)} considered",
            )
        found = []
        for model, field in changed(best.plan, present):
            without = reverted(best.plan, present, model, field)
            name = self._system.models[model].name
            new, old = describe(best.plan[model], field), describe(present[model], field)
            rate, latency = self._predictor.expect(best.plan, best.load)
            other_rate, other_latency = self._predictor.expect(without, best.load)
            if other_rate and latency:
                effect = (
                    f"predicted {rate / other_rate:.2f} times the throughput and {latency / other_latency:.2f} times "
                )
                effect += f"the p{self._goal.slo.percent:g} of {old} at {best.load.text()}"
                found.append(f"{name}: {new}: {effect}")
        busiest = max((each.front for several in self._results.values() for each in several), default=0.0)
        if busiest > 0.8:
            found.append(
                f"the event loop was busy {busiest:.0%} of the time: if the machine has idle processors, try "
                "`remora serve --frontends N`, which cannot be measured in process"
            )
        return tuple(found)

    def _why_not(self, closest: Point | None) -> tuple[str, ...]:
        if closest is None:
            reasons = (
                "; ".join(dict.fromkeys(self._refused.values())) or "the search ended before the first measurement"
            )
            return (f"nothing was measured: {reasons}",)
        goal, missed = self._goal, []
        if closest.latency_ns > goal.slo.limit_ns:
            missed.append(f"p{goal.slo.percent:g} is {closest.latency_ns / 1e6:.3g} ms")
        if goal.rate_per_s and closest.rate_per_s < _HELD_RATE * goal.rate_per_s:
            missed.append(f"{closest.rate_per_s:.1f} of {goal.rate_per_s:g} requests per second are answered")
        if goal.memory_bytes and closest.memory_bytes > goal.memory_bytes:
            missed.append(f"the models take {closest.memory_bytes / 2**20:,.0f} MiB")
        return (f"no configuration holds {goal.slo.text()}: in the closest one {' and '.join(missed)}",)


def _replaced(plan: Plan, model: int, settings: Settings) -> Plan:
    return (*plan[:model], settings, *plan[model + 1 :])
