"""`remora config` on real folders: what is shown can be pasted back, and every problem has its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from remora.cli import main
from remora.config import parse_config
from remora.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup

Captured = pytest.CaptureFixture[str]

COMPLETE = """
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""


@pytest.fixture(scope="module")
def onnx_bytes() -> bytes:
    """A model that takes and gives FP32 [-1, 3]."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 3]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    made: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    return made


def model(root: Path, name: str, config: str | None = None, onnx: bytes | None = None, suffix: str = "pbtxt") -> Path:
    """A model's directory; with ``onnx`` it has a version 1."""
    folder = root / name
    folder.mkdir(parents=True)
    if onnx is not None:
        pytest.importorskip("onnxruntime")
        (folder / "1").mkdir()
        (folder / "1" / "model.onnx").write_bytes(onnx)
    if config is not None:
        (folder / f"config.{suffix}").write_text(config)
    return folder


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
    assert "holds several models (a, b): give one of them" in failed(capsys, "show", tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            "max_bach_size: 1",
            "config.pbtxt:1: max_bach_size: ModelConfig has no such key; did you mean 'max_batch_size'?",
        ),
        ('name: "other"', "unexpected directory name 'm' for model 'other'"),
        ("version_policy { specific { versions: [ 7 ] } }", "picks none of its versions"),
        ('input [ { name: "x" data_type: TYPE_INT32 dims: [ 3 ] } ]', "x"),
    ],
)
def test_what_could_not_be_served_is_not_shown(
    config: str, said: str, tmp_path: Path, capsys: Captured, onnx_bytes: bytes
) -> None:
    assert said in failed(capsys, "show", model(tmp_path, "m", config, onnx_bytes))


def test_paths_with_nothing_to_show_are_told_apart(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "repo" / "empty").mkdir(parents=True)
    (tmp_path / "bare").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    assert "no such file or directory" in failed(capsys, "show", tmp_path / "missing")
    assert "neither a configuration nor a version" in failed(capsys, "show", tmp_path / "repo")
    assert "holds no model" in failed(capsys, "show", tmp_path / "bare")
    assert "is not a model file" in failed(capsys, "show", tmp_path / "notes.txt")


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


# -- check ------------------------------------------------------------------------------------------------------------


def checked(capsys: Captured, *arguments: object) -> list[str]:
    """The problems that a check printed; the exit code must say the same."""
    code = main(["config", "check", *map(str, arguments)])
    out = capsys.readouterr().out.splitlines()
    assert code == (0 if out[-1].endswith("no problems") else 1)
    return out if code else []


def test_a_repository_without_problems_is_praised_in_one_line(
    tmp_path: Path, capsys: Captured, onnx_bytes: bytes
) -> None:
    model(tmp_path, "whole", COMPLETE, onnx_bytes)
    model(tmp_path, "bare", None, onnx_bytes)
    assert main(["config", "check", str(tmp_path), "--open"]) == 0
    assert capsys.readouterr().out == "2 configurations checked: no problems\n"


def test_a_model_whose_files_are_elsewhere_is_a_problem_only_when_it_is_to_be_opened(
    tmp_path: Path, capsys: Captured
) -> None:
    model(tmp_path, "absent", COMPLETE)
    assert not checked(capsys, tmp_path)
    assert "has no version directory" in checked(capsys, tmp_path, "--open")[0]


NOTATIONS: dict[str, str] = {
    "pbtxt": 'max_bach_size: 8\ninput [ {\n  name: "x"\n  data_typ: TYPE_FP3\n} ]\ndynamic_baching { }\n',
    "json": '{"max_bach_size": 8,\n "input": [\n  {"name": "x",\n   "data_typ": "TYPE_FP3"}],\n "x": 1}',
    "yaml": "max_bach_size: 8\ninput:\n- name: x\n  data_typ: TYPE_FP3\n\ndynamic_baching: {}\n",
}


