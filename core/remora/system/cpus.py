"""How many processors and how much memory this process may use; the law: the quota and the affinity, not the machine.

A container sees all of its host's processors but may use a few of them. Threads for all of them would wait for each
other, so everything that sizes a pool asks here.
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
    """The smallest of the cgroup's quota (rounded up), the processors the process is bound to and the machine's.

    Args:
        root: where ``proc`` and ``sys`` are found; tests give a tree of their own.
        affinity: how many processors the process may run on; asked of the system when None.
    """
    if affinity is None:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _machine_cpus()
    return max(1, min([_machine_cpus(), affinity, *_quotas(root)]))


def numa_cpus(node: int, root: Path = Path("/")) -> frozenset[int]:
    """The processors of a memory node; none when there is no such node."""
    found: set[int] = set()
    for part in _text(root / f"sys/devices/system/node/node{node}/cpulist").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The most memory that the cgroup, or else the machine, lets the process have; None when nothing says."""
    limits = [limit for limit in _memory_limits(root) if 0 < limit < _NO_LIMIT]
    return min(limits, default=None)


def memory_in_use_bytes(root: Path = Path("/")) -> int:
    """What is taken of the memory that `memory_limit_bytes` limits, without what the kernel can take back at once."""
    limits = [(limit, folder) for limit, folder in _cgroup_limits(root) if 0 < limit < _NO_LIMIT]
    total, used = memory_bytes(root / "proc")
    if limits and min(limits)[0] < total:
        folder = min(limits)[1]
        taken = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        if taken.isdigit():
            rows = dict(line.partition(" ")[::2] for line in _text(folder / "memory.stat").splitlines())
            cached = rows.get("inactive_file", rows.get("total_inactive_file", "0"))
            return max(int(taken) - int(cached), 0)
    return used


def cpu_signature(root: Path = Path("/")) -> str:
    """What kind of processor this is: equal where code that was made for one runs on the other."""
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):  # x86 and arm
            return f"{platform.machine()} {' '.join(sorted(value.split()))}"
    return f"{platform.machine()} {platform.processor()}"


def _machine_cpus() -> int:
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[int]:
    """Processors by each quota that binds the process: its cgroup's and those of all above it."""
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
    """The limits of the process's cgroup and those above it, each with its folder."""
    for folder in _folders(root, "memory"):
        text = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        if text.isdigit():
            yield int(text), folder


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The process's cgroup folders for a controller, from its own to the top one, for both versions of cgroups.

    Inside a container the path of ``/proc/self/cgroup`` is often the host's, of which only the top folder is mounted;
    files that are not there read as empty.
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
    """Version 1 mounts controllers that go together ("cpu,cpuacct") in one folder, mostly with links for each."""
    together = top / controllers
    return together if together.is_dir() else top / controller


def _text(path: Path) -> str:
    """A small file's text without the space around it; empty when there is none or it may not be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
