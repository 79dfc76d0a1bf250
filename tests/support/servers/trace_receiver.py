"""Collector on loopback that accepts OTLP over HTTP and keeps spans, metrics and log records."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATIENCE_S = 60.0


class Collector:
    """Collector that answers with ``status`` from now on."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.resource: dict[str, str] = {}
        self.requests = 0
        self.base = ""
        self.headers: dict[str, str] = {}
        self.answer = b""
        self._spans: list[Span] = []
        self._exports: list[dict[str, Metric]] = []
        self._records: list[tuple[str, LogRecord]] = []
        self._changed = threading.Condition()

    def take(self, path: str, body: bytes) -> None:
        with self._changed:
            self.requests += 1
            if self.status == 200:
                {"traces": self._take_spans, "metrics": self._take_metrics, "logs": self._take_logs}[path[4:]](body)
            self._changed.notify_all()

    def _take_spans(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = {row.key: row.value.string_value for row in resource.resource.attributes}
            self._spans += [span for scope in resource.scope_spans for span in scope.spans]

    def _take_metrics(self, body: bytes) -> None:
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            self.resource = {row.key: row.value.string_value for row in resource.resource.attributes}
            self._exports.append({metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics})

    def _take_logs(self, body: bytes) -> None:
        for resource in ExportLogsServiceRequest.FromString(body).resource_logs:
            self.resource = {row.key: row.value.string_value for row in resource.resource.attributes}
            for scope in resource.scope_logs:
                self._records += [(scope.scope.name, record) for record in scope.log_records]

    def spans(self, count: int) -> list[Span]:
        """Wait for the first ``count`` spans and return them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._spans) >= count, PATIENCE_S), self._spans
            return list(self._spans)

    def metrics(self, condition: Callable[[dict[str, Metric]], object]) -> dict[str, Metric]:
        """Wait for an export of metrics that meets a condition and return its metrics by name."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(condition, self._exports)), PATIENCE_S), self._exports[-1:]
            return next(filter(condition, self._exports))

    def records(self, condition: Callable[[LogRecord], object], logger: str = "") -> list[LogRecord]:
        """Wait for a log record that meets a condition and return all of them, of one logger if it is named."""

        def found() -> list[LogRecord]:
            return [record for name, record in self._records if logger in ("", name) and condition(record)]

        with self._changed:
            assert self._changed.wait_for(found, PATIENCE_S), [record.body for _, record in self._records]
            return found()


@contextmanager
def collector() -> Iterator[Collector]:
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kept.headers = dict(self.headers)
            kept.take(self.path, gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(kept.status)
            self.send_header("Content-Length", str(len(kept.answer)))
            self.end_headers()
            self.wfile.write(kept.answer)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.base = f"http://127.0.0.1:{server.server_address[1]}"
    kept.url = f"{kept.base}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Attributed(Protocol):
    @property
    def attributes(self) -> Iterable[KeyValue]: ...


def attributes(kept: Attributed) -> dict[str, str | int]:
    return {row.key: row.value.string_value or row.value.int_value for row in kept.attributes}