@pytest.mark.parametrize("suffix", ["pbtxt", "yaml"])
def test_all_misspelt_words_of_a_file_are_told_with_line_key_and_nearest_key(
    suffix: str, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / f"config.{suffix}"
    file.write_text(NOTATIONS[suffix])
    problems = checked(capsys, file)
    last = NOTATIONS[suffix].count("\n")
    for line, key, meant in (
        (1, "max_bach_size", "max_batch_size"),
        (4, "input[0].data_typ", "data_type"),
        (4, "input[0].data_type", "TYPE_FP32"),
        (last, "dynamic_baching", "dynamic_batching"),
    ):
        found = [each for each in problems if each.startswith(f"{file}:{line}: {key}: ")]
        assert len(found) == 1, problems
        assert found[0].endswith(f"did you mean '{meant}'?")
    assert len(problems) == 4


def test_a_word_that_means_nothing_known_ends_the_reading_of_a_file(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "config.json"
    file.write_text(NOTATIONS["json"])
    problems = checked(capsys, file)
    assert problems[-1] == f"{file}:5: x: ModelConfig has no such key"


def test_every_model_of_a_repository_is_checked(tmp_path: Path, capsys: Captured, onnx_bytes: bytes) -> None:
    bad = {
        "misspelt": model(tmp_path, "misspelt", "max_bach_size: 8") / "config.pbtxt",
        "named": model(tmp_path, "named", 'name: "other"' + COMPLETE, onnx_bytes) / "config.pbtxt",
        "negative": model(tmp_path, "negative", "max_batch_size: -1") / "config.pbtxt",
        "twice": model(tmp_path, "twice", COMPLETE),
        "empty": model(tmp_path, "empty"),
        "none": model(tmp_path, "none", "version_policy { specific { versions: [ 7 ] } }", onnx_bytes) / "config.pbtxt",
    }
    (bad["twice"] / "config.json").write_text("{}")
    model(tmp_path, "good", COMPLETE, onnx_bytes)
    problems = checked(capsys, tmp_path)
    assert len(problems) == len(bad)
    for place in bad.values():
        assert sum(problem.startswith(f"{place}:") for problem in problems) == 1, problems


def test_the_number_of_problems_is_told_on_stderr(tmp_path: Path, capsys: Captured) -> None:
    model(tmp_path, "m", "max_bach_size: 8")
    assert main(["config", "check", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "remora config check: 1 problem in 1 configuration\n"


def test_a_configuration_alone_need_not_name_its_backend(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "draft.yaml"
    file.write_text("name: anything\nmax_batch_size: 2\n")
    assert not checked(capsys, file)
    file.write_text("name: anything\nmax_batch_size: -2\n")
    assert "'max_batch_size' must be non-negative" in checked(capsys, file)[0]


def test_only_open_compares_a_configuration_with_its_model(tmp_path: Path, capsys: Captured, onnx_bytes: bytes) -> None:
    wrong = model(tmp_path, "m", COMPLETE.replace("dims: [ 3 ]", "dims: [ 4 ]"), onnx_bytes)
    assert not checked(capsys, wrong)
    (problem,) = checked(capsys, wrong, "--open")
    assert problem.startswith(f"{wrong / 'config.pbtxt'}: ")


@pytest.mark.parametrize(("gpus", "good"), [((), True), (("--gpus", "4"), True), (("--gpus", "3"), False)])
def test_gpus_are_checked_against_a_machine_only_when_one_is_told(
    gpus: tuple[str, ...], good: bool, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "gpu.pbtxt"
    file.write_text(COMPLETE + "instance_group [ { kind: KIND_GPU gpus: [ 0, 3 ] } ]")
    assert (not checked(capsys, file, *gpus)) is good


def test_a_model_in_two_repositories_is_a_problem_but_a_path_given_twice_is_none(
    tmp_path: Path, capsys: Captured
) -> None:
    one, two = model(tmp_path / "one", "m", COMPLETE), model(tmp_path / "two", "m", COMPLETE)
    assert not checked(capsys, one, one)
    (problem,) = checked(capsys, tmp_path / "one", tmp_path / "two")
    assert problem == f"{one}: model 'm' is there more than once: also {two}"


def test_a_path_that_holds_nothing_is_no_success(tmp_path: Path, capsys: Captured) -> None:
    assert main(["config", "check", str(tmp_path / "missing")]) == 1
    assert "no such file or directory" in capsys.readouterr().err


def test_files_that_are_no_text_are_told(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_bytes(b"max_batch_size: 1\n\xff")
    assert checked(capsys, file) == [f"{file}:2: byte 0xff is not UTF-8"]


def test_json_is_printed_for_people(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "c.pbtxt"
    file.write_text(COMPLETE)
    assert main(["config", "show", str(file), "--format", "json"]) == 0
    out = capsys.readouterr().out
    document: dict[str, Any] = json.loads(out)
    assert document["input"][0]["dims"] == [3]
    assert len(out.splitlines()) > 20
