"""Budget of stream messages in a turn of the loop: its size, its order, and its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

from remora.server.grpc.front import MessageTurns


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
    turns = MessageTurns(loop.call_soon, most=3)
    for _ in range(2):
        assert [turns.take() for _ in range(5)] == [True, True, True, False, False]
        assert len(loop.scheduled) == 1
        loop.turn()
    assert not loop.scheduled


def test_streams_that_wait_have_their_turns_in_order() -> None:
    loop, seen = Loop(), list[str]()
    turns = MessageTurns(loop.call_soon, most=3)
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
    turns = MessageTurns(loop.call_soon, most=3)

    def fail() -> None:
        raise ZeroDivisionError

    for work in (fail, lambda: seen.append("a"), lambda: seen.append("b")):
        turns.wait(work)
    with pytest.raises(ZeroDivisionError):  # for the loop, which logs it
        loop.turn()
    loop.turn()
    assert seen == ["a", "b"]
