"""The access log: which requests it takes, what it does with slow disks, and what it leaves behind."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable

import pytest

from eventually import eventually
from fakes import FakeClock, FakeExchange, ticket_of
from remora.messages import Buffer, Ticket
from remora.protocols.grpc.framing import GOOD, trailers
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer, Wire
from remora.server import access_log
from remora.server.access_lines import Entry
from remora.server.access_log import AccessLog, AccessWriter, _status_in
from remora.server.http.exchange import Cancellable, Exchange, bind

HEAD = Head("POST", "/v2/models/m/infer", ((b"X-Request-Id", b"r1"),))
ANSWER = HttpAnswer(200, (), [b"ab", b"cde"])


class Kept(AccessWriter):
    """Writer that keeps its entries."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.now_ns = FakeClock().monotonic_ns

    def put(self, entry: Entry) -> None:
        self.entries.append(entry)


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
    writer, exchange = Kept(), FakeExchange()
    bind(AccessLog(writer, share, makes_ids=ids).over(service), HEAD)(b"", exchange)
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

    writer = Kept()
    with pytest.raises(ZeroDivisionError):
        bind(AccessLog(writer, 0.0).over(Service(fail)), HEAD)(b"", FakeExchange())
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
        answer = bind(log.over(Service(lambda exchange: exchange.respond(ANSWER))), HEAD)
        for _ in range(10_000):
            answer(b"", FakeExchange())
        assert 8_000 < writer.dropped < 9_100
        blocked.set()
        writer.close(60.0)
        return writer

    with caplog.at_level(logging.WARNING, "remora.access"):
        writer = asyncio.run(work())
    eventually(lambda: sum(written) + writer.dropped == 10_000)
    assert f"{writer.dropped} requests are missing" in caplog.text


def test_a_write_that_fails_is_counted_and_the_thread_goes_on() -> None:
    failures = [OSError("disk full")]

    def write(_lines: str) -> None:
        if failures:
            raise failures.pop()

    async def work() -> int:
        writer = AccessWriter(asyncio.get_running_loop(), write, FakeClock())
        for _ in range(2 * access_log._BATCH):
            AccessLog(writer, 1.0).put(AccessLog(writer, 1.0).line(HEAD), 0, 200, 1, "", "", None)
        writer.close(60.0)
        return writer.dropped

    assert asyncio.run(work()) == access_log._BATCH
