"""One gRPC call on our own HTTP/2: when it is given up, and that it ends once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

from remora.errors import UnavailableError
from remora.protocols.grpc.framing import GOOD, HEADS, RESOURCE_EXHAUSTED, Opening, framed, trailers
from remora.server.grpc.call import Converted, GrpcCall, Streaming, UnaryCall

OPENING = Opening("/s/m", (), None, b"identity")


class FakeLink:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.taken = 0
        self.connection: object = "one"
        self.backlog = 0
        self.window = 1 << 30
        self.sent: list[tuple[bytes, ...]] = []

    def consumed(self, size: int) -> None:
        self.taken += size

    def headers(self, block: bytes, *, end: bool = False) -> None:
        self.sent.append((block,))

    def data(self, data: bytes, *, end: bool = False) -> int:
        self.sent.append((data,))
        return 0 if len(data) <= self.window else len(data)

    def respond(self, head: bytes, data: bytes, trailers: bytes = b"") -> None:
        self.sent.append((head, data, trailers))


class FakeThreads:
    """Everything at once, in the test's own thread."""

    max_message_bytes = 1000

    mailbox: Any = None

    def __init__(self) -> None:
        self.ended: list[Streaming] = []

    def post(self, work: Callable[..., object], /, *arguments: Any) -> None:
        work(*arguments)

    def stream_ended(self, call: Streaming, /) -> None:
        self.ended.append(call)

    def convert(self, call: GrpcCall, work: Callable[[], Any], then: Callable[[Any], None], /) -> None:
        then(work())


def opened(begun: list[bytes]) -> tuple[UnaryCall, FakeLink]:
    link: Any = FakeLink()
    return UnaryCall(FakeThreads(), OPENING, lambda _, message: begun.append(message), b"", link), link


def test_a_slow_message_is_awaited_and_a_stalled_one_is_given_up() -> None:
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


class Kept:
    """A behaviour in the test's hands."""

    backlog = 0

    def __init__(self, call: Streaming) -> None:
        self.call = call
        self.messages: list[bytes | None] = []
        self.left = False

    def receive(self, message: bytes, credit: int) -> None:
        self.messages.append(message)
        self.call.consumed(credit)

    def half_close(self) -> None:
        self.messages.append(None)

    def leave(self) -> None:
        self.left = True


def streaming(
    threads: FakeThreads, coding: bytes = b"", begin: Callable[[Streaming], Any] = Kept, opening: Opening = OPENING
) -> tuple[Streaming, FakeLink, list[Kept]]:
    begun: list[Kept] = []
    link: Any = FakeLink()

    def keep(call: Streaming) -> Any:
        begun.append(begin(call))
        return begun[-1]

    return Streaming(threads, opening, keep, coding, link), link, begun


def test_a_stream_begins_with_its_first_message_and_ends_once() -> None:
    async def play() -> None:
        threads = FakeThreads()
        call, link, begun = streaming(threads)
        body = framed(b"message")
        call.received(body[:3], False)
        assert not begun
        call.received(body[3:], False)
        call.received(b"", True)
        (behaviour,) = begun
        assert behaviour.messages == [b"message", None]
        assert link.taken == len(body)
        call.send(b"answer")
        call.end(None)
        call.end(UnavailableError("late"))
        assert link.sent == [(HEADS[b""],), (framed(b"answer"),), (trailers(0, "", alone=False),)]
        assert (threads.ended, behaviour.left) == ([call], True)

    asyncio.run(play())


def test_a_stream_that_ends_without_a_message_begins_then() -> None:
    async def play() -> None:
        call, link, begun = streaming(FakeThreads())
        call.received(b"", True)
        assert begun[0].messages == [None]
        call.end(None)
        assert link.sent == [(trailers(0, "", alone=True),)]

    asyncio.run(play())


