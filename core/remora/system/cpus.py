"""CPUs and memory that this process may use, by cgroup quota and CPU affinity.

A container sees all CPUs of its host but may be limited to a few. Thread pools sized by the host would contend, so
every pool is sized by `usable_cpus`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

from remora.system.machine import memory_bytes

_NO_LIMIT = 1 << 60
"""Larger than any memory; cgroup v1 writes "no limit" as a number near 2^63."""


def usable_cpus(root: Path = Path("/"), affinity: int | None = None) -> int:
    """Return the number of usable CPUs.

    It is the smallest of the cgroup quota (rounded up), the CPU affinity and the machine's CPU count.

    Args:
        root: directory that contains ``proc`` and ``sys``; tests pass a temporary tree.
        affinity: number of CPUs in the process's affinity mask; None reads it from the system.
    """
    if affinity is None:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _machine_cpus()
    return max(1, min([_machine_cpus(), affinity, *_quotas(root)]))


def numa_cpus(node: int, root: Path = Path("/")) -> frozenset[int]:
    """Return the CPUs of a NUMA node, empty when the node does not exist."""
    found: set[int] = set()
    for part in _text(root / f"sys/devices/system/node/node{node}/cpulist").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory limit of the cgroup, or else of the machine.

    Returns None when neither is known.
    """
    limits = [limit for limit in _memory_limits(root) if 0 < limit < _NO_LIMIT]
    return min(limits, default=None)


def memory_in_use_bytes(root: Path = Path("/")) -> int:
    """Return the memory in use, without reclaimable cache, of what `memory_limit_bytes` limits."""
    limits = [(limit, folder) for limit, folder in _cgroup_limits(root) if 0 < limit < _NO_LIMIT]
    total, used = memory_bytes(root / "proc")
    if limits and min(limits)[0] < total:
        folder = min(limits)[1]
        taken = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        if taken.isdigit():
            rows = dict(line.partition(" ")[::2] for line in _text(folder / "memory.stat").splitlines())
            # "total_" includes the groups below in version 1, as all rows of version 2 do.
            cached = rows.get("total_inactive_file", rows.get("inactive_file", "0"))
            return max(int(taken) - int(cached), 0)
    return used


def cpu_signature(root: Path = Path("/")) -> str:
    """Return a string that is equal on two CPUs if code compiled for one runs on the other."""
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):  # x86 and arm
            return f"{platform.machine()} {' '.join(sorted(value.split()))}"
    return f"{platform.machine()} {platform.processor()}"


def _machine_cpus() -> int:
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[int]:
    """Yield the CPUs that each quota of the process's cgroup and its ancestors allows."""
    for folder in _folders(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")  # version 2: "150000 100000" or "max 100000"
        if not quota:
            quota = _text(folder / "cpu.cfs_quota_us")  # version 1: -1 for none
            period = _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            yield -(-int(quota) // int(period))


def _memory_limits(root: Path) -> Iterator[int]:
    yield from (limit for limit, _ in _cgroup_limits(root))
    yield memory_bytes(root / "proc")[0]


def _cgroup_limits(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield the memory limits of the process's cgroup and its ancestors, each with its folder."""
    for folder in _folders(root, "memory"):
        text = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        if text.isdigit():
            yield int(text), folder


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the process's cgroup folders for a controller, from its own to the root.

    Works for cgroup v1 and v2. Inside a container the path in ``/proc/self/cgroup`` is often the host's, of which only
    the root is mounted; missing files read as empty.
    """
    top = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = controllers.split(",")
        if controllers and controller not in names:
            continue
        mount = top if not controllers else _mount(top, controllers, controller)
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts), 0, -1):
            yield mount.joinpath(*parts[:depth])
    yield top
    yield top / controller


def _mount(top: Path, controllers: str, controller: str) -> Path:
    """Return the mount folder of a v1 controller.

    "cpu,cpuacct" share one, usually with a link for each.
    """
    together = top / controllers
    return together if together.is_dir() else top / controller


def _text(path: Path) -> str:
    """Return the stripped text of a small file, empty when it is missing or unreadable."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
