"""Export of traces as OpenTelemetry spans over OTLP/HTTP [T08].

Imported only in that mode. The spans are built from finished traces, with ids that were chosen when the requests began;
OpenTelemetry's SDK only encodes and sends them. If the collector fails, only traces are lost.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace.span import TraceState

from remora._version import __version__
from remora.api.models import Finished, Span, SpanContext, spans_of
from remora.system.url_secrets import without_secrets
from remora_adapters.telemetry.collector import server_resource

_SCOPE = InstrumentationScope("triton-server", __version__)


class SpanSink:
    """Sender of the spans of finished traces.

    Args:
        url: the collector's URL; "" leaves it to OpenTelemetry's variables and its default.
        resource: attributes of this server; they override ``OTEL_RESOURCE_ATTRIBUTES``.
        batch: maximum number of spans per export.
        offset_ns: returns the difference between wall-clock and trace time; called per batch because the wall clock
            may be adjusted.
    """

    def __init__(self, url: str, resource: Mapping[str, str], batch: int, offset_ns: Callable[[], int]) -> None:
        self._resource = server_resource(resource)
        self._exporter = OTLPSpanExporter(endpoint=url or None)
        self._batch = batch
        self._offset_ns = offset_ns
        for name in ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.exporter.http.transport"):
            logging.getLogger(name).addFilter(_quiet)  # they log each failure, which the writer logs once

    def write(self, finished: Sequence[Finished]) -> None:
        """Send the spans of all traces.

        Raises ConnectionError if the collector rejects them or does not answer.
        """
        shift = self._offset_ns()
        spans = [
            self._span(span, shift)
            for _, trace, _ in finished
            if trace is not None
            for span in spans_of(trace, new_span_id)
        ]
        for begin in range(0, len(spans), self._batch):
            if self._exporter.export(spans[begin : begin + self._batch]) is not SpanExportResult.SUCCESS:
                place = without_secrets(self._exporter._endpoint)
                raise ConnectionError(f"the collector at {place} did not accept the spans")

    def close(self) -> None:
        """Shut the exporter down without waiting for pending responses."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _span(self, span: Span, shift: int) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_sdk_context(span.context),
            parent=None if span.parent is None else _sdk_context(span.parent),
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(name, timestamp=ns + shift) for name, ns in span.events],
            kind=api.SpanKind.SERVER,
            instrumentation_scope=_SCOPE,
            status=api.Status(api.StatusCode.ERROR, span.error) if span.error else api.Status(),
            start_time=span.start_ns + shift,
            end_time=span.end_ns + shift,
        )


def new_span_id() -> int:
    """Return a random id other than 0."""
    return random.getrandbits(64) or 1


def _sdk_context(context: SpanContext) -> api.SpanContext:
    state = TraceState.from_header([context.state]) if context.state else None
    return api.SpanContext(context.trace_id, context.span_id, False, api.TraceFlags(int(context.sampled)), state)


def _quiet(record: Any) -> bool:
    return False
