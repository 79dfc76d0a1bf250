"""Memory of a server process under uploads that never end and answers that are not read."""

from __future__ import annotations

import os
import re
import selectors
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")
pytest.importorskip("h2", reason="needs h2: pip install '.[dev]'")
import h2.config
import h2.connection
import h2.events
import h2.settings

from conftest import free_ports
from remora.proto import inference_pb2 as pb
from remora.protocols.http2.frames import (
    DATA,
    FRAME_BYTES,
    HEADERS,
    INITIAL_WINDOW,
    PREFACE,
    SETTING,
    SETTINGS,
    frame,
    pack,
)
from support.process.eventually import eventually
from support.servers.live_server import PATIENCE_S, ask, client, free_port, process, until, write_version
from support.wire.grpc_infer_requests import request

UPLOADS, UPLOAD_BYTES = 40, 64 << 20
LIMIT = 150 << 20
ANSWERS, ANSWER_BYTES = 100, 4 << 20
CALLS, CALL_BYTES = 40, 1 << 20
GRPC_HEAD = (
    (b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"localhost"),
    (b":path", b"/inference.GRPCInferenceService/ModelInfer"), (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)  # fmt: skip


def peak_bytes(pid: int) -> int:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0]) * 1024


def metric(port: int, name: str) -> float:
    with client(port) as connection:
        connection.request("GET", "/v2/metrics")
        text = connection.getresponse().read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def first_answers(uploads: list[socket.socket], count: int) -> list[bytes]:
    """Return the first ``count`` answers. A server may read simultaneous uploads in any order."""
    answers: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        for upload in uploads:
            selector.register(upload, selectors.EVENT_READ)
        while len(answers) < count:
            ready = selector.select(PATIENCE_S)
            assert ready, f"{len(answers)} answers"
            for key, _ in ready:
                upload = selector.unregister(key.fileobj).fileobj
                assert isinstance(upload, socket.socket)
                answers.append(upload.recv(4_096))
    return answers


