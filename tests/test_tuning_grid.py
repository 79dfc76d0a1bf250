"""The grid against servers in closed form: its bounds exclude no best point, and the time of the whole one."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest

from remora.cli.tuning import Load, Point
from remora.cli.tuning.candidates import ladder
from remora.traffic.objective import Slo
from served_model_formula import Formula, goal_of
from tuning_grid import MARGIN, Found, Grid


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


def measured(formula: Formula, slo: Slo, *, bounded: bool) -> Found:
    return Grid(formula.system(), slo, 0.3, formula.run, bounded=bounded).measure()


def true_rate(formula: Formula, point: Point | None) -> float:
    """Return the rate of a point without noise, 0 without a point."""
    return formula.exact(point.plan, point.load)[0] if point is not None else 0.0


@pytest.mark.parametrize(("noise", "least"), [(0.0, 1.0), (0.05, 0.9)])
def test_the_bounds_exclude_no_best_point(noise: float, least: float) -> None:
    for formula, slo in servers(40, noise):
        whole, part = (measured(formula, slo, bounded=bounded) for bounded in (False, True))
        assert part.exceeded < MARGIN
        assert true_rate(formula, part.best) >= least * true_rate(formula, whole.best), (formula, slo)


def test_the_whole_grid_is_estimated_from_the_part() -> None:
    ratios = []
    for formula, slo in servers(40, 0.0):
        whole, part = (measured(formula, slo, bounded=bounded) for bounded in (False, True))
        assert part.windows < whole.windows
        ratios.append(part.whole_s / whole.spent_s)
    assert 0.75 <= min(ratios) <= median(ratios) <= 1.0
    assert max(ratios) <= 1.25


def test_a_grid_without_bounds_measures_all_loads_up_to_the_limit() -> None:
    formula = Formula(fixed_ns=5e6, row_ns=1e4, cores=0.0)
    found = measured(formula, goal_of(20).slo, bounded=False)
    assert found.best is not None
    assert true_rate(formula, found.best) == max(
        rate
        for plan in formula.grid(formula.system())
        for rate, latency in (formula.exact(plan, Load(count)) for count in ladder(1 << 10))
        if latency <= goal_of(20).slo.limit_ns
    )
    assert found.skipped == 0


def test_a_wrong_bound_is_reported() -> None:
    """A model whose batches take a third of the time under load."""

    class Faster(Formula):
        def exact(self, plan: object, load: Load) -> tuple[float, float]:
            rate, latency = super().exact(plan, load)  # type: ignore[arg-type]
            return 3 * rate, latency / 3

    assert measured(Faster(fixed_ns=5e6, row_ns=1e6), goal_of(100).slo, bounded=True).exceeded > MARGIN
