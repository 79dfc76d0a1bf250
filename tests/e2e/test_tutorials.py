"""Console blocks of docs/tutorials.md, run word by word: commands, a server in the background, and shown answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from conftest import ROOT, free_ports
from live_server import until
from test_docs import blocks_of

TUTORIALS = ROOT / "docs" / "tutorials.md"


def section(title: str) -> str:
    """The text below a heading."""
    return re.split(r"^## ", TUTORIALS.read_text().partition(f"## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def commands(title: str) -> Iterator[tuple[str, str]]:
    """The commands of a section's console blocks, each with the output that is shown."""
    for block in blocks_of(section(title)):
        if block.language == "console":
            for part in block.code.split("$ ")[1:]:
                command, _, output = part.partition("\n")
                yield command, output.strip()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose first `remora` is this one."""
    program = tmp_path / "bin" / "remora"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom remora.cli import main\nsys.exit(main())\n")
    program.chmod(0o755)
    paths = os.pathsep.join([str(ROOT / "core"), str(ROOT / "adapters")])
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": paths}


def test_update_and_roll_back(tmp_path: Path, environment: dict[str, str]) -> None:
    follow("Update and roll back", tmp_path, environment)


def follow(title: str, place: Path, environment: dict[str, str]) -> None:
    (port,) = free_ports(1)
    answers = 0
    with ExitStack() as stack:
        for command, shown in commands(title):
            if command.startswith("remora serve "):
                words = ["exec", command, f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false"]
                server = subprocess.Popen(
                    ["bash", "-c", " ".join(words)], cwd=place, env=environment, stderr=subprocess.PIPE, text=True
                )
                stack.callback(server.communicate)
                stack.callback(server.kill)
                until(port, "/v2/health/ready", server)
                continue
            command = command.replace("localhost:8000", f"127.0.0.1:{port}")
            if command.startswith("remora models "):
                command += f" --url http://127.0.0.1:{port}"
            done = subprocess.run(["bash", "-c", command], cwd=place, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}: {done.stderr}"
            if shown:
                assert done.stdout.strip() == shown
                answers += 1
    assert answers
