"""Arms of a release in a real server: aliases, clients that stay, what operators see, gates, and steps."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import free_ports
from support.models.released_model import INPUT, infer, release, release_server
from support.process.eventually import eventually
from support.servers.hosting import ask
from support.servers.live_server import CONFIG, free_port, process, replace, until, write_version

REQUEST: dict[str, Any] = {"inputs": [INPUT]}
TESTS = {"tests": [{"name": "one", **REQUEST, "outputs": [{**INPUT, "name": "OUT", "data": [2]}]}]}


def _version(port: int, model: str = "m", headers: dict[str, str] | None = None, **members: Any) -> str:
    """Return the version that answers, which its output is too."""
    output, version = infer(port, model, headers=headers, **members)
    assert str(output) == version
    return version


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Versions 2, which is stable, and 3."""
    path = tmp_path / "models"
    write_version(path, 2)
    write_version(path, 3)
    (path / "m" / "release.yaml").write_text("stable: 2\n")
    return path


def test_aliases_name_versions_over_http_and_grpc(repository: Path, child_environment: dict[str, str]) -> None:
    grpc = pytest.importorskip("tritonclient.grpc")
    (repository / "m" / "release.yaml").write_text(
        "stable: 2\ncanary: 3\nweight: 0\nsticky: parameter:tenant\naliases: {champion: 2}\n"
    )
    port, grpc_port = free_ports(2)
    with process(repository, port, child_environment, "--allow-grpc=true", f"--grpc-port={grpc_port}") as server:
        until(port, "/readyz", server)
        names = {"stable": "2", "canary": "3", "latest": "3", "champion": "2"}
        assert {alias: _version(port, f"m@{alias}") for alias in names} == names
        assert _version(port) == "2"
        release(port, "alias", alias="champion", version=3)
        assert _version(port, "m@champion") == "3"
        assert ask(port, "POST", "/v2/models/m@other/infer", REQUEST, {}).status == 404
        with grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
            tensor = grpc.InferInput("IN", [1, 1], "INT32")
            tensor.set_data_from_numpy(np.array([[1]], np.int32))
            found = {alias: client.infer(f"m@{alias}", [tensor]).get_response().model_version for alias in names}
            assert found == {**names, "champion": "3"}
        release(port, "weight", weight="50%")
        tenants = {f"t{number}": _version(port, parameters={"tenant": f"t{number}"}) for number in range(30)}
        assert set(tenants.values()) == {"2", "3"}
        assert {tenant: _version(port, parameters={"tenant": tenant}) for tenant in tenants} == tenants


def test_ids_and_sequences_stay_with_their_version(repository: Path, child_environment: dict[str, str]) -> None:
    (repository / "m" / "config.pbtxt").write_text(
        CONFIG
        + "sequence_batching { max_sequence_idle_microseconds: 600000000 oldest { max_candidate_sequences: 64 } }\n"
    )
    with release_server(repository, child_environment) as port:
        release(port, "start", version=3, weight="50%")
        begun = {
            number: _version(port, parameters={"sequence_id": number, "sequence_start": True})
            for number in range(1, 25)
        }
        assert set(begun.values()) == {"2", "3"}
        release(port, "weight", weight="100%")
        assert {number: _version(port, parameters={"sequence_id": number}) for number in begun} == begun
        release(port, "promote")
        ends = {number: {"sequence_id": number, "sequence_end": True} for number in begun}
        assert {number: str(infer(port, parameters=members)[0]) for number, members in ends.items()} == begun
    (repository / "m" / "config.pbtxt").write_text(CONFIG)
    with release_server(repository, child_environment) as port:
        release(port, "start", version=2, weight="50%")  # version 3 was promoted before the restart
        ids = {f"r{number}": _version(port, id=f"r{number}") for number in range(30)}
        assert set(ids.values()) == {"2", "3"}
        assert {each: _version(port, id=each) for each in ids} == ids


def test_statistics_metrics_and_traces_show_each_arm(repository: Path, child_environment: dict[str, str]) -> None:
    flags = (
        "--allow-metrics=true",
        f"--trace-config=triton,file={repository.parent}/traces.json",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=1",
    )
    with release_server(repository, child_environment, *flags) as port:
        release(port, "start", version=3, weight="50%")
        served = [_version(port, id=f"r{number}") for number in range(30)]
        counts = {"2": served.count("2"), "3": served.count("3")}
        rows = json.loads(ask(port, "GET", "/v2/models/m/stats", None, {}).body)["model_stats"]
        assert {row["version"]: row["inference_stats"]["success"]["count"] for row in rows} == counts
        page = eventually(lambda: text if "remora_release" in (text := _metrics(port)) else None)
        found = dict(re.findall(r'remora_release_answers\{model="m",version="(\d)"[^}]*\} (\d+)', page))
        assert {version: int(count) for version, count in found.items()} == counts
        weights = re.findall(r'remora_release_weight\{model="m",version="(\d)"[^}]*\} ([\d.]+)', page)
        assert {version: float(weight) for version, weight in weights} == {"2": 0.5, "3": 0.5}
        traces = json.loads(ask(port, "GET", "/v2/trace/recent", None, {}).body)["traces"]
        assert traces
        assert {served[int(row["request_id"][1:])] == row["version"] for row in traces} == {True}


def _metrics(port: int) -> str:
    return ask(port, "GET", "/v2/metrics", None, {}).body.decode()


