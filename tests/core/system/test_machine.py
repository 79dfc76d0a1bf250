"""Age, memory and CPU time of processes, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remora.system.machine import Usage, memory_bytes, process_age_s, resident_bytes, usage_with_children


def test_the_age_is_that_of_the_process_in_the_middle_of_its_first_tick(tmp_path: Path) -> None:
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    (tmp_path / "self").mkdir()
    fields = ["0"] * 50
    fields[19] = "500"
    (tmp_path / "self/stat").write_text(f"7 (a name) with) {' '.join(fields)}")
    assert process_age_s(tmp_path, lambda: 510 * tick_s) == pytest.approx(9.5 * tick_s)
    assert process_age_s(tmp_path, lambda: 500 * tick_s) == 0.0


def test_without_proc_the_age_is_unknown(tmp_path: Path) -> None:
    assert process_age_s(tmp_path) == 0.0


@pytest.mark.parametrize(
    ("meminfo", "expected"),
    [
        ("MemTotal:       16384 kB\nMemFree: 1 kB\nMemAvailable:  4096 kB\n", (16 << 20, 12 << 20)),
        ("MemTotal: 16384 kB\n", (16 << 20, 16 << 20)),  # a kernel that does not tell what is available
        ("MemTotal: much\nMemAvailable:\n", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_memory_is_reported_as_far_as_the_kernel_reports_it(
    meminfo: str, expected: tuple[int, int], tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text(meminfo)
    assert memory_bytes(tmp_path) == expected


def test_without_proc_the_memory_is_unknown(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == (0, 0)
    assert resident_bytes(tmp_path) == 0


def test_the_resident_memory_of_the_process_is_read_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/statm").write_text("9 3 1 1 0 1 0")
    assert resident_bytes(tmp_path) == 3 * os.sysconf("SC_PAGE_SIZE")


def process(proc: Path, pid: int, parent: int, ticks: int, **files: str) -> None:
    (proc / str(pid)).mkdir()
    fields = ["S", str(parent), *["0"] * 9, str(ticks), str(ticks), *["0"] * 30]
    (proc / str(pid) / "stat").write_text(f"{pid} (a name) with) {' '.join(fields)}")
    for name, text in files.items():
        (proc / str(pid) / name).write_text(text)


def test_the_usage_is_that_of_a_process_and_all_its_descendants(tmp_path: Path) -> None:
    second = os.sysconf("SC_CLK_TCK")
    process(tmp_path, 10, 1, second, smaps_rollup="Rss: 9000 kB\nPss: 1000 kB\n")
    process(tmp_path, 11, 10, second, smaps_rollup="Pss: 200 kB\n")
    process(tmp_path, 12, 11, second, status="VmRSS:\t 30 kB\n")  # a kernel without smaps_rollup
    process(tmp_path, 13, 1, second, smaps_rollup="Pss: 7 kB\n")
    (tmp_path / "14").mkdir()  # a process that has just ended
    assert usage_with_children(tmp_path, 10) == Usage(6.0, 1230 << 10)


def test_this_process_uses_memory_and_time() -> None:
    found = usage_with_children()
    assert found.resident_bytes > 1 << 20
    assert found.cpu_s > 0


def test_without_proc_the_usage_is_unknown(tmp_path: Path) -> None:
    assert usage_with_children(tmp_path) == Usage(0.0, 0)
