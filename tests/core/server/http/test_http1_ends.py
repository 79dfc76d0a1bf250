"""How HTTP/1 connections end: disconnects, timeouts and the stop of the server."""

from __future__ import annotations

import itertools

import pytest

from remora.server.http.exchange import SILENCE_S
from support.wire.http1_bench import Bench, answers_of, benches, get, post

CHUNKED = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_disconnect_cancels_the_request_under_way(waiting: Bench) -> None:
    waiting.receive(get("/a"))
    ((_, ticket, _),) = waiting.service.waiting
    waiting.lose()
    assert ticket.request.cancelled
    assert waiting.listener.connections == {}


def test_a_disconnect_after_the_answer_cancels_nothing(waiting: Bench) -> None:
    waiting.receive(get("/a"))
    ((_, ticket, _),) = waiting.service.waiting
    waiting.answer()
    waiting.lose()
    assert not ticket.request.cancelled


def test_an_answer_after_the_disconnect_is_harmless(waiting: Bench) -> None:
    waiting.receive(get("/a"))
    waiting.transport.close()
    waiting.lose()
    waiting.answer()
    assert waiting.written == b""


@pytest.mark.parametrize("wire", [get("/a"), post("/a", b""), CHUNKED + b"0\r\n\r\n"])
def test_a_client_that_stops_sending_still_gets_its_answer(waiting: Bench, wire: bytes) -> None:
    waiting.receive(wire)
    ((_, ticket, _),) = waiting.service.waiting
    assert waiting.connection.eof_received() is True
    waiting.answer()
    assert not ticket.request.cancelled
    assert waiting.bodies == [b"/a "]
    assert waiting.transport.closing


def test_a_client_that_sent_all_at_once_and_stopped_gets_all_its_answers(waiting: Bench) -> None:
    waiting.receive(get("/a") + get("/b") + b"GET /unfinished")
    waiting.connection.eof_received()
    waiting.answer()
    waiting.answer()
    assert waiting.bodies == [b"/a ", b"/b "]
    assert waiting.transport.ends


@pytest.mark.parametrize("rest", [b"", b"GET /b HT", post("/b", b"x" * 20_000)[:-1], CHUNKED, CHUNKED + b"3\r\nab"])
@pytest.mark.parametrize("before", [0, 1, 2, 40])
def test_a_client_that_stops_sending_amid_a_request_gets_the_answers_before_it_and_the_end(
    before: int, rest: bytes
) -> None:
    for turn in (False, True):
        with benches() as bench:
            bench.receive(b"".join(get(f"/{number}") for number in range(before)) + rest, turn=turn)
            if not bench.connection.eof_received():
                bench.transport.close()
            for _ in range(5):
                bench.turn()
            assert bench.bodies == [b"/%d " % number for number in range(before)]
            assert bench.transport.closing


def test_idle_connections_close_at_once_and_busy_ones_after_their_answer(waiting: Bench) -> None:
    waiting.receive(get("/a"))
    waiting.answer()
    assert waiting.listener.close_idle() == 1
    assert waiting.transport.ends
    with benches(wait=True) as busy:
        busy.receive(get("/a"))
        assert busy.listener.close_idle() == 1
        assert not busy.transport.ends
        busy.answer()
        assert b"Connection: close" in busy.written
        assert busy.transport.ends


def test_a_request_that_is_being_sent_when_the_server_stops_is_still_answered(bench: Bench) -> None:
    wire = post("/a", b"x" * 100)
    bench.receive(wire[:80])
    bench.listener.close_idle()
    assert not bench.transport.ends
    bench.receive(wire[80:])
    assert len(bench.bodies) == 1
    assert bench.transport.ends


