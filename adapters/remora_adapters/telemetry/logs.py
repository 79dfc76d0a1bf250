"""Export of log records to an OpenTelemetry collector over OTLP/HTTP.

Imported only if logs are exported. Records have the names and members of the log's JSON form; ``trace_id`` and
``span_id`` become the record's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber

from remora._version import __version__
from remora.api.models import TraceWriter
from remora.api.system import Line
from remora_adapters.telemetry.collector import Collector, any_value, key_values, server_resource

_ROOM = 16 << 20
"""Maximum estimated bytes of records that wait for the collector."""
_BATCH = 256 << 10
_DELAY_S = 1.0
_WEIGHT = 512
"""Estimated bytes of a record without its texts."""
_SEVERITIES = {
    "DEBUG": SeverityNumber.SEVERITY_NUMBER_DEBUG,
    "INFO": SeverityNumber.SEVERITY_NUMBER_INFO,
    "WARNING": SeverityNumber.SEVERITY_NUMBER_WARN,
    "ERROR": SeverityNumber.SEVERITY_NUMBER_ERROR,
    "CRITICAL": SeverityNumber.SEVERITY_NUMBER_FATAL,
}
_IDS = {"trace_id": 16, "span_id": 8}
"""Members that have a separate field, and their bytes."""
_CLOUD_NAMES = ("logging.googleapis.com/trace", "logging.googleapis.com/spanId")
"""Cloud Logging's names of the same members."""


class _Queued(NamedTuple):
    """A record that waits; ``size`` is its weight in the queue."""

    line: Line
    size: int


class LogExport:
    """Queue of records and the thread that sends them.

    Args:
        base: the collector's URL; "" leaves it to OpenTelemetry's variables and its default.
        environ: source of these variables.

    Raises:
        ConfigError: the URL or a certificate is not valid.
    """

    def __init__(self, base: str, environ: Mapping[str, str]) -> None:
        sink = _LogSink(Collector("logs", base, environ))
        self._writer: TraceWriter[_Queued] = TraceWriter(
            sink, room=_ROOM, batch=_BATCH, delay_s=_DELAY_S, what="log records"
        )

    def put(self, line: Line) -> None:
        """Queue a record; it is dropped, and counted, if there is no room."""
        size = _WEIGHT + len(line.message) + len(line.members.get("stack_trace", ""))
        self._writer.put(_Queued(line, size))

    def close(self, timeout_s: float) -> None:
        """Send what is queued within the timeout, and stop. Idempotent."""
        self._writer.close(timeout_s)


class _LogSink:
    """Sender of records."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._resource = key_values(server_resource({}).attributes)

    def write(self, queued: Sequence[_Queued]) -> None:
        """Send records. Blocks; raises ConnectionError."""
        answer = self._collector.send(request_of([each.line for each in queued], self._resource))
        refused = ExportLogsServiceResponse.FromString(answer).partial_success
        if refused.rejected_log_records:
            raise ConnectionError(
                f"the collector at {self._collector.place} refused {refused.rejected_log_records} records: "
                f"{refused.error_message}"
            )

    def close(self) -> None:
        """Do nothing, because no connection stays open between two requests."""


def request_of(lines: Iterable[Line], resource: Iterable[KeyValue]) -> ExportLogsServiceRequest:
    """Return the request for these records, with a scope for each logger."""
    request = ExportLogsServiceRequest()
    found = request.resource_logs.add()
    found.resource.attributes.extend(resource)
    scopes: dict[str, Any] = {}
    for line in lines:
        scope = scopes.get(line.logger)
        if scope is None:
            scope = scopes[line.logger] = found.scope_logs.add()
            scope.scope.name, scope.scope.version = line.logger, __version__
        scope.log_records.append(_record(line))
    return request


def _record(line: Line) -> LogRecord:
    time_ns = int(line.seconds * 1e9)
    ids = {name: _id(line.members.get(name), size) for name, size in _IDS.items()}
    own = {name for name, value in ids.items() if value}
    members = {name: value for name, value in line.members.items() if name not in own and name not in _CLOUD_NAMES}
    return LogRecord(
        time_unix_nano=time_ns,
        observed_time_unix_nano=time_ns,
        severity_number=_SEVERITIES.get(line.severity, SeverityNumber.SEVERITY_NUMBER_UNSPECIFIED),
        severity_text=line.severity,
        body=any_value(line.message),
        attributes=key_values(members),
        trace_id=ids["trace_id"],
        span_id=ids["span_id"],
    )


def _id(value: object, size: int) -> bytes:
    """Return the bytes of a hexadecimal id; none for any other member."""
    try:
        found = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        return b""
    return found if len(found) == size else b""
