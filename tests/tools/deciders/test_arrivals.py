"""Schedules of open-loop load."""

from __future__ import annotations

import statistics
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora_tools.deciders.arrivals import CONSTANT, POISSON, arrivals


@given(rate=st.floats(0.1, 1e5), parts=st.integers(1, 5))
def test_the_parts_of_a_constant_schedule_are_the_whole(rate: float, parts: int) -> None:
    whole = list(islice(arrivals(rate, CONSTANT), 20 * parts))
    split = sorted(ns for part in range(parts) for ns in islice(arrivals(rate, CONSTANT, part=part, parts=parts), 20))
    assert split == pytest.approx(whole, abs=2)


@given(rate=st.floats(1, 1e5), seed=st.integers(0, 10), parts=st.integers(1, 4), part=st.integers(0, 3))
def test_poisson_gaps_have_the_mean_and_deviation_of_an_exponential(
    rate: float, seed: int, parts: int, part: int
) -> None:
    times = list(islice(arrivals(rate, POISSON, seed, part=part % parts, parts=parts), 4000))
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1e9 * parts / rate, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1e9 * parts / rate, rel=0.15)


def test_a_seed_gives_one_schedule_and_the_parts_differ() -> None:
    first = [list(islice(arrivals(10, POISSON, 1, part=part, parts=2), 5)) for part in (0, 1)]
    assert first == [list(islice(arrivals(10, POISSON, 1, part=part, parts=2), 5)) for part in (0, 1)]
    assert first[0] != first[1]
