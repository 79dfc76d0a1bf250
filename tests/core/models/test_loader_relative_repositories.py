"""Paths of models in a repository whose own path is relative, has ``..`` or leads through a link."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from remora import Engine

CONFIG = """
backend: "python"
max_batch_size: 0
input [{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 1 ] label_filename: "names.txt" }]
parameters [{ key: "MODULE_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/modules" } },
  { key: "EXECUTION_ENV_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/env" } },
  { key: "ISOLATION" value: { string_value: "process" } }]
model_warmup [{ name: "w" batch_size: 1
  inputs: { key: "x" value: { data_type: TYPE_FP32 dims: [ 1 ] input_data_file: "x.bin" } } }]
"""
CODE = """
import os
import triton_python_backend_utils as pb_utils
from scale import FACTOR

class TritonPythonModel:
    def initialize(self, args):
        assert os.path.isabs(args["model_repository"]), args["model_repository"]
        os.chdir("/")

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", each.inputs()[0].as_numpy() * FACTOR)])
            for each in requests
        ]
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a repository whose model uses each kind of path."""
    model = tmp_path / "home" / "models" / "m"
    for folder in ("1", "modules", "warmup", "env/bin"):
        (model / folder).mkdir(parents=True)
    (model / "config.pbtxt").write_text(CONFIG)
    (model / "1" / "model.py").write_text(CODE)
    (model / "modules" / "scale.py").write_text("FACTOR = 3\n")
    (model / "names.txt").write_text("one\n")
    (model / "warmup" / "x.bin").write_bytes(np.float32(1).tobytes())
    python = model / "env" / "bin" / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "home" / "link").symlink_to(tmp_path / "home" / "models")
    (tmp_path / "elsewhere" / "home").symlink_to(tmp_path / "home" / "models")
    monkeypatch.chdir(tmp_path / "home")
    yield tmp_path / "home"
    os.chdir(tmp_path)


@pytest.mark.parametrize(
    "place", ["models", "./models/", "../home/models", "link", "../elsewhere/home", "../elsewhere/home/../link"]
)
@pytest.mark.parametrize("one_model", [False, True])
def test_every_path_of_a_model_is_found_from_a_relative_repository(home: Path, place: str, one_model: bool) -> None:
    with Engine(f"{place}/m" if one_model else place) as engine:
        assert engine.infer("m", {"x": np.float32([2])})["y"] == [6]


def test_a_model_that_changes_the_directory_is_loaded_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = home / "models" / "m" / "config.pbtxt"
    config.write_text(
        CONFIG.replace('string_value: "process"', 'string_value: "thread"').replace(
            '{ key: "EXECUTION_ENV_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/env" } },', ""
        )
    )
    with Engine("models", model_control_mode="explicit", load_model=("m",)) as engine:
        assert Path.cwd() == Path("/")
        engine.load("m")
        assert engine.infer("m", {"x": np.float32([2])})["y"] == [6]
