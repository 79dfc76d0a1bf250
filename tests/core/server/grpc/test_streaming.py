"""One gRPC stream on our own HTTP/2: its messages in order and in turns, its credits, its answers and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

from remora.errors import UnavailableError
from remora.protocols.grpc.framing import HEADS, Opening, framed, trailers
from remora.server.grpc.call import GrpcCall
from remora.server.grpc.streaming import Converted, Streaming
from support.wire.grpc_calls import OPENING, FakeLink, FakeThreads


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
    """Threads whose work runs when the test calls `finish`."""

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


def test_a_stream_that_is_refused_with_a_long_message_leaves_nothing_held() -> None:
    def refuse(_: Streaming) -> Any:
        raise UnavailableError("too many")

    async def play() -> None:
        threads = FakeThreads()
        threads.max_message_bytes = 1 << 20
        call, link, _ = streaming(threads, begin=refuse)
        call.received(framed(bytes(20_000)) * 2, False)
        call.received(framed(bytes(20_000)), True)
        assert link.sent == [(trailers(14, "too many", alone=True),)]
        assert link.held == 0

    asyncio.run(play())


class Waiting(Kept):
    """A behaviour that keeps one message until the test lets it be processed."""

    def __init__(self, call: Streaming) -> None:
        super().__init__(call)
        self.credit = 0

    @property
    def backlog(self) -> int:  # type: ignore[override]
        return self.credit

    def receive(self, message: bytes, credit: int) -> None:
        self.messages.append(message)
        self.credit = credit

    def finish(self) -> None:
        credit, self.credit = self.credit, 0
        self.call.consumed(credit)


def test_messages_that_wait_are_not_split_and_are_credited_when_they_are_processed() -> None:
    async def play() -> None:
        call, link, begun = streaming(FakeThreads(), begin=Waiting)
        body = framed(b"one") + framed(b"") * 1_000 + framed(b"last")
        call.received(body[:-3], False)
        call.received(body[-3:], True)
        (behaviour,) = begun
        assert (behaviour.messages, link.taken) == ([b"one"], 0)
        behaviour.finish()
        assert (behaviour.messages, link.taken) == ([b"one", b""], len(framed(b"one")))
        while behaviour.credit:
            behaviour.finish()
        assert behaviour.messages == [b"one", *[b""] * 1_000, b"last", None]
        assert link.taken == len(body)

    asyncio.run(play())


class Turns(FakeThreads):
    """Turns in the test's hands."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left
        self.waiting: list[Callable[[], None]] = []

    def take_turn(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def await_turn(self, resume: Callable[[], None], /) -> None:
        self.waiting.append(resume)


def test_messages_beyond_the_budget_of_a_turn_wait_for_the_next_in_order() -> None:
    async def play() -> None:
        threads = Turns(2)
        call, _, begun = streaming(threads)
        call.received(b"".join(framed(b"%d" % number) for number in range(5)), False)
        assert begun[0].messages == [b"0", b"1"]
        call.received(framed(b"5"), True)
        assert (len(begun[0].messages), len(threads.waiting)) == (2, 1)
        threads.left = 100
        threads.waiting.pop()()
        assert begun[0].messages == [b"0", b"1", b"2", b"3", b"4", b"5", None]
        assert not threads.waiting

    asyncio.run(play())


def test_a_stream_gives_way_to_others_after_some_messages() -> None:
    async def play() -> None:
        threads = Turns(1_000)
        call, _, begun = streaming(threads)
        call.received(framed(b"") * 100, False)
        assert 0 < len(begun[0].messages) < 50
        assert len(threads.waiting) == 1
        call.lost()
        threads.waiting.pop()()
        assert len(begun[0].messages) < 50

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
