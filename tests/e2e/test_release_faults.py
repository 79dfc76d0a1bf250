"""Faults of releases in a real server: full disks, two operators, wrong weights, unloads and broken versions."""

from __future__ import annotations

import json
import resource
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.models.released_model import infer, release, release_server
from support.process.eventually import eventually
from support.servers.hosting import ask
from support.servers.live_server import CONFIG, free_port, process, until, write_version

EXPLICIT = ("--model-control-mode=explicit", "--load-model=m")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Versions 2, which serves, 3 and 4 of a model that multiplies by its version."""
    path = tmp_path / "models"
    write_version(path, 2)
    write_version(path, 3)
    write_version(path, 4)
    (path / "m" / "config.pbtxt").write_text(CONFIG + "version_policy { specific { versions: 2 } }\n")
    return path


@contextmanager
def _full_disk(server: subprocess.Popen[str]) -> Iterator[None]:
    """Let a running server write nothing more to any file."""
    before = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, before)


def _refusal(port: int, status: int = 400, **body: Any) -> str:
    reply = ask(port, "POST", "/v2/models/m/release", body)
    assert reply.status == status, reply.body
    return str(json.loads(reply.body)["error"])


def _versions(port: int, count: int = 20) -> set[str]:
    return {infer(port)[1] for _ in range(count)}


def test_a_full_disk_refuses_changes_and_lets_a_rollback_pass(
    repository: Path, child_environment: dict[str, str]
) -> None:
    port = free_port()
    with process(repository, port, child_environment) as server:
        until(port, "/readyz", server)
        with _full_disk(server):
            text = _refusal(port, 500, action="start", version=3, weight="50%")
            assert "File too large; nothing has changed; make room, or name another folder with --release-dir" in text
            assert _versions(port) == {"2"}
            assert release(port)["stage"] == "none"
        release(port, "start", version=3, weight="100%")
        with _full_disk(server):
            assert "File too large" in _refusal(port, 500, action="weight", weight="10%")
            assert "File too large" in _refusal(port, 500, action="promote")
            assert _versions(port) == {"3"}
            assert "File too large" in release(port, "rollback")["warning"]
            assert _versions(port) == {"2"}
        assert release(port)["warning"] == ""
        server.kill()
        server.wait()
    with release_server(repository, child_environment) as port:
        status = release(port)
        assert (status["stage"], status["stable"], status["rejected"]) == ("settled", 2, [3])
        assert _versions(port) == {"2"}


def test_a_declared_release_begins_on_a_full_disk(repository: Path, child_environment: dict[str, str]) -> None:
    (repository / "m" / "release.yaml").write_text("stable: 2\ncanary: 3\nweight: 50%\n")
    port = free_port()
    with process(repository, port, child_environment, "--model-control-mode=explicit") as server:
        until(port, "/readyz", server)
        with _full_disk(server):
            assert ask(port, "POST", "/v2/repository/models/m/load", {}).status == 200
            assert _versions(port, 60) == {"2", "3"}
            status = release(port)
            assert "File too large" in status["warning"]
            assert status["stored"] == ""
        assert release(port)["stored"].endswith("releases.json")


def test_a_broken_canary_is_rolled_back_at_a_restart_also_on_a_full_disk(
    repository: Path, child_environment: dict[str, str]
) -> None:
    port = free_port()
    with process(repository, port, child_environment, *EXPLICIT) as server:
        until(port, "/readyz", server)
        release(port, "start", version=3, weight="50%")
        assert ask(port, "POST", "/v2/repository/models/m/unload", {}).status == 200
        (repository / "m" / "3" / "model.py").write_text("raise ValueError('damaged')")
        with _full_disk(server):
            assert ask(port, "POST", "/v2/repository/models/m/load", {}).status == 200
            assert _versions(port) == {"2"}
            status = release(port)
        assert (status["stage"], status["rejected"]) == ("settled", [3])
        assert "damaged" in status["events"][-1]["reason"]


def test_two_operators_at_once_start_one_release(repository: Path, child_environment: dict[str, str]) -> None:
    with release_server(repository, child_environment) as port, ThreadPoolExecutor(8) as operators:

        def start(number: int) -> tuple[int, str]:
            body = {"action": "start", "version": 3 + number % 2, "weight": "10%", "reason": f"operator {number}"}
            reply = ask(port, "POST", "/v2/models/m/release", body)
            return reply.status, reply.body.decode()

        found = list(operators.map(start, range(8)))
        assert Counter(status for status, _ in found) == {200: 1, 400: 7}
        assert all("a release is running: canary is version" in text for status, text in found if status == 400)
        (event,) = release(port)["events"]
        assert event["reason"] == f"operator {[status for status, _ in found].index(200)}"

        def change(number: int) -> dict[str, Any]:
            return release(port, "weight", weight=f"{number}%")

        list(operators.map(change, range(20, 28)))
        status = release(port)
        assert [event["action"] for event in status["events"][1:]] == list(
            dict.fromkeys(event["action"] for event in status["events"][1:])
        ), "each change is there once"
        assert len(status["events"]) == 1 + 8
        assert status["events"][-1]["action"] == f"canary has {status['arms'][1]['weight']:g} %"


def test_weights_beyond_100_percent_are_refused(repository: Path, child_environment: dict[str, str]) -> None:
    with release_server(repository, child_environment) as port:
        assert "expected 0 to 100 percent" in _refusal(port, action="start", version=3, weight="101%")
        release(port, "start", version=3, weight="60%")
        text = _refusal(port, action="start", version=4, weight="50%", alias="b")
        assert "the weights exceed 100 percent: canary 60 % + b 50 % = 110 %" in text
        release(port, "start", version=4, weight="40%", alias="b")
        text = _refusal(port, action="weight", weight="61%")
        assert "the weights exceed 100 percent: canary 61 % + b 40 % = 101 %" in text
        weights = [(arm["alias"], arm["weight"]) for arm in release(port)["arms"]]
        assert weights == [("stable", 0.0), ("canary", 60.0), ("b", 40.0)]


def test_a_model_that_an_operator_unloads_stays_so_until_its_load(
    repository: Path, child_environment: dict[str, str]
) -> None:
    with release_server(repository, child_environment, *EXPLICIT) as port:
        release(port, "start", version=3, weight="50%", rules={"least": 1000}, automatic=True)
        for _ in range(40):
            infer(port)
        assert ask(port, "POST", "/v2/repository/models/m/unload", {}).status == 200

        def unloaded() -> bool:
            rows = json.loads(ask(port, "POST", "/v2/repository/index", {}).body)
            return all(row["state"] == "UNAVAILABLE" for row in rows)

        eventually(unloaded)
        status = release(port)
        assert status["judgement"] == "the model is unloaded"
        assert not any(arm["ready"] for arm in status["arms"])
        assert "the model is unloaded: load it first" in _refusal(port, action="shadow", version=2)
        release(port, "weight", weight="60%")
        release(port, "promote")
        assert unloaded()
        assert ask(port, "POST", "/v2/models/m/infer", {}).status in (400, 404)
        assert ask(port, "POST", "/v2/repository/models/m/load", {}).status == 200
        assert _versions(port) == {"3"}
