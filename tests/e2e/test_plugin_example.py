"""A package that is not remora's, installed into a fresh environment, plugs into the server by its entry points."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from conftest import ROOT
from support.process.separate_python import make_environment, run, serving
from support.servers.hosting import ask

SOURCE = ROOT / "docs" / "examples" / "plugin"
KEY = "key-of-the-plugin-test"
WITH_KEY = {"X-API-Key": KEY}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Interpreter of a fresh environment that has the plug-in, and finds this one's packages."""
    made = make_environment(tmp_path_factory.mktemp("environment"), ROOT / "core", ROOT / "adapters")
    install = [sys.executable, "-m", "pip", "--python", made, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--no-build-isolation", str(SOURCE)], check=True)
    return made


@pytest.fixture(scope="module")
def port(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a server with keys in that environment, which serves a model of the plug-in's backend."""
    folder = tmp_path_factory.mktemp("greeters")
    (folder / "hello" / "1").mkdir(parents=True)
    (folder / "hello" / "1" / "greeting.txt").write_text("Hello")
    (folder / "hello" / "config.pbtxt").write_text('backend: "greeter"\nmax_batch_size: 8\n')
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(python, folder, log, "--api-key=ann:infer,read=@env:ANN", ANN=KEY) as port:
        yield port


def test_its_backend_serves_a_model(port: int) -> None:
    body = {"inputs": [{"name": "name", "shape": [1, 1], "datatype": "BYTES", "data": ["Ada"]}]}
    answer = ask(port, "POST", "/v2/models/hello/infer", body, WITH_KEY)
    assert (answer.status, answer.json["outputs"][0]["data"]) == (200, ["Hello Ada"])


def test_its_paths_are_refused_without_a_key(port: int) -> None:
    assert ask(port, "GET", "/greetings/Ada").status == 401


def test_its_paths_and_its_metric_are_served_with_a_key(port: int) -> None:
    answer = ask(port, "GET", "/greetings/Ada", headers=WITH_KEY)
    assert (answer.status, answer.json) == (200, {"greeters": ["hello"], "name": "Ada"})
    page = ask(port, "GET", "/v2/metrics", headers=WITH_KEY)
    assert page.status == 200
    assert b'greeter_answers_total{model="hello"} ' in page.body


def test_a_path_of_its_group_without_an_action_is_not_served(port: int) -> None:
    assert ask(port, "GET", "/greetings/", headers=WITH_KEY).status == 404


def test_its_command_runs_by_its_name_and_is_in_the_help(python: str, port: int) -> None:
    words = ("greet", "Ada", "--url", f"http://127.0.0.1:{port}")
    done = run(python, "-m", "remora", *words, REMORA_API_KEY=KEY)
    assert (done.stdout, done.returncode) == ("hello greet Ada\n", 0), done.stderr
    assert "greet" in run(python, "-m", "remora", "--help").stdout.partition("Other packages:")[2]


def test_its_backend_is_listed(python: str) -> None:
    assert "greeter" in run(python, "-m", "remora", "backends").stdout
