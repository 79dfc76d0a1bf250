"""One gRPC call on our own HTTP/2: when it is given up, and that it ends once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

from remora.errors import UnavailableError
from remora.protocols.grpc.framing import GOOD, RESOURCE_EXHAUSTED, Opening, framed, trailers
from remora.server.grpc.call import Streaming, UnaryCall

OPENING = Opening("/s/m", (), None, b"identity")


class FakeLink:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.taken = 0
        self.connection: object = "one"
        self.sent: list[tuple[bytes, ...]] = []

    def took(self, size: int) -> None:
        self.taken += size

    def headers(self, block: bytes, *, end: bool = False) -> None:
        self.sent.append((block,))

    def data(self, data: bytes, *, end: bool = False) -> int:
        self.sent.append((data,))
        return 0

    def respond(self, head: bytes, data: bytes, trailers: bytes = b"") -> None:
        self.sent.append((head, data, trailers))


class FakeThreads:
    """Everything at once, in the test's own thread."""

    max_message_bytes = 1000

    def __init__(self) -> None:
        self.begun: list[Callable[[], None]] = []
        self.ended: list[Streaming] = []

    def post(self, work: Callable[..., object], /, *arguments: Any) -> None:
        work(*arguments)

    def begin(self, call: Streaming, connection: object, work: Callable[[], None], /) -> None:
        if connection == "full":
            raise UnavailableError("too many")
        self.begun.append(work)

    def stream_ended(self, call: Streaming, /) -> None:
        self.ended.append(call)

    def convert(self, call: UnaryCall, work: Callable[[], bytes], then: Callable[[bytes], None], /) -> None:
        then(work())


def opened(begun: list[bytes]) -> tuple[UnaryCall, FakeLink]:
    link: Any = FakeLink()
    return UnaryCall(FakeThreads(), link, OPENING, lambda _, message: begun.append(message)), link


def test_a_message_that_comes_slowly_is_waited_for_and_one_that_stands_still_is_not() -> None:
    async def play() -> None:
        begun: list[bytes] = []
        call, link = opened(begun)
        assert call.stalls()
        body = framed(b"message")
        for at in range(len(body)):
            call.received(body[at : at + 1], False)
            assert (call.stalls(), call.stalls()) == (False, True)
        assert link.taken == len(body)
        call.received(b"", True)
        assert begun == [b"message"]
        assert not call.stalls()

    asyncio.run(play())


def test_a_call_ends_once_however_often_it_is_answered() -> None:
    async def play() -> None:
        begun: list[bytes] = []
        call, link = opened(begun)
        call.received(framed(b"x"), True)
        heard: list[str] = []
        assert call.add_callback(lambda: heard.append("ended"))
        call.answer(b"first")
        call.answer(b"second")
        call.fail(1, "late")
        call.lost()
        assert [parts[1:] for parts in link.sent] == [(framed(b"first"), GOOD)]
        assert heard == ["ended"]
        assert not call.add_callback(lambda: heard.append("again"))

    asyncio.run(play())


def test_an_answer_that_is_too_long_fails_its_call() -> None:
    async def play() -> None:
        call, link = opened([])
        call.received(framed(b"x"), True)
        call.answer(bytes(1 << 31))
        text = "Sent message larger than max (2147483648 vs. 2147483647)"
        assert link.sent == [(trailers(RESOURCE_EXHAUSTED, text, alone=True),)]

    asyncio.run(play())


def test_a_stream_has_no_thread_before_its_first_message() -> None:
    async def play() -> None:
        threads, link = FakeThreads(), cast(Any, FakeLink())
        call = Streaming(threads, link, OPENING, lambda messages, _: iter([b"got " + each for each in messages]))
        body = framed(b"message")
        call.received(body[:3], False)
        assert not threads.begun
        call.received(body[3:], False)
        call.received(b"", True)
        (run,) = threads.begun
        run()
        assert link.sent[-1] == (trailers(0, "", alone=False),)
        assert threads.ended == [call]
        call.begin()
        assert len(threads.begun) == 1

    asyncio.run(play())


def test_a_stream_that_ends_without_a_message_is_answered() -> None:
    async def play() -> None:
        threads, link = FakeThreads(), cast(Any, FakeLink())
        call = Streaming(threads, link, OPENING, lambda messages, _: iter(list(messages)))
        call.received(b"", True)
        (run,) = threads.begun
        run()
        assert link.sent == [(trailers(0, "", alone=True),)]

    asyncio.run(play())


def test_a_stream_that_finds_no_thread_is_refused() -> None:
    async def play() -> None:
        threads, link = FakeThreads(), cast(Any, FakeLink())
        link.connection = "full"
        call = Streaming(threads, link, OPENING, lambda messages, _: messages)
        call.received(framed(b"x"), False)
        assert link.sent == [(trailers(14, "too many", alone=True),)]
        assert call.ended

    asyncio.run(play())


def test_a_stream_of_empty_messages_that_are_not_taken_is_ended() -> None:
    async def play() -> None:
        threads, link = FakeThreads(), cast(Any, FakeLink())
        call = Streaming(threads, link, OPENING, lambda messages, _: messages)
        for _ in range(65):
            call.received(framed(b"") * 1_000, False)
        assert not call.ended
        call.received(framed(b"") * 1_000, False)
        text = "more than 65536 messages wait to be read: send larger ones"
        assert link.sent == [(trailers(RESOURCE_EXHAUSTED, text, alone=True),)]
        assert list(call._taken()) == []

    asyncio.run(play())
