"""What a state begins with: zeros, files, and everything about a file that may be wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from remora.errors import ConfigError, RemoraError
from remora.messages import DTYPES
from remora.models.loader import initial_states
from support.engine.fakes import config_of

MODEL = 'name: "m" max_batch_size: %d sequence_batching { state { input_name: "S" output_name: "T" %s } }'


def first(folder: Path, state: str, *, batch: int = 4) -> np.ndarray:
    return initial_states(config_of(MODEL % (batch, state)), folder)["S"]


def from_file(folder: Path, content: bytes, *, data_type: str = "TYPE_INT16", dims: str = "3") -> np.ndarray:
    (folder / "initial_state").mkdir(exist_ok=True)
    (folder / "initial_state" / "first").write_bytes(content)
    state = f'data_type: {data_type} dims: -1 initial_state {{ name: "i" data_type: {data_type} dims: {dims}'
    return first(folder, f'{state} data_file: "first" }}')


@pytest.mark.parametrize(("batch", "shape"), [(4, (1, 2, 1)), (0, (2, 1))])
def test_a_state_begins_with_zeros_and_its_variable_dims_are_one(
    tmp_path: Path, batch: int, shape: tuple[int, ...]
) -> None:
    array = first(tmp_path, "data_type: TYPE_FP32 dims: [ 2, -1 ]", batch=batch)
    assert array.shape == shape
    assert array.dtype == np.float32
    assert not array.any()
    assert not array.flags.writeable


def test_text_begins_empty(tmp_path: Path) -> None:
    assert first(tmp_path, "data_type: TYPE_STRING dims: 2").tolist() == [[b"", b""]]


def test_zeros_in_the_shape_that_the_configuration_gives_them(tmp_path: Path) -> None:
    state = 'data_type: TYPE_INT64 dims: -1 initial_state { name: "i" data_type: TYPE_INT64 dims: 5 zero_data: true }'
    assert first(tmp_path, state).tolist() == [[0] * 5]


def test_values_come_from_a_file_and_what_is_too_much_is_left(tmp_path: Path) -> None:
    array = from_file(tmp_path, np.arange(1, 9, dtype=np.int16).tobytes())
    assert array.tolist() == [[1, 2, 3]]
    assert array.dtype == DTYPES["INT16"]
    assert not array.flags.writeable


def test_text_comes_from_a_file_with_its_lengths(tmp_path: Path) -> None:
    array = from_file(tmp_path, b"\x02\0\0\0hi\0\0\0\0", data_type="TYPE_STRING", dims="2")
    assert array.tolist() == [[b"hi", b""]]


@pytest.mark.parametrize(
    "content", [b"", b"\x02\0\0\0hi", b"\x02\0\0\0hi\x05\0\0\0abc", b"\0\0\0\0" * 3, b"\0\0\0\0\0"]
)
def test_text_of_another_number_of_elements_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="must hold 2 BYTES elements"):
        from_file(tmp_path, content, data_type="TYPE_STRING", dims="2")


def test_a_file_that_is_too_short_is_refused_with_tritons_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, b"\1\2\3\4\5")
    assert str(caught.value) == (
        "initial_state setting expects 6 bytes, but the data provided from firstonly has 5 bytes."
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../secret", "leaves the model's folder"),
        ("/etc/passwd", "leaves the model's folder"),
        ("none", "No such file"),
    ],
)
def test_a_name_is_never_a_path(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "secret").write_bytes(b"\0" * 8)
    initial = f'initial_state {{ name: "i" data_type: TYPE_INT8 dims: 1 data_file: "{name}" }}'
    with pytest.raises(RemoraError, match=reason):
        first(tmp_path, f"data_type: TYPE_INT8 dims: 1 {initial}")


def test_a_state_too_large_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it may take at most 1073741824 bytes"):
        first(tmp_path, "data_type: TYPE_FP32 dims: [ 4000000, 4000000 ]")


def test_omitted_states_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = 'data_type: TYPE_INT8 dims: 1 } state { input_name: "S" output_name: "U" data_type: TYPE_INT8 dims: 2'
    with caplog.at_level(logging.WARNING):
        assert first(tmp_path, state).shape == (1, 1)
    assert "the first state of each name counts" in caplog.text


def test_a_model_without_sequences_has_no_states(tmp_path: Path) -> None:
    assert initial_states(config_of('name: "m"'), tmp_path) == {}