@pytest.mark.parametrize(
    "wire", [get("/a"), post("/a", b"x" * 100), CHUNKED + b"64\r\n" + b"x" * 100 + b"\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("ends", [True, False])
def test_a_request_holds_the_end_of_the_server_as_long_as_it_comes(
    bench: Bench, wire: bytes, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1000.0, 1.9)
    monkeypatch.setattr(bench.connection, "_loop_time", lambda: now)
    now = next(clock)
    for at in range(0, len(wire) - 10, 10):
        bench.receive(wire[at : at + 10])
        now = next(clock)
        assert bench.listener.close_idle() == 1
        assert not bench.transport.ends
    if ends:
        bench.receive(wire[at + 10 :])
        assert len(bench.bodies) == 1
    else:
        now = next(clock)
        bench.listener.close_idle()
        now = next(clock)
        bench.listener.close_idle()
        assert not bench.written
    assert bench.transport.ends


def test_a_client_that_reads_slowly_when_the_server_stops_still_gets_the_answers_to_all_it_sent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((1000.0, 1100.0))
    monkeypatch.setattr(bench.connection, "_loop_time", lambda: next(times))
    bench.connection.pause_writing()
    bench.receive(get("/a"))
    for _ in range(2):
        bench.listener.close_idle()
        assert not bench.transport.ends
    bench.connection.resume_writing()
    bench.turn()
    assert len(bench.bodies) == 1
    assert bench.transport.ends


@pytest.mark.parametrize("part", [b"GET /a HT", post("/a", b"x" * 100)[:-1], CHUNKED + b"1"])
def test_a_client_that_never_ends_its_request_is_dropped_in_time(bench: Bench, part: bytes) -> None:
    bench.receive(part)
    now = bench.connection.receiving_since
    bench.listener.sweep(now, 10.0)
    assert not bench.transport.aborted
    bench.listener.sweep(now + 11.0, 10.0)
    assert bench.transport.aborted
    assert bench.listener.closed == {"slow_request": 1}


def test_a_connection_that_never_speaks_is_closed_in_time(bench: Bench) -> None:
    now = bench.connection.idle_since
    bench.listener.sweep(now + 9.0, 10.0, 100.0)
    assert not bench.transport.aborted
    bench.listener.sweep(now + 11.0, 10.0, 100.0)
    assert bench.transport.aborted
    assert bench.listener.closed == {"first_byte": 1}


def test_a_connection_without_a_request_is_closed_after_its_idle_time(bench: Bench) -> None:
    now = bench.loop.time()
    bench.receive(post("/a", b"x"))
    bench.listener.sweep(now + 50.0, 10.0, 100.0)
    bench.receive(post("/a", b"x"))
    bench.listener.sweep(now + 120.0, 10.0, 100.0)  # sees the second request
    bench.listener.sweep(now + 219.0, 10.0, 100.0)
    assert not bench.transport.aborted
    bench.listener.sweep(now + 221.0, 10.0, 100.0)
    assert bench.transport.aborted
    assert bench.listener.closed == {"idle": 1}


def test_the_first_request_of_a_new_connection_is_awaited_when_the_server_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = bench.connection.idle_since
    monkeypatch.setattr(bench.connection, "_loop_time", lambda: opened + SILENCE_S)
    assert bench.listener.close_idle() == 1
    assert not bench.transport.ends
    bench.receive(post("/a", b"x"))
    assert len(bench.bodies) == 1
    assert bench.transport.ends, "its answer ends the connection"


@pytest.mark.parametrize("hello", [b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
def test_a_client_that_speaks_tls_is_refused_at_its_first_byte_and_logged_once_a_minute(
    bench: Bench, hello: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    bench.receive(hello)
    assert bench.bodies == [b'{"error":"this port speaks plain HTTP, not TLS"}']
    assert bench.transport.ends
    now = bench.loop.time()
    for seconds in (1.0, 30.0, 61.0):
        bench.listener.tls_notice.log(bench.transport, now + seconds)  # type: ignore[arg-type]
    assert [record.levelname for record in caplog.records if record.name == "remora.http"] == ["WARNING", "WARNING"]


def test_a_client_that_waits_for_its_answer_is_not_dropped(waiting: Bench) -> None:
    waiting.receive(post("/a", b"x")[:-1])
    waiting.receive(b"x")
    waiting.listener.sweep(waiting.loop.time() + 100.0, 10.0)
    assert not waiting.transport.aborted


def test_a_body_for_which_there_is_no_memory_is_refused_and_logged_in_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with benches(limit=1 << 60) as bench:
        bench.receive(b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\nx" % (1 << 59))
        ((head, body),) = answers_of(bench.written)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"out of memory" in body
        assert bench.transport.ends
    records = [record for record in caplog.records if record.name == "remora.http"]
    assert [(record.levelname, record.exc_info) for record in records] == [("ERROR", None)]
