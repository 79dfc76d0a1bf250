"""How a server process ends: in time whatever hangs, and without losing a request that it could still answer."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from conftest import EXTRA_FLAGS
from remora.server.http.exchange import SILENCE_S
from support.process.eventually import eventually
from support.servers.live_server import BODY, PATIENCE_S, client, free_port, process, status_of, until, write_version

HANGS = "open({gate!r}).read()"
LATE = (
    "[__import__('threading').Thread(target=lambda sender: (open({gate!r}).read(), "
    "sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)), args=(request.get_response_sender(),)).start() "
    "for request in requests] and None"
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


def write_hanging(repository: Path, name: str) -> Path:
    """A model whose load waits for the pipe that this returns; opening it waits for the load to begin."""
    gate = repository.parent / f"{name}.gate"
    os.mkfifo(gate)
    write_version(repository, 1, name=name, initialize=HANGS.format(gate=str(gate)))
    return gate


def test_more_hung_loads_than_the_loop_has_threads_hold_up_neither_calls_nor_the_end(
    repository: Path, child_environment: dict[str, str]
) -> None:
    names = [f"m{index}" for index in range((os.cpu_count() or 1) + 4 + 2)]
    gates = {name: write_hanging(repository, name) for name in names}
    port = free_port()
    flags = ("--model-control-mode=explicit", "--exit-timeout-secs=2")
    with process(repository, port, child_environment, *flags) as server, ExitStack() as stack:
        until(port, "/readyz", server)
        for name in names:
            connection = stack.enter_context(client(port))
            connection.request("POST", f"/v2/repository/models/{name}/load")
        for gate in gates.values():
            stack.enter_context(gate.open("w"))  # each load is under way
        assert status_of(port, "/v2/repository/index", "POST") == 200
        assert status_of(port, "/v2/status") == 200
        assert status_of(port, "/v2/docs") == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 1


def infer_bytes() -> bytes:
    return b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
        len(BODY),
        BODY.encode(),
    )


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(4096), b""))


def answer_or_nothing(connection: socket.socket) -> bytes:
    try:
        return read_all(connection)
    except ConnectionError:
        return b""


def test_a_hangup_ends_the_server_as_sigterm_does(repository: Path, child_environment: dict[str, str]) -> None:
    write_version(repository, 1)
    port = free_port()
    outside = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a child inherits that it is ignored, as under nohup
    try:
        with process(repository, port, child_environment) as server:
            until(port, "/readyz", server)
            server.send_signal(signal.SIGHUP)
            assert server.stderr is not None
            assert any("Waiting for in-flight requests" in line for line in server.stderr)
            assert server.wait(PATIENCE_S) == 0
    finally:
        signal.signal(signal.SIGHUP, outside)


@pytest.mark.parametrize("lame_duck", ["0", "1"])
def test_new_connections_are_served_when_the_server_is_told_to_stop(
    repository: Path, child_environment: dict[str, str], lame_duck: str
) -> None:
    write_version(repository, 1)

    def are_served() -> bool:
        port = free_port()
        flag = f"--lame-duck-secs={lame_duck}"
        with process(repository, port, child_environment, flag) as server, ExitStack() as stack:
            until(port, "/readyz", server)
            began_s = time.monotonic()
            fresh = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
                for _ in range(50)
            ]
            server.send_signal(signal.SIGTERM)
            assert server.stderr is not None
            next(line for line in server.stderr if "Waiting for in-flight requests" in line)
            for connection in fresh:
                with suppress(ConnectionError):  # its answer is missing
                    connection.sendall(infer_bytes())
            took_s = time.monotonic() - began_s
            answers = [answer_or_nothing(connection) for connection in fresh]
            served = all(answer.startswith(b"HTTP/1.1 200 OK") and b"Connection: close" in answer for answer in answers)
            assert served or took_s > SILENCE_S, answers
            assert server.wait(PATIENCE_S) == 0
        return served

    assert eventually(are_served)  # a busy machine may send too late


def test_under_load_no_request_of_a_new_connection_is_lost_at_the_end(
    repository: Path, child_environment: dict[str, str]
) -> None:
    write_version(repository, 1)
    port = free_port()
    answered, lost = threading.Semaphore(0), list[object]()

    def ask_on() -> None:
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
            except ConnectionRefusedError:  # from now on nothing listens
                return
            with connection:
                try:
                    connection.sendall(
                        infer_bytes().replace(b"Host: localhost", b"Host: localhost\r\nConnection: close")
                    )
                    answer = read_all(connection)
                    if not answer.startswith(b"HTTP/1.1 200 OK"):
                        lost.append(answer)
                except OSError as error:
                    lost.append(repr(error))
            answered.release()

    with process(repository, port, child_environment) as server:
        until(port, "/readyz", server)
        clients = [threading.Thread(target=ask_on) for _ in range(16)]
        for each in clients:
            each.start()
        for _ in range(500):
            assert answered.acquire(timeout=PATIENCE_S)
        server.send_signal(signal.SIGTERM)
        for each in clients:
            each.join(PATIENCE_S)
        assert not lost
        assert server.wait(PATIENCE_S) == 0


def test_idle_connections_beyond_the_descriptors_do_not_lock_out_others(
    repository: Path, child_environment: dict[str, str]
) -> None:
    write_version(repository, 1)
    port = free_port()
    with process(repository, port, child_environment, "--allow-metrics=true") as server, ExitStack() as stack:
        until(port, "/readyz", server)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (96, 96))
        for _ in range(150):
            with suppress(ConnectionResetError):  # connect() itself may fail so when the server sheds the connection
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
        until(port, "/v2/models/m", server)
        with client(port) as connection:
            connection.request("GET", "/v2/metrics")  # imports the page's modules now, which needs descriptors
            (count,) = re.findall(rb'remora_open_connections{protocol="http1"} (\d+)', connection.getresponse().read())
            assert 1 < int(count) < 96
        server.send_signal(signal.SIGTERM)
        assert server.stderr is not None
        log = server.stderr.read()
        warnings = log.count("Raise the limit of open files (ulimit -n)")
        assert warnings == 1 or (EXTRA_FLAGS and not warnings), log  # fronts take the connections, perhaps in time
        assert server.wait(PATIENCE_S) == 0


def test_a_failed_start_ends_with_its_reason_given_once(repository: Path, child_environment: dict[str, str]) -> None:
    for name in ("bad", "good"):
        write_version(repository, 1, name=name, initialize="raise ValueError('no good')" if name == "bad" else "pass")
    with process(repository, free_port(), child_environment) as server:
        assert server.stderr is not None
        log = server.stderr.read()
        assert server.wait(PATIENCE_S) == 1
    assert log.count("no good") == 1
    last = log.splitlines()[-1]
    assert last.endswith("cannot start: 'bad' could not be loaded; --exit-on-error=false serves the models that can be")


def test_an_open_stream_is_in_flight_until_it_ends(repository: Path, child_environment: dict[str, str]) -> None:
    gate = repository.parent / "gate"
    os.mkfifo(gate)
    write_version(repository, 1, initialize=f"self.execute = lambda requests: {LATE.format(gate=str(gate))}")
    with (repository / "m" / "config.pbtxt").open("a") as config:
        config.write("model_transaction_policy { decoupled: true }")
    port = free_port()
    with process(repository, port, child_environment) as server, client(port) as connection:
        until(port, "/readyz", server)
        connection.request("POST", "/v2/models/m/generate_stream", '{"IN": [[0]]}')
        with gate.open("w"):  # opens when the model's own thread reads: execute has returned, the stream is open
            server.send_signal(signal.SIGTERM)
            assert server.stderr is not None
            next(line for line in server.stderr if "Model 'm' (version 1) has 1 in-flight inferences" in line)
        assert connection.getresponse().status == 200
        assert server.wait(PATIENCE_S) == 0
