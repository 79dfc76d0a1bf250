"""The server answers V2 without the project's other packages, and knows what it lacks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from conftest import ROOT, Digits
from support.process.separate_python import make_environment, run, serving
from support.servers.hosting import ask


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Interpreter that finds a copy of the server and the installed packages, but none of the others."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copytree(ROOT / "core" / "remora", folder / "core" / "remora", ignore=shutil.ignore_patterns("__pycache__"))
    return make_environment(folder / "venv", folder / "core")


@pytest.fixture(scope="module")
def port(python: str, digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with serving(python, digits.models, tmp_path_factory.mktemp("log") / "log") as port:
        yield port


def test_no_other_package_can_be_imported(python: str) -> None:
    names = ["remora", "remora_llm", "remora_runtimes", "remora_tools", "remora_adapters", "remora_deploy"]
    code = f"from remora.plugins import is_present; print([name for name in {names} if is_present(name)])"
    assert run(python, "-c", code).stdout == "['remora']\n"


def test_it_answers_inferences_and_shows_its_metrics(port: int, digits: Digits) -> None:
    request = next(path for path in sorted(digits.requests.iterdir()) if path.suffix == ".json")
    answer = ask(port, "POST", "/v2/models/digits/infer", request.read_bytes())
    assert (answer.status, answer.json["model_name"]) == (200, "digits")
    assert b'nv_inference_request_success{model="digits",version="1"} 1' in ask(port, "GET", "/metrics").body
    assert ask(port, "GET", "/v2/docs").status == ask(port, "GET", "/v2/status").status == 200


def test_paths_of_the_other_packages_are_unknown(port: int) -> None:
    assert ask(port, "GET", "/v1/models").status == 404
    assert ask(port, "POST", "/v1/chat/completions", b"{}").status == 404
    assert ask(port, "POST", "/models/none", b"{}").status == 404


def test_its_help_has_only_its_own_commands(python: str) -> None:
    shown = run(python, "-m", "remora", "--help").stdout
    assert {"serve", "config", "backends", "version"} <= set(shown.split())
    assert not {"infer", "release", "tune", "score", "deploy", "emulate"} & {
        line.split()[0] for line in shown.splitlines() if line.strip()
    }
    refused = run(python, "-m", "remora", "tune", "models")
    assert refused.returncode == 2
    assert "invalid choice: 'tune'" in refused.stderr
