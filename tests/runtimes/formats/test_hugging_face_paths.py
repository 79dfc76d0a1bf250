"""Paths in files of transformers and sentence-transformers. Needs none of the libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remora_runtimes.formats.hugging_face import define

CONFIG = {"architectures": ["BertForSequenceClassification"]}


@pytest.mark.parametrize("named", ["../w.safetensors", "/w.safetensors", "a/../../w", "..\\w", "C:\\w", "a\0b"])
@pytest.mark.parametrize("file", ["model.safetensors.index.json", "modules.json"])
def test_a_file_outside_of_the_folder_is_refused(named: str, file: str, tmp_path: Path) -> None:
    index: Any = [{"path": ""}, {"path": named}] if file == "modules.json" else {"weight_map": {"a": "a", "b": named}}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / file).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="which is outside of the folder"):
        define(tmp_path, "m", False)


def test_files_of_the_folder_are_left_to_the_libraries(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "x..y"}})
    )
    assert define(tmp_path, "m", False).name == "m"
    (tmp_path / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}]))
    assert define(tmp_path, "m", False).name == "m"


@pytest.mark.parametrize("index", [5, "text", None, [5], {"weight_map": 5}, {}])
def test_an_index_that_names_no_files_is_left_to_the_libraries(index: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert define(tmp_path, "m", False).name == "m"
