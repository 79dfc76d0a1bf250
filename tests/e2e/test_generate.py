"""Streams, deadlines and clients that hang up against a real server, with a model that does what the test tells it.

The model connects to the test and obeys one byte at a time, so that nothing here waits for the time to pass.
"""

from __future__ import annotations

import http.client
import json
import select
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing

import pytest

from conftest import RunningServer, Serving
from support.process.eventually import eventually
from support.servers.live_server import reset_at_close

PATIENCE_S = 60.0

CONFIG = """
backend: "python"
input { name: "PORT" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
instance_group { kind: KIND_CPU count: 1 }
"""
TALK = """
import socket
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.talk, args=(request, request.get_response_sender())).start()
        return None

    def talk(self, request, sender):
        port = int(pb_utils.get_input_tensor_by_name(request, "PORT").as_numpy()[0])
        count = 0
        with socket.create_connection(("127.0.0.1", port), timeout=60) as orders:
            while True:
                order = orders.recv(1)
                if order == b"e":
                    out = pb_utils.Tensor("OUT", np.array([count], np.int32))
                    sender.send(pb_utils.InferenceResponse([out]))
                    count += 1
                elif order == b"c":
                    orders.sendall(b"1" if sender.is_cancelled() else b"0")
                else:
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                    return
"""
HOLD = """
import socket

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            port = int(pb_utils.get_input_tensor_by_name(request, "PORT").as_numpy()[0])
            with socket.create_connection(("127.0.0.1", port), timeout=60) as orders:
                orders.recv(1)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([7], np.int32))]))
        return answers
"""


