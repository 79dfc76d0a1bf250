"""Streams over HTTP to clients that read slowly: nothing is cut off, and memory stays bounded."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from support.servers.live_server import PATIENCE_S, free_port, process, until

EVENTS, EVENT_BYTES = 400, 100_000
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_STRING dims: 1 }
model_transaction_policy { decoupled: true }
"""
HOSE = f"""
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range({EVENTS}):
                text = pb_utils.Tensor("OUT", np.array([b"x" * {EVENT_BYTES}], np.object_))
                sender.send(pb_utils.InferenceResponse([text]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def peak_bytes(pid: int) -> int:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0]) * 1024


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_reader_that_reads_all_the_while_gets_a_stream_of_any_length(
    tmp_path: Path, child_environment: dict[str, str], isolation: str
) -> None:
    (tmp_path / "models" / "hose" / "1").mkdir(parents=True)
    (tmp_path / "models" / "hose" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "models" / "hose" / "1" / "model.py").write_text(HOSE)
    port = free_port()
    flags = (f"--backend-config=python,isolation={isolation}",)
    with process(tmp_path / "models", port, child_environment, *flags) as server, socket.socket() as client:
        until(port, "/readyz", server)
        before = peak_bytes(server.pid)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE_S)
        client.connect(("127.0.0.1", port))
        body = b'{"IN": 1}'
        client.sendall(
            b"POST /v2/models/hose/generate_stream HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        size, events = 0, 0
        while piece := client.recv(16_384):
            size += len(piece)
            events += piece.count(b"data:")
        assert size > EVENTS * EVENT_BYTES
        assert events >= EVENTS - 2  # a mark may be cut by the end of a piece
        assert peak_bytes(server.pid) - before < 8 << 20
