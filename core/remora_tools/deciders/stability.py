"""Rule for the end of a measurement: throughput and latency have settled. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WINDOWS = 3
TOLERANCE = 0.1


class Window(NamedTuple):
    """Throughput and latency of one window of a measurement."""

    rate_per_s: float
    latency_ns: float


def is_stable(windows: Sequence[Window], tolerance: float = TOLERANCE) -> bool:
    """Return True if the last three windows deviate from their mean by at most the tolerance.

    The rule holds for throughput and latency alike. A window without answers is never stable.
    """
    last = windows[-WINDOWS:]
    if len(last) < WINDOWS:
        return False
    for values in zip(*last, strict=True):
        mean = sum(values) / len(values)
        if not min(values) > 0 or any(abs(value - mean) > tolerance * mean for value in values):
            return False
    return True
