"""gRPC calls that a front relays: their bytes pass in both directions, and each ends once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remora.engine import Engine
from remora.server.fronts.client import RelayedCall
from remora.server.fronts.codec import CodecError, Kind
from support.wire.front_wire import Pair, Port

FIELDS = ((b":path", b"/s/Method"), (b"key", b"\xff"))


class Client:
    """Connection of a call to its client, which reads only ``window`` bytes."""

    connection = object()
    peer = "192.0.2.1"

    def __init__(self, window: int = 1 << 20) -> None:
        self.window = window
        self.events: list[tuple[object, ...]] = []

    def consumed(self, size: int) -> None:
        self.events.append(("consumed", size))

    def respond(self, head: bytes, data: bytes, trailers: bytes = b"") -> None:
        self.events.append(("respond", head, data, trailers))

    def headers(self, block: bytes, *, end: bool = False) -> None:
        self.events.append(("headers", block, end))

    def data(self, data: bytes, *, end: bool = False) -> int:
        self.events.append(("data", data, end))
        sent = min(len(data), self.window)
        self.window -= sent
        return len(data) - sent

    def reset(self, code: int) -> None:
        self.events.append(("reset", code))


class Stream:
    """Call in the engine's process that keeps what it gets."""

    def __init__(self) -> None:
        self.opened: list[tuple[object, object]] = []
        self.got: list[tuple[bytes, bool]] = []
        self.taken: list[int] = []
        self.lost_times = 0
        self.link: object = None

    def open(self, fields: object) -> Callable[[object], Stream]:
        def opened(link: object) -> Stream:
            self.link = link
            self.opened.append((link, fields))
            return self

        return opened

    def received(self, data: bytes, ended: bool) -> None:
        self.got.append((data, ended))

    def lost(self) -> None:
        self.lost_times += 1

    def sent(self, size: int) -> None:
        self.taken.append(size)

    def stalls(self) -> bool:
        return False


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine(tmp_path, model_control_mode="explicit") as running:
        yield running


def call(pair: Pair, client: Client, *, streams: bool = False) -> RelayedCall:
    relayed = pair.client.relay_call(0, FIELDS, 5, client, streams=streams)  # type: ignore[arg-type]
    pair.pump()
    return relayed


def test_the_pieces_of_a_call_and_of_its_answer_pass_unchanged(engine: Engine) -> None:
    stream, client = Stream(), Client()
    pair = Pair(engine, Port(open_call=stream.open))
    relayed = call(pair, client)
    assert stream.opened[0][1] == FIELDS
    relayed.received(b"one", False)
    relayed.received(b"", True)
    pair.pump()
    assert stream.got == [(b"one", False), (b"", True)]
    link = stream.opened[0][0]
    link.consumed(3)  # type: ignore[attr-defined]
    link.headers(b"head")  # type: ignore[attr-defined]
    assert link.data(b"piece") == 5  # type: ignore[attr-defined]
    pair.pump()
    link.headers(b"trailers", end=True)  # type: ignore[attr-defined]
    pair.pump()
    assert client.events == [
        ("consumed", 3), ("headers", b"head", False), ("data", b"piece", False), ("headers", b"trailers", True)
    ]  # fmt: skip
    assert stream.taken == [5]
    assert (pair.client.open, pair.link.open) == (0, 0)
    relayed.received(b"late", True)
    relayed.sent(4)
    pair.pump()
    assert stream.taken == [5]


def test_a_slow_client_holds_up_the_sender(engine: Engine) -> None:
    stream, client = Stream(), Client(window=2)
    pair = Pair(engine, Port(open_call=stream.open))
    relayed = call(pair, client)
    stream.link.data(b"12345")  # type: ignore[attr-defined]
    pair.pump()
    assert stream.taken == [2]
    relayed.sent(3)
    relayed.sent(0)
    pair.pump()
    assert stream.taken == [2, 3]


def test_a_whole_answer_or_a_reset_ends_a_call(engine: Engine) -> None:
    for act, event in (
        (lambda link: link.respond(b"h", b"d", b"t"), ("respond", b"h", b"d", b"t")),
        (lambda link: link.reset(8), ("reset", 8)),
    ):
        stream, client = Stream(), Client()
        pair = Pair(engine, Port(open_call=stream.open))
        call(pair, client)
        act(stream.link)
        pair.pump()
        assert client.events == [event]
        assert (pair.client.open, pair.link.open) == (0, 0)


def test_a_client_that_leaves_ends_its_call_on_both_sides(engine: Engine) -> None:
    stream, client = Stream(), Client()
    pair = Pair(engine, Port(open_call=stream.open))
    relayed = call(pair, client)
    relayed.lost()
    pair.pump()
    assert stream.lost_times == 1
    assert (pair.client.open, pair.link.open) == (0, 0)
    stream.link.headers(b"late", end=True)  # type: ignore[attr-defined]
    pair.pump()
    assert client.events == []


def test_the_calls_of_a_front_that_ends_are_lost(engine: Engine) -> None:
    stream = Stream()
    pair = Pair(engine, Port(open_call=stream.open))
    call(pair, Client())
    pair.link.lost()
    assert stream.lost_times == 1


def test_calls_of_one_connection_have_one_identity(engine: Engine) -> None:
    stream = Stream()
    pair = Pair(engine, Port(open_call=stream.open))
    call(pair, Client())
    call(pair, Client())
    first, second = (link for link, _ in stream.opened)
    assert first.connection == second.connection  # type: ignore[attr-defined]
    other = Stream()
    call(Pair(engine, Port(open_call=other.open)), Client())
    assert other.link.connection != first.connection  # type: ignore[attr-defined]


def test_a_call_stalls_while_its_message_is_incomplete_unless_it_streams(engine: Engine) -> None:
    pair = Pair(engine, Port(open_call=Stream().open))
    unary, streaming = call(pair, Client()), call(pair, Client(), streams=True)
    unary.received(b"part", False)
    assert not unary.stalls()
    assert unary.stalls()
    assert not streaming.stalls()
    unary.received(b"", True)
    assert not unary.stalls()
    assert not unary.stalls()


def test_an_answer_for_the_wrong_kind_of_request_is_refused(engine: Engine) -> None:
    pair = Pair(engine, Port(open_call=Stream().open))
    relayed = call(pair, Client())
    pair.to_front.send(Kind.BEGIN, relayed._number, [b"{}"], ref=200)
    with pytest.raises(CodecError, match="for a call"):
        pair.pump()
