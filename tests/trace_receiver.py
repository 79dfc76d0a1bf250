"""Trace collector on loopback that accepts OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATIENCE_S = 30.0


class Collector:
    """Collector that answers with ``status`` from now on."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.resource: dict[str, str] = {}
        self.requests = 0
        self._spans: list[Span] = []
        self._changed = threading.Condition()

    def take(self, body: bytes) -> None:
        message = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.requests += 1
            for resource in message.resource_spans if self.status == 200 else ():
                self.resource = {row.key: row.value.string_value for row in resource.resource.attributes}
                self._spans += [span for scope in resource.scope_spans for span in scope.spans]
            self._changed.notify_all()

    def spans(self, count: int) -> list[Span]:
        """Wait for the first ``count`` spans and return them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._spans) >= count, PATIENCE_S), self._spans
            return list(self._spans)


@contextmanager
def collector() -> Iterator[Collector]:
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kept.take(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(kept.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def attributes(span: Span) -> dict[str, str | int]:
    return {row.key: row.value.string_value or row.value.int_value for row in span.attributes}
