"""The thread that hands traces on: what it is given room for, and what becomes of the rest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from remora.tracing import writer as tracing_writer
from remora.tracing.sampling import Sampling
from remora.tracing.settings import TraceSettings
from remora.tracing.writer import DroppedError, Finished, TraceWriter
from support.process.no_threads import refuse_threads

PATIENCE_S = 30.0
SAMPLING = Sampling(TraceSettings())


class FakeSink:
    """Keeps what it is given; stands still until it is let go."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.go = threading.Event()
        self.at_work = threading.Event()
        self.failure: Exception | None = None
        self.closed = False
        self.hurries = True

    def write(self, finished: Sequence[Finished]) -> None:
        self.at_work.set()
        assert self.go.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        self.batches.append(len(finished))

    def close(self) -> None:
        self.closed = True
        if self.hurries:
            self.go.set()
        if self.failure is not None:
            raise self.failure


def put(writer: TraceWriter, count: int) -> None:
    for _ in range(count):
        writer.put(Finished(SAMPLING, None))


def test_spans_without_room_are_dropped_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    sink = FakeSink()
    writer = TraceWriter(sink, room=3)
    put(writer, 1)
    assert sink.at_work.wait(PATIENCE_S)
    put(writer, 8)
    assert writer.dropped == 5
    assert [record.message for record in caplog.records] == [
        "traces arrive faster than they can be written: dropping some from now on"
    ]
    sink.go.set()
    assert writer.flush(PATIENCE_S)
    assert sink.batches == [1, 3]
    writer.close(PATIENCE_S)


def test_less_than_a_batch_waits_for_its_time_or_a_flush() -> None:
    sink = FakeSink()
    sink.go.set()
    writer = TraceWriter(sink, room=100, batch=4, delay_s=3600)
    put(writer, 3)
    assert not sink.batches
    assert writer.flush(PATIENCE_S)
    assert sink.batches == [3]
    put(writer, 4)
    assert sink.at_work.wait(PATIENCE_S)
    writer.close(PATIENCE_S)
    assert sum(sink.batches) == 7


def test_a_sink_that_fails_costs_its_traces_and_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sink = FakeSink()
    sink.go.set()
    sink.failure = ConnectionError("down")
    writer = TraceWriter(sink, room=10)
    for _ in range(3):
        put(writer, 1)
        assert writer.flush(PATIENCE_S)
    sink.failure = None
    put(writer, 1)
    assert writer.flush(PATIENCE_S)
    assert writer.dropped == 3
    assert [record.message for record in caplog.records] == [
        "traces cannot be written and are dropped until they can: down",
        "traces are written again; 3 were dropped so far",
    ]
    writer.close(PATIENCE_S)
    assert caplog.records[-1].message == "3 traces were dropped in all"


def test_a_sink_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_writer, "_LAST_S", PATIENCE_S)
    sink = FakeSink()
    writer = TraceWriter(sink, room=10)
    put(writer, 1)
    assert sink.at_work.wait(PATIENCE_S)
    put(writer, 2)
    writer.close(0.01)
    assert sink.closed
    assert writer.dropped == 2


def test_what_a_sink_that_will_not_hurry_has_in_hand_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_writer, "_LAST_S", 0.01)
    sink = FakeSink()
    sink.hurries = False
    writer = TraceWriter(sink, room=10)
    put(writer, 1)
    assert sink.at_work.wait(PATIENCE_S)
    put(writer, 2)
    writer.close(0.01)
    assert writer.dropped == 3
    sink.go.set()


def test_a_sink_that_cannot_be_closed_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    sink = FakeSink()
    sink.failure = OSError("no space left")
    TraceWriter(sink, room=10).close(PATIENCE_S)
    assert [record.message for record in caplog.records] == ["the last traces cannot be written: no space left"]


def test_a_sink_may_keep_what_it_cannot_write_yet() -> None:
    sink = FakeSink()
    sink.go.set()
    sink.failure = DroppedError(2, "unreachable")
    writer = TraceWriter(sink, room=100)
    put(writer, 1)
    assert writer.flush(PATIENCE_S)
    assert writer.dropped == 2
    writer.close(PATIENCE_S)
    assert writer.dropped == 4


def test_a_writer_whose_thread_cannot_start_drops_what_it_gets_until_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = FakeSink()
    sink.go.set()
    writer = TraceWriter(sink, room=9)
    refuse_threads(monkeypatch)
    put(writer, 2)
    assert writer.dropped == 2
    assert [record.message for record in caplog.records] == [
        "traces cannot be written, because no thread can start: dropping some from now on"
    ]
    monkeypatch.undo()
    put(writer, 1)
    assert writer.flush(PATIENCE_S)
    assert sink.batches == [1]
    writer.close(PATIENCE_S)
