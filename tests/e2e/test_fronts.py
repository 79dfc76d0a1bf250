"""A server with front processes: what a front, its clients and the engine's process may do to each other."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from conftest import free_ports
from support.process.eventually import eventually
from support.servers.live_server import (
    BODY,
    PATIENCE_S,
    ask,
    client,
    free_port,
    process,
    status_of,
    until,
    write_version,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="front processes need Linux")

FRONTS = "--frontends=2"
METRICS = "--allow-metrics=true"
GATED = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN")
            if value.as_numpy().item() < 0:
                open({began!r}, "w").close()
                while not request.is_cancelled() and not __import__("os").path.exists({gate!r}):
                    __import__("time").sleep(0.01)
                if request.is_cancelled():
                    open({cancelled!r}, "w").close()
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each.as_numpy())]) for each in inputs]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


def fronts_of(server: subprocess.Popen[str]) -> list[int]:
    """The process ids of a server's fronts."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    named = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, line in named.items() if b"remora front " in line]


def owner_of(connection: socket.socket, server: subprocess.Popen[str]) -> int:
    """Wait until a front has taken over a connection, and return it."""
    return eventually(lambda: owner_now(connection, server), process=server)


def owner_now(connection: socket.socket, server: subprocess.Popen[str]) -> int:
    """Return the front that owns a connection, or 0."""
    local, remote = connection.getsockname()[1], connection.getpeername()[1]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = (f":{remote:04X}", f":{local:04X}")
    inode = next((row[9] for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1])), "0")
    for pid in fronts_of(server):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(fd) == f"socket:[{inode}]":
                    return pid
            except FileNotFoundError:
                continue
    return 0


def appears(path: Path) -> None:
    """Wait until a model has written a file."""
    eventually(path.exists)


def write_gated(repository: Path) -> dict[str, Path]:
    """Write a model that answers a negative number only after its gate is there, or after a cancellation."""
    write_version(repository, 1)
    files = {name: repository.parent / name for name in ("began", "gate", "cancelled")}
    (repository / "m" / "1" / "model.py").write_text(GATED.format(**{name: str(path) for name, path in files.items()}))
    return files


def metric(port: int, name: str) -> float:
    with client(port) as connection:
        connection.request("GET", "/v2/metrics")
        page = connection.getresponse().read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE))


def until_alone(port: int, server: subprocess.Popen[str]) -> None:
    """Wait until no connection counts but the one that asks; a closed one counts until its front has reported it."""
    eventually(lambda: metric(port, "remora_open_connections") == 1, process=server)


def test_connections_spread_evenly_and_any_front_shows_the_whole_server(
    repository: Path, child_environment: dict[str, str]
) -> None:
    write_version(repository, 3)
    port = free_port()
    with process(repository, port, child_environment, FRONTS, METRICS) as server, ExitStack() as stack:
        until(port, "/readyz", server)
        until_alone(port, server)
        clients = [stack.enter_context(client(port)) for _ in range(8)]
        for value, each in enumerate(clients):
            assert ask(each, value)[1]["outputs"][0]["data"] == [3 * value]
        owners = Counter(owner_of(each.sock, server) for each in clients)
        # The connection that read the metrics may count for a moment after it was closed.
        assert sorted(owners.values()) in ([4, 4], [3, 5])
        for each in (clients[0], clients[1]):
            each.request("GET", "/v2/models/m/stats")
            (stats,) = json.loads(each.getresponse().read())["model_stats"]
            assert stats["inference_stats"]["success"]["count"] == 8
            each.request("GET", "/v2/health/ready")
            assert each.getresponse().read() == b""


def test_a_front_that_is_killed_takes_its_own_connections_and_their_requests_along(
    repository: Path, child_environment: dict[str, str]
) -> None:
    files = write_gated(repository)
    port = free_port()
    with process(repository, port, child_environment, FRONTS, METRICS) as server, ExitStack() as stack:
        until(port, "/readyz", server)
        until_alone(port, server)
        waiting, *others = (stack.enter_context(client(port)) for _ in range(5))
        for each in others:
            each.connect()
        waiting.request("POST", "/v2/models/m/infer", BODY.replace("[0]", "[-1]"))
        appears(files["began"])
        victim = owner_of(waiting.sock, server)
        other = next(each for each in others if owner_of(each.sock, server) != victim)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            waiting.getresponse()
        appears(files["cancelled"])  # the engine has cancelled the request, and its instance is free again
        assert ask(other, 7)[0] == 200
        assert server.stderr is not None
        assert any("is started again" in line for line in server.stderr)
        with client(port) as again:
            assert ask(again, 8)[0] == 200
        eventually(lambda: len(fronts := fronts_of(server)) == 2 and victim not in fronts, process=server)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0


