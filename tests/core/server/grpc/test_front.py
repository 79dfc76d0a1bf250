"""Budgets of gRPC in a turn of the loop: of the messages of streams, and the time of calls."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

from remora.protocols.grpc.framing import framed
from remora.protocols.restriction import Restrictions
from remora.server.access_log import AccessLog
from remora.server.grpc.front import GrpcFront, MessageTurns
from remora.server.grpc.rpcs import INFER, Rpcs
from remora.server.http.http1_state import TURN_NS
from remora.server.loop import LoopMailbox
from support.engine.engine_by_hand import ByHand
from support.wire.grpc_calls import FakeLink


class Loop:
    """An event loop whose turns the test runs."""

    def __init__(self) -> None:
        self.scheduled: list[Callable[[], None]] = []

    def call_soon(self, work: Callable[[], None]) -> None:
        self.scheduled.append(work)

    def turn(self) -> None:
        scheduled, self.scheduled = self.scheduled, []
        for work in scheduled:
            work()


def test_each_turn_has_its_budget() -> None:
    loop = Loop()
    turns = MessageTurns(loop.call_soon, lambda: 0, most=3)
    for _ in range(2):
        assert [turns.take() for _ in range(5)] == [True, True, True, False, False]
        assert len(loop.scheduled) == 1
        loop.turn()
    assert not loop.scheduled


def test_a_turn_ends_with_its_time() -> None:
    loop = Loop()
    turns = MessageTurns(loop.call_soon, itertools.count(0, TURN_NS // 2).__next__, most=100)
    for _ in range(2):
        assert [turns.take() for _ in range(5)] == [True, True, True, False, False]
        loop.turn()


def test_a_message_that_takes_longer_than_a_turn_is_processed_alone() -> None:
    loop, seen = Loop(), list[int]()
    turns = MessageTurns(loop.call_soon, itertools.count(0, 2 * TURN_NS).__next__, most=100)

    def process() -> None:
        while turns.take():
            seen.append(len(seen))
        if len(seen) < 3:
            turns.wait(process)

    turns.wait(process)
    for number in range(3):
        loop.turn()
        assert len(seen) == number + 1


@pytest.mark.parametrize("logged", [False, True])
def test_the_time_of_an_inference_counts_for_its_connection(logged: bool) -> None:
    async def play() -> None:
        engine: Any = ByHand()
        mailbox = LoopMailbox(asyncio.get_running_loop())
        calls = Rpcs(engine, Restrictions(), 16)
        front = GrpcFront(engine, calls, mailbox, 1 << 20, now=itertools.count(0, 7).__next__)
        writer: Any = SimpleNamespace(now_ns=lambda: 0, put=lambda entry: None)
        open_call = AccessLog(writer, 1.0).over_calls(front.open) if logged else front.open
        link: Any = FakeLink()
        call: Any = open_call(((b":path", INFER.encode()),))(link)
        call.received(framed(b""), True)
        assert (len(link.sent), link.spent) == (1, 7)
        front.close()

    asyncio.run(play())


def test_streams_that_wait_have_their_turns_in_order() -> None:
    loop, seen = Loop(), list[str]()
    turns = MessageTurns(loop.call_soon, lambda: 0, most=3)
    left = {"a": 4, "b": 4, "c": 1}

    def process(name: str) -> None:
        for _ in range(2):
            if left[name] and turns.take():
                left[name] -= 1
                seen.append(name)
        if left[name]:
            turns.wait(lambda: process(name))

    for name in left:
        turns.wait(lambda name=name: process(name))  # type: ignore[misc]
    shown = []
    while loop.scheduled:
        loop.turn()
        shown.append("".join(seen))
        seen.clear()
    assert shown == ["aab", "caa", "bbb", ""]
    assert not any(left.values())


def test_a_stream_that_fails_in_its_turn_does_not_stop_the_others() -> None:
    loop, seen = Loop(), list[str]()
    turns = MessageTurns(loop.call_soon, lambda: 0, most=3)

    def fail() -> None:
        raise ZeroDivisionError

    for work in (fail, lambda: seen.append("a"), lambda: seen.append("b")):
        turns.wait(work)
    with pytest.raises(ZeroDivisionError):  # for the loop, which logs it
        loop.turn()
    loop.turn()
    assert seen == ["a", "b"]
