"""The grid against servers in closed form: its bounds exclude no best point, and the time of the whole one."""

from __future__ import annotations

import math
from random import Random
from statistics import fmean, median

import pytest

from remora_tools.deciders.objective import Slo
from remora_tools.tuning import CostResult, Load, LoadResult, LoadTrial, Plan, Point, Refused, Result, System, Trial
from remora_tools.tuning.candidates import ladder
from support.engine.served_model_formula import Formula, goal_of
from support.engine.tuning_grid import MARGIN, Found, Grid


def servers(count: int, noise: float) -> list[tuple[Formula, Slo]]:
    """Return servers and limits at random."""
    random = Random(f"{noise}")
    return [
        (
            Formula(
                fixed_ns=10 ** random.uniform(4.3, 6.8),
                row_ns=10 ** random.uniform(3, 6.3),
                parallel=random.choice([0, 0.5, 0.9]),
                cores=random.choice([0, 0.3, 1]),
                front_ns=10 ** random.uniform(4, 5),
                noise=noise,
                seed=random.randrange(1 << 30),
            ),
            goal_of(10 ** random.uniform(0.5, 2)).slo,
        )
        for _ in range(count)
    ]


class Several:
    """A model, and an ensemble of two others, that get requests in turn: none disturbs the others."""

    ROUTES = ((0,), (1, 2))

    def __init__(self, models: list[Formula]) -> None:
        self.models = models

    def system(self) -> System:
        spaces = [each.system() for each in self.models]
        return spaces[0]._replace(models=tuple(each.models[0] for each in spaces), routes=self.ROUTES)

    def exact(self, plan: Plan, load: Load) -> tuple[float, float]:
        """Return rate per second and latency in nanoseconds without noise."""
        visits = [sum(route.count(model) for route in self.ROUTES) for model in range(len(plan))]
        least = [each.batch_ns(settings.runtime, 1) for each, settings in zip(self.models, plan, strict=True)]
        alone = [sum(least[model] for model in route) for route in self.ROUTES]
        rates = [
            each.exact((settings,), load)[0] * len(self.ROUTES) / count
            for each, settings, count in zip(self.models, plan, visits, strict=True)
        ]
        rate = min(*rates, load.connections / fmean(alone) * 1e9)
        return rate, self.models[0].tail * max(load.connections / rate * 1e9, *alone)

    def run(self, trial: Trial) -> Result:
        results = [
            each.run(trial._replace(plan=(settings,))) for each, settings in zip(self.models, trial.plan, strict=True)
        ]
        if isinstance(trial, LoadTrial):
            rate, latency = self.exact(trial.plan, trial.load)
            return LoadResult(rate, latency, 0, trial.seconds)
        costs = [each.costs[0] for each in results if isinstance(each, CostResult)]
        return CostResult(costs, 1.0, 0.0, 0, 0.2) if len(costs) == len(results) else Refused("too many rows", 0.1)


def several(count: int) -> list[tuple[Several, Slo]]:
    """Return models and limits at random."""
    random = Random(count)
    return [
        (
            Several(
                [Formula(10 ** random.uniform(5, 6.5), 10 ** random.uniform(3, 6), cores=0, limit=16) for _ in range(3)]
            ),
            goal_of(10 ** random.uniform(1, 2)).slo,
        )
        for _ in range(count)
    ]


def measured(formula: Formula | Several, slo: Slo, *, bounded: bool) -> Found:
    return Grid(formula.system(), slo, 0.3, formula.run, bounded=bounded).measure()


def true_rate(formula: Formula | Several, point: Point | None) -> float:
    """Return the rate of a point without noise, 0 without a point."""
    return formula.exact(point.plan, point.load)[0] if point is not None else 0.0


@pytest.mark.parametrize(("noise", "least"), [(0.0, 1.0), (0.05, 0.9)])
def test_the_bounds_exclude_no_best_point(noise: float, least: float) -> None:
    for formula, slo in servers(40, noise):
        whole, part = (measured(formula, slo, bounded=bounded) for bounded in (False, True))
        assert part.exceeded < MARGIN
        assert true_rate(formula, part.best) >= least * true_rate(formula, whole.best), (formula, slo)


def test_requests_in_turn_have_the_capacity_of_all_routes() -> None:
    for formula, slo in several(5):
        whole, part = (measured(formula, slo, bounded=bounded) for bounded in (False, True))
        assert part.exceeded == pytest.approx(1.0, abs=0.01)
        assert true_rate(formula, part.best) == pytest.approx(true_rate(formula, whole.best))


def test_a_window_that_several_models_share_counts_once() -> None:
    for formula, slo in several(3):
        whole, part = (measured(formula, slo, bounded=bounded) for bounded in (False, True))
        assert whole.skipped == 0
        assert whole.whole_s == whole.spent_s
        assert part.windows + part.skipped <= whole.windows


def windows_to_the_limit(formula: Formula, slo: Slo) -> int:
    """Return the windows of all plans with a mean latency within the limit, and those of the first load beyond it."""
    loads: dict[Plan, list[bool]] = {}
    for trial in formula.trials:
        if isinstance(trial, LoadTrial):
            rate = formula.exact(trial.plan, trial.load)[0]
            loads.setdefault(trial.plan, []).append(trial.load.connections <= rate * slo.limit_ns / 1e9)
    return sum(min(sum(held) + 1, len(held)) for held in loads.values())


def test_the_whole_grid_is_estimated_from_the_part() -> None:
    ratios = []
    for formula, slo in servers(40, 0.0):
        part = measured(formula, slo, bounded=True)
        formula.trials.clear()
        whole = measured(formula, slo, bounded=False)
        assert part.windows < whole.windows
        assert part.whole_s <= whole.whole_s == whole.spent_s
        ratios.append((part.windows + part.skipped) / windows_to_the_limit(formula, slo))
    assert 0.75 <= min(ratios) <= median(ratios) <= 1.0
    assert max(ratios) <= 1.25


def test_a_grid_without_bounds_measures_all_loads() -> None:
    formula = Formula(fixed_ns=5e6, row_ns=1e4, cores=0.0)
    found = measured(formula, goal_of(20).slo, bounded=False)
    assert found.best is not None
    assert true_rate(formula, found.best) == max(
        rate
        for plan in formula.grid(formula.system())
        for rate, latency in (formula.exact(plan, Load(count)) for count in ladder(1 << 10))
        if latency <= goal_of(20).slo.limit_ns
    )
    assert found.windows == found.plans * len(ladder(math.inf))
    assert found.skipped == 0


def test_a_wrong_bound_is_reported() -> None:
    """A model whose batches take a third of the time under load."""

    class Faster(Formula):
        def exact(self, plan: object, load: Load) -> tuple[float, float]:
            rate, latency = super().exact(plan, load)  # type: ignore[arg-type]
            return 3 * rate, latency / 3

    assert measured(Faster(fixed_ns=5e6, row_ns=1e6), goal_of(100).slo, bounded=True).exceeded > MARGIN
