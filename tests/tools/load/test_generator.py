"""Process of the load generator, by its lines on stdin and stdout."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from remora.messages import Tensor
from remora.proto.inference_pb2 import ModelInferRequest
from remora_tools.client.inputs import InferRequest
from remora_tools.load import MOST_WAITING, Plan, results_from_json
from remora_tools.load.generator import SEQUENCE_ID, message_of, wake_ns
from remora_tools.load.requests import grpc_message, in_sequence

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
MESSAGE = b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"


def plan(port: int, **changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "protocol": "http", "host": "127.0.0.1", "port": port, "tls": False, "messages": (MESSAGE,), "connections": 1,
        "rate_per_s": 0.0, "shape": "poisson", "seed": 1, "part": 0, "parts": 1, "sequence": 0,
        "window_ns": 100_000_000, "timeout_s": 60.0,
    }  # fmt: skip
    return Plan(**(fields | changes))


@contextmanager
def generator(settings: Plan, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "remora_tools.load.generator"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings.to_json()) + "\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.communicate()


def begin(process: subprocess.Popen[str]) -> Iterator[str]:
    """Let the generator begin, and return its lines."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write(f"{time.monotonic_ns()}\n")
    process.stdin.flush()
    return iter(process.stdout.readline, "")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_windows_follow_until_stdin_ends(listener: socket.socket, child_environment: dict[str, str]) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(ConnectionError):  # the generator may close with an answer unread
            while connection.recv(1000):
                connection.sendall(ANSWER)

    thread = threading.Thread(target=serve)
    thread.start()
    with generator(plan(listener.getsockname()[1]), child_environment) as process:
        lines = begin(process)
        windows = []
        while len(windows) < 2 or not any(window.latency.count for window in windows):  # the test's timeout ends this
            windows.append(results_from_json(json.loads(next(lines))))
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
        process.stdin = None
    thread.join()
    assert all(window.seconds >= 0.1 and not window.failures for window in windows)


@pytest.mark.parametrize("seed", [0, 1, (1 << 22) - 1, 1 << 40])
def test_an_id_in_a_message_of_grpc_is_replaced_by_one_of_64_bits(seed: int) -> None:
    request = in_sequence(InferRequest((Tensor("x", "INT32", np.ones(1, "i4")),)), 3)[0]
    settings = plan(1, protocol="grpc", messages=(grpc_message("m", "", request),) * 3, seed=seed, sequence=3)
    ids = [_sequence_id(message_of(settings, number, position)) for number in (0, 5) for position in (0, 2, 3, 5)]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert len(set(ids)) == 4
    assert all(SEQUENCE_ID <= id_ < 1 << 63 for id_ in ids)


def _sequence_id(message: bytes) -> int:
    return int(ModelInferRequest.FromString(message).parameters["sequence_id"].int64_param)


def test_an_answer_that_never_comes_is_a_timeout(listener: socket.socket, child_environment: dict[str, str]) -> None:
    settings = plan(listener.getsockname()[1], timeout_s=0.2)
    with generator(settings, child_environment) as process:
        lines = begin(process)
        failures: dict[str, int] = {}
        while not failures:  # the test's timeout ends this
            failures = results_from_json(json.loads(next(lines))).failures
    assert set(failures) == {"timeout"}


def test_a_server_that_is_absent_is_reported(child_environment: dict[str, str]) -> None:
    with generator(plan(1), child_environment) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"error": "cannot connect to 127.0.0.1:1: Connection refused"}
        assert process.wait(60) == 1


@pytest.mark.parametrize(
    ("now", "due", "waiting", "expected"),
    [
        (5, 30, 0, 10),  # before the begin
        (20, 30, 0, 30),
        (20, 15, 1, 15),  # late, and there is room for it
        (20, 15, MOST_WAITING, 110),  # late, but it has to wait for an answer
        (20, 200, 0, 110),
        (20, None, 0, 110),
    ],
)
def test_the_generator_wakes_when_it_can_act(now: int, due: int | None, waiting: int, expected: int) -> None:
    assert wake_ns(now, 10, 110, due, waiting) == expected


def test_a_full_backlog_takes_no_processor(listener: socket.socket, child_environment: dict[str, str]) -> None:
    """A busy machine only lowers the share of a processor, so that the limit holds at any speed."""
    settings = plan(listener.getsockname()[1], rate_per_s=1e6, timeout_s=300.0)
    with generator(settings, child_environment) as process:
        windows = (results_from_json(json.loads(line)) for line in begin(process))
        full = (window for window in windows if window.waiting == MOST_WAITING)  # the test's timeout ends this
        next(full)  # in which the backlog may have grown
        assert next(full).cpu < 0.5
