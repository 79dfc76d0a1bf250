"""Comparison of outputs: exact, with a tolerance, and by the largest elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from remora_tools.rollout.comparing import Comparison, difference

EXACT = Comparison()


def _f(*values: float) -> Any:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("expected", "found", "how", "text"),
    [
        (_f(1, 2), _f(1, 2), EXACT, ""),
        (_f(1, np.nan), _f(1, np.nan), EXACT, ""),
        (_f(1, 2), _f(1, 2.5), EXACT, "y: 1 of 2 elements differ, by at most 0.5"),
        (_f(1, 2), _f(1, 2.0001), Comparison(1e-3), ""),
        (_f(1, 2), _f(1, 2.1), Comparison(1e-3), "y: 1 of 2 elements differ, by at most 0.1"),
        (_f(1, np.inf), _f(1, 2), EXACT, "y: 1 of 2 elements differ"),
        (_f(0.1, 0.7, 0.2), _f(0.15, 0.6, 0.25), Comparison(top_k=2), ""),
        (_f(0.1, 0.7, 0.2), _f(0.7, 0.1, 0.2), Comparison(top_k=1), "y: other elements are the 1 largest"),
        (_f(1, 2), _f(1, 2, 3), EXACT, "y: float32[3], expected float32[2]"),
        (_f(1), np.array([1.0]), EXACT, "y: float64[1], expected float32[1]"),
        (np.array([b"a"], object), np.array([b"a"], object), EXACT, ""),
        (np.array([b"a"], object), np.array([b"b"], object), Comparison(9), "y: other elements"),
        (np.array([True]), np.array([False]), EXACT, "y: 1 of 1 elements differ"),
        (np.zeros((0,), np.int32), np.zeros((0,), np.int32), EXACT, ""),
        (np.array([255], np.uint8), np.array([0], np.uint8), EXACT, "by at most 255"),
    ],
)
def test_the_difference_is_told(expected: Any, found: Any, how: Comparison, text: str) -> None:
    reason = difference({"y": expected}, {"y": found}, how)
    assert text in reason
    assert bool(text) == bool(reason)


def test_other_outputs_are_a_difference() -> None:
    assert difference({"y": _f(1)}, {"z": _f(1)}, EXACT) == "outputs z, expected y"
