"""Answers in pieces on one HTTP connection: flushed one by one, in order, ended when the client stops reading."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from remora.server.http.exchange import STREAM_BACKLOG, Exchange
from remora.server.http.held_bytes import UNREAD_S
from remora.server.http.http1 import Connection
from remora.server.http.http1_listener import Listener
from support.engine.fakes import FakeService, FakeTransport

HEADERS = ((b"Content-Type", b"text/event-stream"),)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


class Bench:
    """A connection whose service waits, in a loop that is turned by hand."""

    def __init__(self, loop: asyncio.AbstractEventLoop, service: FakeService | None = None) -> None:
        self.loop = loop
        self.service = service or FakeService(wait=True)
        self.listener = Listener(self.service, max_body_bytes=1 << 20)
        self.transport = FakeTransport()
        self.connection: Connection = self.listener.connection()
        self.do(lambda: self.connection.connection_made(self.transport))

    def do(self, act: Callable[[], object]) -> None:
        """Run something in the loop, and what follows from it."""

        async def run() -> None:
            act()

        self.loop.run_until_complete(run())
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))

    def receive(self, data: bytes) -> None:
        def feed() -> None:
            self.connection.get_buffer(-1)[: len(data)] = data
            self.connection.buffer_updated(len(data))

        self.do(feed)

    @property
    def exchange(self) -> Exchange:
        """The oldest request that waits."""
        return self.service.waiting[0][0]

    @property
    def cancelled(self) -> bool:
        return self.service.waiting[0][1].request.cancelled

    def begin(self) -> None:
        self.do(lambda: self.exchange.begin(200, HEADERS))

    def send(self, piece: bytes) -> None:
        self.do(lambda: self.exchange.send(piece))

    def finish(self) -> None:
        self.do(self.exchange.finish)
        self.service.waiting.pop(0)

    def written(self) -> bytes:
        """What was written since the last time."""
        found = bytes(self.transport.written)
        self.transport.written.clear()
        return found


@pytest.fixture
def bench() -> Iterator[Bench]:
    loop = asyncio.new_event_loop()
    yield Bench(loop)
    loop.close()


def post(path: str, *lines: str, version: str = "1.1") -> bytes:
    return "\r\n".join((f"POST {path} HTTP/{version}", "Host: h", "Content-Length: 0", *lines, "", "")).encode()


def test_each_piece_is_a_chunk_that_is_written_when_it_comes(bench: Bench) -> None:
    bench.receive(post("/s"))
    bench.begin()
    assert bench.written() == CHUNKED
    bench.send(b"one")
    assert bench.written() == b"3\r\none\r\n"
    bench.send(b"x" * 26)
    assert bench.written() == b"1a\r\n" + b"x" * 26 + b"\r\n"
    bench.finish()
    assert bench.written() == b"0\r\n\r\n"


def test_an_empty_piece_does_not_end_the_stream(bench: Bench) -> None:
    bench.receive(post("/s"))
    bench.begin()
    bench.send(b"")
    assert bench.written() == CHUNKED


def test_the_connection_is_kept_after_a_stream(bench: Bench) -> None:
    bench.receive(post("/s"))
    bench.begin()
    bench.finish()
    assert not bench.transport.ends
    bench.receive(post("/next"))
    assert [path for _, path, _ in bench.service.requests] == ["/s", "/next"]


def test_a_request_sent_behind_a_stream_waits_for_its_end(bench: Bench) -> None:
    bench.receive(post("/s") + post("/behind"))
    bench.begin()
    bench.send(b"one")
    assert len(bench.service.requests) == 1
    bench.finish()
    assert len(bench.service.requests) == 2
    assert bench.written().endswith(b"0\r\n\r\n"), "the second answer began before the first ended"
    bench.do(lambda: bench.service.answer())
    assert bench.written().startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("lines", [(), ("Connection: keep-alive",)])
def test_a_client_of_http_1_0_gets_a_stream_that_ends_with_the_connection(bench: Bench, lines: tuple[str, ...]) -> None:
    bench.receive(post("/s", *lines, version="1.0"))
    bench.begin()
    bench.send(b"one")
    bench.finish()
    assert bench.written() == HEAD + b"Connection: close\r\n\r\none"
    assert bench.transport.ends


def test_a_connection_is_closed_after_the_stream_if_the_client_wants_it(bench: Bench) -> None:
    bench.receive(post("/s", "Connection: close"))
    bench.begin()
    bench.finish()
    assert bench.written() == HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\n"
    assert bench.transport.ends


def test_a_server_that_stops_lets_an_open_stream_end(bench: Bench) -> None:
    bench.receive(post("/s"))
    bench.begin()
    assert bench.listener.close_idle() == 1
    assert not bench.transport.ends
    bench.send(b"one")
    bench.finish()
    assert bench.written().endswith(b"3\r\none\r\n0\r\n\r\n")
    assert bench.transport.ends


def test_a_client_that_disconnects_cancels_its_stream(bench: Bench) -> None:
    bench.receive(post("/s"))
    bench.begin()
    bench.transport.closing = True
    bench.connection.connection_lost(None)
    assert bench.cancelled
    bench.written()
    bench.send(b"late")
    bench.finish()
    assert bench.written() == b""


def test_a_client_that_closes_its_sending_side_amid_a_stream_cancels_it(bench: Bench) -> None:
    bench.receive(post("/s"))
    bench.begin()
    bench.connection.eof_received()
    assert bench.cancelled


def test_a_client_that_has_closed_its_sending_side_before_a_stream_began_gets_it_whole(bench: Bench) -> None:
    bench.receive(post("/s"))
    bench.connection.eof_received()
    bench.begin()
    bench.send(b"one")
    assert not bench.cancelled
    bench.finish()
    assert bench.written().endswith(b"3\r\none\r\n0\r\n\r\n")
    assert bench.transport.closing


def test_a_client_that_does_not_read_is_given_up_at_some_point(bench: Bench) -> None:
    bench.receive(post("/s"))
    bench.begin()
    bench.connection.pause_writing()
    bench.transport.unsent = STREAM_BACKLOG
    bench.send(b"one")
    assert not bench.cancelled, "this much may wait"
    bench.transport.unsent = STREAM_BACKLOG + 1
    bench.send(b"two")
    assert bench.cancelled
    assert bench.transport.aborted
    assert not bench.transport.written.endswith(b"two\r\n")


def test_a_client_that_reads_may_get_pieces_of_any_size(bench: Bench) -> None:
    bench.receive(post("/s"))
    bench.begin()
    bench.transport.unsent = STREAM_BACKLOG + 1  # of an earlier moment: the transport has not asked to wait
    bench.send(b"one")
    assert not bench.transport.ends


def test_a_slow_reader_that_catches_up_loses_nothing(bench: Bench) -> None:
    bench.receive(post("/s") + post("/behind"))
    bench.begin()
    bench.connection.pause_writing()
    bench.send(b"one")
    bench.finish()
    assert len(bench.service.requests) == 1, "more was begun for a client that does not read"
    bench.do(bench.connection.resume_writing)
    assert len(bench.service.requests) == 2


def test_a_client_that_reads_a_stream_slowly_stays_although_as_much_waits_at_each_sweep(bench: Bench) -> None:
    bench.receive(post("/s"))
    bench.begin()
    for sweep in range(9):
        bench.transport.unsent = 1_000 + sweep
        bench.connection.pause_writing()
        bench.listener.sweep(sweep * UNREAD_S, 1e9)
        assert not bench.transport.aborted
        bench.do(bench.connection.resume_writing)
    bench.connection.pause_writing()
    bench.listener.sweep(9 * UNREAD_S, 1e9)
    bench.listener.sweep(10 * UNREAD_S + 1, 1e9)
    assert bench.transport.aborted
    assert bench.listener.closed == {"unread_answer": 1}


def test_a_stream_that_breaks_in_the_service_does_not_look_whole(bench: Bench) -> None:
    class Breaking(FakeService):
        def handle(self, head: object, body: object, exchange: Exchange) -> None:  # type: ignore[override]
            exchange.begin(200, HEADERS)
            raise RuntimeError("a mistake")

    broken = Bench(bench.loop, Breaking())
    broken.receive(post("/s"))
    assert broken.transport.aborted
    assert broken.written() == CHUNKED
