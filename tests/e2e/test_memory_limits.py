"""Memory of a server process under uploads that never end and answers that are not read."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

from eventually import eventually
from live_server import PATIENCE_S, ask, client, free_port, process, until, write_version
from remora.protocols.http2.frames import DATA, HEADERS, INITIAL_WINDOW, PREFACE, SETTING, SETTINGS, frame, pack

UPLOADS, UPLOAD_BYTES = 40, 64 << 20
LIMIT = 150 << 20
ANSWERS, ANSWER_BYTES = 100, 4 << 20


def peak_bytes(pid: int) -> int:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0]) * 1024


def metric(port: int, name: str) -> float:
    with client(port) as connection:
        connection.request("GET", "/v2/metrics")
        text = connection.getresponse().read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def test_uploads_that_never_end_hold_no_more_than_the_limit(tmp_path: Path, child_environment: dict[str, str]) -> None:
    write_version(tmp_path / "models", 1)
    port = free_port()
    flags = (f"--max-held-bytes={LIMIT}", "--max-connection-bytes=-1", "--allow-metrics=true")
    with process(tmp_path / "models", port, child_environment, *flags) as server, ExitStack() as opened:
        until(port, "/readyz", server)
        before = peak_bytes(server.pid)
        head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % UPLOAD_BYTES
        uploads = []
        for _ in range(UPLOADS):
            upload = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
            upload.sendall(head + bytes(100_000))
            uploads.append(upload)
        admitted = LIMIT // UPLOAD_BYTES
        refusals = [upload.recv(4_096) for upload in uploads[admitted:]]
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
