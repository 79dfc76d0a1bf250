"""Captured requests of an engine: which are kept, what is left out, and where it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live_server import write_version
from remora.engine import Engine
from remora.errors import ConfigError
from remora.tracing.capture import capture_settings


def captured(tmp_path: Path, *values: int, **settings: Any) -> list[dict[str, Any]]:
    """Return the lines of an engine that got requests with these values."""
    write_version(tmp_path / "models", 2)
    path = tmp_path / "captured.jsonl"
    options = {"backend_config": ("python,isolation=thread",), "capture": str(path), **settings}
    with Engine(model_repository=(tmp_path / "models",), **options) as engine:
        for value in values:
            engine.infer("m", {"IN": np.full((1, 1), value, np.int32)})
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_inputs_and_outputs_are_captured_in_the_order_of_their_answers(tmp_path: Path) -> None:
    found = captured(tmp_path, 1, 2)
    assert [each["inputs"][0]["data"] for each in found] == [[1], [2]]
    assert [each["answers"][0][0]["data"] for each in found] == [[2], [4]]
    assert all(each["duration_us"] >= 0 and each["version"] == "2" for each in found)


@pytest.mark.parametrize(
    ("redact", "inputs", "outputs"),
    [("m", True, True), ("*", True, True), ("m:IN", True, False), ("m:OUT", False, True), ("other", False, False)],
)
def test_values_of_redacted_tensors_are_left_out(tmp_path: Path, redact: str, inputs: bool, outputs: bool) -> None:
    (found,) = captured(tmp_path, 77_777, capture_redact=(redact,))
    assert (found["inputs"][0].get("redacted", False), "data" in found["inputs"][0]) == (inputs, not inputs)
    assert (found["answers"][0][0].get("redacted", False), "data" in found["answers"][0][0]) == (outputs, not outputs)
    if inputs:
        assert "77777" not in json.dumps(found)


def test_the_file_never_exceeds_its_limit(tmp_path: Path) -> None:
    assert 0 < len(captured(tmp_path, *range(20), capture_max_bytes=1_000)) < 5
    assert (tmp_path / "captured.jsonl").stat().st_size <= 1_000


def test_nothing_is_captured_without_the_option(tmp_path: Path) -> None:
    write_version(tmp_path / "models", 2)
    with Engine(model_repository=(tmp_path / "models",), backend_config=("python,isolation=thread",)) as engine:
        assert engine.capture is None


@pytest.mark.parametrize("share", ["0", "1.5", "x", "-1"])
def test_an_impossible_share_is_refused(share: str) -> None:
    with pytest.raises(ConfigError, match="--capture-share"):
        capture_settings("file", share, 1, ())


def test_a_file_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        captured(tmp_path, capture=str(tmp_path / "none" / "file"))
