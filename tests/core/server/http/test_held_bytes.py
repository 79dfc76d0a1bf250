"""Bytes that connections hold: what is counted, what is refused, and what is given back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.http2.frames import (
    DATA,
    ENHANCE_YOUR_CALM,
    HEADERS,
    INITIAL_WINDOW,
    PREFACE,
    SETTING,
    SETTINGS,
    frame,
    pack,
    window_update,
)
from remora.protocols.rest.answer import HttpAnswer
from remora.server.http import held_bytes
from remora.server.http.held_bytes import FREE_BYTES, Account, HeldBytes
from remora.server.http.http1_state import Phase
from remora.server.http.http2 import Http2Connection, Http2Listener
from remora.server.http.http2_requests import Requests
from support.engine.fakes import FakeClock
from support.wire.http1_bench import Bench, answers_of, benches, get, post

LONG = 4 * FREE_BYTES
CHUNKED = b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_the_first_message_of_a_server_may_exceed_every_limit() -> None:
    held = HeldBytes(100, 10)
    assert held.account().take(1_000)
    assert held.total == 1_000


def test_a_further_message_is_refused_by_the_limit_that_it_meets() -> None:
    held = HeldBytes(100, 50)
    one, other = held.account(), held.account()
    assert one.take(40)
    assert not one.has_room(11)
    assert one.has_room(10)
    assert other.take(50)
    assert not one.has_room(10 + 1)
    assert not held.account().has_room(11)
    assert held.refused == {"connection": 2, "server": 1}


def test_without_limits_all_is_admitted_and_counted() -> None:
    held = HeldBytes()
    accounts = [held.account() for _ in range(3)]
    assert all(each.take(1 << 40) for each in accounts)
    assert held.total == 3 << 40


def test_the_limits_default_to_shares_of_the_memory_and_are_divided_among_processes() -> None:
    whole, half = HeldBytes(0, 0), HeldBytes(0, 0, share=2)
    assert whole.most >= 64 << 20
    assert whole.most_of_one == min(whole.most // 2, 256 << 20)
    assert half.most == whole.most // 2


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(("take", "answers", "close")), st.integers(0, 200))))
def test_the_total_is_the_sum_of_the_accounts(steps: list[tuple[int, str, int]]) -> None:
    held = HeldBytes(500, 300)
    accounts = [held.account() for _ in range(4)]
    for which, what, size in steps:
        account = accounts[which]
        alone = held.total == account.requests + account.answers
        if what == "take":
            if account.take(size):
                assert held.total <= 500 or alone
        elif what == "answers":
            account.set_answers(size)
        else:
            account.close()
        assert held.total == sum(each.requests + each.answers for each in accounts)
        assert held.answers == sum(each.answers for each in accounts)
    for each in accounts:
        each.close()
    assert held.total == held.answers == 0


def test_memory_is_worth_trimming_once_after_much_was_given_back() -> None:
    held = HeldBytes()
    account = held.account()
    account.add(100 << 20)
    assert not held.has_freed_much()
    account.close()
    assert held.has_freed_much()
    assert not held.has_freed_much()


def test_the_oldest_waiting_uploads_are_resumed_when_bytes_are_given_back() -> None:
    held, resumed = HeldBytes(300_000), list[int]()
    account = held.account()
    account.add(300_000)
    waits: list[Callable[[], None]] = [lambda number=number: resumed.append(number) for number in range(3)]  # type: ignore[misc]
    for each in waits:
        held.wait(each)
    held.stop_waiting(waits[0])
    account.add(-10)
    assert resumed == [1]
    assert held.is_awaited
    account.add(-10)
    assert resumed == [1, 2]
    assert not held.is_awaited


# -- HTTP/1.1 ----------------------------------------------------------------------------------------------------


def in_loop(bench: Bench, act: Callable[[], None]) -> None:
    async def run() -> None:
        act()

    bench.loop.run_until_complete(run())


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have uploads wait for memory as long as a busy machine needs."""
    monkeypatch.setattr(held_bytes, "ROOM_WAIT_S", 3600.0)


def fill(held: HeldBytes) -> Account:
    other = held.account()
    other.add(held.most)
    return other


def test_a_long_body_is_counted_from_its_head_to_its_answer() -> None:
    held = HeldBytes()
    with benches(wait=True, held=held) as bench:
        bench.receive(post("/a", b"x" * LONG)[:-1])
        assert held.total == LONG
        bench.receive(b"x")
        assert held.total == LONG
        bench.answer()
        assert held.total == 0


