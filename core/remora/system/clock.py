"""The one place that reads the time; tests put another clock in its place."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: one that only grows, one that people understand."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some fixed moment."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970."""


class SystemClock:
    """The machine's clock."""

    __slots__ = ()

    monotonic_ns = staticmethod(time.monotonic_ns)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000
