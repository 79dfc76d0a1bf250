"""Work of one connection in a turn of the loop, updates of windows, and malformed requests."""

from __future__ import annotations

import pytest

from remora.protocols.http2.connection import Http2, Http2Limits
from remora.protocols.http2.frames import (
    DATA,
    ENHANCE_YOUR_CALM,
    HEADERS,
    PREFACE,
    PROTOCOL_ERROR,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    Fields,
    Http2Error,
    frame,
    pack,
)
from remora.protocols.http2.stream import Opener, Stream

REQUEST: Fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/s/m"))
BLOCK = pack(REQUEST)
HEAD = pack(((b":status", b"200"),))
ENDS, ALL_HEADERS = 1, 4
OPEN = frame(HEADERS, ALL_HEADERS, 1, BLOCK)


class Seen:
    """Handler and receiver that keeps the streams, and the numbers of those that ended or were lost."""

    backlog = 0
    peer = ""

    def __init__(self) -> None:
        self.of: dict[int, Stream] = {}
        self.ended = 0
        self.gone = 0

    def read(self, fields: Fields) -> Opener:
        assert fields == REQUEST
        return self.open

    def open(self, stream: Stream) -> Seen:
        self.of[stream.number] = stream
        return self

    def received(self, data: bytes, ended: bool) -> None:
        self.ended += ended

    def lost(self) -> None:
        self.gone += 1

    def sent(self, size: int) -> None: ...

    def stalls(self) -> bool:
        return False

    def output_ready(self) -> None: ...

    def pinged(self) -> None: ...


def greeted() -> tuple[Http2, Seen]:
    seen = Seen()
    server = Http2(seen)
    server.receive(PREFACE + frame(SETTINGS, 0, 0, b""))
    server.take()
    return server, seen


def test_a_turn_handles_a_bounded_number_of_requests_and_the_next_turns_the_others() -> None:
    server, seen = greeted()
    server.receive(b"".join(frame(HEADERS, ALL_HEADERS, number, BLOCK) for number in range(1, 1400, 2)))
    assert 60 <= len(seen.of) <= 70
    assert server.paused
    server.receive(frame(HEADERS, ALL_HEADERS, 1401, BLOCK))
    while server.paused:
        server.receive(b"")
    assert list(seen.of) == list(range(1, 1402, 2))


@pytest.mark.parametrize(
    "block",
    [
        BLOCK + b"\0\1x\xff" + b"\x99\x74" + b"\x18" * 15_000,  # a value in Huffman's code
        BLOCK + b"\x40\1x\1y" + b"\xbe" * 1_000,  # references to the dynamic table
    ],
)
def test_a_turn_handles_few_header_blocks_that_take_long_to_decode(block: bytes) -> None:
    class SeenAll(Seen):
        """Handler of any request."""

        def read(self, fields: Fields) -> Opener:
            return self.open

    seen = SeenAll()
    server = Http2(seen)
    server.receive(PREFACE + frame(SETTINGS, 0, 0, b""))
    frames = b"".join(frame(HEADERS, ALL_HEADERS, number, block) for number in range(1, 41, 2))
    server.receive(frames)
    assert 2 <= len(seen.of) <= 3
    turns = 1
    while server.paused:
        server.receive(b"")
        turns += 1
    assert list(seen.of) == list(range(1, 41, 2))
    assert 20 / 3 <= turns <= 20 / 2


