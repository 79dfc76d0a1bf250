"""Two sides of a channel on one loop: nothing is lost or overtakes, whatever is full."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from remora.backends.worker.polling import PollBudget
from remora.server.fronts.codec import CodecError, Kind, Message, TooLargeError

channels = pytest.importorskip("remora.server.fronts.channel", reason="needs mmap and event fds")
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has anonymous shared memory")

PATIENCE_S = 60.0
ARENA_BYTES = 1 << 20


class Side:
    """One side with what it has received."""

    def __init__(self, ends: channels.Ends, *, serves: bool, poll_ns: int = 0) -> None:
        self.got: list[Message] = []
        self.errors: list[Exception] = []
        self.arrived = asyncio.Event()
        self.channel = channels.LoopChannel(ends, self.receive, self.errors.append, serves=serves, poll_ns=poll_ns)

    def receive(self, message: Message) -> None:
        self.got.append(message)
        self.arrived.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.arrived.clear()
                await self.arrived.wait()


def run(story: Callable[[Side, Side], Awaitable[None]], arena_bytes: int = ARENA_BYTES, *, poll_ns: int = 0) -> None:
    async def main() -> None:
        ours, theirs = channels.create(arena_bytes)
        sides = Side(ours, serves=True, poll_ns=poll_ns), Side(theirs, serves=False)
        try:
            await story(*sides)
        finally:
            for side in sides:
                side.got.clear()
                side.channel.close()

    asyncio.run(main())


def test_messages_of_both_directions_arrive_in_order() -> None:
    async def story(engine: Side, front: Side) -> None:
        for number in range(1, 1001):
            engine.channel.send(Kind.ANSWER, number, [b"a" * (number % 300)])
            front.channel.send(Kind.INFER, number, [b"b"])
            if number % 100 == 0:
                await asyncio.sleep(0)
        await engine.until(lambda: len(engine.got) == 1000)
        await front.until(lambda: len(front.got) == 1000)
        assert [message.number for message in engine.got] == [*range(1, 1001)]
        assert [(message.number, len(message.parts[0])) for message in front.got] == [  # type: ignore[arg-type]
            (number, number % 300) for number in range(1, 1001)
        ]

    run(story)


@pytest.fixture
def wake_ups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Descriptors through which sides were woken."""
    found: list[int] = []
    write = os.eventfd_write

    def count(fd: int, value: int) -> None:
        found.append(fd)
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", count)
    # A machine that is busy may take the processor away, upon which a side would not poll for a while.
    monkeypatch.setattr(PollBudget, "record_loss", lambda _budget, _now: None)
    return found


async def polling(engine: Side, front: Side) -> None:
    """Have the engine's side poll, after its other side sent at short intervals."""
    for _ in range(200):
        engine.channel._expected._budget.record_wait(1_000)  # type: ignore[union-attr]
    engine.channel.poll()
    assert engine.channel._expected.poll.active  # type: ignore[union-attr]


def test_a_side_that_polls_is_not_woken(wake_ups: list[int]) -> None:
    async def story(engine: Side, front: Side) -> None:
        await polling(engine, front)
        front.channel.send(Kind.CANCEL, 1)
        front.channel.flush()
        assert wake_ups == []
        await engine.until(lambda: len(engine.got) == 1)

    run(story, poll_ns=10**9)


def test_a_side_whose_poll_found_nothing_is_woken(wake_ups: list[int]) -> None:
    async def story(engine: Side, front: Side) -> None:
        await polling(engine, front)
        async with asyncio.timeout(PATIENCE_S):
            while engine.channel._expected.poll.active:  # type: ignore[union-attr]
                await asyncio.sleep(0)
        for number in (1, 2):
            front.channel.send(Kind.CANCEL, number)
            await engine.until(lambda number=number: len(engine.got) == number)
        assert len(wake_ups) == 2

    run(story, poll_ns=1_000_000)


def test_a_side_without_a_limit_for_polls_sleeps(wake_ups: list[int]) -> None:
    async def story(engine: Side, front: Side) -> None:
        engine.channel.poll()
        assert engine.channel._expected is None
        front.channel.send(Kind.CANCEL, 1)
        await engine.until(lambda: len(engine.got) == 1)
        assert len(wake_ups) == 1

    run(story)


def test_a_reader_that_comes_later_finds_more_than_the_ring_holds() -> None:
    """A full ring: the messages wait in their sender, and all arrive in order once the other side reads."""

    async def story(engine: Side, front: Side) -> None:
        reading = channels.LoopChannel._read
        front.channel._read = lambda: None  # a loop that is busy with other work
        for number in range(1, 2001):
            engine.channel.send(Kind.ANSWER, number, [bytes(4000)])
        engine.channel.flush()
        assert engine.channel.waiting
        front.channel._read = lambda: reading(front.channel)
        front.channel._read()
        await front.until(lambda: len(front.got) == 2000)
        assert [message.number for message in front.got] == [*range(1, 2001)]
        assert not engine.channel.waiting

    run(story)


