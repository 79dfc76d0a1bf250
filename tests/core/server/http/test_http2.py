"""One HTTP/2 connection on the event loop: what is given up and what is not, how long it lives, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.http2.frames import (
    CANCEL,
    DATA,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PROTOCOL_ERROR,
    RST_STREAM,
    SETTINGS,
    Fields,
    frame,
    pack,
)
from remora.protocols.http2.keepalive import KeepalivePolicy
from remora.protocols.http2.stream import Opener, Stream
from remora.protocols.rest.answer import HttpAnswer
from remora.server.http import http2
from remora.server.http.exchange import Exchange
from remora.server.http.http2 import Http2Connection, Http2Listener, OpenRequest
from remora.server.http.http2_requests import Requests
from support.engine.fakes import FakeClock, FakeTransport

PATIENCE_S = 60.0
OPEN = pack(((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/v2/x")))
CALL = pack(((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/s/m"), (b"content-type", b"application/grpc")))
GREETING = PREFACE + frame(SETTINGS, 0, 0, b"")
ASKED_TO_LEAVE = frame(GOAWAY, 0, 0, b"\x7f\xff\xff\xff" + bytes(4))


class Client(FakeTransport):
    """A transport that tells when it is closed or aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.closed, self.cut = asyncio.Event(), asyncio.Event()

    def close(self) -> None:
        super().close()
        self.closed.set()

    def abort(self) -> None:
        super().abort()
        self.cut.set()


class Later:
    """A service that answers when another task is done."""

    def __init__(self) -> None:
        self.asked: list[Head] = []
        self.exchanges: list[Exchange] = []

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> None:
        self.asked.append(head)
        self.exchanges.append(exchange)


class Call:
    """A call that keeps what it hears."""

    def __init__(self) -> None:
        self.gone = 0

    def received(self, data: bytes, ended: bool) -> None: ...

    def lost(self) -> None:
        self.gone += 1

    def sent(self, size: int) -> None: ...

    def stalls(self) -> bool:
        return False


def refuse(fields: Fields) -> Opener:
    raise AssertionError("no call was to come")


def connected(listener: Http2Listener, received: bytes = b"") -> tuple[Http2Connection, Client]:
    connection, client = listener.connection(), Client()
    connection.connection_made(client)
    connection.take_in(GREETING + received)
    return connection, client


def listening(open_call: OpenRequest = refuse, **terms: Any) -> tuple[Http2Listener, Later]:
    service = Later()
    # On a real clock a pause of the process would end a turn of the loop before its requests do.
    requests = Requests(service, 1000, FakeClock().monotonic_ns)
    return Http2Listener(open_call, requests.open, KeepalivePolicy(**terms)), service


def played(play: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(play, PATIENCE_S))


def opened(*streams: int) -> bytes:
    return b"".join(frame(HEADERS, 5, stream, OPEN) for stream in streams)


@pytest.mark.parametrize(
    "part", [b"", PREFACE[:9], GREETING + frame(HEADERS, 4, 1, OPEN)[:-1], GREETING + frame(HEADERS, 0, 1, OPEN)]
)
def test_a_connection_that_sends_half_a_head_is_closed_in_time(part: bytes) -> None:
    async def play() -> None:
        listener, _ = listening()
        connection, client = listener.connection(), Client()
        connection.connection_made(client)
        connection.take_in(part)
        for now, aborted in ((0.0, False), (100.0, False), (121.0, True)):
            listener.sweep(now, 120.0)
            assert client.cut.is_set() == aborted
        assert listener.closed == {"slow_request" if part else "first_byte": 1}

    played(play())


def test_a_connection_without_a_stream_is_asked_to_end_after_its_idle_time() -> None:
    async def play() -> None:
        listener, _ = listening()
        connection, client = connected(listener, b"")
        start = connection.idle_since
        listener.sweep(start + 99.0, 120.0, 100.0)
        assert ASKED_TO_LEAVE not in client.written
        listener.sweep(start + 101.0, 120.0, 100.0)
        assert ASKED_TO_LEAVE in client.written
        assert listener.closed["idle"] == 1

    played(play())


def test_a_stalled_request_is_given_up_and_a_slow_answer_is_awaited() -> None:
    async def play() -> None:
        listener, service = listening()
        whole, begun, silent = frame(DATA, 1, 1, b"x"), frame(DATA, 0, 3, b"x"), b""
        headers = b"".join(frame(HEADERS, 4, stream, OPEN) for stream in (1, 3, 5))
        _, client = connected(listener, headers + whole + begun + silent)
        assert len(service.asked) == 1
        for now in (0.0, 100.0, 200.0):
            listener.sweep(now, 120.0)
        resets = [n for n in (1, 3, 5) if frame(RST_STREAM, 0, n, CANCEL.to_bytes(4, "big")) in client.written]
        assert resets == [3, 5]
        assert listener.closed["slow_request"] == 2

    played(play())


def test_a_call_that_is_refused_while_it_is_opened_is_not_kept() -> None:
    async def play() -> None:
        call = Call()

        def answer_at_once(stream: Stream) -> Call:
            stream.headers(OPEN, end=True)
            return call

        connection, _ = connected(listening(lambda _fields: answer_at_once)[0], frame(HEADERS, 4, 1, CALL))
        connection.connection_lost(None)
        assert call.gone == 0

    played(play())


