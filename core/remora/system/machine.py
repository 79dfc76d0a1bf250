"""Memory, CPU usage and age of processes from /proc, or zeros without /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


def memory_bytes(proc: Path = Path("/proc")) -> tuple[int, int]:
    """Return (total, used) main memory in bytes, or 0 for unknown values."""
    try:
        text = (proc / "meminfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0, 0
    rows = dict(line.partition(":")[::2] for line in text.splitlines())
    words = [rows.get(key, "").split() or ["0"] for key in ("MemTotal", "MemAvailable")]
    total, available = (int(each[0]) * 1024 if each[0].isdecimal() else 0 for each in words)  # "16384 kB"
    return total, max(total - available, 0)


class CpuUsage:
    """Share of CPU time in use between two readings, 0 to 1."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last = self._ticks()

    def read(self) -> float:
        """Return the share since the previous reading or since construction."""
        busy, total = self._ticks()
        last_busy, last_total = self._last
        self._last = (busy, total)
        return (busy - last_busy) / (total - last_total) if total > last_total else 0.0

    def _ticks(self) -> tuple[int, int]:
        try:
            fields = [int(word) for word in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return 0, 0
        return sum(fields) - fields[3] - fields[4], sum(fields)


class Usage(NamedTuple):
    """CPU time in seconds and resident memory in bytes.

    A page that several processes share counts once.
    """

    cpu_s: float
    resident_bytes: int


def usage_with_children(proc: Path = Path("/proc"), pid: int | None = None) -> Usage:
    """Return the usage of a process (default: this one) and its living descendants."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
        except (OSError, ValueError, IndexError):  # the process has ended
            continue
    family = {os.getpid() if pid is None else pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    cpu_s = sum(ticks.get(each, 0) for each in family) / os.sysconf("SC_CLK_TCK")
    return Usage(cpu_s, sum(_resident_bytes(proc / str(each)) for each in family))


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """Return the resident memory of this process alone, 0 if it is unknown.

    It is cheaper than `usage_with_children`, because the kernel need not visit each page.
    """
    try:
        return int((proc / "self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _resident_bytes(folder: Path) -> int:
    for name, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            text = (folder / name).read_text(errors="replace")
        except OSError:
            continue
        words = next((line.split() for line in text.splitlines() if line.startswith(key)), [])
        if len(words) > 1 and words[1].isdecimal():
            return int(words[1]) * 1024
    return 0


def process_age_s(proc: Path = Path("/proc"), boot_age_s: Callable[[], float] | None = None) -> float:
    """Return the seconds since this process was started (exec), 0 where that is unknown.

    Accurate to half a kernel tick, 5 ms, because the kernel stores start times in whole ticks. ``boot_age_s`` returns
    the machine's uptime by the clock that counts those ticks.
    """
    try:
        started_ticks = int((proc / "self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = (boot_age_s or _boot_age_s)() - (started_ticks + 0.5) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return max(age_s, 0.0)


def _boot_age_s() -> float:
    """Return the uptime. Raises AttributeError on systems without CLOCK_BOOTTIME."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
