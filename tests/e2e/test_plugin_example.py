"""A package that is not remora's, installed into a fresh environment, plugs into the server by its entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import ROOT, end, free_ports, wait_until_ready

SOURCE = ROOT / "docs" / "examples" / "plugin"
KEY = "key-of-the-plugin-test"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Interpreter of a fresh environment that has the plug-in, and finds this one's packages."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    places = [path for path in sys.path if path.endswith("site-packages")]
    (site / "beside.pth").write_text("\n".join([str(ROOT / "core"), str(ROOT / "adapters"), *places]) + "\n")
    made = str(folder / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", made, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--no-build-isolation", str(SOURCE)], check=True)
    return made


@pytest.fixture(scope="module")
def url(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server with keys in that environment, which serves a model of the plug-in's backend."""
    folder = tmp_path_factory.mktemp("greeters")
    (folder / "hello" / "1").mkdir(parents=True)
    (folder / "hello" / "1" / "greeting.txt").write_text("Hello")
    (folder / "hello" / "config.pbtxt").write_text('backend: "greeter"\nmax_batch_size: 8\n')
    (port,) = free_ports(1)
    log = tmp_path_factory.mktemp("log") / "log"
    flags = [f"--http-port={port}", "--allow-grpc=false", "--metrics-port=0", "--api-key=ann:infer,read=@env:ANN"]
    command = [python, "-m", "remora", "serve", str(folder), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "ANN": KEY})
    try:
        wait_until_ready(process, port, log, "/readyz")
        yield f"http://127.0.0.1:{port}"
    finally:
        end(process)


def ask(url: str, path: str, body: object = None, key: str = KEY) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"X-API-Key": key} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


def run(python: str, *words: str, **environ: str) -> str:
    done = subprocess.run(
        [python, "-m", "remora", *words], capture_output=True, text=True, env={**os.environ, **environ}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_backend_serves_a_model(url: str) -> None:
    body = {"inputs": [{"name": "name", "shape": [1, 1], "datatype": "BYTES", "data": ["Ada"]}]}
    status, answer = ask(url, "/v2/models/hello/infer", body)
    assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, ["Hello Ada"])


def test_its_paths_are_refused_without_a_key(url: str) -> None:
    assert ask(url, "/greetings/Ada", key="")[0] == 401


def test_its_paths_and_its_metric_are_served_with_a_key(url: str) -> None:
    status, answer = ask(url, "/greetings/Ada")
    assert (status, json.loads(answer)) == (200, {"greeters": ["hello"], "name": "Ada"})
    status, page = ask(url, "/v2/metrics")
    assert status == 200
    assert 'greeter_answers_total{model="hello"} ' in page


def test_a_path_of_its_group_without_an_action_is_not_served(url: str) -> None:
    assert ask(url, "/greetings/")[0] == 404


def test_its_command_runs_by_its_name_and_is_in_the_help(python: str, url: str) -> None:
    assert run(python, "greet", "Ada", "--url", url, REMORA_API_KEY=KEY) == "hello greet Ada\n"
    assert "greet" in run(python, "--help").partition("Other packages:")[2]


def test_its_backend_is_listed(python: str) -> None:
    assert "greeter" in run(python, "backends")
