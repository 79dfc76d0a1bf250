"""How old this process is, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remora.system.machine import process_age_s


def test_the_age_is_that_of_the_process_in_the_middle_of_its_first_tick(tmp_path: Path) -> None:
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    (tmp_path / "self").mkdir()
    fields = ["0"] * 50
    fields[19] = "500"
    (tmp_path / "self/stat").write_text(f"7 (a name) with) {' '.join(fields)}")
    assert process_age_s(tmp_path, lambda: 510 * tick_s) == pytest.approx(9.5 * tick_s)
    assert process_age_s(tmp_path, lambda: 500 * tick_s) == 0.0


def test_where_there_is_no_proc_the_age_is_not_known(tmp_path: Path) -> None:
    assert process_age_s(tmp_path) == 0.0
