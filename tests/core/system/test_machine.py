"""How old this process is and how much memory is in use, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remora.system.machine import memory_bytes, process_age_s


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