class Later(FakeThreads):
    """Threads that finish when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []

    def convert(self, call: GrpcCall, work: Callable[[], Any], then: Callable[[Any], None], /) -> None:
        self.work.append(lambda: then(work()))

    def finish(self) -> None:
        work, self.work = self.work, []
        for each in work:
            each()


def test_messages_behind_a_compressed_one_wait_until_it_is_inflated() -> None:
    async def play() -> None:
        threads = Later()
        call, _, begun = streaming(threads, opening=Opening("/s/m", (), None, b"gzip"))
        long = bytes(1_000)
        call.received(framed(long, b"gzip") + framed(b"plain") + framed(long, b"gzip"), False)
        call.received(framed(b"last"), True)
        assert begun[0].messages == []
        threads.finish()
        assert begun[0].messages == [long, b"plain"]
        threads.finish()
        assert begun[0].messages == [long, b"plain", long, b"last", None]

    asyncio.run(play())


def test_answers_are_compressed_in_order_and_the_end_follows_them() -> None:
    async def play() -> None:
        threads = Later()
        call, link, _ = streaming(threads, b"gzip")
        call.received(framed(b"x"), False)
        first, second, third = (bytes([n]) * 1_000 for n in range(3))
        call.send(first)
        call.send(second)
        call.send(third)
        call.end(None)
        assert (link.sent, call.unsent) == ([], 3_000)
        threads.finish()
        assert link.sent == [(HEADS[b"gzip"],), (framed(first, b"gzip"),)]
        threads.finish()
        rest = framed(second, b"gzip") + framed(third, b"gzip")
        assert link.sent[2:] == [(rest,), (trailers(0, "", alone=False),)]

    asyncio.run(play())


def test_answers_beyond_the_windows_count_until_they_are_sent_or_the_call_ends() -> None:
    async def play() -> None:
        for ends in (False, True):
            call, link, _ = streaming(FakeThreads())
            call.received(framed(b"x"), False)
            link.window = 0
            call.send(b"answer")
            resumed: list[bool] = []
            call.when_sent(lambda resumed=resumed: resumed.append(True))
            call.sent(5)
            assert (call.unsent, resumed) == (len(framed(b"answer")) - 5, [])
            if ends:
                call.lost()
            else:
                call.sent(call.unsent)
            assert (call.unsent, resumed) == (0, [True])

    asyncio.run(play())


def test_a_stream_that_cannot_begin_is_refused() -> None:
    def refuse(_: Streaming) -> Any:
        raise UnavailableError("too many")

    async def play() -> None:
        call, link, _ = streaming(FakeThreads(), begin=refuse)
        call.received(framed(b"x"), False)
        assert link.sent == [(trailers(14, "too many", alone=True),)]
        assert call.ended

    asyncio.run(play())


def test_a_stream_of_empty_messages_that_are_not_processed_is_ended() -> None:
    class Waiting(Kept):
        """A behaviour that processes nothing."""

        @property
        def backlog(self) -> int:  # type: ignore[override]
            return len(self.messages)

    async def play() -> None:
        call, link, begun = streaming(FakeThreads(), begin=Waiting)
        for _ in range(65):
            call.received(framed(b"") * 1_000, False)
        assert not call.ended
        call.received(framed(b"") * 1_000, False)
        text = "more than 65536 messages wait to be read: send larger ones"
        assert link.sent == [(trailers(RESOURCE_EXHAUSTED, text, alone=True),)]
        assert begun[0].left

    asyncio.run(play())


def test_each_message_of_a_converted_stream_is_answered_in_order() -> None:
    async def play() -> None:
        threads, link = Later(), cast(Any, FakeLink())
        call = Streaming(threads, OPENING, Converted, b"", link, convert=bytes.upper)
        call.received(framed(b"a") + framed(b"b"), False)
        call.received(b"", True)
        threads.finish()
        threads.finish()
        assert link.sent[1:] == [(framed(b"A"),), (framed(b"B"),), (trailers(0, "", alone=False),)]

    asyncio.run(play())
