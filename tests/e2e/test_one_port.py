"""REST and gRPC on one port of a real process: Triton's clients for both, long messages, streams, cancels, the end."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import RunningServer, Serving, free_ports, wait_until_ready
from support.servers.hosting import ask

grpcio = pytest.importorskip("grpc", reason="needs grpcio: pip install '.[dev]'")
grpc = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]: pip install '.[dev]'")
http = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]: pip install '.[dev]'")

PATIENCE_S = 60.0
FLAGS = ("--allow-grpc=false", "--grpc-on-http-port=true", "--backend-config=python,isolation=thread")
LONG = np.random.default_rng(0).integers(0, 2**31, (20 << 20) // 4, np.int32)
CONFIG = """
backend: "python"
input {{ name: "IN" data_type: TYPE_INT32 dims: -1 }}
output {{ name: "OUT" data_type: TYPE_INT32 dims: -1 }}
{more}
"""
ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(request.inputs()[0].as_numpy()[0])):
                if request.is_cancelled():
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
WAIT = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            with open({begun!r}, "w") as begun:  # the test reads it
                begun.write("x")
            while not request.is_cancelled() and not os.path.exists({gate!r}):
                time.sleep(0.005)
            with open({ended!r}, "w") as ended:
                ended.write("cancelled" if request.is_cancelled() else "answered")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


def write(repository: Path, name: str, code: str, more: str = "") -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(more=more))
    (repository / name / "1" / "model.py").write_text(code)


def write_waiting(repository: Path, place: Path) -> dict[str, Path]:
    """A model that waits for a file, and tells by named pipes when it began and how it ended."""
    import os

    paths = {word: place / word for word in ("begun", "ended", "gate")}
    for word in ("begun", "ended"):
        os.mkfifo(paths[word])
    write(repository, "wait", WAIT.format(**{word: str(path) for word, path in paths.items()}))
    return paths


@pytest.fixture(scope="module")
def server(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("one-port")
    write(repository, "echo", ECHO)
    write(repository, "count", COUNT, "model_transaction_policy { decoupled: true }")
    with serving(repository, *FLAGS) as running:
        yield running


def inputs(kind: Any, values: Any) -> list[Any]:
    tensor = kind.InferInput("IN", values.shape, "INT32")
    tensor.set_data_from_numpy(values)
    return [tensor]


def test_both_clients_are_answered_and_nothing_else_listens(server: RunningServer) -> None:
    values = np.arange(5, dtype=np.int32)
    for kind in (http, grpc, http):
        with kind.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
            assert client.is_server_ready()
            assert client.infer("echo", inputs(kind, values)).as_numpy("OUT").tolist() == values.tolist()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.grpc))


def test_messages_of_twenty_megabytes_pass_both_ways(server: RunningServer) -> None:
    for kind in (grpc, http):
        with kind.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
            np.testing.assert_array_equal(client.infer("echo", inputs(kind, LONG)).as_numpy("OUT"), LONG)


def test_a_stream_gives_all_its_answers(server: RunningServer) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        client.start_stream(lambda result, error: answers.put(error or int(result.as_numpy("OUT")[0])))
        client.async_stream_infer("count", inputs(grpc, np.array([500], np.int32)))
        assert [answers.get(timeout=PATIENCE_S) for _ in range(500)] == list(range(500))
        client.stop_stream()


def test_many_clients_of_both_kinds_at_once(server: RunningServer) -> None:
    wrong: list[Any] = []

    def ask_often(kind: Any, number: int) -> None:
        try:
            with kind.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
                for turn in range(40):
                    values = np.full(1 + 257 * turn, number * 1000 + turn, np.int32)
                    if not np.array_equal(client.infer("echo", inputs(kind, values)).as_numpy("OUT"), values):
                        wrong.append((kind.__name__, number, turn))
        except Exception as error:
            wrong.append((kind.__name__, number, str(error)))

    threads = [threading.Thread(target=ask_often, args=(kind, n)) for n in range(3) for kind in (http, grpc)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []


def test_a_cancelled_call_is_cancelled_in_the_model(serving: Serving, tmp_path: Path) -> None:
    paths = write_waiting(tmp_path / "models", tmp_path)
    with (
        serving(tmp_path / "models", *FLAGS) as running,
        grpc.InferenceServerClient(f"127.0.0.1:{running.http}") as client,
    ):
        done: queue.Queue[Any] = queue.Queue()
        call = client.async_infer(
            "wait", inputs(grpc, np.ones(1, np.int32)), lambda result, error: done.put((result, error))
        )
        assert paths["begun"].read_text() == "x"
        call.cancel()
        assert paths["ended"].read_text() == "cancelled"
        assert "CANCELLED" in str(done.get(timeout=PATIENCE_S)[1].status())


def test_what_is_under_way_at_sigterm_is_answered(tmp_path: Path, child_environment: dict[str, str]) -> None:
    paths = write_waiting(tmp_path / "models", tmp_path)
    (port,) = free_ports(1)
    log = tmp_path / "log.txt"
    words = [sys.executable, "-m", "remora", "serve", str(tmp_path / "models"), f"--http-port={port}", *FLAGS]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, "--allow-metrics=false"], stdout=output, stderr=output, env=child_environment
        )
    try:
        wait_until_ready(process, port, log)
        with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            done: queue.Queue[Any] = queue.Queue()
            client.async_infer(
                "wait", inputs(grpc, np.ones(1, np.int32)), lambda result, error: done.put((result, error))
            )
            assert paths["begun"].read_text() == "x"
            process.send_signal(signal.SIGTERM)
            while b"in-flight requests" not in log.read_bytes():
                assert process.poll() is None
            paths["gate"].touch()
            assert paths["ended"].read_text() == "answered"
            result, error = done.get(timeout=PATIENCE_S)
            assert error is None, error
            assert result.as_numpy("OUT").tolist() == [1]
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_messages_beyond_the_limit_are_refused_and_others_go_on(serving: Serving, tmp_path: Path) -> None:
    write(tmp_path / "models", "echo", ECHO)
    small, large = np.ones(1000, np.int32), np.ones(300_000, np.int32)
    with (
        serving(tmp_path / "models", *FLAGS, "--http-max-input-size=1000000") as running,
        grpc.InferenceServerClient(f"127.0.0.1:{running.http}") as client,
    ):
        for _ in range(2):
            with pytest.raises(Exception, match="larger than max"):
                client.infer("echo", inputs(grpc, large))
            assert client.infer("echo", inputs(grpc, small)).as_numpy("OUT").tolist() == small.tolist()


def without(tmp_path: Path, *packages: str) -> str:
    """A path for Python on which packages cannot be imported."""
    (tmp_path / "hidden").mkdir()
    for package in packages:
        (tmp_path / "hidden" / f"{package}.py").write_text(f"raise ImportError('No module named {package}')")
    root = Path(__file__).resolve().parents[2]
    return f"{tmp_path / 'hidden'}:{root / 'core'}:{root / 'adapters'}"


def test_without_its_package_clients_of_http2_are_refused_and_the_log_says_so_once(
    serving: Serving, tmp_path: Path
) -> None:
    write(tmp_path / "models", "echo", ECHO)
    flags = (*FLAGS, "--allow-grpc=true")
    with serving(tmp_path / "models", *flags, PYTHONPATH=without(tmp_path, "hpack")) as running:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", running.http)) as client:
                client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                said = b"".join(iter(lambda: client.recv(4096), b""))
            assert b"\0\0\0\x0dgRPC is off" in said  # HTTP_1_1_REQUIRED
            assert ask(running.http, "GET", "/v2/health/ready").status == 200
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", running.grpc))
        assert running.log.read_text().count("gRPC is off") == 1


def test_without_grpcio_grpc_and_its_reflection_are_served(serving: Serving, tmp_path: Path) -> None:
    write(tmp_path / "models", "echo", ECHO)
    values = np.arange(5, dtype=np.int32)
    flags = (*FLAGS, "--allow-grpc=true")
    with serving(tmp_path / "models", *flags, PYTHONPATH=without(tmp_path, "grpc", "grpc_reflection")) as running:
        for port in (running.http, running.grpc):
            with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
                assert client.infer("echo", inputs(grpc, values)).as_numpy("OUT").tolist() == values.tolist()
            with grpcio.insecure_channel(f"127.0.0.1:{port}") as channel:
                path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
                (listed,) = channel.stream_stream(path)(iter([b":\0"]), timeout=PATIENCE_S)  # list_services
                assert b"inference.GRPCInferenceService" in listed
                health = channel.unary_unary("/grpc.health.v1.Health/Check")
                assert health(b"", timeout=PATIENCE_S) == b"\x08\x01"


def test_a_restriction_of_http_holds_for_grpc_on_its_port(serving: Serving, tmp_path: Path) -> None:
    write(tmp_path / "models", "echo", ECHO)
    values = np.ones(1, np.int32)
    with (
        serving(tmp_path / "models", *FLAGS, "--http-restricted-api=inference:key=secret") as running,
        grpc.InferenceServerClient(f"127.0.0.1:{running.http}") as client,
    ):
        with pytest.raises(Exception, match="restricted"):
            client.infer("echo", inputs(grpc, values))
        answer = client.infer("echo", inputs(grpc, values), headers={"triton-grpc-protocol-key": "secret"})
        assert answer.as_numpy("OUT").tolist() == [1]


@pytest.mark.parametrize("transport", ["own", "grpcio"])
def test_both_ports_of_grpc_have_the_same_restrictions_and_limits(
    serving: Serving, tmp_path: Path, transport: str
) -> None:
    write(tmp_path / "models", "echo", ECHO)
    flags = (
        f"--grpc-transport={transport}",
        "--grpc-on-http-port=true",
        "--http-restricted-api=inference:key=secret",
        "--http-max-input-size=1000000",
        "--backend-config=python,isolation=thread",
    )
    key = {"triton-grpc-protocol-key": "secret"}
    with serving(tmp_path / "models", *flags) as running:
        for port in (running.grpc, running.http):
            with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
                with pytest.raises(Exception, match="restricted"):
                    client.infer("echo", inputs(grpc, np.ones(1, np.int32)))
                answer = client.infer("echo", inputs(grpc, np.ones(1, np.int32)), headers=key)
                assert answer.as_numpy("OUT").tolist() == [1]
                with pytest.raises(Exception, match="larger than max"):
                    client.infer("echo", inputs(grpc, np.ones(300_000, np.int32)), headers=key)
        assert ask(running.http, "GET", "/v2/health/ready").status == 200


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--grpc-use-ssl=true",), "leave --grpc-use-ssl out"),
        (("--allow-http=false",), "there is no such port"),
        (("--grpc-transport=grpcio",), "grpc-transport=grpcio serves gRPC's separate port alone"),
        (("--grpc-restricted-protocol=nonsense",), "grpc-restricted-protocol"),
    ],
)
def test_options_that_exclude_one_port_are_refused_at_the_start(
    flags: tuple[str, ...], why: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    write(tmp_path / "models", "echo", ECHO)
    words = [sys.executable, "-m", "remora", "serve", str(tmp_path / "models"), "--http-port=0", *FLAGS, *flags]
    ended = subprocess.run(words, capture_output=True, text=True, env=child_environment, timeout=PATIENCE_S)
    assert ended.returncode != 0
    assert why in ended.stderr
