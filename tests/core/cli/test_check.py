"""`remora config check` on real folders: every problem has its place, and a correct repository has none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conftest import needs
from remora.cli import main
from support.models.model_folders import COMPLETE, ensemble, model, negation
from support.process.small_wheels import write_wheel

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def onnx_bytes() -> bytes:
    return negation()


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
    assert main(["config", "check", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "2 configurations checked, models not opened (--open does): no problems\n"


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
def test_all_misspelt_words_of_a_file_are_reported_with_line_key_and_nearest_key(
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


def test_the_number_of_problems_is_reported_on_stderr(tmp_path: Path, capsys: Captured) -> None:
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
def test_gpus_are_checked_only_against_a_known_machine(
    gpus: tuple[str, ...], good: bool, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "gpu.pbtxt"
    file.write_text(COMPLETE + "instance_group [ { kind: KIND_GPU gpus: [ 0, 3 ] } ]")
    assert (not checked(capsys, file, *gpus)) is good


def test_a_model_in_two_repositories_is_a_problem_and_a_repeated_path_is_harmless(
    tmp_path: Path, capsys: Captured
) -> None:
    one, two = model(tmp_path / "one", "m", COMPLETE), model(tmp_path / "two", "m", COMPLETE)
    assert not checked(capsys, one, one)
    (problem,) = checked(capsys, tmp_path / "one", tmp_path / "two")
    assert problem == f"{one}: model 'm' is there more than once: also {two}"


def test_a_path_that_holds_nothing_is_not_a_success(tmp_path: Path, capsys: Captured) -> None:
    assert main(["config", "check", str(tmp_path / "missing")]) == 1
    assert "no such file or directory" in capsys.readouterr().err


def test_files_that_are_not_text_are_reported(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_bytes(b"max_batch_size: 1\n\xff")
    assert checked(capsys, file) == [f"{file}:2: byte 0xff is not UTF-8"]


# -- ensembles and backends -------------------------------------------------------------------------------------------


def test_a_correct_ensemble_has_no_problem_opened_or_not(tmp_path: Path, capsys: Captured, onnx_bytes: bytes) -> None:
    folder = ensemble(tmp_path)
    model(tmp_path, "first", None, onnx_bytes)
    model(tmp_path, "second", COMPLETE, onnx_bytes)
    for paths in ((tmp_path,), (folder,)):
        assert not checked(capsys, *paths)
        assert checked(capsys, *paths, "--open") == (
            [
                f"{folder / 'config.pbtxt'}: ensemble pipeline allows maximum batch size 8, but it contains model first"
                " which only allows maximum batch size to be 4"
            ]
        )
    (tmp_path / "first" / "config.pbtxt").write_text(COMPLETE)
    assert not checked(capsys, tmp_path, "--open")
    assert not checked(capsys, folder, "--open")


def test_a_step_without_a_model_is_found_without_opening(tmp_path: Path, capsys: Captured, onnx_bytes: bytes) -> None:
    folder = ensemble(tmp_path, second="secnd")
    model(tmp_path, "first", COMPLETE)
    model(tmp_path, "second", COMPLETE)
    for path in (tmp_path, folder):
        assert checked(capsys, path) == [
            f"{folder / 'config.pbtxt'}: ensemble pipeline contains models that are not available or ambiguous: secnd; "
            "did you mean 'second'?"
        ]


def test_a_batch_too_large_for_a_step_is_found_without_opening(tmp_path: Path, capsys: Captured) -> None:
    ensemble(tmp_path, batch=16)
    model(tmp_path, "first", COMPLETE)
    model(tmp_path, "second", COMPLETE)
    (problem,) = checked(capsys, tmp_path)
    assert "allows maximum batch size 16, but it contains model first which only allows" in problem


def test_what_a_step_takes_is_compared_with_the_opened_model(
    tmp_path: Path, capsys: Captured, onnx_bytes: bytes
) -> None:
    folder = ensemble(tmp_path)
    model(tmp_path, "first", COMPLETE, onnx_bytes)
    model(tmp_path, "second", COMPLETE, onnx_bytes)
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace('key: "x" value: "between"', 'key: "z" value: "between"'))
    assert not checked(capsys, tmp_path)
    (problem,) = checked(capsys, tmp_path, "--open")
    assert "mapping to non-existing input z in model second" in problem


def test_a_broken_model_beside_an_ensemble_is_a_problem_of_the_ensemble(tmp_path: Path, capsys: Captured) -> None:
    folder = ensemble(tmp_path)
    model(tmp_path, "first", COMPLETE)
    model(tmp_path, "second", "max_batch_size: -1")
    assert len(checked(capsys, tmp_path)) == 1
    (problem,) = checked(capsys, folder)
    assert "depends on 'second' which has no loaded version" in problem


def test_an_ensemble_of_itself_is_a_problem(tmp_path: Path, capsys: Captured) -> None:
    ensemble(tmp_path, second="pipeline")
    model(tmp_path, "first", COMPLETE)
    (problem,) = checked(capsys, tmp_path)
    assert "composed of itself: pipeline -> pipeline" in problem


@pytest.mark.parametrize(
    ("backend", "hint"),
    [("onnx", "did you mean 'onnxruntime'?"), ("other", "there are ensemble, fil, generation, native, ")],
)
def test_an_unknown_backend_is_found_without_opening(backend: str, hint: str, tmp_path: Path, capsys: Captured) -> None:
    folder = model(tmp_path, "m", COMPLETE.replace("onnxruntime", backend))
    (problem,) = checked(capsys, tmp_path)
    assert problem.startswith(f"{folder / 'config.pbtxt'}: backend: there is no backend '{backend}'; {hint}")
    (tmp_path / "backends" / backend).mkdir(parents=True)
    assert not checked(capsys, folder, "--backend-directory", tmp_path / "backends")


def test_a_model_that_asks_for_no_gpu_is_opened_without_a_warning(
    tmp_path: Path, capsys: Captured, onnx_bytes: bytes
) -> None:
    model(tmp_path, "m", COMPLETE, onnx_bytes)
    assert main(["config", "check", str(tmp_path), "--open"]) == 0
    assert capsys.readouterr().err == ""


def test_an_ensemble_without_a_version_is_a_problem_opened_or_not(tmp_path: Path, capsys: Captured) -> None:
    folder = ensemble(tmp_path)
    (folder / "1").rmdir()
    model(tmp_path, "first", COMPLETE)
    model(tmp_path, "second", COMPLETE)
    (problem,) = checked(capsys, tmp_path)
    assert problem.endswith("create an empty folder 1/")


REQUIRING = """
import numpy as np
import triton_python_backend_utils as pb_utils
import remora_one

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", remora_one.VALUE)]) for each in requests]
"""
REQUIRING_CONFIG = """
backend: "python"
input [{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 1 ] }]
"""


@pytest.mark.parametrize("packages", ["requirements.txt", "EXECUTION_ENV_PATH"])
@pytest.mark.parametrize(
    "command",
    [
        ("config", "check", "--open", "."),
        ("config", "show", "m"),
        pytest.param(("infer", "m", "--repository", ".", "--input", "x=1"), marks=needs("remora_tools")),
        pytest.param(("score", ".", "rows.csv", "out.csv"), marks=needs("remora_tools")),
        pytest.param(("manifests", "knative", ".", "--models", "gs://bucket/models"), marks=needs("remora_deploy")),
    ],
    ids=lambda words: words[0] + words[1].partition("-")[0],
)
def test_a_command_that_opens_models_accepts_the_environments_that_the_server_does(
    packages: str, command: tuple[str, ...], tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "repository" / "m" / "1"
    version.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "repository")
    config, code = REQUIRING_CONFIG, REQUIRING
    if packages == "requirements.txt":
        wheel = write_wheel(tmp_path, "remora-one", "1.0", "import numpy\nVALUE = numpy.float32([7])\n")
        (version.parent / "requirements.txt").write_text(f"{wheel}\n")
    else:
        code = REQUIRING.replace("import remora_one", "class remora_one:\n    VALUE = np.float32([7])")
        python = version.parent / "env" / "bin" / "python3"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        config += 'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/env" } }'
    (version.parent / "config.pbtxt").write_text(config)
    (version / "model.py").write_text(code)
    (tmp_path / "repository" / "rows.csv").write_text("x\n1\n")
    assert main(command) == 0, capsys.readouterr()
