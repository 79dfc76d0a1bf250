"""Nothing is lost: constant load by real clients, every answer checked, through hot swaps, polls, starts and SIGTERM.

`make soak` asks for more of each by REMORA_SOAK.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

import pytest

from conftest import free_ports
from support.servers.live_server import (
    BODY,
    PATIENCE_S,
    THREADS,
    ask,
    client,
    free_port,
    process,
    status_of,
    until,
    write_version,
)

SOAK = bool(os.environ.get("REMORA_SOAK"))
SWAPS = 100 if SOAK else 8
POLLS = 20 if SOAK else 2


class Load:
    """Clients that ask one after another, as behind a load balancer: they stop when the server is not ready.

    A client that a busy machine keeps from looking at /readyz for ``lame_duck_s`` may be refused.
    """

    def __init__(self, port: int, clients: int = 4, lame_duck_s: float = inf) -> None:
        self.port = port
        self.lame_duck_s = lame_duck_s
        self.versions: Counter[str] = Counter()
        self.wrong: list[object] = []
        self.answered = threading.Semaphore(0)
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads)

    def wait_for(self, answers: int) -> None:
        """Until so many more requests were answered."""
        for _ in range(answers):
            assert self.answered.acquire(timeout=PATIENCE_S), self.wrong

    def _run(self, first: int) -> None:
        with client(self.port) as connection:
            self._ask_on(connection, first)

    def _ask_on(self, connection: http.client.HTTPConnection, value: int) -> None:
        looked_s = time.monotonic()
        while not self._end.is_set() and not self.wrong:
            value += 1
            try:
                status, answer = ask(connection, value)
                version = answer.get("model_version", "0")
                if status != 200 or answer["outputs"][0]["data"] != [value * int(version)]:
                    self.wrong.append((status, answer))
                self.versions[version] += 1
            except (OSError, http.client.HTTPException, KeyError) as error:
                if self._end.is_set() or time.monotonic() - looked_s > self.lame_duck_s:
                    return
                self.wrong.append(repr(error))
            self.answered.release()
            if value % 8 == 0:
                looked_s = time.monotonic()
                if not self._is_ready():
                    self._end.set()

    def _is_ready(self) -> bool:
        try:
            return status_of(self.port, "/readyz") == 200
        except OSError:
            return False


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with version 1 of the model m."""
    path = tmp_path / "models"
    path.mkdir()
    write_version(path, 1)
    return path


def test_no_request_fails_while_versions_are_swapped(repository: Path, serving: Callable[..., Any]) -> None:
    explicit = ("--model-control-mode=explicit", "--load-model=m", *THREADS)
    with serving(repository, *explicit) as server, Load(server.http) as load:
        for version in range(2, SWAPS + 2):
            load.wait_for(10)
            write_version(repository, version)
            assert status_of(server.http, "/v2/repository/models/m/load", "POST") == 200
            assert status_of(server.http, "/v2/health/ready") == 200, "a load makes nothing unready"
            while not load.versions[str(version)] and not load.wrong:
                load.wait_for(1)
    assert not load.wrong
    print(f"{SWAPS} swaps: {sum(load.versions.values())} requests, {len(load.versions)} versions seen, none failed")
    assert len(load.versions) == SWAPS + 1, "the clients have seen all versions come and go"


def test_no_request_fails_while_the_repository_is_polled(repository: Path, serving: Callable[..., Any]) -> None:
    poll = ("--model-control-mode=poll", "--repository-poll-secs=1", *THREADS)
    with serving(repository, *poll) as server, Load(server.http) as load:
        for version in range(2, POLLS + 2):
            write_version(repository, version)
            while not load.versions[str(version)] and not load.wrong:
                load.wait_for(1)
    assert not load.wrong
    print(f"{POLLS} polls with a change: {sum(load.versions.values())} requests, none failed")


def test_no_request_fails_when_the_server_is_told_to_stop(repository: Path, serving: Callable[..., Any]) -> None:
    load: Load
    with serving(repository, "--lame-duck-secs=5", *THREADS) as server:  # in which clients must look at /readyz
        load = Load(server.http, lame_duck_s=5)
        load.__enter__()
        load.wait_for(50)
    load.__exit__()  # the server got SIGTERM, and has exited with 0 before this
    assert not load.wrong
    print(f"SIGTERM: {sum(load.versions.values())} requests, none failed")
    log = server.log.read_text()
    assert "not ready from now on, serving for 5 s more" in log
    assert "Found 0 model versions that have in-flight inferences" in log


