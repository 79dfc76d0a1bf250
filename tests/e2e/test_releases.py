"""Releases of a real server: commands, headers, sticky clients, keys, front processes, and a kill amid a release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import free_ports
from support.process.eventually import eventually
from support.servers.hosting import ask
from support.servers.live_server import PATIENCE_S, free_port, process, until, write_version

REQUEST: dict[str, Any] = {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [1]}]}
FRONTS = pytest.param("--frontends=2", marks=pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"))


def _remora(environment: dict[str, str], port: int, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "remora", "release", verb, *words, f"--url=http://127.0.0.1:{port}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def _version(port: int, headers: dict[str, str] | None = None, **members: Any) -> tuple[str, str | None]:
    """Return the version in the answer and the one in its header."""
    reply = ask(port, "POST", "/v2/models/m/infer", {**REQUEST, **members}, headers or {})
    assert reply.status == 200, reply.body
    document = json.loads(reply.body)
    assert str(document["outputs"][0]["data"][0]) == document["model_version"]
    return document["model_version"], reply.headers.get("x-model-version")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    write_version(path, 2)
    return path


@pytest.mark.parametrize("fronts", ["--frontends=0", FRONTS])
def test_a_release_over_the_command_line(fronts: str, repository: Path, child_environment: dict[str, str]) -> None:
    port = free_port()
    with process(repository, port, child_environment, fronts) as server:
        until(port, "/readyz", server)
        assert _version(port) == ("2", None)
        write_version(repository, 3)
        refused = _remora(child_environment, port, "start", "m", "9", "--canary", "10%")
        assert refused.returncode == 1
        assert "names version 9, which the model's repository does not have: it has 2, 3" in refused.stderr
        started = _remora(child_environment, port, "start", "m", "3", "--canary", "50%", "--sticky", "header:X-User")
        assert started.returncode == 0, started.stderr
        assert started.stdout.splitlines()[0] == "m: a release is running"
        users = {f"user {number}": _version(port, {"X-User": f"user {number}"}) for number in range(40)}
        assert {version for version, _ in users.values()} == {"2", "3"}
        assert all(version == header for version, header in users.values())
        for user, found in users.items():
            assert _version(port, {"X-User": user}) == found
        server.kill()
        server.wait()
    with process(repository, port, child_environment, fronts) as server:
        until(port, "/readyz", server)
        for user, found in users.items():
            assert _version(port, {"X-User": user}) == found
        shown = _remora(child_environment, port, "status", "m", "--json-out")
        arms = json.loads(shown.stdout)["arms"]
        assert [(arm["alias"], arm["version"], arm["ready"]) for arm in arms] == [
            ("stable", 2, True),
            ("canary", 3, True),
        ]
        assert sum(arm["answers"] for arm in arms) == len(users)
        promoted = _remora(child_environment, port, "promote", "m", "--reason", "it is better")
        assert "m: version 3 is stable, no release is running" in promoted.stdout
        assert "- promote version 3: it is better" in promoted.stdout
        assert {_version(port) for _ in range(10)} == {("3", None)}
        assert server.poll() is None


@pytest.mark.parametrize("weight", ["50%", "100%"])
def test_an_automatic_release_ends_a_canary_that_fails_at_once(
    weight: str, repository: Path, child_environment: dict[str, str]
) -> None:
    port = free_port()
    with process(repository, port, child_environment) as server:
        until(port, "/readyz", server)
        write_version(repository, 3)
        model = repository / "m" / "3" / "model.py"
        model.write_text(model.read_text().replace("arrays = [", "raise ValueError('bad')\n        arrays = ["))
        started = _remora(child_environment, port, "start", "m", "3", "--canary", weight, "--auto", "--bake=0s")
        assert "judged automatically" in started.stdout, started.stderr
        statuses = []
        while "settled" not in (shown := _remora(child_environment, port, "status", "m", "--json-out")).stdout:
            statuses += [ask(port, "POST", "/v2/models/m/infer", REQUEST, {}).status for _ in range(20)]
            assert len(statuses) < 1000
        assert weight == "50%" or 200 not in statuses[:20]
        status = json.loads(shown.stdout)
        assert (status["stable"], status["rejected"]) == (2, [3])
        assert "failed answers" in status["events"][-1]["reason"]
        assert {_version(port) for _ in range(10)} == {("2", None)}


@pytest.mark.parametrize("fronts", ["--frontends=0", FRONTS])
def test_grpc_and_plain_json_follow_the_release(
    fronts: str, repository: Path, child_environment: dict[str, str]
) -> None:
    grpc = pytest.importorskip("tritonclient.grpc")
    port, grpc_port = free_ports(2)
    flags = (fronts, "--allow-grpc=true", f"--grpc-port={grpc_port}")
    with process(repository, port, child_environment, *flags) as server:
        until(port, "/readyz", server)
        write_version(repository, 3)
        assert _remora(child_environment, port, "start", "m", "3", "--canary", "100%").returncode == 0
        reply = ask(port, "POST", "/models/m", {"IN": [1]}, {})
        assert (reply.status, reply.headers.get("x-model-version")) == (200, "3"), reply.body
        with grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
            tensor = grpc.InferInput("IN", [1, 1], "INT32")
            tensor.set_data_from_numpy(np.array([[1]], np.int32))
            found = client.infer("m", [tensor])
            assert (found.get_response().model_version, found.as_numpy("OUT").tolist()) == ("3", [[3]])


def test_only_a_key_that_controls_changes_a_release(
    repository: Path, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    port = free_port()
    words = []
    for role in ("infer", "read", "control"):
        (tmp_path / role).write_text(f"secret-{role}-0123456789")
        words.append(f"--api-key={role}:{role}=@{tmp_path / role}")
    write_version(repository, 1)
    with process(repository, port, child_environment, *words) as server:
        until(port, "/readyz", server)
        change = {"action": "start", "version": 1, "weight": 10}

        def status(role: str, method: str, body: object = None) -> int:
            headers = {"X-API-Key": f"secret-{role}-0123456789"}
            return ask(port, method, "/v2/models/m/release", body, headers).status

        assert [status(role, "POST", change) for role in ("infer", "read", "control")] == [403, 403, 200]
        assert [status(role, "GET") for role in ("infer", "read", "control")] == [403, 200, 200]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("{}", 'expected a JSON object with an \\"action\\"'),
        ("[1]", 'expected a JSON object with an \\"action\\"'),
        ("{", "failed to parse the request JSON buffer"),
        ('{"action": "start", "version": 2, "weight": 1e4}', "expected 0 to 100 percent"),
        ('{"action": "start", "version": {"a": 1}}', "expected the number of a version"),
        (
            '{"action": "start", "version": 2, "steps": ["50%"], "rules": {"alpha": 0.01}}',
            """release start of model 'm': steps and rules: only with \\"automatic\\": true, because people decide """
            "without it; add it, or leave steps and rules out",
        ),
        ('{"action": "start", "version": 2, "reason": 5}', "reason: expected a text"),
    ],
)
def test_a_bad_body_is_refused_with_the_reason(
    body: str, text: str, repository: Path, child_environment: dict[str, str]
) -> None:
    port = free_port()
    with process(repository, port, child_environment) as server:
        until(port, "/readyz", server)
        reply = ask(port, "POST", "/v2/models/m/release", body.encode(), {})
        assert reply.status in (400, 500)
        assert text in reply.body.decode()
        assert _version(port) == ("2", None)


def test_a_shadow_server_that_crashes_costs_no_answer(
    repository: Path, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    ours, theirs = free_ports(2)
    write_version(tmp_path / "theirs", 7)
    kept = tmp_path / "differences.jsonl"
    (tmp_path / "compare.py").write_text("def same(expected, found):\n    return 'x' * 10_000\n")
    flags = (
        f"--shadow-url=there=http://127.0.0.1:{theirs}",
        f"--shadow-compare=same={tmp_path / 'compare.py'}:same",
        f"--shadow-differences={kept}",
        "--shadow-processors=1",
    )

    def counts(ended: str) -> dict[str, Any] | None:
        shadow = json.loads(_remora(child_environment, ours, "status", "m", "--json-out").stdout)["shadow"]
        return shadow if shadow[ended] else None

    with (
        process(tmp_path / "theirs", theirs, child_environment) as other,
        process(repository, ours, child_environment, *flags) as server,
    ):
        until(theirs, "/readyz", other)
        until(ours, "/readyz", server)
        started = _remora(child_environment, ours, "shadow", "m", "--to", "there", "--compare", "same")
        assert started.returncode == 0, started.stderr
        assert "shadow: the model at 'there' gets copies of 100 %" in started.stdout
        assert {_version(ours)[0] for _ in range(20)} == {"2"}
        found = eventually(lambda: counts("differing"))
        assert found["failed"] == 0
        assert len(found["samples"][0]) <= 300
        other.kill()
        other.wait()
        assert {_version(ours)[0] for _ in range(20)} == {"2"}
        # The first copies may fail on connections that the other server had open.
        eventually(lambda: "ConnectionRefusedError" in str((counts("failed") or {}).get("samples")))
        refused = _remora(child_environment, ours, "shadow", "m", "--to", "http://169.254.169.254/")
        assert refused.returncode == 1
        assert "the server's option --shadow-url defines; there are: there" in refused.stderr
        rows = eventually(lambda: kept.read_text().splitlines())
        assert json.loads(rows[0])["found"][0]["data"] == [7]
