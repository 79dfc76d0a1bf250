"""The cost model: what it predicts from what it learned."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from remora.scheduling.costs import CostModel


def learned(*runs: tuple[int, int]) -> CostModel:
    costs = CostModel()
    for rows, ns in runs:
        costs.learn(rows, ns)
    return costs


def test_nothing_is_predicted_before_anything_ran() -> None:
    assert math.isinf(CostModel().predict(1))


def test_a_size_that_ran_is_predicted_from_its_run() -> None:
    assert learned((4, 1000)).predict(4) == 1000


def test_sizes_between_two_powers_of_two_share_an_estimate() -> None:
    assert learned((3, 1000)).predict(4) == 1000
    assert learned((5, 1000)).predict(8) == 1000


def test_a_faster_run_moves_the_estimate_half_way_and_a_slower_one_a_tenth() -> None:
    assert learned((1, 1000), (1, 500)).predict(1) == 750
    assert learned((1, 1000), (1, 2000)).predict(1) == 1100


def test_only_repeated_slow_runs_count() -> None:
    assert learned((1, 1000), (1, 100_000)).predict(1) < 11_000
    assert learned((1, 1000), *[(1, 100_000)] * 40).predict(1) > 90_000


def test_a_larger_size_is_extrapolated_in_proportion_from_the_nearest_smaller_one() -> None:
    assert learned((1, 100), (2, 150)).predict(8) == 600


def test_a_smaller_size_costs_at_most_what_a_larger_one_does() -> None:
    assert learned((8, 800), (16, 900)).predict(1) == 800


def test_no_rows_count_as_one() -> None:
    assert learned((0, 100)).predict(1) == 100


def test_the_curve_is_ordered_by_size() -> None:
    assert list(learned((8, 3), (1, 1), (3, 2)).curve()) == [1, 4, 8]


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 10**9)), min_size=1, max_size=30), st.integers(0, 200))
def test_predictions_stay_within_what_was_seen_and_its_growth(runs: list[tuple[int, int]], rows: int) -> None:
    predicted = learned(*runs).predict(rows)
    times = [ns for _, ns in runs]
    assert min(times) <= predicted <= max(times) * 256
