"""The channel over a socket: who handles a message when the reader role changes hands."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from remora.backends.worker.pipes import PipeChannel
from remora.backends.worker.wire import Message, MessageKind


@pytest.fixture
def ends() -> Iterator[tuple[PipeChannel, PipeChannel]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield PipeChannel(ours), PipeChannel(theirs)


def test_a_message_that_arrives_after_the_fronts_last_look_is_handled_when_it_leaves(
    ends: tuple[PipeChannel, PipeChannel],
) -> None:
    near, far = ends
    handled: list[Message] = []
    with near.front():
        far.send(MessageKind.CLOSE, 1)
        far.send(MessageKind.CLOSE, 2)
        near.background(handled.append)
        first = near.next(0)
        assert first is not None
        assert (first.number, handled) == (1, [])
    assert [message.number for message in handled] == [2]


def test_without_a_front_the_background_thread_handles_messages_at_once(ends: tuple[PipeChannel, PipeChannel]) -> None:
    near, far = ends
    handled: list[Message] = []
    with near.front():
        pass
    far.send(MessageKind.CLOSE, 3)
    near.background(handled.append)
    assert [message.number for message in handled] == [3]