def test_large_parts_wait_for_room_that_the_reader_gives_back() -> None:
    async def story(engine: Side, front: Side) -> None:
        block = np.full(ARENA_BYTES // 4, 7, np.uint8)
        for number in range(1, 41):
            engine.channel.send(Kind.ANSWER, number, [block])
        await front.until(lambda: bool(front.got))
        assert len(front.got) <= 4  # the rest has no room while these are referenced
        seen = 0
        while seen < 40:
            await front.until(lambda: bool(front.got))
            for message in front.got:
                seen += 1
                assert message.number == seen
                assert bytes(message.parts[0]) == block.tobytes()  # type: ignore[arg-type]
            del message
            front.got.clear()

    run(story)


def test_memory_is_given_back_although_nothing_else_is_sent() -> None:
    async def story(engine: Side, front: Side) -> None:
        engine.channel.send(Kind.ANSWER, 1, [bytes(100_000)])
        await front.until(lambda: bool(front.got))
        assert engine.channel._memory.arena.used_bytes
        front.got.clear()
        async with asyncio.timeout(PATIENCE_S):
            while engine.channel._memory.arena.used_bytes:
                await asyncio.sleep(0)

    run(story)


def test_a_message_that_never_has_room_is_refused_when_it_is_sent() -> None:
    async def story(engine: Side, front: Side) -> None:
        with pytest.raises(TooLargeError, match=f"more than the {ARENA_BYTES // 2} bytes"):
            engine.channel.send(Kind.ANSWER, 1, [bytes(ARENA_BYTES)])
        engine.channel.send(Kind.ANSWER, 2, [b"small"])
        await front.until(lambda: bool(front.got))
        assert [message.number for message in front.got] == [2]

    run(story)


@pytest.mark.parametrize("garbage", [b"x" * 16, bytes(7), b"\xff" * 64])
def test_invalid_data_of_the_other_side_is_reported_and_ends_the_reading(garbage: bytes) -> None:
    async def story(engine: Side, front: Side) -> None:
        engine.channel._out.put(garbage)
        os.eventfd_write(engine.channel._ends.peer_wake, 1)
        async with asyncio.timeout(PATIENCE_S):
            while not front.errors:
                await asyncio.sleep(0)
        assert isinstance(front.errors[0], CodecError)
        assert front.got == []

    run(story)


def test_an_offset_that_is_not_in_use_is_invalid_data() -> None:
    async def story(engine: Side, front: Side) -> None:
        front.channel.send(Kind.RELEASE, 0, [(64).to_bytes(8, "little")])
        async with asyncio.timeout(PATIENCE_S):
            while not engine.errors:
                await asyncio.sleep(0)
        assert "offset 64" in str(engine.errors[0])

    run(story)


def test_a_closed_side_takes_no_messages_and_closes_its_descriptors() -> None:
    before = {path.name for path in Path("/proc/self/fd").iterdir()}

    async def story(engine: Side, front: Side) -> None:
        for side in (engine, front):
            side.channel.close()
            side.channel.close()
            side.channel.send(Kind.ANSWER, 1, [b"late"])
        await asyncio.sleep(0)

    run(story)
    gc.collect()  # a mapping holds a descriptor until the last reference to it is gone
    left = {path.name for path in Path("/proc/self/fd").iterdir()} - before
    assert len(left) <= 1  # the folder itself


def test_the_memory_needs_no_file_system() -> None:
    ours, theirs = channels.create(ARENA_BYTES)
    try:
        assert Path(f"/proc/self/fd/{ours.memory}").readlink().as_posix().startswith("/memfd:")
    finally:
        for fd in (*ours, *theirs):
            os.close(fd)


def test_untouched_memory_costs_nothing() -> None:
    ours, theirs = channels.create(1 << 40)
    try:
        assert os.fstat(ours.memory).st_blocks == 0
    finally:
        for fd in (*ours, *theirs):
            os.close(fd)


def test_memory_is_given_back_although_its_last_reader_ends_amid_a_look() -> None:
    async def story(engine: Side, front: Side) -> None:
        class Views(dict[int, object]):
            """Views the end of which another thread records while the loop looks at them."""

            def pop(self, *what: object) -> object:
                found = super().pop(*what)  # type: ignore[call-overload]
                front.channel._tidying.cancel()  # because this is its call
                front.channel._tidy()
                return found

        front.channel._views = Views()
        engine.channel.send(Kind.ANSWER, 1, [bytes(100_000)])
        await front.until(lambda: bool(front.got))
        front.got.clear()
        async with asyncio.timeout(PATIENCE_S):
            while engine.channel._memory.arena.used_bytes:
                await asyncio.sleep(0)

    run(story)
