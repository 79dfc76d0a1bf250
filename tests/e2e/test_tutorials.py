"""docs/tutorials.md followed word by word: its files are written, its commands run, and its answers compared.

A python block begins with the name of its file. A server runs in the background until the next one, or to the end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from conftest import ROOT, free_ports
from support.process.small_wheels import write_wheel
from support.servers.live_server import child, until
from test_docs import blocks_of

TUTORIALS = ROOT / "docs" / "tutorials.md"
ELSEWHERE = ("pip install ", "docker ", 'python -c "from transformers import pipeline;')
"""Commands that need a package index, a container engine or the hub; tests/containers builds such images."""
HAS_HATCHLING = importlib.util.find_spec("hatchling") is not None
"""True where `remora build` can make the wheel of this checkout; elsewhere it gets a stand-in."""
NEAR = 1e-3
"""Difference of a number that is shown rounded."""


def section(title: str) -> str:
    """The text below a heading."""
    return re.split(r"^## ", TUTORIALS.read_text().partition(f"## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def steps(title: str) -> Iterator[tuple[str, str]]:
    """The files and commands of a section in order.

    A file is its name, after ``#``, and its text; a command has the output that is shown.
    """
    for block in blocks_of(section(title)):
        if block.language == "python":
            assert re.match(r"# \w+\.py\n", block.code), f"line {block.line}: the block names no file"
            yield block.code.partition("\n")[0], block.code + "\n"
        elif block.language == "console":
            for part in block.code.split("$ ")[1:]:
                command, _, output = part.partition("\n")
                yield command, output.strip()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose first `remora` and `python` are these."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("remora", f"#!{sys.executable}\nimport sys\nfrom remora.cli import main\nsys.exit(main())\n"),
        ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    paths = os.pathsep.join([str(ROOT / "core"), str(ROOT / "adapters")])
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": paths, "PYTEST_ADDOPTS": ""}


def test_a_model_of_scikit_learn(tmp_path: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install '.[dev]'")
    assert follow("Your scikit-learn model, from training to an image", tmp_path, environment) == 2


def test_a_model_of_pytorch(tmp_path: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed here: make test-formats")
    assert follow("A PyTorch model", tmp_path, environment) == 2


def test_a_folder_of_hugging_face(tmp_path: Path, environment: dict[str, str]) -> None:
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed here: make test-formats")
    assert follow("A folder of Hugging Face", tmp_path, environment) == 1


def test_steps_before_and_after_a_model(tmp_path: Path, environment: dict[str, str]) -> None:
    assert follow("Steps before and after a model", tmp_path, environment) == 2


def test_update_and_roll_back(tmp_path: Path, environment: dict[str, str]) -> None:
    assert follow("Update and roll back", tmp_path, environment) == 3


def follow(title: str, place: Path, environment: dict[str, str]) -> int:
    """Follow a tutorial and return the number of its answers that were compared."""
    (port,) = free_ports(1)
    answers = 0
    with ExitStack() as stack:
        for command, shown in steps(title):
            if command.startswith("# "):
                (place / command.removeprefix("# ")).write_text(shown)
            elif command.startswith("remora serve "):
                stack.close()
                words = ["exec", command, f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false"]
                server = stack.enter_context(child(["bash", "-c", " ".join(words)], environment, place))
                until(port, "/v2/health/ready", server)
            elif not command.startswith(ELSEWHERE):
                if command.startswith("remora build ") and not HAS_HATCHLING:
                    command += f" --wheel {write_wheel(place, 'remora', '0', '')}"
                output = run(command, port, place, environment)
                if shown:
                    assert alike(output.strip(), shown), f"{command}: {output}"
                    answers += 1
    return answers


def run(command: str, port: int, place: Path, environment: dict[str, str]) -> str:
    """Run a command and return its output. Fails the test with its error."""
    command = command.replace("localhost:8000", f"127.0.0.1:{port}").replace("~/remora/", f"{ROOT}/")
    if command.startswith("remora models "):
        command += f" --url http://127.0.0.1:{port}"
    done = subprocess.run(["bash", "-c", command], cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def alike(output: str, shown: str) -> bool:
    """Return True if JSON has the shown values, or another text is the shown one."""
    if output == shown:
        return True
    found, expected = json.loads(output), json.loads(shown)
    return bool(found.keys() == expected.keys() and all(near(found[name], expected[name]) for name in expected))


def near(found: object, expected: object) -> bool:
    """Return True for equal values, and for numbers and lists of numbers that differ by rounding."""
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        return all(near(*pair) for pair in zip(found, expected, strict=True))
    if isinstance(expected, float) and isinstance(found, float):
        return found == pytest.approx(expected, abs=NEAR)
    return found == expected
