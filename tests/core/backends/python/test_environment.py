"""Execution environments: what is planned for a model, and what comes of it on a real disk."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from gzip import GzipFile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.backends import Source
from remora.backends.python.environment import (
    Archive,
    Folder,
    Own,
    Plan,
    Virtual,
    check_in_thread,
    interpreter_for,
    plan_environment,
)
from remora.environments import install_commands
from remora.environments.installed import is_met
from remora.errors import ConfigError, InternalError
from remora.proto.model_config_pb2 import ModelConfig
from support.process.small_wheels import write_wheel

MODEL = Path("/repo/m")
ENV = "EXECUTION_ENV_PATH"


@pytest.mark.parametrize(
    ("parameters", "requirements", "folder", "expected"),
    [
        ({}, None, False, Own()),
        ({}, "", False, Own()),
        ({}, "# nothing\n", False, Own()),
        ({}, "x\n", False, Virtual(MODEL / "requirements.txt", "x\n")),
        ({}, "--index-url x\n", False, Own()),
        ({}, "-r more.txt\n", False, Virtual(MODEL / "requirements.txt", "-r more.txt\n")),
        ({}, "./one.whl\n", False, Virtual(MODEL / "requirements.txt", "./one.whl\n")),
        ({ENV: "/envs/one.tar.gz"}, None, False, Archive(Path("/envs/one.tar.gz"))),
        ({ENV: "/envs/one"}, "x", True, Folder(Path("/envs/one"))),
        ({ENV: "$$TRITON_MODEL_DIRECTORY/env.tar"}, "x", False, Archive(MODEL / "env.tar")),
        ({ENV: "env"}, None, True, Folder(MODEL / "env")),
        ({ENV: ""}, "x\n", False, Virtual(MODEL / "requirements.txt", "x\n")),
    ],
)
def test_a_path_wins_over_requirements_and_these_over_the_servers_own(
    parameters: dict[str, str], requirements: str | None, folder: bool, expected: Plan
) -> None:
    assert plan_environment(parameters, MODEL, requirements, folder=folder) == expected


def source_of(folder: Path, **settings: str) -> Source:
    model = folder / "m"
    (model / "1").mkdir(parents=True, exist_ok=True)
    cache = {"environment-cache-directory": str(folder / "cache")}
    return Source("m", 1, model, model / "1", folder, {**cache, **settings})


def config_of(path: str = "") -> ModelConfig:
    config = ModelConfig(name="m", backend="python")
    if path:
        config.parameters[ENV].string_value = path
    return config


def environment_at(folder: Path, name: str = "python3") -> Path:
    """Something that looks like an unpacked environment: its interpreter starts the one that runs the tests."""
    python = folder / "bin" / name
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_a_model_that_asks_for_nothing_runs_on_the_servers_interpreter(tmp_path: Path) -> None:
    assert interpreter_for(source_of(tmp_path), config_of()) == Path(sys.executable)


@pytest.mark.parametrize("name", ["python3", "python"])
def test_an_environments_folder_is_used_where_it_lies(tmp_path: Path, name: str) -> None:
    source = source_of(tmp_path)
    python = environment_at(source.model_dir / "env", name)
    assert interpreter_for(source, config_of("$$TRITON_MODEL_DIRECTORY/env")) == python


def test_an_archive_is_unpacked_once_and_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="remora.models")
    source = source_of(tmp_path)
    environment_at(tmp_path / "env")
    found = []
    for extra in ("", "", "more"):
        (tmp_path / "env" / "extra").write_text(extra)
        with (
            GzipFile(source.model_dir / "env.tar.gz", "wb", mtime=0) as packed,  # the same bytes in the next second
            tarfile.open(fileobj=packed, mode="w") as tar,
        ):
            for path in sorted((tmp_path / "env").rglob("*")):
                info = tar.gettarinfo(path, str(path.relative_to(tmp_path / "env")))
                info.mtime = 0
                if path.is_file():
                    with path.open("rb") as file:
                        tar.addfile(info, file)
                else:
                    tar.addfile(info)
        found.append(interpreter_for(source, config_of("env.tar.gz")))
    assert len(re.findall(r"unpacking env\.tar\.gz of model 'm', 1 MB \(once\)", caplog.text)) == 2
    assert found[0].is_relative_to(tmp_path / "cache")
    assert found[2] != found[0]
    assert [python.is_file() for python in found] == [True] * 3


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda env: None, "which is not there"),
        (lambda env: env.mkdir(), "has no interpreter at"),
        (lambda env: env.write_text("no tar"), "cannot unpack environment archive"),
        (lambda env: environment_at(env).write_text("#!/bin/sh\necho broken >&2; exit 3\n"), "cannot run .*: broken"),
    ],
)
def test_an_environment_that_cannot_be_used_says_why(tmp_path: Path, prepare: Any, said: str) -> None:
    source = source_of(tmp_path)
    prepare(source.model_dir / "env")
    with pytest.raises((ConfigError, InternalError), match=said):
        interpreter_for(source, config_of("env"))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that can be installed without an index or a build tool's own dependencies."""
    return write_wheel(tmp_path_factory.mktemp("wheels"), "remora-probe", "1.2", "ANSWER = 42\n")


