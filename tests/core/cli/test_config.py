"""`remora config` on real folders: what is shown can be pasted back, and every problem has its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from remora.cli import main
from remora.config import parse_config
from remora.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup
from support.models.model_folders import COMPLETE, ensemble, model, negation

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def onnx_bytes() -> bytes:
    return negation()


def printed(capsys: Captured, *arguments: object, notation: Literal["pbtxt", "json", "yaml"] = "pbtxt") -> ModelConfig:
    """What a command printed, parsed back."""
    assert main(["config", *map(str, arguments), "--format", notation]) == 0
    return parse_config(capsys.readouterr().out, path="printed", syntax=notation)


def failed(capsys: Captured, *arguments: object) -> str:
    """The one line a command failed with."""
    assert main(["config", *map(str, arguments)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err


# -- show -------------------------------------------------------------------------------------------------------------


def test_a_configuration_alone_is_shown_with_its_defaults(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "mine.pbtxt"
    file.write_text('name: "m"' + COMPLETE)
    config = printed(capsys, "show", file)
    assert config.name == "m"
    assert config.version_policy.latest.num_versions == 1
    assert config.platform == "onnxruntime_onnx"
    assert [group.count for group in config.instance_group] == [2]


def test_what_a_configuration_leaves_out_comes_from_the_model(
    tmp_path: Path, capsys: Captured, onnx_bytes: bytes
) -> None:
    folder = model(tmp_path, "m", "max_batch_size: 16", onnx_bytes)
    for path in (folder, folder / "config.pbtxt", tmp_path):
        config = printed(capsys, "show", path)
        assert (config.name, config.max_batch_size, config.backend) == ("m", 16, "onnxruntime")
        assert [(row.name, list(row.dims)) for row in config.input] == [("x", [3])]
        assert config.HasField("dynamic_batching")


def test_as_written_leaves_the_model_closed(tmp_path: Path, capsys: Captured) -> None:
    folder = model(tmp_path, "m", "max_batch_size: 16", b"no model")
    config = printed(capsys, "show", folder, "--as-written")
    assert (config.max_batch_size, len(config.input)) == (16, 0)
    assert "cannot load" in failed(capsys, "show", folder)


@pytest.mark.parametrize("notation", ["pbtxt", "json", "yaml"])
def test_what_is_shown_can_be_served_as_it_is(
    notation: Literal["pbtxt", "json", "yaml"], tmp_path: Path, capsys: Captured, onnx_bytes: bytes
) -> None:
    first = printed(capsys, "show", model(tmp_path / "a", "m", None, onnx_bytes), notation=notation)
    assert main(["config", "show", str(tmp_path / "a" / "m"), "--format", notation]) == 0
    again = model(tmp_path / "b", "m", capsys.readouterr().out, onnx_bytes, notation)
    assert printed(capsys, "show", again, notation=notation) == first


def test_a_custom_configuration_is_shown_with_its_model(tmp_path: Path, capsys: Captured, onnx_bytes: bytes) -> None:
    folder = model(tmp_path, "m", "max_batch_size: 16", onnx_bytes)
    (folder / "configs").mkdir()
    (folder / "configs" / "small.pbtxt").write_text("max_batch_size: 2")
    config = printed(capsys, "show", folder / "configs" / "small.pbtxt")
    assert (config.name, config.max_batch_size, len(config.input)) == ("m", 2, 1)


def test_gpus_of_another_machine_can_be_assumed(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("name: m\nbackend: onnxruntime\n")
    here, there = printed(capsys, "show", file), printed(capsys, "show", file, "--gpus", "2")
    assert [group.kind for group in here.instance_group] == [ModelInstanceGroup.KIND_CPU]
    assert [list(group.gpus) for group in there.instance_group] == [[0, 1]]


def test_a_repository_of_several_models_is_not_guessed_at(tmp_path: Path, capsys: Captured) -> None:
    for name in ("a", "b"):
        model(tmp_path, name, COMPLETE)
    assert "holds several models (a, b): pass one of them" in failed(capsys, "show", tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            "max_bach_size: 1",
            "config.pbtxt:1: max_bach_size: ModelConfig has no such key; did you mean 'max_batch_size'?",
        ),
        ('name: "other"', "unexpected directory name 'm' for model 'other'"),
        ("version_policy { specific { versions: [ 7 ] } }", "selects none of its versions"),
        ('input [ { name: "x" data_type: TYPE_INT32 dims: [ 3 ] } ]', "x"),
    ],
)
def test_what_could_not_be_served_is_not_shown(
    config: str, said: str, tmp_path: Path, capsys: Captured, onnx_bytes: bytes
) -> None:
    assert said in failed(capsys, "show", model(tmp_path, "m", config, onnx_bytes))


def test_paths_without_results_are_distinguished(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "repo" / "empty").mkdir(parents=True)
    (tmp_path / "bare").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    assert "no such file or directory" in failed(capsys, "show", tmp_path / "missing")
    assert "neither a configuration nor a version" in failed(capsys, "show", tmp_path / "repo")
    assert "holds no model" in failed(capsys, "show", tmp_path / "bare")
    assert "is not a model file" in failed(capsys, "show", tmp_path / "notes.txt")


def test_an_ensemble_is_decoupled_if_a_step_declares_itself_so(tmp_path: Path, capsys: Captured) -> None:
    for name in ("step", "chain"):
        (tmp_path / name / "1").mkdir(parents=True)
    (tmp_path / "step" / "1" / "model.py").write_text(
        "class TritonPythonModel:\n"
        "    @staticmethod\n"
        "    def auto_complete_config(config):\n"
        "        config.set_model_transaction_policy({'decoupled': True})\n"
        "        return config\n"
        "    def execute(self, requests):\n"
        "        return None\n"
    )
    tensors = 'input { name: "I" data_type: TYPE_INT32 dims: 1 } output { name: "O" data_type: TYPE_INT32 dims: 1 }'
    (tmp_path / "step" / "config.pbtxt").write_text(f'backend: "python" {tensors}')
    maps = 'input_map { key: "I" value: "I" } output_map { key: "O" value: "O" }'
    (tmp_path / "chain" / "config.pbtxt").write_text(
        f'platform: "ensemble" {tensors} '
        f'ensemble_scheduling {{ step {{ model_name: "step" model_version: -1 {maps} }} }}'
    )
    assert printed(capsys, "show", tmp_path / "chain").model_transaction_policy.decoupled
    assert not printed(capsys, "show", "--as-written", tmp_path / "chain").model_transaction_policy.decoupled


def test_an_ensemble_is_shown_as_it_would_be_served(tmp_path: Path, capsys: Captured, onnx_bytes: bytes) -> None:
    folder = ensemble(tmp_path)
    model(tmp_path, "first", COMPLETE, onnx_bytes)
    model(tmp_path, "second", "model_transaction_policy { decoupled: true }" + COMPLETE, onnx_bytes)
    config = printed(capsys, "show", folder)
    assert (config.name, config.platform, config.max_batch_size) == ("pipeline", "ensemble", 8)
    assert config.version_policy.latest.num_versions == 1
    assert config.model_transaction_policy.decoupled


# -- derive -----------------------------------------------------------------------------------------------------------


def test_derive_asks_the_model_and_not_its_configuration(tmp_path: Path, capsys: Captured, onnx_bytes: bytes) -> None:
    folder = model(tmp_path, "m", "this is no configuration", onnx_bytes)
    for path in (folder, folder / "1" / "model.onnx"):
        config = printed(capsys, "derive", path)
        assert (config.name, config.max_batch_size, config.platform) == ("m", 4, "onnxruntime_onnx")
        assert [row.name for row in config.input] == ["x"]
        assert [row.name for row in config.output] == ["y"]


def test_derive_takes_a_model_file_that_lies_anywhere(tmp_path: Path, capsys: Captured, onnx_bytes: bytes) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "model.onnx").write_bytes(onnx_bytes)
    assert printed(capsys, "derive", tmp_path / "there" / "model.onnx", notation="json").name == "there"


def test_derive_without_a_model_says_so(tmp_path: Path, capsys: Captured) -> None:
    assert "there is no model at" in failed(capsys, "derive", model(tmp_path, "m", COMPLETE))
    assert "there is no model at" in failed(capsys, "derive", tmp_path / "m" / "config.pbtxt")


def test_json_is_printed_for_people(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "c.pbtxt"
    file.write_text(COMPLETE)
    assert main(["config", "show", str(file), "--format", "json"]) == 0
    out = capsys.readouterr().out
    document: dict[str, Any] = json.loads(out)
    assert document["input"][0]["dims"] == [3]
    assert len(out.splitlines()) > 20
