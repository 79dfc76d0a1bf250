"""Tests of ``remora_tools.scoring.identity``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from remora.engine import Engine
from remora_tools.scoring.identity import digest_of_models

FUNCTION = """
import remora
import scaling

@remora.model
def scaled(x: float) -> float:
    return x * scaling.FACTOR
"""
MODEL = """
import scaling
class TritonPythonModel:
    def execute(self, requests):
        raise NotImplementedError
"""
CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
parameters { key: "MODULE_PATH" value { string_value: "../../modules" } }
"""


def digest(place: Path) -> str:
    with Engine(str(place)) as engine:
        return digest_of_models(engine.models())


def append(file: Path) -> None:
    with file.open("a") as stream:
        stream.write("# changed\n")


def test_a_module_that_a_model_imports_counts(tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "scaling.py").write_text("FACTOR = 2\n")
    folder = tmp_path / "models" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(MODEL)
    (folder / "config.pbtxt").write_text(CONFIG)
    before = digest(tmp_path / "models")
    append(tmp_path / "modules" / "scaling.py")
    assert digest(tmp_path / "models") != before


@pytest.mark.parametrize("changed", ["app.py", "scaling.py"])
def test_the_files_of_a_function_count_and_their_place_does_not(tmp_path: Path, changed: str) -> None:
    app, copy = tmp_path / "app", tmp_path / "copy"
    app.mkdir()
    (app / "app.py").write_text(FUNCTION)
    (app / "scaling.py").write_text("FACTOR = 2\n")
    (app / "notes.txt").write_text("not imported\n")
    shutil.copytree(app, copy)
    append(copy / "notes.txt")
    before = digest(app / "app.py")
    assert digest(copy / "app.py") == before
    append(copy / changed)
    assert digest(copy / "app.py") != before
