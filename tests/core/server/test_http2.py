"""One HTTP/2 connection on the event loop: what is given up, and what is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install 'remora[grpc]'")

from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.http2_frames import CANCEL, PREFACE, frame, pack
from remora.server.exchange import Exchange
from remora.server.http2 import Http2Listener

OPEN = pack(((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/v2/x")))


class Written:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return False


class Later:
    """A service that answers when somebody else is done."""

    def __init__(self) -> None:
        self.asked: list[Head] = []

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> None:
        self.asked.append(head)


def test_a_request_that_does_not_come_is_given_up_and_one_that_is_answered_late_is_not() -> None:
    async def play() -> None:
        service, written = Later(), Written()
        listener = Http2Listener(lambda link, fields: None, service, 1000)
        connection = listener.connection()
        transport: Any = written
        connection.connection_made(transport)
        whole, begun, silent = frame(0, 1, 1, b"x"), frame(0, 0, 3, b"x"), b""
        connection.take_in(PREFACE + b"".join(frame(1, 4, n, OPEN) for n in (1, 3, 5)) + whole + begun + silent)
        assert len(service.asked) == 1
        for now in (0.0, 100.0, 200.0):
            listener.drop_stalled(now, 120.0)
        resets = [n for n in (1, 3, 5) if frame(3, 0, n, CANCEL.to_bytes(4, "big")) in written.data]
        assert resets == [3, 5]

    asyncio.run(play())