def test_the_fronts_end_with_a_clear_line_when_the_engine_dies(
    repository: Path, child_environment: dict[str, str]
) -> None:
    write_version(repository, 1)
    port = free_port()
    with process(repository, port, child_environment, FRONTS) as server:
        until(port, "/readyz", server)
        fronts = fronts_of(server)
        watched = [os.pidfd_open(pid) for pid in fronts]
        server.kill()
        assert server.stderr is not None
        text = server.stderr.read()  # ends when no process has the stream any more
        assert text.count("the engine's process has ended") == 2
        for fd in watched:
            assert select.select([fd], [], [], PATIENCE_S)[0], "a front has not ended"
            os.close(fd)


def test_a_front_that_cannot_start_ends_the_server(repository: Path, child_environment: dict[str, str]) -> None:
    write_version(repository, 1)
    broken = repository.parent / "broken" / "uvloop"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(
        "import sys\nif any('remora front' in word for word in sys.argv): raise SystemExit('uvloop is broken')\n"
        "raise ImportError\n"
    )
    environment = {**child_environment, "PYTHONPATH": str(broken.parent)}
    with process(repository, free_port(), environment, FRONTS) as server:
        assert server.wait(PATIENCE_S) == 1
        assert server.stderr is not None
        text = server.stderr.read()
        assert "uvloop is broken" in text
        assert "--frontends=2: front process 0 did not start" in text


@pytest.mark.parametrize("value", ["two", "-1", "1.5", ""])
def test_a_number_of_fronts_that_is_none_is_refused(
    repository: Path, child_environment: dict[str, str], value: str
) -> None:
    write_version(repository, 1)
    with process(repository, free_port(), child_environment, f"--frontends={value}") as server:
        assert server.wait(PATIENCE_S) == 1
        assert server.stderr is not None
        text = server.stderr.read()
        assert text == f"remora serve: --frontends={value}: expected a number of processes, or auto\n"


def test_grpcio_is_refused_with_fronts(repository: Path, child_environment: dict[str, str]) -> None:
    write_version(repository, 1)
    flags = (FRONTS, "--allow-grpc=true", "--grpc-port=0", "--grpc-transport=grpcio")
    with process(repository, free_port(), child_environment, *flags) as server:
        assert server.wait(PATIENCE_S) == 1
        assert server.stderr is not None
        assert "--frontends: grpcio serves in one process" in server.stderr.read()


def test_a_client_that_does_not_read_its_answers_holds_up_no_other(
    repository: Path, child_environment: dict[str, str]
) -> None:
    write_version(repository, 1)
    port = free_port()
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
    with process(repository, port, child_environment, "--frontends=1") as server, socket.socket() as deaf:
        until(port, "/readyz", server)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        deaf.settimeout(0.5)
        flood = head % (len(BODY), BODY.encode()) * 100_000
        with pytest.raises(TimeoutError):  # the front reads no more of its pipelined requests
            deaf.sendall(flood)
        with client(port) as other:
            for value in range(50):
                assert ask(other, value)[0] == 200


def test_a_client_that_leaves_cancels_its_request(repository: Path, child_environment: dict[str, str]) -> None:
    files = write_gated(repository)
    port = free_port()
    with process(repository, port, child_environment, FRONTS) as server:
        until(port, "/readyz", server)
        with client(port) as leaving:
            leaving.request("POST", "/v2/models/m/infer", BODY.replace("[0]", "[-1]"))
            appears(files["began"])
        appears(files["cancelled"])
        with client(port) as other:
            assert ask(other, 5)[0] == 200


def test_more_connections_than_the_fronts_have_descriptors_are_served_one_after_the_other(
    repository: Path, child_environment: dict[str, str]
) -> None:
    write_version(repository, 1)
    port = free_port()
    with process(repository, port, child_environment, "--frontends=1", descriptors=256) as server, ExitStack() as stack:
        until(port, "/readyz", server)
        clients = [stack.enter_context(client(port)) for _ in range(400)]
        for each in clients:
            with suppress(ConnectionResetError):  # connect() itself may fail so when the server sheds the connection
                each.connect()
        for value, each in enumerate(clients):  # idle ones make room for those that wait
            try:
                assert ask(each, value)[0] == 200
            except (http.client.RemoteDisconnected, ConnectionError):
                continue
        with client(port) as last:
            assert ask(last, 1)[0] == 200
        assert server.poll() is None


