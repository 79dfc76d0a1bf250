"""Rule for settled throughput and latency."""

from __future__ import annotations

import pytest

from remora_tools.deciders.stability import Window, is_stable


@pytest.mark.parametrize(
    ("rates", "latencies", "stable"),
    [
        ([100, 100], [1, 1], False),
        ([100, 100, 100], [1, 1, 1], True),
        ([90, 100, 110], [1, 1, 1], True),
        ([85, 100, 110], [1, 1, 1], False),
        ([100, 100, 100], [1, 1, 1.4], False),
        ([5, 100, 101, 99], [9, 1, 1, 1], True),
        ([100, 101, 99, 5], [1, 1, 1, 9], False),
        ([0, 0, 0], [0, 0, 0], False),
    ],
)
def test_the_last_three_windows_decide(rates: list[float], latencies: list[float], stable: bool) -> None:
    windows = [Window(rate, latency) for rate, latency in zip(rates, latencies, strict=True)]
    assert is_stable(windows) is stable
