"""Server side of HTTP/2 against hyper's h2 as the client, and against hostile clients."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.protocols.http2.connection import Http2, Http2Limits
from remora.protocols.http2.frames import (
    CANCEL,
    COMPRESSION_ERROR,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    PREFACE,
    PROTOCOL_ERROR,
    STREAM_CLOSED,
    Fields,
    Http2Error,
    frame,
    pack,
)
from remora.protocols.http2.stream import Opener, Stream

h2_config = pytest.importorskip("h2.config", reason="h2 is not installed: pip install '.[dev]'")
h2_connection = pytest.importorskip("h2.connection")
h2_events = pytest.importorskip("h2.events")

ASKED = [(":method", "POST"), (":scheme", "http"), (":path", "/s/m"), (":authority", "x"), ("te", "trailers")]
HEAD = pack(((b":status", b"200"), (b"content-type", b"application/grpc")))
TRAILERS = pack(((b"grpc-status", b"0"),))
BLOCK = pack(((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/s/m")))
HEADERS, DATA, RST, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 1, 0, 3, 4, 6, 7, 8, 9
ENDS, ALL_HEADERS = 1, 4


class Body:
    """Receiver of one stream, which keeps what it gets in `Streams`."""

    def __init__(self, streams: Streams, number: int) -> None:
        self.streams = streams
        self.number = number

    def received(self, data: bytes, ended: bool) -> None:
        self.streams.bodies[self.number] += data
        if ended:
            self.streams.ended.append(self.number)

    def lost(self) -> None:
        self.streams.gone.append(self.number)

    def sent(self, size: int) -> None:
        self.streams.late[self.number] = self.streams.late.get(self.number, 0) + size

    def stalls(self) -> bool:
        return False


class Streams:
    """Owner of a connection that keeps what happens on its streams."""

    backlog = 0

    def __init__(self) -> None:
        self.of: dict[int, Stream] = {}
        self.fields: dict[int, Fields] = {}
        self.bodies: dict[int, bytes] = {}
        self.ended: list[int] = []
        self.gone: list[int] = []
        self.late: dict[int, int] = {}
        self.pings = 0
        self.woken = 0

    def read(self, fields: Fields) -> Opener:
        def opened(stream: Stream) -> Body:
            self.of[stream.number] = stream
            self.fields[stream.number] = fields
            self.bodies[stream.number] = b""
            return Body(self, stream.number)

        return opened

    def output_ready(self) -> None:
        self.woken += 1

    def pinged(self) -> None:
        self.pings += 1


class Pair:
    """A server of ours and h2's client."""

    def __init__(self, limits: type[Http2Limits] = Http2Limits) -> None:
        self.streams = Streams()
        self.server = Http2(self.streams, limits)
        self.client: Any = h2_connection.H2Connection(h2_config.H2Configuration(client_side=True))
        self.events: list[Any] = []
        self.client.initiate_connection()
        self.turn()

    def turn(self, pieces: random.Random | None = None) -> None:
        """Carry bytes both ways until there are none; with ``pieces`` cut anywhere."""
        while True:
            up, down = self.client.data_to_send(), self.server.take()
            if not up and not down:
                return
            for part in cut(up, pieces):
                self.server.receive(part)
            for part in cut(down, pieces):
                self.events += self.client.receive_data(part)

    def body_of(self, stream: int) -> bytes:
        got = [event for event in self.events if isinstance(event, h2_events.DataReceived)]
        return b"".join(event.data for event in got if event.stream_id == stream)


def cut(data: bytes, pieces: random.Random | None) -> list[bytes]:
    if pieces is None or len(data) < 2:
        return [data] if data else []
    at = sorted(pieces.randrange(len(data)) for _ in range(pieces.randrange(4)))
    return [part for part in (data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)) if part]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=5), st.integers(0, 200_000), st.randoms())
