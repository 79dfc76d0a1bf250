"""The access log: which requests it takes, what it does with slow disks, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from remora.messages import Buffer, Ticket
from remora.protocols.grpc.framing import GOOD, trailers
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer, Wire
from remora.server import access_log
from remora.server.access_lines import Entry
from remora.server.access_log import AccessLog, AccessWriter, _status_in
from remora.server.http.exchange import Cancellable, Exchange, binder_of
from remora.system import logs
from remora.system.clock import SystemClock
from remora.system.log_lines import Line
from support.engine.fakes import FakeAccessWriter, FakeClock, FakeExchange, ticket_of
from support.process.eventually import eventually

HEAD = Head("POST", "/v2/models/m/infer", ((b"X-Request-Id", b"r1"),))
ANSWER = HttpAnswer(200, (), [b"ab", b"cde"])


class Queued:
    """Request that got its ticket at the end of its turn."""

    def __init__(self, ticket: Ticket | Queued) -> None:
        self.ticket = ticket

    def cancel(self) -> None: ...


class Service:
    """Service that answers by a function, and returns a ticket or a request that has one."""

    def __init__(self, answer: Callable[[Exchange], None], ticket: Ticket | Queued | None = None) -> None:
        self.answer = answer
        self.ticket = ticket

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        self.answer(exchange)
        return self.ticket


class Model:
    """Model as in the context of a ticket."""

    name, version_text = "m", "3"


def ran() -> Ticket:
    ticket = ticket_of()
    ticket.arrival_ns, ticket.start_ns, ticket.spent_ns, ticket.batch_rows = 10, 30, (1, 2, 3), 8
    ticket.context = (None, Model())
    return ticket


def ask(service: Service, *, share: float = 1.0, ids: bool = False) -> tuple[list[Entry], FakeExchange]:
    writer, exchange = FakeAccessWriter(), FakeExchange()
    binder_of(AccessLog(writer, share, makes_ids=ids).over(service))(HEAD)(b"", exchange)
    return writer.entries, exchange


@pytest.mark.parametrize("ticket", [ran(), Queued(ran()), Queued(Queued(ran()))])
def test_an_answer_that_comes_before_the_ticket_is_logged_with_its_execution(ticket: Ticket | Queued) -> None:
    (entry,), _ = ask(Service(lambda exchange: exchange.respond(ANSWER), ticket))
    assert entry[1] == 200
    assert entry[4:7] == (5, "", "r1")
    assert entry[7] == ("m", "3", 1, 8, 20, (1, 2, 3), "")


def test_a_later_answer_is_logged_with_the_execution_and_keeps_no_ticket() -> None:
    kept: list[Exchange] = []
    ticket, model = ran(), Model()
    service = Service(kept.append, ticket)
    ticket.context, gone = (None, model), weakref.ref(model)
    entries, exchange = ask(service)
    assert not entries
    kept[0].respond(ANSWER)
    assert exchange.answers == [ANSWER]
    assert entries[0][7] is not None
    service.ticket = None
    del ticket, model
    assert gone() is None  # the exchange lives on, and its ticket does not


def test_a_stream_is_logged_at_its_end() -> None:
    kept: list[Exchange] = []
    entries, exchange = ask(Service(kept.append))
    kept[0].begin(200, ())
    for piece in (b"ab", b"c"):
        kept[0].send(piece)
    assert not entries
    kept[0].finish()
    assert entries[0][1:5:3] == (200, 3)
    assert (exchange.pieces, exchange.finished) == ([b"ab", b"c"], 1)


def test_a_service_that_fails_is_logged_as_500() -> None:
    def fail(_exchange: Exchange) -> None:
        raise ZeroDivisionError

    writer = FakeAccessWriter()
    with pytest.raises(ZeroDivisionError):
        binder_of(AccessLog(writer, 0.0).over(Service(fail)))(HEAD)(b"", FakeExchange())
    assert writer.entries[0][1] == 500


@pytest.mark.parametrize(("share", "status", "logged"), [(0.0, 200, 0), (0.0, 404, 1), (1.0, 200, 1), (-1.0, 500, 0)])
def test_the_share_selects_successes_and_failures_are_always_logged(share: float, status: int, logged: int) -> None:
    answer = ANSWER._replace(status=status)
    assert len(ask(Service(lambda exchange: exchange.respond(answer)), share=share)[0]) == logged


def test_the_id_of_the_client_is_echoed_on_both_forms_of_an_answer() -> None:
    answer = ANSWER._replace(wire=Wire())
    _, exchange = ask(Service(lambda each: each.respond(answer)), ids=True)
    (echoed,) = exchange.answers
    assert echoed.headers == ((b"X-Request-Id", b"r1"),)
    assert echoed.wire is not None
    assert echoed.wire.start == b"HTTP/1.1 200 OK\r\nX-Request-Id: r1\r\nContent-Length: 5\r\n\r\nab"
    assert answer.wire is not None
    assert b"r1" not in answer.wire.start  # the next request has another id


def test_new_ids_differ() -> None:
    log = AccessLog(None, -1.0, makes_ids=True)
    assert len({log.new_id() for _ in range(100)}) == 100


@pytest.mark.parametrize("status", [0, 5, 14])
def test_the_status_of_a_call_is_read_from_its_trailers(status: int) -> None:
    assert _status_in(trailers(status, "text", alone=True)) == status
    assert _status_in(GOOD) == 0
    assert _status_in(b"") == 2


def test_a_writer_that_blocks_costs_entries_and_not_memory_and_reports_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access_log, "MOST_WAITING", 1_000)
    blocked, written = threading.Event(), []

    def write(lines: str) -> None:
        blocked.wait(60)
        written.append(lines.count("\n"))

    async def work() -> AccessWriter:
        writer = AccessWriter(asyncio.get_running_loop(), write, FakeClock())
        log = AccessLog(writer, 1.0)
        answer = binder_of(log.over(Service(lambda exchange: exchange.respond(ANSWER))))(HEAD)
        for _ in range(10_000):
            answer(b"", FakeExchange())
        assert 8_000 < writer.dropped < 9_100
        assert writer.waiting <= 1_000 + access_log._PRINTED_AT_ONCE
        blocked.set()
        writer.close(60.0)
        return writer

    with caplog.at_level(logging.WARNING, "remora.access"):
        writer = asyncio.run(work())
    eventually(lambda: sum(written) + writer.dropped == 10_000)
    assert f"{writer.dropped} requests are missing" in caplog.text


@pytest.mark.parametrize("error", [OSError("disk full"), ValueError("closed"), RuntimeError("reentrant call")])
def test_a_write_that_fails_is_counted_and_the_thread_goes_on(error: Exception) -> None:
    failures = [error]

    def write(_lines: str) -> None:
        if failures:
            raise failures.pop()

    async def work() -> int:
        writer = AccessWriter(asyncio.get_running_loop(), write, FakeClock())
        for _ in range(2):
            log_many(writer, 10)
            writer.pass_on()
        writer.close(60.0)
        return writer.dropped

    assert asyncio.run(work()) == 10


def log_many(writer: AccessWriter, number: int) -> None:
    log = AccessLog(writer, 1.0)
    line = log.line(HEAD)
    for each in range(number):
        log.put(line, 0, 200, each, "", "", None)


def test_ninety_thousand_lines_reach_a_file_in_order_and_none_is_lost(tmp_path: Path) -> None:
    async def work() -> AccessWriter:
        with (tmp_path / "access.log").open("w") as file:
            writer = AccessWriter(asyncio.get_running_loop(), file.write, SystemClock())
            log = AccessLog(writer, 1.0)
            line = log.line(HEAD)
            for number in range(90_000):  # 3 s at 30,000 a second, 10 ms of them at a time
                log.put(line, 0, 200, number, "10.0.0.7", "", None)
                while number % 300 == 0 and writer.waiting > 9_000:  # the disk is never 0.3 s behind
                    await asyncio.sleep(0)
            writer.close(60.0)
        return writer

    writer = asyncio.run(work())
    lines = (tmp_path / "access.log").read_text().splitlines()
    assert [int(re.findall(r" bytes=(\d+) ", line)[0]) for line in lines] == list(range(90_000))
    assert (writer.dropped, writer.waiting) == (0, 0)


class Timers:
    """Loop that keeps its timers for the test to run."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_later(self, _delay: float, work: Callable[[], None]) -> Timers:
        self.due.append(work)
        return self

    def cancel(self) -> None:
        self.due.clear()