def test_a_client_that_breaks_the_rules_and_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "_GOODBYE_S", 0.0)

    async def play() -> None:
        call = Call()
        connection, client = connected(
            listening(lambda _fields: lambda _stream: call)[0], frame(HEADERS, 4, 1, CALL) + frame(5, 0, 1, b"")
        )
        assert client.closing
        assert connection._listener.closed == {"protocol_error": 1}
        assert PROTOCOL_ERROR.to_bytes(4, "big") in client.written
        await client.cut.wait()
        connection.connection_lost(None)
        assert call.gone == 1

    played(play())


def test_a_client_that_answers_no_ping_is_sent_away() -> None:
    async def play() -> None:
        listener, _ = listening(silence_s=0.01, answer_s=0.01)
        _, client = connected(listener, opened(1))
        await client.closed.wait()
        assert frame(PING, 0, 0, b"is there") in client.written
        assert client.written.endswith(b"a keepalive ping was not answered")

    played(play())


def test_a_client_that_pings_too_often_gets_enhance_your_calm() -> None:
    async def play() -> None:
        connection, client = connected(listening(strikes=1)[0], opened(1))
        ping = frame(PING, 0, 0, b"12345678")
        connection.take_in(ping + ping)
        assert not client.closing
        connection.take_in(ping)
        assert client.closing
        assert client.written.endswith(ENHANCE_YOUR_CALM.to_bytes(4, "big") + b"too_many_pings")
        assert connection._listener.closed == {"abuse": 1}

    played(play())


def test_an_old_connection_ends_once_its_client_knows_and_its_calls_are_answered() -> None:
    async def play() -> None:
        listener, service = listening(age_s=0.01)
        connection, client = connected(listener, opened(1))
        while ASKED_TO_LEAVE not in client.written:
            await asyncio.sleep(0)
        connection.take_in(opened(3) + frame(PING, 1, 0, b"leaving ") + opened(5))
        assert frame(GOAWAY, 0, 0, (3).to_bytes(4, "big") + bytes(4)) in client.written
        service.exchanges[0].respond(HttpAnswer(200, (), [b"x"]))
        assert not client.closing
        service.exchanges[1].respond(HttpAnswer(200, (), [b"x"]))
        await client.closed.wait()
        assert len(service.exchanges) == 2

    played(play())


def test_an_old_connection_whose_calls_last_ends_after_its_grace() -> None:
    async def play() -> None:
        _, client = connected(listening(age_s=0.01, grace_s=0.01)[0], opened(1))
        await client.closed.wait()
        assert client.written.endswith(b"the maximum connection age is exceeded")

    played(play())


def test_a_client_that_does_not_say_that_it_knows_of_the_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "_GOODBYE_S", 0.0)

    async def play() -> None:
        listener, _ = listening()
        _, client = connected(listener)
        assert listener.close_idle() == 1
        await client.closed.wait()
        assert ASKED_TO_LEAVE in client.written

    played(play())


def test_a_server_that_ends_waits_for_what_is_being_sent_only_while_something_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        listener, service = listening()
        connection, client = connected(listener, opened(1) + frame(HEADERS, 4, 3, OPEN) + frame(DATA, 0, 3, b"x"))
        listener.close_idle()
        connection.take_in(frame(PING, 1, 0, b"leaving "))
        given_up = frame(RST_STREAM, 0, 3, CANCEL.to_bytes(4, "big"))
        assert given_up not in client.written
        monkeypatch.setattr(http2, "SILENCE_S", -1.0)
        listener.close_idle()
        assert given_up in client.written
        assert not client.closing  # the other is being answered
        service.exchanges[0].respond(HttpAnswer(200, (), [b"x"]))
        await client.closed.wait()

    played(play())


def test_clients_that_connect_during_shutdown_are_answered_and_then_disconnected() -> None:
    async def play() -> None:
        listener, service = listening()
        listener.closing = True
        connection, client = connected(listener, opened(1))
        assert b"\x7f\xff\xff\xff" not in client.written
        service.exchanges[0].respond(HttpAnswer(200, (), [b"x"]))
        while ASKED_TO_LEAVE not in client.written:
            await asyncio.sleep(0)
        connection.take_in(frame(PING, 1, 0, b"leaving "))
        assert client.closing

    played(play())


def test_a_request_that_takes_long_leaves_the_others_of_its_connection_to_the_next_turns() -> None:
    async def play() -> None:
        service = Later()
        clock = itertools.count(0, 6_000_000).__next__  # nanoseconds: each request takes more than a turn
        listener = Http2Listener(refuse, Requests(service, 1000, clock).open, KeepalivePolicy())
        connected(listener, opened(1, 3, 5))
        assert len(service.asked) == 1
        while len(service.asked) < 3:
            before = len(service.asked)
            await asyncio.sleep(0)
            assert len(service.asked) <= before + 1

    played(play())


def test_the_socket_is_not_read_in_a_turn_that_handles_frames_of_the_turn_before() -> None:
    async def play() -> None:
        listener, service = listening()
        _, client = connected(listener, opened(*range(1, 200, 2)))  # more than a turn handles
        assert 0 < len(service.asked) < 100
        assert not client.reading
        await asyncio.sleep(0)
        assert len(service.asked) == 100
        assert not client.reading
        await asyncio.sleep(0)
        assert client.reading

    played(play())


def test_an_attack_that_is_noticed_in_a_later_turn_ends_the_connection() -> None:
    resets = b"".join(frame(HEADERS, 5, n, OPEN) + frame(RST_STREAM, 0, n, bytes(4)) for n in range(1, 2400, 2))

    async def play() -> None:
        listener, _ = listening()
        _, client = connected(listener, resets)
        assert not client.closing  # the first turn handles a part of the frames
        await client.closed.wait()
        assert b"too many resets" in client.written

    played(play())