def test_uploads_that_never_end_hold_no_more_than_the_limit(tmp_path: Path, child_environment: dict[str, str]) -> None:
    write_version(tmp_path / "models", 1)
    port = free_port()
    flags = (f"--max-held-bytes={LIMIT}", "--max-connection-bytes=-1", "--allow-metrics=true")
    with process(tmp_path / "models", port, child_environment, *flags) as server, ExitStack() as opened:
        until(port, "/readyz", server)
        before = peak_bytes(server.pid)
        head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % UPLOAD_BYTES
        uploads, admitted = [], LIMIT // UPLOAD_BYTES
        for number in range(UPLOADS):
            upload = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
            # The first ones are admitted; if they were slow, they would be refused in favour of those that wait.
            upload.sendall(head + bytes(UPLOAD_BYTES // 2 if number < admitted else 100_000))
            uploads.append(upload)
        refusals = first_answers(uploads, UPLOADS - admitted)
        assert all(refusal.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1" in refusal for refusal in refusals)
        assert metric(port, "remora_held_bytes") == admitted * UPLOAD_BYTES
        assert metric(port, "remora_held_bytes_limit") == LIMIT
        assert metric(port, "remora_held_bytes_refusals_total") == UPLOADS - admitted
        opened.close()
        eventually(lambda: metric(port, "remora_held_bytes") == 0, process=server)
        assert peak_bytes(server.pid) - before < LIMIT
        assert server.poll() is None


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Make a cgroup with a memory limit inside this process's own. Skips the test where that is not permitted."""
    rows = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    mounts = {"": Path("/sys/fs/cgroup"), "memory": Path("/sys/fs/cgroup/memory")}
    owned = {names: mounts[names] / path.lstrip("/") for _, names, path in rows if names in mounts}
    parent, file = (
        (owned["memory"], "memory.limit_in_bytes") if "memory" in owned else (owned.get("", mounts[""]), "memory.max")
    )
    group = parent / f"remora-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"a cgroup cannot be made in {parent}: {error.strerror}")
    try:
        try:
            (group / file).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"the memory of a cgroup in {parent} cannot be limited: {error.strerror}")
        yield group
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def send_until_blocked(uploads: list[socket.socket], left: dict[socket.socket, int]) -> None:
    """Send what each connection takes at once of its upload but the last byte."""
    piece = bytes(1 << 20)
    for upload in uploads:
        with suppress(BlockingIOError, ConnectionError):
            while left[upload] > 1:
                left[upload] -= upload.send(piece[: left[upload] - 1], socket.MSG_DONTWAIT)


def test_forty_unfinished_uploads_leave_a_server_in_a_small_container_alive(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    write_version(tmp_path / "models", 1)
    port, container = free_port(), 700 << 20
    with (
        memory_group(container) as group,
        process(tmp_path / "models", port, child_environment, "--allow-metrics=true", group=group) as server,
        ExitStack() as opened,
    ):
        until(port, "/readyz", server)
        assert metric(port, "remora_memory_limit_bytes") == container
        limit = metric(port, "remora_held_bytes_limit")
        assert limit == container // 4
        head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % UPLOAD_BYTES
        uploads = [
            opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
            for _ in range(UPLOADS)
        ]
        for upload in uploads:
            upload.sendall(head)
        left, admitted = dict.fromkeys(uploads, UPLOAD_BYTES), int(limit // UPLOAD_BYTES)

        def others_are_refused() -> bool:
            send_until_blocked(uploads, left)
            return metric(port, "remora_held_bytes_refusals_total") == UPLOADS - admitted

        eventually(others_are_refused, process=server)
        assert list(left.values()).count(1) >= admitted
        with client(port) as connection:
            assert ask(connection, 3)[0] == 200
        assert metric(port, "remora_held_bytes") == admitted * UPLOAD_BYTES
        assert 2 * UPLOAD_BYTES < metric(port, "remora_memory_used_bytes") < container
        assert server.poll() is None


ROWS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensor = pb_utils.Tensor("OUT", np.zeros(ANSWER_BYTES, np.int8))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
""".replace("ANSWER_BYTES", str(ANSWER_BYTES))
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT8 dims: -1 }
"""


@pytest.mark.parametrize("fronts", [(), ("--frontends=1",)], ids=["alone", "front"])
def test_answers_that_are_not_read_hold_no_more_than_the_limit(
    tmp_path: Path, child_environment: dict[str, str], fronts: tuple[str, ...]
) -> None:
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "models" / "m" / "1" / "model.py").write_text(ROWS)
    port, limit = free_port(), 32 << 20
    flags = (f"--max-connection-bytes={limit}", "--grpc-on-http-port=true", "--allow-metrics=true", *fronts)
    body = (
        b'{"inputs":[{"name":"IN","shape":[1],"datatype":"INT32","data":[1]}],"parameters":{"binary_data_output":true}}'
    )
    head = pack(
        ((b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"localhost"), (b":path", b"/v2/models/m/infer"))
    )
    streams = range(1, 2 * ANSWERS, 2)
    with process(tmp_path / "models", port, child_environment, *flags) as server:
        until(port, "/readyz", server)
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as reader:
            reader.sendall(PREFACE + frame(SETTINGS, 0, 0, SETTING.pack(INITIAL_WINDOW, 0)))
            reader.sendall(b"".join(frame(HEADERS, 4, each, head) + frame(DATA, 1, each, body) for each in streams))
            refused = ANSWERS - limit // (ANSWER_BYTES + 100)
            eventually(lambda: metric(port, "remora_held_bytes_refusals_total") >= refused - 1, process=server)
            assert limit - 2 * ANSWER_BYTES < metric(port, "remora_held_bytes") <= limit + 100_000
        eventually(lambda: metric(port, "remora_held_bytes") == 0, process=server)
        assert server.poll() is None


ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each.inputs()[0].as_numpy())]) for each in requests]
"""
ECHO_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT8 dims: -1 }
output { name: "OUT" data_type: TYPE_INT8 dims: -1 }
"""


