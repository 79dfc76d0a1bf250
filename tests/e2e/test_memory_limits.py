"""Memory of a server process under uploads that never end and answers that are not read."""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

from eventually import eventually
from live_server import PATIENCE_S, client, free_port, process, until, write_version
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
