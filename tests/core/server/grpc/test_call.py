"""One gRPC call on our own HTTP/2: when it is given up, and that it ends once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

from remora.protocols.grpc.framing import GOOD, RESOURCE_EXHAUSTED, framed, trailers
from remora.server.grpc.call import UnaryCall
from support.wire.grpc_calls import OPENING, FakeLink, FakeThreads


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
