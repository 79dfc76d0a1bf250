"""Log records as OpenTelemetry's collectors get them, and what a collector that is down costs."""

from __future__ import annotations

import logging

import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import SeverityNumber

from remora.system.log_lines import Line, trace_members
from remora.system.logs import Log, LogSettings
from remora_adapters.telemetry import logs as otlp_logs
from remora_adapters.telemetry.logs import LogExport, request_of
from support.process.eventually import eventually
from support.servers.trace_receiver import attributes, collector

PATIENCE_S = 30.0
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_record_has_its_severity_members_and_place_in_the_trace() -> None:
    line = Line(1.5, "WARNING", "remora.x", "text", {"model": "m", "rows": 3, **trace_members(TRACE, SPAN)})
    request = request_of([line, line._replace(logger="remora.y", members={"trace_id": "none"})], [])
    first, second = request.resource_logs[0].scope_logs
    assert (first.scope.name, second.scope.name) == ("remora.x", "remora.y")
    (record,) = first.log_records
    assert (record.severity_number, record.severity_text) == (SeverityNumber.SEVERITY_NUMBER_WARN, "WARNING")
    assert (record.time_unix_nano, record.body.string_value) == (1_500_000_000, "text")
    assert (record.trace_id.hex(), record.span_id.hex()) == (TRACE, SPAN)
    assert attributes(record) == {"model": "m", "rows": 3}
    assert not second.log_records[0].trace_id, "a member that is no id stays a member"
    assert attributes(second.log_records[0]) == {"trace_id": "none"}


@pytest.fixture
def logger() -> logging.Logger:
    made = logging.Logger("remora.test")
    made.propagate = False
    return made


def exporting(logger: logging.Logger, url: str) -> Log:
    log = Log(logger)
    log.set_up(LogSettings(), root=logger)
    export = LogExport(url, {})
    log.export_to(export.put, export.close)
    return log


def test_a_collector_gets_the_records_that_the_log_shows(logger: logging.Logger) -> None:
    with collector() as kept:
        log = exporting(logger, kept.base)
        logger.debug("hidden")
        logger.info("%s", "shown", extra={"fields": {"model": "m"}})
        try:
            raise ValueError("bad")
        except ValueError:
            logger.exception("failed")
        log.end_export(PATIENCE_S)
        log.end_export(PATIENCE_S)
        records = kept.records(lambda record: True, "remora.test")
        assert [record.body.string_value for record in records] == ["shown", "failed"]
        assert attributes(records[0]) == {"model": "m"}
        assert "ValueError: bad" in str(attributes(records[1])["stack_trace"])
        assert kept.resource["service.name"] == "triton-inference-server"


def test_a_collector_that_is_down_costs_bounded_memory_and_one_warning(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp_logs, "_ROOM", 10 * 1024)
    monkeypatch.setattr(otlp_logs, "_BATCH", 1024)
    with collector() as kept:
        kept.status = 503
        log = exporting(logger, kept.base)
        for number in range(100):
            logger.info("%04d%s", number, "x" * 508)
        eventually(lambda: kept.requests >= 1)
        logger.info("late")
        log.end_export(PATIENCE_S)
    texts = [record.getMessage() for record in caplog.records if record.name == "remora.traces"]
    assert sum("cannot be written and are dropped until they can" in text for text in texts) == 1
    assert sum("arrive faster" in text for text in texts) <= 1
    assert "dropped in all" in texts[-1]
