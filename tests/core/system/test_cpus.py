"""What a container may use is read from its cgroup; every machine here is a tree of small files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remora.system.cpus import cpu_signature, memory_in_use_bytes, memory_limit_bytes, usable_cpus

MACHINE = 64


@pytest.fixture(autouse=True)
def _big_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: MACHINE)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


V2 = "proc/self/cgroup", "0::/"
V1 = "proc/self/cgroup", "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, MACHINE),
        (dict([V2]) | {"sys/fs/cgroup/cpu.max": "max 100000"}, MACHINE),
        (dict([V2]) | {"sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        (dict([V2]) | {"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        (dict([V2]) | {"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        (dict([V2]) | {"sys/fs/cgroup/cpu.max": "nonsense"}, MACHINE),
        (dict([V2]) | {"sys/fs/cgroup/cpu.max": "100000 0"}, MACHINE),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),
        ({"proc/self/cgroup": "0::/../../x", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
        (dict([V1]) | {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, MACHINE),
        (
            dict([V1])
            | {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            4,
        ),
        (
            dict([V1])
            | {
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "50000",
            },
            5,
        ),
    ],
)
def test_the_quota_of_either_cgroup_version_is_kept(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert usable_cpus(tree(tmp_path, files), affinity=MACHINE) == expected


def test_the_tightest_quota_of_the_tree_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/container",
        "sys/fs/cgroup/pod/cpu.max": "200000 100000",
        "sys/fs/cgroup/pod/container/cpu.max": "800000 100000",
    }
    assert usable_cpus(tree(tmp_path, files), affinity=MACHINE) == 2


def test_the_affinity_counts_when_it_is_tighter_than_the_quota(tmp_path: Path) -> None:
    root = tree(tmp_path, dict([V2]) | {"sys/fs/cgroup/cpu.max": "400000 100000"})
    assert usable_cpus(root, affinity=3) == 3
    assert usable_cpus(root, affinity=16) == 4


def test_the_machine_is_the_limit_when_nothing_else_is(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path, affinity=1000) == MACHINE


def test_there_is_always_one_processor(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path, affinity=0) == 1


def test_this_machine_can_be_inspected() -> None:
    assert usable_cpus() >= 1
    limit = memory_limit_bytes()
    assert limit is None or limit > 0
    assert cpu_signature()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (dict([V2]) | {"sys/fs/cgroup/memory.max": "max"}, None),
        (dict([V2]) | {"sys/fs/cgroup/memory.max": "1048576"}, 1 << 20),
        (dict([V1]) | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        (dict([V1]) | {"sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "2097152"}, 2 << 20),
        ({"proc/meminfo": "MemTotal:       16384 kB\nMemFree: 1 kB"}, 16 << 20),
        (dict([V2]) | {"sys/fs/cgroup/memory.max": "1048576", "proc/meminfo": "MemTotal: 16384 kB"}, 1 << 20),
    ],
)
def test_the_memory_limit_is_the_tightest_there_is(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    assert memory_limit_bytes(tree(tmp_path, files)) == expected


MEMINFO = "MemTotal: 16384 kB\nMemAvailable: 4096 kB"
STAT_V1 = "cache 900\ninactive_file 100\ntotal_cache 400000\ntotal_inactive_file 300000"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "sys/fs/cgroup/memory.max": "1048576",
                "sys/fs/cgroup/memory.current": "700000",
                "sys/fs/cgroup/memory.stat": "anon 400000\nfile 300000\ninactive_file 200000\n",
            },
            500_000,
        ),
        (
            dict([V1])
            | {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "9000000000",
                "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "1048576",
                "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "700000",
                "sys/fs/cgroup/memory/docker/abc/memory.stat": STAT_V1,
            },
            400_000,
        ),
        (
            {  # the limit of the pod, which counts the files of all its containers
                "proc/self/cgroup": "0::/pod/container",
                "sys/fs/cgroup/pod/memory.max": "1048576",
                "sys/fs/cgroup/pod/memory.current": "800000",
                "sys/fs/cgroup/pod/container/memory.max": "max",
                "sys/fs/cgroup/pod/container/memory.current": "1000",
            },
            800_000,
        ),
        ({"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "700000"}, 12 << 20),
        ({"sys/fs/cgroup/memory.max": "999999999", "sys/fs/cgroup/memory.current": "700000"}, 12 << 20),
        ({"sys/fs/cgroup/memory.max": "1048576"}, 12 << 20),  # a kernel without a file of the use
    ],
    ids=["v2", "v1", "an ancestor's", "no limit", "more than the machine", "unknown use"],
)
def test_the_memory_in_use_is_that_of_the_group_with_the_limit_without_its_cache(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/", "proc/meminfo": MEMINFO} | files)
    assert memory_in_use_bytes(root) == expected


def test_the_order_of_the_flags_does_not_make_another_processor(tmp_path: Path) -> None:
    first = tree(tmp_path / "a", {"proc/cpuinfo": "model name\t: X\nflags\t\t: avx sse avx2"})
    second = tree(tmp_path / "b", {"proc/cpuinfo": "model name\t: X\nflags\t\t: sse avx2 avx"})
    other = tree(tmp_path / "c", {"proc/cpuinfo": "flags : sse"})
    assert cpu_signature(first) == cpu_signature(second) != cpu_signature(other)