@pytest.mark.parametrize(
    "end", [frame(WINDOW_UPDATE, 0, 1, (10_000).to_bytes(4, "big")), frame(RST_STREAM, 0, 1, bytes(4))]
)
def test_a_client_that_leaves_much_unread_may_not_send_further_bodies_until_it_reads(end: bytes) -> None:
    class Small(Http2Limits):
        """Windows of a few frames."""

        stream_window = 1_000_000
        connection_window = 100_000

    seen = Seen()
    server = Http2(seen, Small, most_paused=50_000)
    server.receive(PREFACE + frame(SETTINGS, 0, 0, b"\0\4\0\0\0\0") + OPEN + frame(HEADERS, ALL_HEADERS, 3, BLOCK))
    half = frame(DATA, 0, 3, bytes(10_000)) * 5
    credit = frame(WINDOW_UPDATE, 0, 0, (50_000).to_bytes(4, "big"))
    seen.of[1].data(bytes(50_000))
    server.take()
    server.receive(half)
    assert server.take() == credit
    seen.of[1].data(bytes(10_000))
    server.receive(half)
    assert server.take() == b""
    server.receive(end)
    assert credit in server.take()
    server.receive(half)
    assert server.take() == credit


def test_a_handler_that_pauses_leaves_further_requests_to_the_next_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    server, seen = greeted()
    monkeypatch.setattr(seen, "received", lambda _data, _ended: setattr(server, "paused", True))
    opened = [frame(HEADERS, ALL_HEADERS | ENDS, number, BLOCK) for number in range(1, 10, 2)]
    server.receive(b"".join(opened))
    for handled in range(1, 6):
        assert len(seen.of) == handled
        assert server.paused  # also after the last one, because the transport would read more
        server.receive(b"")
    assert not server.paused


def test_updates_of_windows_that_free_nothing_end_the_connection() -> None:
    server, _ = greeted()
    server.receive(OPEN)
    with pytest.raises(Http2Error) as caught:
        server.receive(frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * (Http2Limits.abuse_budget + 100))
    assert caught.value.code == ENHANCE_YOUR_CALM


def test_updates_of_windows_for_received_data_are_no_abuse() -> None:
    server, seen = greeted()
    server.receive(OPEN)
    seen.of[1].headers(HEAD)
    for _ in range(2 * Http2Limits.abuse_budget):
        seen.of[1].data(bytes(100))
        server.take()
        server.receive(frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\x64") + frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\x64"))


@pytest.mark.parametrize("fields", [((b":path", b"/x"),), ((b":method", b"GET"),), ((b"Upper", b"x"),)])
def test_a_malformed_request_is_reset_and_the_connection_goes_on(fields: Fields) -> None:
    server, seen = greeted()
    server.receive(frame(HEADERS, ALL_HEADERS | ENDS, 1, pack(fields)))
    assert server.take() == frame(RST_STREAM, 0, 1, PROTOCOL_ERROR.to_bytes(4, "big"))
    server.receive(frame(HEADERS, ALL_HEADERS | ENDS, 3, BLOCK))
    assert list(seen.of) == [3]


def test_trailers_end_a_body_and_malformed_ones_reset_the_stream() -> None:
    for trailers, valid in ((((b"key", b"value"),), True), (((b":path", b"/x"),), False)):
        server, seen = greeted()
        server.receive(OPEN + frame(HEADERS, ALL_HEADERS | ENDS, 1, pack(trailers)))
        assert (seen.ended, seen.gone) == (valid, not valid)


def test_data_after_the_end_of_a_request_resets_its_stream_and_data_in_flight_is_dropped() -> None:
    server, seen = greeted()
    server.receive(frame(HEADERS, ALL_HEADERS | ENDS, 1, BLOCK) + frame(HEADERS, ALL_HEADERS, 3, BLOCK))
    for number in (1, 3):
        seen.of[number].respond(HEAD, b"answer")
    server.take()
    server.receive(frame(0, 0, 3, b"in flight"))
    assert server.take() == b""
    server.receive(frame(0, 0, 1, b"late"))
    assert server.take() == frame(RST_STREAM, 0, 1, STREAM_CLOSED.to_bytes(4, "big"))
    server.receive(frame(RST_STREAM, 0, 3, bytes(4)))
    with pytest.raises(Http2Error) as caught:
        server.receive(frame(0, 0, 1, b"x") * (Http2Limits.abuse_budget + 1))
    assert caught.value.code == ENHANCE_YOUR_CALM
