"""Batching of ONNX files that no configuration describes."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from conftest import needs
from remora import Engine
from remora.calls import ModelExplain
from remora.cli import main
from support.models.onnx_models import Dims, graph, onnx, open_model, value


def file_of(path: Path, dims: Dims, op: str = "Relu", out: Dims = None, **attributes: object) -> Path:
    """Write a model of one operation whose input and output have these dimensions."""
    node = onnx.helper.make_node(op, ["x"], ["y"], **attributes)
    model = graph([node], [value("x", "FP32", dims)], [value("y", "FP32", dims if out is None else out)])
    path.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path / "m.onnx")
    return path / "m.onnx"


def largest_batch(file: Path) -> int:
    _, config = open_model(file.parent, onnx.load(file))
    return int(config.max_batch_size)


@pytest.mark.parametrize("axis", ["batch", "N", "b", "batch_size", None, "unk__5"])
def test_a_file_whose_first_axis_is_a_batch_is_batched(tmp_path: Path, axis: str | None) -> None:
    assert largest_batch(file_of(tmp_path, (axis, 2))) == 4


@pytest.mark.parametrize("axis", ["seq", "time", "nodes", "batch_times_seq"])
def test_a_file_whose_first_axis_has_another_name_is_not_batched(tmp_path: Path, axis: str) -> None:
    assert largest_batch(file_of(tmp_path, (axis, 2))) == 0


@pytest.mark.parametrize("axis", ["batch", None])
def test_rows_that_depend_on_each_other_are_not_batched_whatever_the_name(tmp_path: Path, axis: str | None) -> None:
    assert largest_batch(file_of(tmp_path, (axis, 2), "Softmax", axis=0)) == 0


def test_axes_of_different_names_are_not_batched(tmp_path: Path) -> None:
    assert largest_batch(file_of(tmp_path, ("batch", 2), out=("N", 2))) == 0


def test_a_configured_batch_size_needs_no_trial(tmp_path: Path) -> None:
    file = file_of(tmp_path, ("seq", 2), "Softmax", axis=0)
    model, config = open_model(file.parent, onnx.load(file), "max_batch_size: 8")
    assert config.max_batch_size == 8
    assert model.batching is None


def test_a_trial_that_the_model_refuses_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shape = onnx.numpy_helper.from_array(np.array([-1, 17, 19], "i8"), "shape")
    node = onnx.helper.make_node("Reshape", ["x", "shape"], ["y"])
    model = graph([node], [value("x", "FP32", (None, "w"))], [value("y", "FP32", (None, 17, 19))], [shape])
    opened, config = open_model(tmp_path, model)
    assert config.max_batch_size == 0
    assert opened.batching is not None
    assert "does not run on generated values" in opened.batching.reason
    assert capfd.readouterr().err == ""


@needs("remora_tools")
def test_the_log_and_the_explanation_give_the_choice_and_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_of(tmp_path, ("seq", 2))
    said = "requests are not batched, because the first axis of 'x' is named 'seq'"
    with caplog.at_level(logging.INFO, "remora"), Engine(file) as engine:
        assert f"model 'm': {said}" in caplog.text
        assert said in engine.perform(ModelExplain("m")).notes[0]


@pytest.mark.parametrize("notation", ["pbtxt", "yaml"])
def test_config_show_gives_the_choice_as_a_comment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], notation: str
) -> None:
    file = file_of(tmp_path, ("batch", 2))
    assert main(["config", "show", str(file), "--format", notation]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# requests are batched up to 4 rows, although no max_batch_size is configured, because")


def test_config_show_prints_json_without_a_comment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(file_of(tmp_path, ("batch", 2))), "--format", "json"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("{")
    assert shown.err.startswith("note: requests are batched up to 4 rows")
