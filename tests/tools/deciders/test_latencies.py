"""Histogram of durations, against sorted lists."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from remora_tools.deciders.latencies import Histogram, from_json, merge

DURATIONS = st.lists(st.integers(0, 10**12), min_size=1, max_size=200)


def filled(values: list[int]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    return histogram


@given(values=DURATIONS, percent=st.floats(0.1, 100))
def test_a_percentile_is_within_one_percent_of_the_exact_one(values: list[int], percent: float) -> None:
    exact = sorted(values)[max(math.ceil(len(values) * percent / 100 - 1e-9) - 1, 0)]
    assert abs(filled(values).percentile(percent) - exact) <= 0.01 * exact
    assert filled(values).mean_ns == sum(values) / len(values)


@given(first=DURATIONS, second=DURATIONS)
def test_merged_histograms_are_those_of_all_values(first: list[int], second: list[int]) -> None:
    merged = merge([filled(first), from_json(json.loads(json.dumps(filled(second).to_json())))])
    whole = filled(first + second)
    assert (merged.buckets, merged.total_ns, merged.count) == (whole.buckets, whole.total_ns, whole.count)


@given(values=DURATIONS)
def test_the_curve_rises_to_one(values: list[int]) -> None:
    curve = filled(values).curve()
    assert curve == sorted(curve)
    assert curve[-1][1] == 1.0


def test_no_values_have_no_percentiles() -> None:
    assert (Histogram().percentile(99), Histogram().mean_ns, Histogram().curve()) == (0, 0.0, [])
    assert filled([-5]).percentile(100) == 0
