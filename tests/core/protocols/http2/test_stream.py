"""Sending on one stream: in one step where the windows allow, else in pieces, and nothing after the end."""

from __future__ import annotations

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.http2.connection import Http2
from remora.protocols.http2.flow_control import Flow, Sender
from remora.protocols.http2.frames import PREFACE, SETTINGS, Fields, frame, pack
from remora.protocols.http2.stream import Opener, Receiver, Stream

HEAD = pack(((b":status", b"200"),))
TRAILERS = pack(((b"grpc-status", b"0"),))
OPEN = frame(1, 5, 1, pack(((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"))))


class Owner:
    """Owner of a connection that keeps its only stream, answered or not."""

    backlog = 7

    def __init__(self, receiver: Receiver | None = None) -> None:
        self.stream: Stream | None = None
        self.receiver = receiver

    def read(self, fields: Fields) -> Opener:
        def opened(stream: Stream) -> Receiver | None:
            self.stream = stream
            return self.receiver

        return opened

    def output_ready(self) -> None: ...

    def pinged(self) -> None: ...


class Held:
    """Receiver that ignores its stream."""

    def received(self, data: bytes, ended: bool) -> None: ...

    def lost(self) -> None: ...

    def sent(self, size: int) -> None: ...

    def stalls(self) -> bool:
        return False


def opened() -> tuple[Http2, Stream]:
    owner = Owner()
    server = Http2(owner)
    server.receive(PREFACE + frame(SETTINGS, 0, 0, b"") + OPEN)
    server.take()
    assert owner.stream is not None
    return server, owner.stream


@given(
    st.one_of(st.integers(0, 300), st.integers(16_380, 16_390), st.integers(65_530, 65_540)),
    st.sampled_from((b"", TRAILERS, pack(((b"long", b"x" * 20_000),)))),
    st.booleans(),
)
def test_a_response_in_one_step_has_the_bytes_of_its_pieces(size: int, trailers: bytes, view: bool) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    server, stream = opened()
    stream.respond(HEAD, memoryview(data) if view else data, trailers)
    in_one = server.take()
    server, stream = opened()
    stream.headers(HEAD)
    waits = stream.data(data, end=not trailers)
    if trailers:
        stream.headers(trailers, end=True)
    assert server.take() == in_one
    assert stream.is_open == (waits > 0)


def test_a_response_that_waits_for_a_window_frees_what_received_the_request() -> None:
    class Request(Held):
        """Receiver that can be observed."""

    request = Request()
    freed = weakref.ref(request)
    owner = Owner(request)
    server = Http2(owner)
    server.receive(PREFACE + frame(SETTINGS, 0, 0, b"") + OPEN)
    del request
    owner.receiver = None
    assert owner.stream is not None
    assert freed() is not None
    owner.stream.respond(HEAD, bytes(100_000), TRAILERS)
    assert owner.stream.is_open
    assert freed() is None


@given(st.lists(st.integers(0, 20_000), max_size=8))
def test_pieces_are_sent_in_order_whether_they_fit_or_wait(sizes: list[int]) -> None:
    server, stream = opened()
    pieces = [bytes((number,)) * size for number, size in enumerate(sizes)]
    waits = sum(stream.data(memoryview(piece) if number % 2 else piece) for number, piece in enumerate(pieces))
    sent = body_of(server.take())
    assert sent + bytes(waits) == b"".join(pieces)[: len(sent)] + bytes(waits)
    assert len(sent) == min(65_535, sum(sizes)) == sum(sizes) - waits
    server.receive(frame(8, 0, 0, (1 << 20).to_bytes(4, "big")) + frame(8, 0, 1, (1 << 20).to_bytes(4, "big")))
    assert sent + body_of(server.take()) == b"".join(pieces)


def body_of(wire: bytes) -> bytes:
    """Return the contents of the DATA frames."""
    body, at = b"", 0
    while at < len(wire):
        size, kind = int.from_bytes(wire[at : at + 3], "big"), wire[at + 3]
        body += wire[at + 9 : at + 9 + size] if kind == 0 else b""
        at += 9 + size
    return body


def test_a_stream_knows_its_connection_and_what_its_client_has_not_read() -> None:
    server, stream = opened()
    assert (stream.connection, stream.backlog) == (server.handler, 7)


@pytest.mark.parametrize("end", ["answered", "reset", "lost"])
def test_after_its_end_a_stream_sends_nothing(end: str) -> None:
    server, stream = opened()
    if end == "answered":
        stream.respond(HEAD, b"x", TRAILERS)
    elif end == "reset":
        stream.reset(8)
    else:
        server.receive(frame(3, 0, 1, bytes(4)))
    server.take()
    stream.respond(HEAD, b"x", TRAILERS)
    stream.headers(HEAD, end=True)
    stream.consumed(1 << 30)
    stream.reset(8)
    assert (stream.data(b"x", end=True), server.take()) == (0, b"")


def test_the_bytes_that_were_sent_since_the_client_last_opened_a_window_are_counted() -> None:
    sender, flow = Sender(lambda _stream, _size: None, lambda _stream: None), Flow(1, 10)
    sender.data(flow, bytes(30), end=False)
    assert sender.unconfirmed == 10
    sender.widen_stream(flow, 5)  # which lets five more go
    assert sender.unconfirmed == 5
    sender.widen(100)
    assert sender.unconfirmed == 0