def test_large_tensors_cross_in_both_directions(repository: Path, child_environment: dict[str, str]) -> None:
    write_version(repository, 2)
    (repository / "m" / "config.pbtxt").write_text(
        'backend: "python" input { name: "IN" data_type: TYPE_INT32 dims: -1 } '
        'output { name: "OUT" data_type: TYPE_INT32 dims: -1 }'
    )
    port = free_port()
    values = np.arange(3_000_000, dtype=np.int32)
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": "IN",
                    "shape": [values.size],
                    "datatype": "INT32",
                    "parameters": {"binary_data_size": values.nbytes},
                }
            ],
            "outputs": [{"name": "OUT", "parameters": {"binary_data": True}}],
        }
    ).encode()
    with process(repository, port, child_environment, FRONTS) as server, client(port) as connection:
        until(port, "/readyz", server)
        for _ in range(20):  # 240 MB, more than stays in the memory of the channel
            body = header + values.tobytes()
            connection.request(
                "POST", "/v2/models/m/infer", body, {"Inference-Header-Content-Length": str(len(header))}
            )
            reply = connection.getresponse()
            data = reply.read()[int(reply.headers["Inference-Header-Content-Length"]) :]
            assert reply.status == 200
            assert (np.frombuffer(data, np.int32) == 2 * values).all()


def test_no_request_is_lost_while_versions_are_swapped_and_the_server_is_told_to_stop(
    repository: Path, child_environment: dict[str, str]
) -> None:
    swaps = 5
    write_version(repository, 1)
    port = free_port()
    answered, versions, lost = threading.Semaphore(0), Counter[str](), list[object]()
    flags = (FRONTS, "--model-control-mode=explicit", "--load-model=m")

    def call() -> None:
        with client(port) as connection:
            ask_on(connection)

    def ask_on(connection: http.client.HTTPConnection) -> None:
        value = 0
        while not lost:
            value += 1
            try:
                status, document = ask(connection, value)
            except ConnectionRefusedError:  # from now on nothing listens
                return
            except (http.client.HTTPException, OSError) as error:
                if not versions["stopping"]:  # else the server has closed a connection without a request
                    lost.append(error)
                return
            if status != 200 or document["outputs"][0]["data"] != [value * int(document["model_version"])]:
                lost.append(document)
            else:
                versions[document["model_version"]] += 1
            answered.release()

    with process(repository, port, child_environment, *flags) as server:
        until(port, "/readyz", server)
        callers = [threading.Thread(target=call) for _ in range(8)]
        for caller in callers:
            caller.start()
        for version in range(2, swaps + 2):
            assert all(answered.acquire(timeout=PATIENCE_S) for _ in range(40)), lost
            write_version(repository, version)
            assert status_of(port, "/v2/repository/models/m/load", "POST") == 200
        while not versions[str(swaps + 1)] and not lost:
            assert answered.acquire(timeout=PATIENCE_S)
        versions["stopping"] = 1
        server.send_signal(signal.SIGTERM)
        for caller in callers:
            caller.join(PATIENCE_S)
        assert server.wait(PATIENCE_S) == 0
    assert not lost


@contextmanager
def grpc_server(repository: Path, environment: dict[str, str]) -> Iterator[tuple[int, int]]:
    http_port, grpc_port = free_ports(2)
    flags = (FRONTS, "--allow-grpc=true", f"--grpc-port={grpc_port}")
    with process(repository, http_port, environment, *flags) as server:
        assert server.stderr is not None
        assert any(line.startswith("READY") for line in server.stderr)
        yield http_port, grpc_port


def test_tritons_client_calls_through_fronts(repository: Path, child_environment: dict[str, str]) -> None:
    grpc = pytest.importorskip("tritonclient.grpc", reason="Triton's client: pip install tritonclient[grpc]")
    write_version(repository, 4)
    with grpc_server(repository, child_environment) as (_, port), ExitStack() as stack:
        triton = stack.enter_context(grpc.InferenceServerClient(f"127.0.0.1:{port}"))
        assert triton.is_server_ready()
        assert triton.get_model_metadata("m").name == "m"
        tensor = grpc.InferInput("IN", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.array([[3]], np.int32))
        assert triton.infer("m", [tensor], request_id="r").as_numpy("OUT").tolist() == [[12]]
        with pytest.raises(Exception, match="unknown model"):
            triton.infer("other", [tensor])
        results: list[object] = []
        arrived = threading.Semaphore(0)

        def take(result: object, error: object) -> None:
            results.append(error if error is not None else result.as_numpy("OUT").tolist())  # type: ignore[attr-defined]
            arrived.release()

        triton.start_stream(take)
        for _ in range(5):
            triton.async_stream_infer("m", [tensor])
        assert all(arrived.acquire(timeout=PATIENCE_S) for _ in range(5))
        triton.stop_stream()
        assert results == [[[12]]] * 5


def test_metrics_of_any_front_are_those_of_the_whole_server(
    repository: Path, child_environment: dict[str, str]
) -> None:
    write_version(repository, 1)
    port = free_port()
    with process(repository, port, child_environment, FRONTS, METRICS) as server, ExitStack() as stack:
        until(port, "/readyz", server)
        clients = [stack.enter_context(client(port)) for _ in range(6)]
        for each in clients:
            assert ask(each, 1)[0] == 200
        assert metric(port, "nv_inference_request_success") == 6
        eventually(lambda: metric(port, "remora_open_connections") >= 6, process=server)  # fronts report every 100 ms
