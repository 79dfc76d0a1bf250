"""The clock of the engine, which tests replace."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic and a wall clock."""

    def monotonic_ns(self) -> int:
        """Return nanoseconds since a fixed but unspecified moment."""

    def wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch."""


class SystemClock:
    """The operating system's clock."""

    __slots__ = ()

    monotonic_ns = staticmethod(time.monotonic_ns)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000