def test_bodies_of_any_size_come_and_go_whole_however_the_bytes_are_cut(
    sizes: list[int], answer: int, chance: random.Random
) -> None:
    pair = Pair()
    numbers = []
    for size in sizes:
        number = pair.client.get_next_available_stream_id()
        numbers.append(number)
        pair.client.send_headers(number, ASKED)
        body, at = bytes(size), 0
        while at < size:
            room = min(pair.client.local_flow_control_window(number), pair.client.max_outbound_frame_size, size - at)
            pair.client.send_data(number, body[at : at + room])
            at += room
            pair.turn(chance)
            pair.streams.of[number].consumed(room)
        pair.client.end_stream(number)
        pair.turn(chance)
    sent = bytes(chance.randrange(256) for _ in range(min(answer, 1000))) * (answer // 1000 + 1)
    for number in numbers:
        assert len(pair.streams.bodies[number]) == sizes[numbers.index(number)]
        pair.streams.of[number].respond(HEAD, sent, TRAILERS)
    while pair.server.open:
        pair.turn(chance)
        for number in numbers:
            done = len(pair.body_of(number))
            if done < len(sent):
                pair.client.increment_flow_control_window(1 + chance.randrange(70_000))
                pair.client.increment_flow_control_window(1 + chance.randrange(70_000), number)
    pair.turn(chance)
    for number in numbers:
        assert pair.body_of(number) == sent
        trailers = [e for e in pair.events if isinstance(e, h2_events.TrailersReceived) and e.stream_id == number]
        assert [(bytes(n), bytes(v)) for n, v in trailers[0].headers] == [(b"grpc-status", b"0")]
    assert not any(pair.streams.of[number].is_open for number in numbers)


@given(st.lists(st.tuples(st.sampled_from(["a", "b-bin", "grpc-timeout"]), st.text("abc123", max_size=40)), max_size=8))
def test_header_blocks_mean_the_same_whenever_they_come_again(fields: list[tuple[str, str]]) -> None:
    """h2 refers to what it sent before, so equal bytes may mean something else once the table has changed."""
    pair = Pair()
    wanted = {}
    for more in (fields, fields, fields[::-1], [*fields, ("x", "1")], fields):
        number = pair.client.get_next_available_stream_id()
        pair.client.send_headers(number, [*ASKED, *more], end_stream=True)
        pair.turn()
        wanted[number] = tuple((name.encode(), value.encode()) for name, value in [*ASKED, *more])
    assert pair.streams.fields == wanted
    assert pair.streams.ended == list(wanted)


def test_the_receiver_learns_when_paused_data_is_sent() -> None:
    pair = Pair()
    pair.client.send_headers(1, ASKED, end_stream=True)
    pair.turn()
    pair.streams.of[1].headers(HEAD)
    assert pair.streams.of[1].data(bytes(70_000)) == 70_000 - 65_535
    assert pair.streams.of[1].data(bytes(10)) == 10
    pair.turn()
    assert pair.streams.late == {}
    pair.client.increment_flow_control_window(100_000)
    pair.client.increment_flow_control_window(100_000, 1)
    pair.turn()
    assert pair.streams.late == {1: 70_010 - 65_535}


def test_streams_beyond_the_limit_are_refused_and_may_come_again() -> None:
    class Few(Http2Limits):
        streams = 2

    pair = Pair(Few)
    raw = b"".join(frame(HEADERS, ALL_HEADERS, number, BLOCK) for number in (1, 3, 5))
    pair.server.receive(raw)
    assert sorted(pair.streams.fields) == [1, 3]
    assert frame(RST, 0, 5, (7).to_bytes(4, "big")) in pair.server.take()
    pair.streams.of[1].respond(HEAD, b"", TRAILERS)
    pair.server.receive(frame(HEADERS, ALL_HEADERS | ENDS, 7, BLOCK))
    assert 7 in pair.streams.fields


def test_a_reset_stream_is_reported_and_sent_nothing_more() -> None:
    pair = Pair()
    pair.client.send_headers(1, ASKED)
    pair.turn()
    pair.client.reset_stream(1, 8)
    pair.turn()
    assert pair.streams.gone == [1]
    pair.streams.of[1].respond(HEAD, b"late", TRAILERS)
    assert not pair.server.sender.out


def test_an_answer_before_the_end_of_its_request_ends_both() -> None:
    pair = Pair()
    pair.client.send_headers(1, ASKED)
    pair.turn()
    pair.streams.of[1].headers(TRAILERS, end=True)
    pair.server.receive(frame(DATA, 0, 1, b"on its way"))
    assert frame(RST, 0, 1, bytes(4)) in pair.server.take()
    assert pair.streams.bodies[1] == b""


def test_a_server_that_leaves_ends_what_it_has_begun_and_takes_no_more() -> None:
    pair = Pair()
    pair.client.send_headers(1, ASKED, end_stream=True)
    pair.turn()
    pair.server.leave()
    asked = pair.server.take()
    assert frame(GOAWAY, 0, 0, b"\x7f\xff\xff\xff" + bytes(4)) in asked
    pair.server.receive(frame(HEADERS, ALL_HEADERS | ENDS, 3, BLOCK))  # sent before that was heard
    pair.server.receive(frame(PING, 1, 0, b"another!"))
    assert not pair.server.left
    pair.server.receive(frame(PING, 1, 0, asked[-8:]) + frame(HEADERS, ALL_HEADERS | ENDS, 5, BLOCK))
    assert pair.server.left
    pair.server.leave()
    pair.server.stop_accepting()
    pair.streams.of[1].respond(HEAD, b"x", TRAILERS)
    said = pair.server.take()
    assert said.count(frame(GOAWAY, 0, 0, (3).to_bytes(4, "big") + bytes(4))) == 1
    assert frame(RST, 0, 5, (7).to_bytes(4, "big")) in said
    assert frame(DATA, 0, 1, b"x") in said
    assert list(pair.streams.fields) == [1, 3]


def test_a_silent_client_does_not_delay_the_drain() -> None:
    server = Http2(Streams())
    server.leave()
    assert server.left


def test_pings_are_answered_and_reported_with_the_data_sent_meanwhile() -> None:
    server, streams = greeted()
    server.sent_data()
    server.receive(frame(PING, 0, 0, b"12345678") + frame(PING, 1, 0, b"leaving "))
    assert (server.take(), streams.pings, server.sent_data(), server.left) == (
        frame(PING, 1, 0, b"12345678"),
        1,
        False,
        False,
    )
    server.receive(OPEN)
    server.ping()
    assert not server.sent_data()
    streams.of[1].headers(HEAD)
    assert (server.sent_data(), server.sent_data()) == (True, False)
    streams.of[1].data(b"x")
    assert (server.sent_data(), server.sent_data()) == (True, False)


def test_the_owner_is_woken_once_for_all_output_outside_of_receive() -> None:
    server, streams = greeted()
    server.receive(OPEN + frame(HEADERS, ALL_HEADERS | ENDS, 3, BLOCK))
    streams.of[1].headers(HEAD)
    assert streams.woken == 0  # the caller of `receive` takes the output
    server.take()
    streams.of[1].data(b"x")
    streams.of[3].respond(HEAD, b"x", TRAILERS)
    assert streams.woken == 1
    server.take()
    streams.of[1].reset(CANCEL)
    assert streams.woken == 2


def test_an_abandoned_stream_is_sent_nothing() -> None:
    server, streams = greeted()
    server.receive(OPEN)
    server.take()
    assert [type(each) for each in server.abandon()] == [Body]
    streams.of[1].respond(HEAD, b"x", TRAILERS)
    streams.of[1].consumed(1 << 30)
    assert (server.open, server.take(), streams.woken) == (0, b"", 0)


class Small(Http2Limits):
    """Limits that short sequences of frames reach."""

    streams = 3
    stream_window = 65_535
    connection_window = 1 << 17
    abuse_budget = 4


def answer(stream: Stream, *, whole: bool) -> None:
    if whole:
        stream.respond(HEAD, b"x", TRAILERS)
    else:
        stream.reset(CANCEL)


def padded(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    """Return a frame with padding of length 0, which takes the branch of unusual frames."""
    return frame(kind, flags | 8, number, b"\0" + payload)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just(HEADERS), st.sampled_from((4, 5)), st.integers(0, 9), st.sampled_from((0, 1))),
            st.tuples(st.just(DATA), st.sampled_from((0, 1)), st.integers(0, 9), st.sampled_from((0, 1, 16_000))),
            st.tuples(st.just(RST), st.just(0), st.integers(0, 9), st.just(0)),
            st.tuples(st.just(-1), st.just(0), st.integers(0, 9), st.integers(0, 3)),
        ),
        max_size=24,
    ),
    st.booleans(),
)
def test_the_branch_of_usual_frames_does_what_that_of_unusual_ones_does(
    sequence: list[tuple[int, int, int, int]], together: bool
) -> None:
    """The same frames with padding, one to one, and without; ``-1`` is an answer or a reset by the server."""
    blocks = (BLOCK, pack(((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/x"))))
    results = []
    for unusual in (True, False):
        server, seen = greeted(Small)
        make = padded if unusual else frame
        error, pending = None, b""
        try:
            for kind, flags, number, what in sequence:
                if kind == HEADERS:
                    pending += make(HEADERS, flags, number, blocks[what])
                elif kind == DATA:
                    pending += make(DATA, flags, number, bytes(what))
                elif kind == RST:
                    pending += frame(RST, 0, number, bytes(4))
                else:
                    server.receive(pending)
                    pending = b""
                    if number in seen.of:
                        answer(seen.of[number], whole=what > 0)
                if not together:
                    server.receive(pending)
                    pending = b""
            server.receive(pending)
        except Http2Error as caught:
            error = (caught.code, str(caught))
        streams = {number: (stream.is_open, stream.ended) for number, stream in seen.of.items()}
        results.append((error, seen.fields, seen.bodies, seen.ended, seen.gone, streams, server.open))
    assert results[0] == results[1]


# -- clients that mean no good -----------------------------------------------------------------------------------------


def greeted(limits: type[Http2Limits] = Http2Limits) -> tuple[Http2, Streams]:
    streams = Streams()
    server = Http2(streams, limits)
    server.receive(PREFACE + frame(SETTINGS, 0, 0, b""))
    server.take()
    return server, streams


OPEN = frame(HEADERS, ALL_HEADERS, 1, BLOCK)
CLOSED = frame(HEADERS, ALL_HEADERS | ENDS, 1, BLOCK)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (frame(DATA, 0, 1, b"x"), PROTOCOL_ERROR),
        (frame(DATA, 0, 0, b"x"), PROTOCOL_ERROR),
        (CLOSED + frame(DATA, 0, 1, b"x"), STREAM_CLOSED),
        (frame(HEADERS, ALL_HEADERS, 2, BLOCK), PROTOCOL_ERROR),
        (frame(HEADERS, ALL_HEADERS, 0, BLOCK), PROTOCOL_ERROR),
        (OPEN + OPEN, PROTOCOL_ERROR),
        (
            frame(HEADERS, ALL_HEADERS, 5, BLOCK) + frame(RST, 0, 5, bytes(4)) + frame(HEADERS, 4, 3, BLOCK),
            STREAM_CLOSED,
        ),
        (frame(HEADERS, 0, 1, BLOCK) + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
        (frame(CONTINUATION, 4, 1, BLOCK), PROTOCOL_ERROR),
        (frame(HEADERS, ALL_HEADERS | 8, 1, b"\xff" + BLOCK), PROTOCOL_ERROR),
        (frame(HEADERS, ALL_HEADERS | 32, 1, b"\0\0"), FRAME_SIZE_ERROR),
        (frame(HEADERS, ALL_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"), COMPRESSION_ERROR),
        (b"\xff\xff\xff\0\0\0\0\0\1", FRAME_SIZE_ERROR),
        (frame(RST, 0, 1, bytes(4)), PROTOCOL_ERROR),
        (OPEN + frame(RST, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
        (frame(5, 0, 1, bytes(4)), PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 1, b""), PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, struct.pack(">HL", 2, 2)), PROTOCOL_ERROR),
        (frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
        (frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
        (frame(GOAWAY, 0, 0, bytes(4)), FRAME_SIZE_ERROR),
        (frame(2, 0, 0, bytes(5)), PROTOCOL_ERROR),
        (frame(2, 0, 1, b"\0\0\0\1\0"), PROTOCOL_ERROR),
        (frame(HEADERS, ALL_HEADERS | 32, 1, b"\0\0\0\1\0" + BLOCK), PROTOCOL_ERROR),
        (CLOSED + frame(HEADERS, ALL_HEADERS | ENDS, 1, BLOCK), STREAM_CLOSED),
        (frame(SETTINGS, 0, 0, b"x"), FRAME_SIZE_ERROR),
        (frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 1 << 31)), FLOW_CONTROL_ERROR),
        (frame(SETTINGS, 0, 0, struct.pack(">HL", 5, 1)), PROTOCOL_ERROR),
        (frame(PING, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
        (frame(WINDOW, 0, 0, bytes(4)), PROTOCOL_ERROR),
        (frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff"), FLOW_CONTROL_ERROR),
        (frame(WINDOW, 0, 9, b"\0\0\0\1"), PROTOCOL_ERROR),
    ],
)
def test_what_the_protocol_forbids_ends_the_connection_with_its_code(raw: bytes, code: int) -> None:
    server, _ = greeted()
    with pytest.raises(Http2Error) as caught:
        server.receive(raw)
    assert caught.value.code == code
    said = server.final_goaway(caught.value)
    assert said[-len(str(caught.value)) - 4 : -len(str(caught.value))] == code.to_bytes(4, "big")


def test_a_connection_whose_first_frame_is_not_settings_is_refused() -> None:
    for first in (frame(PING, 0, 0, bytes(8)), frame(SETTINGS, 1, 0, b""), frame(HEADERS, 5, 1, BLOCK)):
        with pytest.raises(Http2Error) as caught:
            Http2(Streams()).receive(PREFACE + first)
        assert caught.value.code == PROTOCOL_ERROR


def receive_all(server: Http2, data: bytes) -> None:
    """Receive bytes over as many turns of the loop as they take."""
    server.receive(data)
    while server.paused:
        server.receive(b"")


def test_a_connection_without_the_preface_is_refused_at_its_first_bytes() -> None:
    with pytest.raises(Http2Error):
        Http2(Streams()).receive(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(lambda n: frame(PING, 0, 0, bytes(8)), id="pings"),
        pytest.param(lambda n: frame(SETTINGS, 0, 0, b""), id="settings"),
        pytest.param(lambda n: frame(2, 0, 1, bytes(5)), id="priorities"),
        pytest.param(lambda n: frame(0x7F, 0, 0, b""), id="unknown frames"),
        pytest.param(
            lambda n: frame(HEADERS, 5, 2 * n + 3, BLOCK) + frame(RST, 0, 2 * n + 3, bytes(4)), id="rapid resets"
        ),
    ],
)
def test_a_client_that_only_makes_work_is_sent_away(raw: Any) -> None:
    server, _ = greeted()
    server.receive(OPEN)
    with pytest.raises(Http2Error) as caught:
        receive_all(server, b"".join(raw(number) for number in range(Http2Limits.abuse_budget + 1)))
    assert caught.value.code == ENHANCE_YOUR_CALM


@pytest.mark.parametrize("size", [0, 2**31 - 1], ids=["zero", "overflow"])
def test_a_client_that_makes_the_server_reset_its_streams_is_sent_away(size: int) -> None:
    server, seen = greeted()
    sent = b"".join(
        frame(HEADERS, ALL_HEADERS | ENDS, number, BLOCK) + frame(WINDOW, 0, number, size.to_bytes(4, "big"))
        for number in range(1, 4 * Http2Limits.abuse_budget, 2)
    )
    with pytest.raises(Http2Error) as caught:
        receive_all(server, sent)
    assert caught.value.code == ENHANCE_YOUR_CALM
    assert Http2Limits.abuse_budget - 2 <= len(seen.gone) <= Http2Limits.abuse_budget


def test_requests_that_the_server_resets_count_as_those_that_the_client_resets() -> None:
    server, seen = greeted()
    for number in range(1, 2 * Http2Limits.abuse_budget, 2):
        server.receive(frame(HEADERS, ALL_HEADERS | ENDS, number, BLOCK))
        seen.of[number].reset(PROTOCOL_ERROR)
    assert len(seen.of) == Http2Limits.abuse_budget
    number = 2 * Http2Limits.abuse_budget + 1
    with pytest.raises(Http2Error) as caught:
        server.receive(frame(HEADERS, ALL_HEADERS | ENDS, number, BLOCK))
    assert caught.value.code == ENHANCE_YOUR_CALM


def test_a_client_that_pings_for_years_is_kept() -> None:
    server, _ = greeted()
    for _ in range(20):
        for _ in range(Http2Limits.abuse_budget // 3):
            server.receive(frame(PING, 0, 0, bytes(8)))
        server.decay_abuse()
    assert server.sender.out


def test_empty_data_and_endless_headers_come_to_an_end() -> None:
    for raw in (
        OPEN + frame(DATA, 0, 1, b"") * 2000,
        frame(HEADERS, 0, 1, BLOCK) + frame(CONTINUATION, 0, 1, b"") * 2000,
    ):
        server, _ = greeted()
        with pytest.raises(Http2Error) as caught:
            server.receive(raw)
        assert caught.value.code == ENHANCE_YOUR_CALM
    server, _ = greeted()
    with pytest.raises(Http2Error) as caught:
        server.receive(frame(HEADERS, 0, 1, bytes(16_000)) + frame(CONTINUATION, 0, 1, bytes(16_000)) * 5)
    assert caught.value.code == ENHANCE_YOUR_CALM


def test_a_header_block_in_thousands_of_crumbs_is_refused_long_before_its_limit() -> None:
    server, _ = greeted()
    with pytest.raises(Http2Error) as caught:
        server.receive(frame(HEADERS, 0, 1, BLOCK) + frame(CONTINUATION, 0, 1, b"x") * 5000)
    assert caught.value.code == ENHANCE_YOUR_CALM


def test_a_header_block_that_unpacks_to_more_than_the_limit_is_refused() -> None:
    import hpack

    encoder = hpack.Encoder()
    block = encoder.encode([("a", "x" * 3000)]) + b"\xbe" * 100  # refers to the long one a hundred times
    server, _ = greeted()
    with pytest.raises(Http2Error) as caught:
        server.receive(frame(HEADERS, ALL_HEADERS, 1, block))
    assert caught.value.code == COMPRESSION_ERROR


def test_more_data_than_the_windows_hold_is_refused() -> None:
    class Narrow(Http2Limits):
        stream_window = 65_535
        connection_window = 1 << 20

    server, _ = greeted(Narrow)
    server.receive(OPEN)
    with pytest.raises(Http2Error) as caught:
        server.receive(frame(DATA, 0, 1, bytes(16_384)) * 5)
    assert caught.value.code == FLOW_CONTROL_ERROR


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 9), st.integers(0, 255), st.integers(0, 7))
def test_no_bytes_at_all_do_worse_than_end_their_connection(junk: bytes, kind: int, flags: int, stream: int) -> None:
    server, _ = greeted()
    try:
        server.receive(OPEN + frame(kind, flags, stream, junk))
        server.receive(junk)
    except Http2Error as error:
        server.final_goaway(error)
