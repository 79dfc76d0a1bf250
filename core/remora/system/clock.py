"""The clock of the engine, which tests replace."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic and a wall clock, and the processor time of a thread."""

    def monotonic_ns(self) -> int:
        """Return nanoseconds since a fixed but unspecified moment."""

    def wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch."""

    def thread_ns(self) -> int:
        """Return the processor time of the calling thread, in nanoseconds."""


class SystemClock:
    """The operating system's clock."""

    __slots__ = ()

    monotonic_ns = staticmethod(time.monotonic_ns)
    thread_ns = staticmethod(time.thread_time_ns)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000
