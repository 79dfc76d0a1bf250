"""Which of two measured alternatives is faster."""

from __future__ import annotations

import math

import pytest

from remora_tools.deciders.pairs import verdict


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.2, 1.21, 1.19], 1),
        ([0.8, 0.79, 0.82], -1),
        ([1.01, 1.0, 1.015], 0),  # below 2 %
        ([1.3, 0.9, 1.1], 0),  # below the spread
        ([1.3, 1.28, 0.7], 1),  # one outlier
        ([math.inf, math.inf, 1.0], 1),
        ([0.0, 0.0, 1.0], -1),
    ],
)
def test_only_a_difference_beyond_the_spread_counts(ratios: list[float], expected: int) -> None:
    assert verdict(ratios) == expected