def test_on_demand_no_request_fails_with_more_models_than_there_is_room_for(
    tmp_path: Path, serving: Callable[..., Any]
) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    names = [f"m{index}" for index in range(20 if SOAK else 8)]
    for name in names:
        write_version(repository, 1, name=name)
    size = (repository / "m0" / "1" / "model.py").stat().st_size
    budget = (f"--model-memory-budget={size * 2 * 5}", "--model-control-mode=ondemand", "--load-model=m0")
    with serving(repository, *budget, *THREADS) as server:

        def ask_around(first: int) -> list[tuple[int, Any]]:
            with client(server.http) as connection:
                order = [names[(first + index * 3) % len(names)] for index in range(3 * len(names))]
                return [ask(connection, value, name) for value, name in enumerate(order)]

        with ThreadPoolExecutor(4) as clients:
            replies = list(clients.map(ask_around, range(4)))
        print(f"on demand: {sum(map(len, replies))} requests to {len(names)} models with room for 5, none failed")
        for each in replies:
            assert [status for status, _ in each] == [200] * len(each)
            assert [reply["outputs"][0]["data"] for _, reply in each] == [[value] for value in range(len(each))]
        with client(server.http) as connection:
            connection.request("POST", "/v2/repository/index", '{"ready": true}')
            ready = [row["name"] for row in json.loads(connection.getresponse().read())]
        assert "m0" in ready, "it is pinned"
        assert len(ready) <= 5