def test_a_chunked_body_is_counted_as_it_arrives() -> None:
    held = HeldBytes()
    with benches(wait=True, held=held) as bench:
        bench.receive(CHUNKED + b"%x\r\n" % LONG + b"x" * (LONG - 5))
        assert LONG - 5 <= held.total <= LONG + 10
        bench.receive(b"x" * 5 + b"\r\n0\r\n\r\n")
        assert held.total >= LONG
        bench.answer()
        assert held.total == 0
        assert bench.service.requests == [("POST", "/c", b"x" * LONG)]


def test_small_requests_are_not_counted() -> None:
    held = HeldBytes(1, 1)
    fill(held)
    with benches(held=held) as bench:
        bench.receive(post("/a", b"x" * (FREE_BYTES - 100)))
        assert len(bench.service.requests) == 1


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("split", [0, 1, 100, LONG - 1])
def test_an_upload_waits_for_memory_and_then_arrives_whole(split: int) -> None:
    held = HeldBytes(100)
    other = fill(held)
    with benches(held=held) as bench:
        head = post("/a", b"")[:-4].replace(b"Content-Length: 0", b"Content-Length: %d" % LONG) + b"\r\n\r\n"
        body = bytes(range(256)) * (LONG // 256)
        bench.receive(head + body[:split])
        assert bench.connection._phase is Phase.WAITING
        assert not bench.transport.reading
        other.close()
        bench.turn()
        assert bench.transport.reading
        bench.receive(body[split:] + get("/b"))
        assert bench.service.requests == [("POST", "/a", body), ("GET", "/b", b"")]
        assert held.total == 0


@pytest.mark.usefixtures("patient")
def test_a_chunked_upload_waits_for_memory_and_then_arrives_whole() -> None:
    held = HeldBytes(100)
    other = fill(held)
    with benches(held=held) as bench:
        bench.receive(CHUNKED + b"%x\r\n" % LONG + b"x" * LONG)
        assert not bench.transport.reading
        other.close()
        bench.turn()
        bench.receive(b"\r\n0\r\n\r\n")
        assert bench.service.requests == [("POST", "/c", b"x" * LONG)]


@pytest.mark.usefixtures("patient")
def test_an_upload_that_waits_too_long_is_refused_and_told_when_to_try_again() -> None:
    held = HeldBytes(100)
    fill(held)
    with benches(held=held) as bench:
        bench.receive(post("/a", b"x" * LONG)[:-1])
        assert bench.connection._waiting is not None
        wait = bench.connection._waiting
        in_loop(bench, wait._expire)
        head, _ = answers_of(bench.written)[0]
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in head
        assert b"Connection: close" in head
        assert bench.connection not in bench.listener.connections  # it closes when the client has read the answer
        assert held.refused == {"server": 1}
        assert not held.is_awaited


def test_a_whole_request_without_room_is_refused_and_its_connection_goes_on() -> None:
    held = HeldBytes(100)
    other = fill(held)
    with benches(held=held) as bench:
        bench.receive(post("/a", b"x" * LONG) + get("/b"))
        answers = answers_of(bench.written)
        assert [head[9:12] for head, _ in answers] == [b"503", b"200"]
        other.close()
        bench.receive(post("/a", b"x" * LONG))
        assert answers_of(bench.written)[-1][0].startswith(b"HTTP/1.1 200 ")


def test_a_client_that_leaves_gives_everything_back_at_once() -> None:
    held = HeldBytes()
    with benches(wait=True, held=held) as bench:
        bench.receive(post("/a", b"x" * LONG)[:-1])
        body = bench.connection._body
        assert body is not None
        memory = weakref.ref(body.obj if isinstance(body.obj, np.ndarray) else np.asarray(body.obj).base)
        del body
        gc.disable()
        try:
            bench.lose()
            assert held.total == 0
            assert memory() is None
        finally:
            gc.enable()


def test_an_answer_is_counted_while_the_client_does_not_read_it() -> None:
    held = HeldBytes()
    with benches(wait=True, held=held) as bench:
        bench.receive(get("/a"))
        bench.transport.unsent = LONG
        bench.connection.pause_writing()
        assert held.answers == held.total == LONG
        bench.connection.resume_writing()
        assert held.total == 0


def test_an_answer_without_room_becomes_a_refusal() -> None:
    held = HeldBytes(100)
    fill(held)
    with benches(wait=True, held=held) as bench:
        bench.receive(get("/a"))
        bench.connection.respond(HttpAnswer(200, (), [b"x" * LONG]))
        assert [head[9:12] for head, _ in answers_of(bench.written)] == [b"503"]


def test_an_upload_that_is_too_slow_is_refused_only_while_others_wait() -> None:
    held = HeldBytes(LONG)
    with benches(wait=True, held=held) as bench:
        bench.receive(post("/a", b"x" * LONG)[: -LONG + 100])
        start = bench.connection.receiving_since
        bench.connection.sweep(start + 60.0, 120.0, 600.0)
        assert bench.written == b""
        held.wait(lambda: None)
        bench.connection.sweep(start + 1.0, 120.0, 600.0)
        assert bench.written == b""
        in_loop(bench, lambda: bench.connection.sweep(start + 60.0, 120.0, 600.0))
        assert bench.written.startswith(b"HTTP/1.1 408 ")
        assert bench.listener.closed == {"slow_body": 1}
        assert held.total == 0


def test_a_client_that_reads_nothing_of_its_answer_is_dropped_in_time() -> None:
    with benches(wait=True) as bench:
        bench.receive(get("/a"))
        bench.transport.unsent = LONG
        bench.connection.pause_writing()
        for now, unsent, aborted in ((0.0, 50, False), (50.0, 50, False), (55.0, 40, False), (110.0, 40, False)):
            bench.transport.unsent = unsent
            bench.connection.sweep(now, 1e9, 1e9)
            assert bench.transport.aborted == aborted
        bench.connection.sweep(116.0, 1e9, 1e9)
        assert bench.transport.aborted
        assert bench.listener.closed == {"unread_answer": 1}


# -- HTTP/2 ----------------------------------------------------------------------------------------------------

GREETING = PREFACE + frame(SETTINGS, 0, 0, SETTING.pack(INITIAL_WINDOW, 0))
POST = pack(((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a"), (b":authority", b"h")))


def http2(bench: Bench, held: HeldBytes) -> Http2Connection:
    """A connection of HTTP/2 whose client gives streams no window, with the service and transport of a bench."""
    requests = Requests(bench.service, 1 << 30, FakeClock().monotonic_ns)
    listener = Http2Listener(lambda _fields: lambda _stream: None, requests.open, held=held)
    connection = listener.connection()

    async def connect() -> None:
        connection.connection_made(bench.transport)
        connection.take_in(GREETING)

    bench.loop.run_until_complete(connect())
    return connection


def upload(stream: int, size: int, *, ended: bool) -> bytes:
    pieces = [b"x" * min(FREE_BYTES, size - at) for at in range(0, size, FREE_BYTES)]
    flags = [0] * (len(pieces) - 1) + [1 if ended else 0]
    data = b"".join(frame(DATA, flag, stream, piece) for flag, piece in zip(flags, pieces, strict=True))
    return frame(HEADERS, 4, stream, POST) + data


def test_a_body_over_http2_is_counted_until_its_answer() -> None:
    held = HeldBytes()
    with benches(wait=True) as bench:
        connection = http2(bench, held)
        connection.take_in(upload(1, LONG, ended=False))
        assert held.total == LONG
        connection.take_in(frame(DATA, 1, 1, b"xy"))
        assert held.total == LONG + 2
        bench.service.waiting[0][0].respond(HttpAnswer(200, (), [b"ok"]))
        connection.flush()
        assert held.total == len(b"ok")
        connection.connection_lost(None)
        assert held.total == 0


def test_an_answer_over_http2_without_room_becomes_a_refusal() -> None:
    held = HeldBytes(3 * LONG, 2 * LONG)
    with benches(wait=True) as bench:
        connection = http2(bench, held)
        for stream in range(1, 9, 2):
            connection.take_in(frame(HEADERS, 5, stream, POST))
        for exchange, _, _ in bench.service.waiting:
            exchange.respond(HttpAnswer(200, (), [b"x" * LONG]))
        connection.flush()
        assert 2 * LONG <= held.answers < 2 * LONG + 500
        assert held.refused == {"connection": 2}


def test_the_answers_of_a_client_that_leaves_are_freed_at_once() -> None:
    class Piece(np.ndarray):  # type: ignore[type-arg]
        """Memory that can be observed."""

    held = HeldBytes()
    with benches(wait=True) as bench:
        connection = http2(bench, held)
        connection.take_in(frame(HEADERS, 5, 1, POST))
        memory = np.zeros(LONG, np.uint8).view(Piece)
        freed = weakref.ref(memory)
        (stream,) = connection.machine.streams
        stream.data(memoryview(memory))  # type: ignore[arg-type]
        connection.flush()
        assert held.answers == LONG
        del memory, stream
        gc.disable()
        try:
            connection.connection_lost(None)
            assert held.total == 0
            assert freed() is None
        finally:
            gc.enable()


def test_a_stream_whose_answer_is_not_read_is_reset_in_time() -> None:
    held = HeldBytes()
    with benches(wait=True) as bench:
        connection = http2(bench, held)
        connection.take_in(frame(HEADERS, 5, 1, POST))
        bench.service.waiting[0][0].respond(HttpAnswer(200, (), [b"x" * LONG]))
        for now, open_streams in ((0.0, 1), (59.0, 1), (61.0, 0)):
            connection.sweep(now, 1e9, 1e9)
            assert connection.machine.open == open_streams
        connection.flush()
        assert held.total == 0


def answered(bench: Bench, connection: Http2Connection, *streams: int) -> None:
    """Answer new requests with ``LONG`` bytes each."""
    for stream in streams:
        connection.take_in(frame(HEADERS, 5, stream, POST))
        bench.service.waiting[-1][0].respond(HttpAnswer(200, (), [b"x" * LONG]))
    connection.flush()


def test_a_connection_that_reads_nothing_of_many_answers_is_closed_sooner() -> None:
    held = HeldBytes(0, 16 * LONG)
    with benches(wait=True) as bench:
        connection = http2(bench, held)
        answered(bench, connection, 1, 3, 5)
        assert held.answers > held.most_unread
        for now, closing in ((0.0, False), (20.0, False), (21.0, True)):
            connection.sweep(now, 1e9, 1e9)
            assert bench.transport.closing == closing
        assert bench.written.endswith(ENHANCE_YOUR_CALM.to_bytes(4, "big") + b"no answers were read")
        assert connection._listener.closed == {"unread_answer": 1}
        connection.connection_lost(None)
        assert held.total == 0


def test_a_client_that_reads_steadily_keeps_its_answers_however_slowly_it_reads() -> None:
    held = HeldBytes(0, 16 * LONG)
    with benches(wait=True) as bench:
        connection = http2(bench, held)
        answered(bench, connection, 1, 3, 5)
        for now in range(0, 500, 15):
            for stream in (1, 3, 5):
                connection.take_in(window_update(stream, 1))
            connection.sweep(float(now), 1e9, 1e9)
        assert held.answers > held.most_unread
        assert connection.machine.open == 3
        assert not bench.transport.closing


def test_answers_that_are_not_read_are_dropped_alone_while_others_are_read() -> None:
    held = HeldBytes(0, 16 * LONG)
    with benches(wait=True) as bench:
        connection = http2(bench, held)
        answered(bench, connection, 1, 3, 5)
        for now in range(0, 70, 5):
            connection.take_in(window_update(5, 1))
            connection.sweep(float(now), 1e9, 1e9)
        assert [stream.number for stream in connection.machine.streams] == [5]
        assert not bench.transport.closing
        assert connection._listener.closed == {"unread_answer": 2}


def test_an_http2_client_that_reads_nothing_of_its_socket_is_dropped_in_time() -> None:
    held = HeldBytes()
    with benches(wait=True) as bench:
        connection = http2(bench, held)
        bench.transport.unsent = 50
        connection.pause_writing()
        for now, unsent, closing in ((0.0, 50, False), (50.0, 50, False), (55.0, 40, False), (115.0, 40, False)):
            bench.transport.unsent = unsent
            connection.sweep(now, 1e9, 1e9)
            assert bench.transport.closing == closing
        connection.sweep(116.0, 1e9, 1e9)
        assert bench.transport.closing
        assert connection._listener.closed == {"unread_answer": 1}


def test_an_http2_client_that_reads_while_more_is_written_stays() -> None:
    held = HeldBytes()
    with benches(wait=True) as bench:
        connection = http2(bench, held)
        connection.take_in(window_update(0, 1 << 20))
        bench.transport.unsent = 1_000
        connection.pause_writing()
        size = len(bench.written)
        for stream in range(1, 40, 2):
            connection.take_in(frame(HEADERS, 5, stream, POST))
            bench.service.waiting[-1][0].respond(HttpAnswer(200, (), [b""]))
            connection.flush()
            bench.transport.unsent = 1_000 + len(bench.written) - size - stream  # the client reads two bytes
            connection.sweep(15.0 * stream, 1e9, 1e9)
            assert not bench.transport.closing


def test_one_buffer_of_a_connection_is_handled_in_a_turn() -> None:
    with benches(wait=True) as bench:
        connection = http2(bench, HeldBytes())

        async def receive(data: bytes, *, is_full: bool) -> None:
            connection.get_buffer(-1)[: len(data)] = data
            connection.buffer_updated(len(data))
            assert bench.transport.reading != is_full

        size = len(connection.get_buffer(-1))
        body = upload(1, 3 * size, ended=False)
        bench.loop.run_until_complete(receive(body[: size - 1], is_full=False))
        bench.loop.run_until_complete(receive(body[size - 1 : 2 * size - 1], is_full=True))
        bench.turn()
        assert bench.transport.reading


def test_a_closed_connection_is_reported_once() -> None:
    held, closed = HeldBytes(), list[int]()
    account = held.account()
    account.add(10)
    held.when_closed = lambda: closed.append(held.total)
    account.close()
    account.close()
    assert closed == [0]
