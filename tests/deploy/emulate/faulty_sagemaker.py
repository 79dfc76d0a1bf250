"""A SageMaker container in miniature, right in everything but the one fault that the variable FAULT names.

    FAULT=ping-body python faulty_sagemaker.py serve

It doubles the numbers of {"numbers": [...]}, and answers {"stream": true} in pieces.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))
from support.programs import faulty_generation as language

FAULT = os.environ.get("FAULT", "")
counting = threading.Lock()
stopping = threading.Event()
state = {"pings": 0, "invocations": 0, "connections": 0}
CROWD = 8


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.get()

    def get(self) -> None:
        if self.path == "/ping":
            state["pings"] += 1
            if FAULT == "slow-ping" and state["pings"] == 1:
                self.rfile.read(1)  # until the client has closed the connection
                self.close_connection = True
                return None
            if FAULT == "never-ready" or (FAULT == "ping-while-busy" and state["connections"] > CROWD):
                return self.answer(503)
            return self.answer(200, b"pong" if FAULT == "ping-body" else b"")
        if self.path == "/execution-parameters" and FAULT == "execution-parameters":
            return self.answer(200, b'{"BatchStrategy": "MultiRecord"}')
        if language.IS_THERE and self.path in language.ROUTES:
            return self.answer(200, json.dumps(language.MODELS).encode())
        if language.IS_THERE and self.path == "/metrics":
            return self.answer(200, language.metrics())
        return self.answer(404, b"no such path")

    def do_POST(self) -> None:
        if FAULT == "large-body" and int(self.headers["Content-Length"]) > 1_000_000:
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers["Content-Length"]))
        state["invocations"] += 1
        self.invoke(body)

    def invoke(self, body: bytes) -> None:
        if FAULT == "early-ready" and state["invocations"] == 1:
            return self.answer(503, b"still loading")
        if FAULT == "strict-headers" and self.headers["X-Amzn-SageMaker-Unheard-Of"]:
            return self.answer(400, b"what is X-Amzn-SageMaker-Unheard-Of?")
        if self.headers["Content-Type"] == "text/csv":
            self.records(body.splitlines())
            return None
        try:
            asked = json.loads(body)
            doubled = json.dumps({"numbers": [number * 2 for number in asked.get("numbers", [])]}).encode()
        except ValueError:
            return self.answer(500 if FAULT == "bad-body" else 400, b"not JSON")
        if "messages" in asked:
            return self.spoken(asked)
        if asked.get("stream"):
            return self.stream()
        if FAULT == "attributes" and self.headers["X-Amzn-SageMaker-Custom-Attributes"]:
            return self.answer(200, doubled, X_Amzn_SageMaker_Custom_Attributes="a" * 1_025)
        if FAULT == "writes":
            (Path(os.environ["SAGEMAKER_BASE_DIR"]) / "model" / "scratch").write_text("mine")
        if FAULT == "gzip":
            return self.answer(200, gzip.compress(doubled), Content_Encoding="gzip")
        if asked.get("slow"):
            stopping.wait()
        self.answer(200, doubled)
        return None

    def spoken(self, asked: dict[str, Any]) -> None:
        """Answer a chat."""
        if not asked.get("stream"):
            self.answer(200, json.dumps(language.whole()).encode())
            return
        language.answer_stream(self)

    def records(self, lines: list[bytes]) -> None:
        if FAULT == "loses-records":
            lines = lines[:2]
        if FAULT == "shuffles":
            lines = lines[::-1]
        self.answer(200, b"".join(b"%d\n" % (2 * int(line)) for line in lines))

    def stream(self) -> None:
        pieces = [b"one ", b"two ", b"three"]
        if FAULT == "buffers":
            self.answer(200, b"".join(pieces))
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


class Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 128

    def process_request(self, request: Any, client_address: Any) -> None:
        """Count a connection when it is accepted, which is in the order in which clients connected."""
        with counting:
            state["connections"] += 1
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with counting:
            state["connections"] -= 1
        super().shutdown_request(request)


def main() -> int:
    if sys.argv[1:2] != ["serve"] or FAULT == "no-serve":
        print("what is", sys.argv[1:], "?")
        return 2
    port = 0 if FAULT == "own-port" else int(os.environ["SAGEMAKER_BIND_TO_PORT"])
    server = Server(("127.0.0.1" if FAULT == "loopback" else "0.0.0.0", port), Handler)
    if FAULT == "stray-port":  # after its own, or a probe might meet it first and wait there
        stray = socket.create_server(("0.0.0.0", 0))
        assert stray

    def stop(number: int, frame: object) -> None:
        if FAULT == "drops":
            os._exit(0)
        stopping.set()
        if FAULT != "stays":
            threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    server.serve_forever(0.02)
    server.server_close()
    return 3 if FAULT == "bad-status" else 0


if __name__ == "__main__":
    sys.exit(main())
