"""Part of a wait that a process caused, on a machine that also runs other programs.

A wait on the clock grows with every program beside it. Linux counts for each thread the time in which it could run and
no processor ran it; such time is not the fault of the process. Neither is time in which the process used no processor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import NamedTuple


class Look(NamedTuple):
    """A moment: the clock, how long the threads were not scheduled until now, and the processor time of the process."""

    at_s: float
    unscheduled_s: float
    processor_s: float


def caused_s(began: Look, ended: Look, pause_s: float = 0.0) -> float:
    """Return the part of the time between two looks that the process caused; ``pause_s`` of it was intended."""
    waited_s = ended.at_s - began.at_s - (ended.unscheduled_s - began.unscheduled_s) - pause_s
    return max(0.0, min(waited_s, ended.processor_s - began.processor_s))


class Account:
    """Scheduler's account of a process and of those threads that take part in a wait.

    Without schedstat in the kernel no time counts as unscheduled, so that what a process caused is an upper bound.
    """

    def __init__(self, process: int, threads: Iterable[tuple[int, int]]) -> None:
        self._clock = ~process << 3 | 2  # the clock id of another process, as clock_getcpuclockid(3) makes it
        self._files: list[int] = []
        for owner, thread in threads:
            try:
                self._files.append(os.open(f"/proc/{owner}/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC))
            except FileNotFoundError:
                continue

    def close(self) -> None:
        """Close the files of the threads."""
        while self._files:
            os.close(self._files.pop())

    def look(self) -> Look:
        """Return the state of this moment. Raises OSError when the process has ended."""
        at_s = time.monotonic()
        unscheduled_ns = sum(int(os.pread(file, 100, 0).split()[1]) for file in self._files)
        return Look(at_s, unscheduled_ns / 1e9, time.clock_gettime(self._clock))