def test_a_line_that_cannot_be_exported_costs_no_other_line_and_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exported, written = list[str](), list[str]()

    def export(line: Line) -> None:
        size = line.members["httpRequest"]["responseSize"]
        if size != "2":
            raise KeyError(size)
        exported.append(line.message)

    monkeypatch.setattr(logs.OURS, "export", export)
    writer = AccessWriter(Timers(), written.append, FakeClock())  # type: ignore[arg-type]
    for _ in range(2):
        log_many(writer, 3)
        writer.pass_on()
    writer.close(60.0)
    assert "".join(written).count("\n") == 6
    assert exported == ["POST /v2/models/m/infer 200"] * 2
    assert (writer.waiting, writer.dropped) == (0, 0)
    assert caplog.text.count("cannot be exported") == 1


def test_the_thread_is_woken_once_in_a_window_and_gets_all_lines_of_it() -> None:
    timers, written = Timers(), list[str]()
    writer = AccessWriter(timers, written.append, FakeClock())  # type: ignore[arg-type]
    for _ in range(2):
        log_many(writer, 100)
        (end_window,) = timers.due
        assert writer.waiting <= 100
        before = len(written)
        end_window()
        eventually(lambda: writer.waiting == 0)
        assert len(written) == before + 1
        assert written[-1].count("\n") == 100
        assert not timers.due
    writer.close(60.0)


class SteppedClock(FakeClock):
    """Clock whose wall-clock time is set apart from its monotonic time."""

    ahead_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.ahead_ms


def test_lines_after_a_pause_have_the_format_and_the_clock_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "OURS", logs.Log(logging.Logger("remora.test")))
    clock, written = SteppedClock(), list[str]()
    writer = AccessWriter(Timers(), written.append, clock)  # type: ignore[arg-type]
    log_many(writer, 1)
    writer.pass_on()
    logs.OURS.change({"log_format": "json"})
    clock.ahead_ms = 86_400_000
    clock.advance(5_000_000_000)
    log_many(writer, 1)
    writer.close(60.0)
    first, second = written
    assert " remora.access: " in first
    assert json.loads(second)["timestamp"] == "1970-01-02T00:00:06.000Z"


def test_a_burst_wakes_the_thread_before_the_window_ends() -> None:
    written: list[str] = []
    writer = AccessWriter(Timers(), written.append, FakeClock())  # type: ignore[arg-type]
    log_many(writer, access_log._MOST_COLLECTED)
    eventually(lambda: "".join(written).count("\n") == access_log._MOST_COLLECTED)
    writer.close(60.0)