class LateReader:
    """Client of gRPC that heeds all windows and opens none for answers until it reads.

    Each call sends ``CALL_BYTES`` to a model that returns them.
    """

    def __init__(self, port: int) -> None:
        self._connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self._connection.initiate_connection()
        self._connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._reads = False
        self._pings = 0
        tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="INT8", shape=[CALL_BYTES])
        message = request(tensor, raw=(bytes(CALL_BYTES),))
        self._body = b"\0" + len(message).to_bytes(4, "big") + message
        self._unsent = 0  # of the last call
        self.begun = 0
        self.answered: dict[int, int] = {}
        """Bytes of answers by stream, from their headers on."""
        self.ended: list[bytes] = []
        """The status of each answer that is complete."""

    def send(self, calls: int) -> bool:
        """Send more calls, up to as many in all; return False if the server does not let it go on."""
        while self._unsent or self.begun < calls:
            if not self._unsent:
                self.begun += 1
                self._connection.send_headers(2 * self.begun - 1, GRPC_HEAD)
                self._unsent = len(self._body)
            stream = 2 * self.begun - 1
            size = min(FRAME_BYTES, self._unsent, self._connection.local_flow_control_window(stream))
            if size:
                at = len(self._body) - self._unsent
                self._unsent -= size
                self._connection.send_data(stream, self._body[at : at + size], end_stream=not self._unsent)
                self._flush()
            elif not self._gains_window(stream):
                return False
        return True

    def _gains_window(self, stream: int) -> bool:
        """Wait until it may send more; return False once all calls are answered and it still may not."""
        while not self._connection.local_flow_control_window(stream):
            if len(self.answered) == self.begun - 1 and self._pings == 0:
                self._pings = 1
                self._connection.ping(b"any more")
                self._flush()
            self.receive()
            if self._pings == 2:
                self._pings = 0
                return bool(self._connection.local_flow_control_window(stream))
        return True

    def read(self) -> None:
        """Open all windows from now on."""
        self._reads = True
        self._connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 30})
        self._connection.increment_flow_control_window(1 << 30)
        self._flush()

    def receive(self) -> None:
        """Wait for bytes of the server."""
        data = self._socket.recv(1 << 20)
        assert data
        for event in self._connection.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                self.answered[event.stream_id] = 0
            elif isinstance(event, h2.events.DataReceived):
                self.answered[event.stream_id] += len(event.data)
            elif isinstance(event, h2.events.TrailersReceived):
                self.ended.append(dict(event.headers)[b"grpc-status"])
            elif isinstance(event, h2.events.PingAckReceived):
                self._pings = 2
            assert not isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated)
        self._flush()

    def _flush(self) -> None:
        self._socket.sendall(self._connection.data_to_send())

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("fronts", [(), ("--frontends=1",)], ids=["alone", "front"])
@pytest.mark.parametrize("port_name", ["http", "grpc"])
def test_a_client_that_reads_late_waits_and_then_gets_every_answer(
    tmp_path: Path, child_environment: dict[str, str], fronts: tuple[str, ...], port_name: str
) -> None:
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(ECHO_CONFIG)
    (tmp_path / "models" / "m" / "1" / "model.py").write_text(ECHO)
    http, grpc = free_ports(2)
    flags = (
        "--max-connection-bytes=67108864", "--grpc-on-http-port=true", f"--grpc-port={grpc}", "--allow-grpc=true",
        "--allow-metrics=true", *fronts,
    )  # fmt: skip
    with process(tmp_path / "models", http, child_environment, *flags) as server:
        until(http, "/readyz", server)
        with closing(LateReader(http if port_name == "http" else grpc)) as reader:
            assert not reader.send(CALLS)
            most = (8 << 20) + (16 << 20) + 2 * CALL_BYTES
            eventually(lambda: 8 << 20 < metric(http, "remora_held_bytes") < most, process=server)
            reader.read()
            for calls in range(reader.begun, CALLS + 1):
                assert reader.send(calls)
                while len(reader.ended) < calls:
                    reader.receive()
        assert reader.ended == [b"0"] * CALLS
        assert all(size > CALL_BYTES for size in reader.answered.values())
        eventually(lambda: metric(http, "remora_held_bytes") == 0, process=server)
