"""The conformance kit finds faults, and passes a correct backend of another project, installed or in a folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.backends import API_VERSION, Execution, Instance, Placement, Source
from remora.backends.arrays import ArrayInstance
from remora.backends.registry import backend_in
from remora.engine import Engine
from remora.errors import ConfigError, NotFoundError
from remora.messages import Array, Response, Tensor
from remora.proto.model_config_pb2 import ModelConfig
from remora.testing.backend import CHECKS, Example, check_backend

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = ROOT / "docs" / "examples" / "python-backend"
DOUBLES = (
    'backend: "doubles" max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 2 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 2 } output { name: "z" data_type: TYPE_FP32 dims: 2 }'
)


class Doubles:
    """A backend that is right: y = 2 x, z = 3 x; negative values are refused. Tests break one thing of it each."""

    name = "doubles"

    def open(self, source: Source, config: ModelConfig) -> Doubles:
        if not (source.path / "model.doubles").exists():
            raise NotFoundError("no model.doubles")
        return self

    def complete(self, config: ModelConfig) -> None:
        pass

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        return ArrayInstance(placement.name, config, self.run)

    def run(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        if (inputs["x"] < 0).any():
            raise ValueError("negative")
        return [Tensor(name, "FP32", inputs["x"] * {"y": 2, "z": 3}[name]) for name in wanted]

    def close(self) -> None:
        pass


class OfAnotherApi(Doubles):
    api_version = "99.0"


class Restless(Doubles):
    def complete(self, config: ModelConfig) -> None:
        config.max_batch_size += 1


class Wrong(Doubles):
    def run(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        return [Tensor(name, "FP32", inputs["x"] * 5) for name in wanted]


class OfAnotherType(Doubles):
    def run(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        return [Tensor(name, "FP32", data.astype("f8")) for name, _, data in super().run(inputs, wanted)]


class Changing(Doubles):
    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        inner = super().instance(config, placement)

        class Changes:
            name, quick, close = inner.name, False, inner.close

            def execute(self, execution: Execution) -> Any:
                answers = inner.execute(execution)
                for request in execution.requests:
                    array = request.inputs["x"]
                    (array if array.base is None else array.base)[...] = 0
                return answers

        return Changes()


class Reusing(Doubles):
    def run(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        if not hasattr(self, "memory"):
            self.memory = np.empty((16, 2), "f4")
        found = []
        for name, _, data in super().run(inputs, wanted):
            self.memory[: len(data)] = data
            found.append(Tensor(name, "FP32", self.memory[: len(data)]))
        return found


class Generous(Doubles):
    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        inner = super().instance(config, placement)

        class GivesAll:
            name, quick, close = inner.name, False, inner.close

            def execute(self, execution: Execution) -> Any:
                return [
                    Response([Tensor("y", "FP32", r.inputs["x"] * 2), Tensor("z", "FP32", r.inputs["x"] * 3)])
                    for r in execution.requests
                ]

        return GivesAll()


class Whole(Doubles):
    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        class GivesTheBatch:
            name, quick = placement.name, False

            def execute(self, execution: Execution) -> Any:
                x = np.concatenate([request.inputs["x"] for request in execution.requests])
                whole = {"y": Tensor("y", "FP32", x * 2), "z": Tensor("z", "FP32", x * 3)}
                return [Response([whole[name] for name in request.requested]) for request in execution.requests]

            def close(self) -> None:
                pass

        return GivesTheBatch()


class Failing(Doubles):
    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        inner = super().instance(config, placement)

        class FailsTogether:
            name, quick, close = inner.name, False, inner.close

            def execute(self, execution: Execution) -> Any:
                answers = inner.execute(execution)
                if any(isinstance(answer, Exception) for answer in answers):
                    raise ValueError("one of them failed")
                return answers

        return FailsTogether()


class Leaking(Doubles):
    def open(self, source: Source, config: ModelConfig) -> Doubles:
        LEAKED.append(os.open(os.devnull, os.O_RDONLY))
        return super().open(source, config)


class Trusting(Doubles):
    def open(self, source: Source, config: ModelConfig) -> Doubles:
        return self


LEAKED: list[int] = []


@pytest.fixture
def example(tmp_path: Path) -> Example:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.doubles").touch()
    (tmp_path / "m" / "config.pbtxt").write_text(DOUBLES)
    x = np.arange(6, dtype="f4").reshape(3, 2)
    return Example(tmp_path / "m", {"x": x}, {"y": x * 2, "z": x * 3}, {"x": -x - 1})


def test_a_backend_that_is_right_passes_every_check(example: Example) -> None:
    check_backend(Doubles(), example)


@pytest.mark.parametrize(
    ("broken", "check", "reason"),
    [
        (OfAnotherApi, "check_it_speaks_this_api", "written for API 99"),
        (Restless, "check_completing_twice_changes_nothing", "changed a complete configuration"),
        (Wrong, "check_a_request_is_answered", "'y' is"),
        (OfAnotherType, "check_a_request_is_answered", "in an array of float64"),
        (Generous, "check_only_what_is_requested_comes_back", "'y' was requested"),
        (Whole, "check_a_batch_is_cut_at_its_requests", "has shape"),
        (Changing, "check_inputs_stay_as_they_are", "'x' was changed"),
        (Reusing, "check_an_answer_outlives_the_next_run", "'y' is"),
        (Failing, "check_a_bad_request_fails_alone", "one of them failed"),
        (Leaking, "check_loading_and_unloading_leaves_nothing", "open files were left behind"),
        (Trusting, "check_a_missing_file_is_told", "a model without files was opened"),
    ],
)
def test_each_check_finds_what_it_is_for(example: Example, broken: Callable[[], Any], check: str, reason: str) -> None:
    (chosen,) = [each for each in CHECKS if each.__name__ == check]
    with pytest.raises(Exception, match=reason):
        chosen(broken(), example)
    while LEAKED:
        os.close(LEAKED.pop())


def test_all_that_is_wrong_is_reported_at_once(example: Example) -> None:
    with pytest.raises(AssertionError) as told:
        check_backend(OfAnotherType(), example)
    lines = str(told.value).splitlines()
    assert len(lines) > 1
    assert all(line.startswith("check_") for line in lines)


# -- A backend from outside -------------------------------------------------------------------------------------------


def test_an_installed_backend_is_found_by_its_entry_point_and_conforms(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    for needed in ("hatchling", "pip"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed, which installs the template")
    project, site = tmp_path / "linear", tmp_path / "site"
    shutil.copytree(TEMPLATE, project)
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", *install, str(project)], check=True, capture_output=True)
    environment = {**child_environment, "PYTHONPATH": f"{site}{os.pathsep}{child_environment['PYTHONPATH']}"}
    run = subprocess.run(
        [sys.executable, str(project / "test_linear_backend.py")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.stdout == "linear: conforms\n", run.stderr


def test_a_backend_in_a_folder_is_found_by_its_name_and_serves(tmp_path: Path) -> None:
    (tmp_path / "backends" / "linear").mkdir(parents=True)
    shutil.copy(TEMPLATE / "linear_backend.py", tmp_path / "backends" / "linear" / "backend.py")
    version = tmp_path / "models" / "m" / "1"
    version.mkdir(parents=True)
    matrix = np.arange(6, dtype="f4").reshape(3, 2)
    np.save(version / "matrix.npy", matrix)
    (version.parent / "config.pbtxt").write_text('backend: "linear"')
    x = np.ones((2, 3), "f4")
    found = backend_in(tmp_path / "backends", "linear")
    assert found is not None
    check_backend(found, Example(version.parent, {"x": x}, {"y": x @ matrix}, {"x": x * np.nan}))
    with Engine(tmp_path / "models", backend_directory=str(tmp_path / "backends")) as engine:
        np.testing.assert_array_equal(engine.infer("m", {"x": x})["y"], x @ matrix)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "has no class Backend"),
        ('class Backend:\n    name, api_version = "other", "2.0"\n', f"version 2.0 .* this engine has {API_VERSION}"),
    ],
)
def test_a_folder_without_a_backend_for_this_api_is_refused(tmp_path: Path, code: str, reason: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "backend.py").write_text(code)
    with pytest.raises(ConfigError, match=reason):
        backend_in(tmp_path, "other")


def test_names_that_are_paths_are_not_backends(tmp_path: Path) -> None:
    (tmp_path / "backend.py").write_text("raise SystemExit")
    assert backend_in(tmp_path / "folder", "..") is None
    assert backend_in(tmp_path, "python") is None