# -- the process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gated(tmp_path: Path) -> tuple[Path, Path]:
    """A repository whose model cannot be loaded before the test writes into the FIFO beside it."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    path = tmp_path / "models"
    path.mkdir()
    write_version(path, 1, initialize=f"open({str(gate)!r}).read()")
    return path, gate


@pytest.fixture
def port() -> int:
    return free_port()


def test_requests_that_come_before_the_model_wait_for_it(
    gated: tuple[Path, Path], port: int, child_environment: dict[str, str]
) -> None:
    repository, gate = gated
    count = 200

    def early(value: int) -> tuple[int, Any]:
        with client(port) as connection:
            return ask(connection, value)

    with process(repository, port, child_environment) as server:
        until(port, "/livez", server)
        assert status_of(port, "/startupz") == 503
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/livez?verbose") as reply:
            assert b"waits for: the models of the start are being loaded" in reply.read()
        with ThreadPoolExecutor(count) as clients:
            answers = [clients.submit(early, value) for value in range(count)]
            assert not any(answer.done() for answer in answers)
            gate.write_text("go")
            replies = [answer.result(PATIENCE_S) for answer in answers]
        assert [status for status, _ in replies] == [200] * count
        assert [reply["outputs"][0]["data"] for _, reply in replies] == [[value] for value in range(count)]
        assert status_of(port, "/startupz") == 200
        assert status_of(port, "/readyz") == 200


def test_where_they_may_not_wait_early_requests_fail_at_once_and_the_server_is_alive_not_ready(
    gated: tuple[Path, Path], port: int, child_environment: dict[str, str]
) -> None:
    repository, gate = gated
    with process(repository, port, child_environment, "--wait-for-models=false") as server:
        until(port, "/livez", server)
        assert status_of(port, "/v2/health/live") == 200
        assert status_of(port, "/v2/health/ready") == 400
        assert status_of(port, "/readyz") == 503
        with client(port) as connection:
            assert ask(connection, 1)[0] == 404
        gate.write_text("go")
        until(port, "/readyz", server)


def test_a_request_waits_no_longer_than_its_own_deadline(
    gated: tuple[Path, Path], port: int, child_environment: dict[str, str]
) -> None:
    repository, _gate = gated
    with process(repository, port, child_environment) as server, client(port) as connection:
        until(port, "/livez", server)
        connection.request("POST", "/v2/models/m/infer", "{}", {"X-Request-Timeout-Ms": "50"})
        reply = connection.getresponse()
        assert (reply.status, b"the request waited for 0.05 s" in reply.read()) == (503, True)


def test_only_so_many_requests_may_wait(gated: tuple[Path, Path], port: int, child_environment: dict[str, str]) -> None:
    repository, _gate = gated
    with process(repository, port, child_environment, "--max-waiting-requests=1") as server:
        until(port, "/v2/health/live", server)  # the server itself: it reads one request after the other
        with client(port) as waiting, client(port) as refused:
            waiting.request("POST", "/v2/models/m/infer", "{}")
            status, answer = ask(refused, 1)
        assert (status, "1 wait for it" in answer["error"]) == (503, True), answer


@pytest.mark.parametrize("names", [("m",), ("m", "n")], ids=["one", "side-by-side"])
def test_a_server_that_is_told_to_stop_while_it_loads_ends_cleanly(
    gated: tuple[Path, Path], port: int, child_environment: dict[str, str], names: tuple[str, ...]
) -> None:
    repository, gate = gated
    for name in names[1:]:
        write_version(repository, 1, name=name, initialize=f"open({str(gate)!r}).read()")
    with process(repository, port, child_environment) as server:
        until(port, "/v2/health/live", server)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0


def test_requests_that_still_wait_at_the_end_of_the_stop_time_are_answered(
    gated: tuple[Path, Path], port: int, child_environment: dict[str, str]
) -> None:
    repository, _gate = gated
    flags = ("--max-waiting-requests=1", "--exit-timeout-secs=1")
    with process(repository, port, child_environment, *flags) as server, client(port) as waiting:
        until(port, "/v2/health/live", server)
        waiting.request("POST", "/v2/models/m/infer", BODY)
        with client(port) as refused:
            assert "1 wait for it" in ask(refused, 1)[1]["error"]
        server.send_signal(signal.SIGTERM)
        reply = waiting.getresponse()
        assert (reply.status, b"the server is stopping" in reply.read()) == (503, True)
        assert server.wait(PATIENCE_S) == 0


def test_a_load_that_a_client_asked_for_does_not_hold_up_the_end(
    gated: tuple[Path, Path], port: int, child_environment: dict[str, str]
) -> None:
    repository, gate = gated
    flags = ("--model-control-mode=explicit", "--exit-timeout-secs=1")
    with process(repository, port, child_environment, *flags) as server, client(port) as connection:
        until(port, "/readyz", server)
        connection.request("POST", "/v2/repository/models/m/load")
        with gate.open("w"):  # opens when the model reads: its load is under way
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_S) == 1


@pytest.mark.parametrize(
    ("transport", "stays"),
    [("own", True), ("own", False), ("grpcio", True)],
    ids=["own-client-stays", "own-client-goes", "grpcio-client-stays"],
)
def test_a_load_that_a_client_of_grpc_asked_for_does_not_hold_up_the_end_either(
    gated: tuple[Path, Path], child_environment: dict[str, str], transport: str, stays: bool
) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install '.[grpcio]'")
    from remora.proto import inference_pb2 as pb

    repository, gate = gated
    port, grpc_port = free_ports(2)
    flags = ("--model-control-mode=explicit", "--exit-timeout-secs=1", "--allow-grpc=true", f"--grpc-port={grpc_port}")
    message = pb.RepositoryModelLoadRequest(model_name="m").SerializeToString()
    with process(repository, port, child_environment, *flags, f"--grpc-transport={transport}") as server:
        until(port, "/readyz", server)
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            load = channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad").future(message)
            with gate.open("w"):  # opens when the model reads: its load is under way
                if not stays:
                    load.cancel()
                server.send_signal(signal.SIGTERM)
                assert server.wait(PATIENCE_S) == 1


def test_a_server_with_nothing_to_do_ends_in_order_without_any_time_for_it(
    repository: Path, port: int, child_environment: dict[str, str]
) -> None:
    with process(repository, port, child_environment, "--exit-timeout-secs=0") as server:
        until(port, "/readyz", server)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0


STUCK = "import threading, os; self.execute = lambda requests: open({gate!r}).read()"


@pytest.mark.parametrize("second_signal", [False, True], ids=["timeout", "second-signal"])
def test_what_never_ends_is_given_up_with_exit_code_1(
    tmp_path: Path, port: int, child_environment: dict[str, str], second_signal: bool
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    repository = tmp_path / "models"
    repository.mkdir()
    write_version(repository, 1, initialize=STUCK.format(gate=str(gate)))
    timeout = "--exit-timeout-secs=3600" if second_signal else "--exit-timeout-secs=1"
    with process(repository, port, child_environment, timeout) as server, client(port) as connection:
        until(port, "/readyz", server)
        connection.request("POST", "/v2/models/m/infer", BODY)
        with gate.open("w"):  # opens when the model reads: its request is under way
            server.send_signal(signal.SIGTERM)
            assert server.stderr is not None
            line = next(line for line in server.stderr if "model versions that have in-flight inferences" in line)
            assert "Found 1 model versions" in line
            assert "Model 'm' (version 1) has 1 in-flight inferences" in next(server.stderr)
            if second_signal:
                server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_S) == 1
            rest = server.stderr.read()
    assert ("a second signal came" if second_signal else "Exit timeout expired. Exiting immediately.") in rest


def test_in_its_lame_duck_time_a_server_is_not_ready_and_serves_all_that_comes(
    repository: Path, port: int, child_environment: dict[str, str]
) -> None:
    with process(repository, port, child_environment, "--lame-duck-secs=3600") as server:
        until(port, "/readyz", server)
        server.send_signal(signal.SIGTERM)
        until(port, "/readyz", server, 503)
        assert status_of(port, "/v2/health/ready") == 503
        assert status_of(port, "/v2/health/live") == 200
        assert status_of(port, "/livez") == 200
        with client(port) as connection:
            connection.request("POST", "/v2/models/m/infer", BODY.replace("[0]", "[7]"))
            reply = connection.getresponse()
            assert (reply.status, reply.getheader("Connection")) == (200, "close")
            assert json.loads(reply.read())["outputs"][0]["data"] == [7]
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 1, "the second signal ends it at once"
