"""The server answers V2 without the project's other packages, and knows what it lacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import ROOT, Digits, end, free_ports, wait_until_ready


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Interpreter that finds a copy of the server and the installed packages, but none of the others."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copytree(ROOT / "core" / "remora", folder / "core" / "remora", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "server.pth").write_text(f"{folder / 'core'}\n{sysconfig.get_path('purelib')}\n")
    return str(folder / "venv" / "bin" / "python")


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(python: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-m", "remora", *words], capture_output=True, text=True, env=environment())


@pytest.fixture(scope="module")
def url(python: str, digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (port,) = free_ports(1)
    log = tmp_path_factory.mktemp("log") / "log"
    flags = [f"--http-port={port}", "--allow-grpc=false", "--metrics-port=0"]
    with log.open("wb") as output:
        command = [python, "-m", "remora", "serve", str(digits.models), *flags]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment())
    try:
        wait_until_ready(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        assert end(process) == 0, log.read_text()


def ask(url: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, body), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


def test_no_other_package_can_be_imported(python: str) -> None:
    code = "from importlib.util import find_spec; import remora.plugins as p; print(p.is_present('remora_llm.routes'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout == "False\n"


def test_it_answers_inferences_and_shows_its_metrics(url: str, digits: Digits) -> None:
    request = next(path for path in sorted(digits.requests.iterdir()) if path.suffix == ".json")
    status, answer = ask(url, "/v2/models/digits/infer", request.read_bytes())
    assert (status, json.loads(answer)["model_name"]) == (200, "digits")
    assert 'nv_inference_request_success{model="digits",version="1"} 1' in ask(url, "/metrics")[1]
    assert ask(url, "/v2/docs")[0] == ask(url, "/v2/status")[0] == 200


def test_paths_and_backends_of_the_other_packages_are_unknown(url: str, python: str) -> None:
    assert ask(url, "/v1/models")[0] == 404
    assert ask(url, "/v1/chat/completions", b"{}")[0] == 404
    assert ask(url, "/models/none", b"{}")[0] == 404


def test_its_help_has_only_its_own_commands(python: str) -> None:
    shown = run(python, "--help").stdout
    assert {"serve", "infer", "config", "release"} <= set(shown.split())
    assert not {"tune", "score", "deploy", "emulate"} & {line.split()[0] for line in shown.splitlines() if line.strip()}
    refused = run(python, "tune", "models")
    assert refused.returncode == 2
    assert "invalid choice: 'tune'" in refused.stderr
