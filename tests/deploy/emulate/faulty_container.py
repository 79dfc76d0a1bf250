"""A container in miniature for any platform but SageMaker, right in everything but the one fault that FAULT names.

    FAULT=no-ids python faulty_container.py azureml

It doubles the numbers of {"instances": [...]}, and knows the routes of the platform that its first argument names.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))
from support.programs import faulty_generation as language

FAULT = os.environ.get("FAULT", "")
PLATFORM = sys.argv[1]
PORT = int(
    next((word.partition("=")[2] for word in sys.argv if word.startswith("--http_port=")), "")
    or next(os.environ[name] for name in ("PORT", "SERVER_PORT", "AIP_HTTP_PORT") if name in os.environ)
)
READY = {
    "azureml": "/readyz",
    "cloud-run": "/",
    "knative": "/v2/health/ready",
    "kserve": "/v2/health/ready",
    "vertex": os.environ.get("AIP_HEALTH_ROUTE", ""),
}[PLATFORM]
PREDICT = {
    "azureml": "/score",
    "cloud-run": "/v2/models/scale/infer",
    "knative": "/v2/models/scale/infer",
    "kserve": "/v1/models/m:predict",
    "vertex": os.environ.get("AIP_PREDICT_ROUTE", ""),
}[PLATFORM]
CHATS = "/openai/v1/chat/completions" if PLATFORM == "kserve" else "/v1/chat/completions"
state = {"requests": 0, "busy": 0, "probes": 0}
changed = threading.Condition()
lingers_s = (0.02 * 1.5**count for count in range(1_000))
QUIET_S = 3.0


def tell(name: str, step: int = 1) -> int:
    """Count something; returns the new count."""
    with changed:
        state[name] += step
        changed.notify_all()
        return state[name]


def meets(seen: Callable[[], bool]) -> bool:
    """Whether something comes while a request is under way: waits for it, until it came once, and longer every time.

    It is not known whether a request will come, and on a slow machine it comes late.
    """
    with changed:
        met = changed.wait_for(seen, 0 if "met" in state else min(next(lingers_s), 10.0))
        if met:
            state["met"] = 1
        return met


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: object = None, **headers: str) -> None:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == READY:
            self.probed()
        elif self.path == "/livez":
            self.answer(500 if FAULT == "dead" else 200)
        elif self.path == "/metrics":
            page = language.metrics() if language.IS_THERE else b"# TYPE a counter\n"
            self.answer(404 if FAULT == "no-metrics" else 200, page)
        elif language.IS_THERE and self.path in language.ROUTES[: 1 if PLATFORM == "kserve" else 2]:
            self.answer(200, language.MODELS)
        elif PLATFORM == "kserve":
            self.looked()
        else:
            self.answer(404, {"error": "no such path"})

    def probed(self) -> None:
        if tell("probes") == 1 and FAULT == "slow-probe":
            self.rfile.read(1)  # until the client has closed the connection
            self.close_connection = True
            return None
        if FAULT == "never-ready" or (FAULT == "probe-while-busy" and state["busy"]):
            return self.answer(503)
        if FAULT == "failing-probe" and "kube-probe" in self.headers.get("User-Agent", ""):
            return self.answer(503)
        empty = PLATFORM != "kserve" or FAULT == "triton-health"
        return self.answer(200, None if empty else {"ready": True})

    def looked(self) -> None:
        known = {
            "/": {"status": "dead" if FAULT == "not-alive" else "alive"},
            "/v1/models": {"models": ["m"]},
            "/v1/models/m": {"name": "m", "ready": True},
            "/v2/health/live": {"live": True},
        }
        if self.path in known:
            return self.answer(200, known[self.path])
        return self.answer(503 if FAULT == "unknown-503" else 404, {"error": "unknown"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        tell("busy")
        try:
            self.posted(body)
        finally:
            tell("busy", -1)

    def posted(self, body: bytes) -> None:
        if self.path.startswith("/v2/repository/models/"):
            return self.answer(400 if FAULT == "agent-body" and not body else 200, {"name": "m"})
        if self.headers.get("X-Vertex-Ai-Triton-Redirect") == "metrics":
            return self.answer(200, language.metrics())
        if language.IS_THERE and (b'"messages"' in body or self.path == CHATS):
            return self.spoken(json.loads(body))
        if self.path != PREDICT:
            return self.answer(404, {"error": "no such path"})
        if "X-Vertex-Ai-Triton-Redirect" in self.headers:
            return self.answer(200 if FAULT == "redirects" else 403, {"error": "no"})
        if FAULT != "long-ids" and len(self.headers.get("x-request-id", "")) > 100:
            return self.answer(431, {"error": "too long"})
        if FAULT == "strict" and meets(lambda: state["busy"] > 2):
            return self.answer(429, {"error": "busy"})
        return self.predicted(body)

    def spoken(self, asked: dict[str, Any]) -> None:
        """Answer a chat."""
        if not asked.get("stream"):
            answer = language.whole()
            self.answer(200, {"predictions": answer} if "instances" in asked else answer)
            return
        language.answer_stream(self)

    def predicted(self, body: bytes) -> None:
        if tell("requests") == 1 and FAULT == "first-request":
            return self.answer(503, {"error": "not yet"})
        if FAULT == "never-answers":
            return self.answer(500, {"error": "no"})
        try:
            rows = json.loads(body)["instances"]
        except (ValueError, KeyError):
            return self.answer(400, b"bad" if FAULT == "plain-error" else {"error": "no instances"})
        if FAULT == "probe-while-busy":
            probes = state["probes"]
            meets(lambda: state["probes"] > probes)
        if FAULT == "writes":
            model = os.environ.get("AZUREML_MODEL_DIR") or os.environ.get("REMORA_MODEL_REPOSITORY")
            Path(model or os.environ["AIP_STORAGE_URI"], "cache").write_text("x")
        predictions = [[2 * number for number in row] for row in rows]
        if FAULT == "drops-predictions":
            predictions = predictions[:8]
        headers = {}
        if PLATFORM == "azureml" and FAULT != "no-ids":
            headers = {"x_request_id": "1", "x_ms_client_request_id": self.headers.get("x-ms-client-request-id", "")}
        if "ce-id" in self.headers and FAULT != "no-events":
            headers |= {"ce_id": "2", "ce_type": "answer", "ce_source": "m", "ce_specversion": "1.0"}
        return self.answer(200, predictions if FAULT == "bare-list" else {"predictions": predictions}, **headers)


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


def main() -> None:
    if FAULT == "ends":
        sys.exit(1)
    if FAULT == "never-listens":
        signal.pause()
    port = 0 if FAULT == "own-port" else PORT
    server = Server(("127.0.0.1" if FAULT == "loopback" else "0.0.0.0", port), Handler)
    if FAULT == "second-port":
        other = Server(("0.0.0.0", 0), Handler)
        threading.Thread(target=other.serve_forever, daemon=True).start()
    # Waited for, not handled: a handler may run while its own thread holds what it needs.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.sigwait({signal.SIGTERM})
    if FAULT == "stays":
        signal.sigwait({signal.SIGTERM})
    if PLATFORM == "knative" and FAULT not in ("stops-at-once", "bad-status"):
        with changed:
            while changed.wait(QUIET_S):  # requests still arrive
                pass
    os._exit(3 if FAULT == "bad-status" else 0)


main()
