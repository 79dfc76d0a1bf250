"""A multi-model container in miniature, right in everything but the one fault that the variable FAULT names.

FAULT=load-again python faulty_sagemaker_mme.py serve
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FAULT = os.environ.get("FAULT", "")
ROOT = Path(os.environ["SAGEMAKER_BASE_DIR"], "models")
models: dict[str, dict[str, object]] = {}
leaked: list[bytes] = []
loading: list[str] = []
pinged = threading.Event()
lingers_s = (0.02 * 1.5**count for count in range(1_000))


def is_below_root(url: str) -> bool:
    return FAULT == "any-url" or (url == os.path.normpath(url) and Path(url).is_relative_to(ROOT))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: object = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def entry(self, name: str) -> dict[str, str]:
        url = str(models[name]["url"])
        return {"modelName": name, "modelUrl": os.path.dirname(url) if FAULT == "bad-show" else url}

    def do_GET(self) -> None:
        parts = self.path.split("/")[1:]
        if parts == ["ping"]:
            sick = (FAULT == "needs-model" and not models) or (FAULT == "blocks" and loading)
            self.answer(503 if sick else 200)
            if sick:
                pinged.set()
        elif parts == ["models"]:
            rows = [self.entry(name) for name in models]
            self.answer(200, {"models": rows or (None if FAULT == "list-null" else [])})
        elif parts[0] == "models" and parts[1] in models:
            self.answer(200, self.entry(parts[1]))
        else:
            self.answer(400 if FAULT == "unknown-400" and parts[-1].startswith("f") else 404)

    def do_DELETE(self) -> None:
        name = self.path.rpartition("/")[2]
        if name not in models:
            self.answer(404)
            return
        if FAULT == "leaks":
            leaked.append(models[name]["weights"])  # type: ignore[arg-type]
        if FAULT == "shared":
            models.clear()
        elif FAULT != "stale":
            del models[name]
        self.answer(200)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parts = self.path.split("/")[1:]
        if parts == ["models"]:
            self.load(body)
        elif parts[1] not in models:
            self.answer(404)
        elif FAULT == "by-target" and self.headers["X-Amzn-SageMaker-Target-Model"] != models[parts[1]]["target"]:
            self.answer(400, {"error": "unknown model"})
        else:
            self.answer(200, json.loads(body))

    def load(self, body: bytes) -> None:
        try:
            asked = json.loads(body)
            name, url = str(asked["model_name"]), str(asked["url"])
        except (ValueError, KeyError, TypeError):
            self.answer(500 if FAULT == "bad-500" else 400, {"error": "what is this?"})
            return
        if name in models and FAULT != "load-again":
            self.answer(409)
        elif Path(url, "too-large").exists():
            self.answer(400 if FAULT == "oom-400" else 507)
        elif FAULT == "no-load" or not is_below_root(url):
            self.answer(400, {"error": "cannot load"})
        else:
            loading.append(name)
            if FAULT == "blocks":  # a ping may or may not come: until one did, wait longer every time
                pinged.wait(min(next(lingers_s), 10.0))
            path = Path(url, "weights")
            weights = bytearray(path.read_bytes()) if path.exists() else b""
            models[name] = {"url": url, "target": self.headers["X-Amzn-SageMaker-Target-Model"], "weights": weights}
            loading.remove(name)
            self.answer(200)


def main() -> None:
    server = ThreadingHTTPServer(("0.0.0.0", int(os.environ["SAGEMAKER_BIND_TO_PORT"])), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever(0.02)
    server.server_close()


if __name__ == "__main__":
    sys.exit(main())