def test_an_automatic_release_takes_its_steps_and_is_promoted(
    repository: Path, child_environment: dict[str, str]
) -> None:
    rules = {"bake_s": 0, "least": 10, "error_margin": 0.4, "slow_margin": 0.4, "slow_ms": 10_000}
    with release_server(repository, child_environment) as port:
        release(port, "start", version=3, weight="30%", steps=["60%"], rules=rules, automatic=True)

        def settled() -> bool:
            for _ in range(20):
                _version(port)
            return release(port)["stage"] == "settled"

        eventually(settled)
        status = release(port)
        assert (status["stable"], status["arms"][0]["version"]) == (3, 3)
        assert [event["action"] for event in status["events"]] == [
            "start canary version 3 with 30 %",
            "canary has 60 %",
            "promote version 3",
        ]
        assert "no rate is worse than its margin allows" in status["events"][-1]["reason"]


def test_an_automatic_release_goes_on_after_a_kill(repository: Path, child_environment: dict[str, str]) -> None:
    rules = {"bake_s": 0, "least": 30, "error_margin": 0.4, "slow_margin": 0.4, "slow_ms": 10_000}
    with release_server(repository, child_environment) as port:
        release(port, "start", version=3, weight="50%", steps=["60%"], rules=rules, automatic=True)
        for number in range(20):
            _version(port, id=f"r{number}")
        before = release(port)
    with release_server(repository, child_environment) as port:
        after = release(port)
        for name in ("stage", "automatic", "steps", "rules", "since_ms", "events"):
            assert after[name] == before[name]
        assert after["judgement"] == "the canary has 0 of the 30 answers that a verdict needs"

        def settled() -> bool:
            for _ in range(20):
                _version(port)
            return release(port)["stage"] == "settled"

        eventually(settled)
        actions = [event["action"] for event in release(port)["events"]]
        assert actions == ["start canary version 3 with 50 %", "canary has 60 %", "promote version 3"]


@pytest.mark.parametrize("slow", [False, True])
def test_a_step_of_all_requests_is_judged_also_after_a_kill(
    slow: bool, repository: Path, child_environment: dict[str, str]
) -> None:
    """The stable version is slow, so that its latency limit is far above the latencies of a busy machine."""
    rules = {"bake_s": 0, "least": 40, "error_margin": 0.4, "slow_margin": 0.4}
    _delay(repository / "m" / "2", seconds=0.01)

    with ThreadPoolExecutor(8) as clients:

        def answer_until(action: str) -> bool:
            list(clients.map(lambda _: _version(port), range(8)))
            return bool(release(port)["events"][-1]["action"] == action)

        with release_server(repository, child_environment) as port:
            release(port, "start", version=3, weight="40%", steps=["100%"], rules=rules, automatic=True)
            eventually(lambda: answer_until("canary has 100 %"))
            limit_ms = release(port)["slow_limit_ms"]
            assert limit_ms > 10
        if slow:
            _delay(repository / "m" / "3", seconds=limit_ms / 1000)
        with release_server(repository, child_environment) as port:
            status = release(port)
            assert (status["arms"][1]["weight"], status["slow_limit_ms"]) == (100, limit_ms)
            eventually(lambda: answer_until("roll back version 3" if slow else "promote version 3"))
            status = release(port)
    assert (status["stage"], status["stable"]) == ("settled", 2 if slow else 3)
    assert ("slow answers" if slow else "no rate is worse") in status["events"][-1]["reason"]


def _delay(version: Path, *, seconds: float) -> None:
    model = version / "model.py"
    text = model.read_text()
    model.write_text("import time\n" + text.replace("arrays = [", f"time.sleep({seconds})\n        arrays = ["))


def test_a_version_that_fails_its_golden_tests_gets_no_request(
    repository: Path, child_environment: dict[str, str]
) -> None:
    (repository / "m" / "3").rename(repository.parent / "3")
    (repository / "m" / "tests.json").write_text(json.dumps(TESTS))
    with release_server(repository, child_environment) as port:
        (repository.parent / "3").rename(repository / "m" / "3")
        refused = ask(port, "POST", "/v2/models/m/release", {"action": "start", "version": 3, "weight": "50%"}, {})
        assert refused.status == 400
        assert "OUT[0, 0] is 3, expected 2" in refused.body.decode()
        assert {_version(port) for _ in range(20)} == {"2"}
        assert len(release(port)["arms"]) == 1


def test_the_assignments_of_an_ab_test_are_lines_of_the_log(
    repository: Path, child_environment: dict[str, str]
) -> None:
    port = free_port()
    with process(repository, port, child_environment, "--log-format=json") as server:
        until(port, "/readyz", server)
        release(port, "start", version=3, weight="50%", alias="b", sticky="header:X-User", log=True)
        served = {
            f"r{number}": _version(port, headers={"X-User": f"secret-{number}"}, id=f"r{number}")
            for number in range(20)
        }
        server.terminate()
        assert server.stderr is not None
        log = server.stderr.read()
    rows = [json.loads(line) for line in log.splitlines() if "assignment" in line]
    assert {row["request"]: row["version"] for row in rows} == served
    assert {row["arm"] for row in rows} == {"stable", "b"}
    assert len({row["client"] for row in rows}) == len(served)
    assert "secret-" not in log


def test_a_swap_of_the_primary_under_a_canary_keeps_the_release(
    repository: Path, child_environment: dict[str, str]
) -> None:
    with release_server(repository, child_environment, "--model-control-mode=poll", "--repository-poll-secs=1") as port:
        release(port, "start", version=3, weight="50%")
        file = repository / "m" / "2" / "model.py"
        replace(file, file.read_text().replace("self.factor = 2", "self.factor = 20"))

        eventually(lambda: {infer(port)[0] for _ in range(20)} == {3, 20})
        status = release(port)
        assert [(arm["version"], arm["weight"], arm["ready"]) for arm in status["arms"]] == [
            (2, 50.0, True),
            (3, 50.0, True),
        ]
        assert len(status["events"]) == 1
