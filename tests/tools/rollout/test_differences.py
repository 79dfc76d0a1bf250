"""Log of differences: its rate, its size, and large tensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from remora.errors import ConfigError
from remora.messages import InferForm, InputSpec, Tensor
from remora_tools.rollout import differences
from remora_tools.rollout.differences import (
    MOST_PER_SECOND,
    MOST_TENSOR_BYTES,
    Difference,
    DifferenceLog,
    open_differences,
)
from support.engine.fakes import FakeClock


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends with a log is written, however long the machine takes."""
    monkeypatch.setattr(differences, "_END_S", 60.0)


def _difference(size: int = 1) -> Difference:
    outputs = [Tensor("y", "FP32", np.ones(size, np.float32))]
    form = InferForm((InputSpec("x", "BYTES", (1,)),), id="r")
    return Difference("m", "2", "version 3", form, [[b"text"]], outputs, outputs, "y: why")


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_second_has_at_most_so_many_lines(tmp_path: Path) -> None:
    clock = FakeClock()
    log = DifferenceLog(tmp_path / "d", 1 << 20, {}, clock)
    for _ in range(MOST_PER_SECOND + 5):
        log.put(_difference())
    clock.advance(1_000_000_000)
    log.put(_difference())
    log.close()
    rows = _lines(tmp_path / "d")
    assert len(rows) == MOST_PER_SECOND + 1
    assert rows[0]["inputs"] == [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["text"]}]


def test_the_values_of_a_large_tensor_are_left_out(tmp_path: Path) -> None:
    log = DifferenceLog(tmp_path / "d", 1 << 20, {}, FakeClock())
    log.put(_difference(MOST_TENSOR_BYTES))
    log.close()
    (row,) = _lines(tmp_path / "d")
    left_out = {"name": "y", "datatype": "FP32", "shape": [MOST_TENSOR_BYTES], "left_out": 4 * MOST_TENSOR_BYTES}
    assert row["expected"] == [left_out]


def test_the_file_never_exceeds_its_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = DifferenceLog(tmp_path / "d", 600, {}, FakeClock())
    for _ in range(5):
        log.put(_difference())
    log.close()
    assert 0 < (tmp_path / "d").stat().st_size <= 600
    assert _lines(tmp_path / "d")
    assert "--shadow-differences-max-bytes" in caplog.text


def test_no_path_is_no_log_and_no_size_is_refused(tmp_path: Path) -> None:
    assert open_differences("", 1, {}, FakeClock()) is None
    with pytest.raises(ConfigError, match="expected at least 1"):
        open_differences(str(tmp_path / "d"), 0, {}, FakeClock())