@pytest.fixture(scope="module")
def server(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`talk` streams as its request says; `hold` answers when the test lets it."""
    repository = tmp_path_factory.mktemp("generate")
    for name, code, more in (
        ("talk", TALK, "model_transaction_policy { decoupled: true }"),
        ("hold", HOLD, ""),
    ):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(CONFIG + more)
        (repository / name / "1" / "model.py").write_text(code)
    with serving(repository, "--allow-grpc=false") as running:
        yield running


class Orders:
    """The test's end: models connect to `port`."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PATIENCE_S)
        self.port = self._listener.getsockname()[1]

    def accept(self) -> socket.socket:
        """The next model that begins."""
        model, _ = self._listener.accept()
        model.settimeout(PATIENCE_S)
        return model

    def fileno(self) -> int:
        """The descriptor that is readable when a model begins."""
        return self._listener.fileno()

    @property
    def none_waits(self) -> bool:
        self._listener.setblocking(False)
        try:
            self._listener.accept()[0].close()
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def orders() -> Iterator[Orders]:
    with closing(Orders()) as made:
        yield made


def body_of(port: int) -> bytes:
    return json.dumps({"PORT": port}).encode()


def connect(server: RunningServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.http, timeout=PATIENCE_S)


def event(number: int) -> bytes:
    return b'data: {"OUT":%d,"model_name":"talk","model_version":"1"}\n' % number


@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
def test_curl_sees_each_event_when_it_happens(server: RunningServer, orders: Orders, version: str) -> None:
    curl = shutil.which("curl") or pytest.skip("curl is not installed")
    url = f"http://127.0.0.1:{server.http}/v2/models/talk/generate_stream"
    command = [curl, "-sSN", "--fail", "-m", "60", version, "-d", body_of(orders.port).decode(), url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reader, orders.accept() as model:
        assert reader.stdout is not None
        for number in range(3):
            model.sendall(b"e")
            assert reader.stdout.readline() == event(number)
            assert reader.stdout.readline() == b"\n"
        model.sendall(b"f")
        assert reader.stdout.read() == b""
    assert reader.returncode == 0


def test_a_connection_serves_more_requests_after_a_stream(server: RunningServer, orders: Orders) -> None:
    with closing(connect(server)) as client:
        for _ in range(2):
            client.request("POST", "/v2/models/talk/generate_stream", body_of(orders.port))
            with orders.accept() as model:
                model.sendall(b"eef")
                answer = client.getresponse()
                assert answer.getheader("Content-Type") == "text/event-stream; charset=utf-8"
                assert answer.read() == event(0) + b"\n" + event(1) + b"\n"
        client.request("GET", "/v2/health/live")
        assert client.getresponse().status == 200


def test_a_client_that_hangs_up_stops_the_model(server: RunningServer, orders: Orders) -> None:
    client = connect(server)
    client.request("POST", "/v2/models/talk/generate_stream", body_of(orders.port))
    with orders.accept() as model:
        model.sendall(b"e")
        answer = client.getresponse()
        assert answer.readline() == event(0)
        model.sendall(b"c")
        assert model.recv(1) == b"0"
        answer.close()
        client.close()
        eventually(lambda: ask(model))
        model.sendall(b"ef")  # what it says now goes nowhere
    with closing(connect(server)) as other:
        other.request("GET", "/v2/health/live")
        assert other.getresponse().status == 200


def ask(model: socket.socket) -> bool:
    """Whether the model sees that it is cancelled."""
    model.sendall(b"c")
    return model.recv(1) == b"1"


def test_clients_that_hang_up_while_they_wait_are_not_served(server: RunningServer, orders: Orders) -> None:
    with closing(connect(server)) as first, closing(Orders()) as others:
        first.request("POST", "/v2/models/hold/generate", body_of(orders.port))
        with orders.accept() as model:
            leaving = [connect(server) for _ in range(20)]
            for client in leaving:
                client.request("POST", "/v2/models/hold/generate", body_of(others.port))
            for client in leaving:
                reset_at_close(client.sock)
                client.close()
            with closing(connect(server)) as last:
                for _ in range(2):  # behind what the others did
                    last.request("GET", "/v2/health/live")
                    last.getresponse().read()
                model.sendall(b"f")
                assert json.loads(first.getresponse().read())["OUT"] == 7
                last.request("POST", "/v2/models/hold/generate", body_of(orders.port))
                with orders.accept() as model_again:
                    model_again.sendall(b"f")
                    assert json.loads(last.getresponse().read())["OUT"] == 7
        assert others.none_waits, "the model ran for a client that had left"


@pytest.mark.parametrize("path", ["generate", "generate_stream", "infer"])
def test_a_deadline_is_kept_while_the_model_runs(server: RunningServer, orders: Orders, path: str) -> None:
    tensor = {"name": "PORT", "datatype": "INT32", "shape": [1], "data": [orders.port]}
    body = json.dumps({"inputs": [tensor]}).encode() if path == "infer" else body_of(orders.port)
    with closing(connect(server)) as client, closing(Orders()) as others:
        for deadline_ms in (40, 400, 4_000, 40_000):  # a busy machine may need more time to begin the request
            client.request("POST", f"/v2/models/hold/{path}", body, {"X-Request-Timeout-Ms": str(deadline_ms)})
            answer = client.getresponse()
            assert answer.status == 503
            assert json.loads(answer.read()) == {"error": "[request id: <id_unknown>] Request timeout expired"}
            # The connection goes on; the answer that comes late must not be taken for the next request's.
            client.request("GET", "/v2/health/live")
            assert client.getresponse().read() == b""
            client.request("POST", "/v2/models/hold/generate", body_of(others.port))
            begun = select.select([orders, others], [], [], PATIENCE_S)[0]
            for each in begun if begun == [others] else (orders, others):
                with each.accept() as model:
                    model.sendall(b"f")
            assert json.loads(client.getresponse().read())["OUT"] == 7
            if begun != [others]:
                return
        pytest.fail("the model never ran a request with a deadline")


def test_what_still_waits_at_its_deadline_never_runs(server: RunningServer, orders: Orders) -> None:
    with closing(connect(server)) as first, closing(connect(server)) as second, closing(Orders()) as others:
        first.request("POST", "/v2/models/hold/generate", body_of(orders.port))
        with orders.accept() as model:
            deadline = {"X-Request-Timeout-Ms": "40"}
            second.request("POST", "/v2/models/hold/generate", body_of(others.port), deadline)
            assert second.getresponse().status == 503
            model.sendall(b"f")
        assert json.loads(first.getresponse().read())["OUT"] == 7
        first.request("POST", "/v2/models/hold/generate", body_of(orders.port))
        with orders.accept() as model:
            model.sendall(b"f")
        assert first.getresponse().status == 200
        assert others.none_waits, "the model ran for a refused request"


@pytest.mark.parametrize("path", ["generate", "generate_stream", "infer"])
def test_a_deadline_that_is_not_a_number_is_refused(server: RunningServer, path: str) -> None:
    with closing(connect(server)) as client:
        client.request("POST", f"/v2/models/hold/{path}", b"{}", {"X-Request-Timeout-Ms": "soon"})
        answer = client.getresponse()
        assert answer.status == 400
        assert b"X-Request-Timeout-Ms must be a whole number of milliseconds" in answer.read()