def printed(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(
    not Path(np.__file__).is_relative_to(sys.prefix), reason="this environment finds numpy in another one"
)
def test_requirements_get_an_environment_that_has_them_and_the_servers_packages(
    tmp_path: Path, package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = source_of(tmp_path)
    (source.model_dir / "requirements.txt").write_text(f"--no-index\n--find-links {package.parent}\nremora-probe>=1\n")
    with caplog.at_level("INFO", logger="remora.models"):
        python = interpreter_for(source, config_of())
    assert "model 'm': installing remora" in caplog.text
    assert "model 'm': installed 1 of 1 packages" in caplog.text
    assert printed(python, "import numpy, remora, remora_probe; print(remora_probe.ANSWER)") == "42\n"
    before = python.stat().st_mtime_ns
    assert interpreter_for(source, config_of()) == python
    assert python.stat().st_mtime_ns == before


@pytest.mark.parametrize("pip", [(), (21, 9), (22, 2)])
def test_an_environment_has_a_pip_where_the_servers_is_too_old(pip: tuple[int, ...]) -> None:
    make, install = install_commands(Path("/env"), Path("r.txt"), pip)
    assert "--without-pip" not in make
    assert install[:3] == ["/env/bin/python", "-m", "pip"]


def test_requirements_that_the_server_meets_need_neither_an_environment_nor_an_index(
    tmp_path: Path, package: Path
) -> None:
    source = source_of(tmp_path)
    file = source.model_dir / "requirements.txt"
    file.write_text("numpy>=1\nprotobuf ; python_version >= '3'\n")
    assert interpreter_for(source, config_of()) == Path(sys.executable)
    assert not (tmp_path / "cache").exists()
    file.write_text(f"numpy>=1\n--no-index\n--find-links {package.parent}\nremora-probe\n")
    assert not is_met(file)  # within reach, but not there yet


def test_relative_paths_start_at_the_folder_of_the_file_behind_a_link(tmp_path: Path, package: Path) -> None:
    source = source_of(tmp_path)
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "requirements.txt").write_text("-r more.txt\n")
    (origin / "more.txt").write_text(f"./{package.name}\n")
    (origin / package.name).write_bytes(package.read_bytes())
    (source.model_dir / "requirements.txt").symlink_to(origin / "requirements.txt")
    python = interpreter_for(source, config_of())
    assert printed(python, "import remora_probe; print(remora_probe.ANSWER)") == "42\n"


def test_a_wheel_that_is_named_by_its_path_is_installed(tmp_path: Path, package: Path) -> None:
    source = source_of(tmp_path)
    (source.model_dir / "requirements.txt").write_text(f"{package}\n")
    python = interpreter_for(source, config_of())
    assert printed(python, "import remora_probe; print(remora_probe.ANSWER)") == "42\n"


def test_requirements_that_cannot_be_installed_leave_nothing_behind_and_say_why(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    (source.model_dir / "requirements.txt").write_text("--no-index\nremora-probe-that-is-nowhere\n")
    with pytest.raises(InternalError, match=r"cannot install .*requirements.txt of model 'm': .*remora-probe-that-is"):
        interpreter_for(source, config_of())
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


# -- in a thread of the server --------------------------------------------------------------------------------------


def test_in_a_thread_a_missing_package_is_named_with_its_line_and_the_remedies(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    file = source.model_dir / "requirements.txt"
    file.write_text("numpy\nremora-probe-that-is-nowhere>=2\nnumpy<0.1\n")
    with pytest.raises(ConfigError) as caught:
        check_in_thread(source, config_of())
    text = str(caught.value)
    assert "line 2: remora-probe-that-is-nowhere>=2 (not installed); line 3: numpy<0.1 (" in text
    assert f"-m pip install -r {file}" in text
    assert "ISOLATION: process" in text


def test_in_a_thread_requirements_that_are_met_are_fine(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    check_in_thread(source, config_of())
    (source.model_dir / "requirements.txt").write_text("numpy>=1\nprotobuf\n")
    check_in_thread(source, config_of())


def test_in_a_thread_a_separate_environment_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    environment_at(source.model_dir / "env")
    with pytest.raises(ConfigError, match="runs in a thread of the server"):
        check_in_thread(source, config_of("env"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * (1 << 20) + b"x"])
def test_a_requirements_file_that_cannot_be_one_is_refused(tmp_path: Path, content: bytes) -> None:
    source = source_of(tmp_path)
    (source.model_dir / "requirements.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"requirements.txt"):
        interpreter_for(source, config_of())


def test_a_limit_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, **{"environment-cache-byte-size": "much"})
    (source.model_dir / "env.tar").touch()
    with pytest.raises(ConfigError, match="environment-cache-byte-size=much: expected a number"):
        interpreter_for(source, config_of("env.tar"))
