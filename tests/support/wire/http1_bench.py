"""HTTP/1 connection over a fake transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

from remora.messages import Buffer
from remora.server.http.exchange import Service
from remora.server.http.held_bytes import HeldBytes
from remora.server.http.http1 import Connection
from remora.server.http.http1_listener import Listener
from remora.server.http.http1_listener_state import Handover
from support.engine.fakes import FakeClock, FakeService, FakeTransport

LIMIT = 1 << 20


class Bench(NamedTuple):
    """A connection with a fake service and a fake transport, in a loop that is turned by hand."""

    service: FakeService
    listener: Listener
    connection: Connection
    transport: FakeTransport
    loop: asyncio.AbstractEventLoop

    def turn(self) -> None:
        """Let the loop do what is due."""
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))

    def receive(self, data: Buffer, *, turn: bool = True) -> None:
        """Give bytes to the connection as a transport does: as many as its buffer takes, until it closes or pauses."""

        async def feed() -> None:
            view = memoryview(data)
            while view and not self.transport.closing:
                receiver = cast(asyncio.BufferedProtocol, self.transport.protocol or self.connection)
                buffer = receiver.get_buffer(-1)
                count = min(len(buffer), len(view))
                assert count, "the transport was given an empty buffer"
                buffer[:count] = view[:count]
                receiver.buffer_updated(count)
                view = view[count:]

        self.loop.run_until_complete(feed())
        if turn:
            self.turn()

    def answer(self) -> None:
        """Have the service answer its oldest request, in the loop."""

        async def respond() -> None:
            self.service.answer()

        self.loop.run_until_complete(respond())
        self.turn()

    def lose(self) -> None:
        self.connection.connection_lost(None)

    @property
    def written(self) -> bytes:
        return bytes(self.transport.written)

    @property
    def bodies(self) -> list[bytes]:
        """The bodies of all answers so far."""
        return [body for _, body in answers_of(self.written)]


def answers_of(wire: bytes) -> list[tuple[bytes, bytes]]:
    """(head, body) of each answer in ``wire``, by their lengths."""
    found = []
    while wire:
        head, _, rest = wire.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        found.append((head, rest[:length]))
        assert len(rest) >= length, "an answer is shorter than it says"
        wire = rest[length:]
    return found


@contextmanager
def benches(
    *,
    wait: bool = False,
    limit: int = LIMIT,
    http2: Handover | None = None,
    held: HeldBytes | None = None,
    over: Callable[[FakeService], Service] = lambda service: service,
) -> Iterator[Bench]:
    """Yield a bench whose listener has what ``over`` returns for the fake service."""
    loop = asyncio.new_event_loop()
    service = FakeService(wait=wait)
    # On a real clock a pause of the process would end a turn of the loop before its requests do.
    now = FakeClock().monotonic_ns
    listener = Listener(over(service), max_body_bytes=limit, http2=http2, held=held, now=now)
    connection, transport = listener.connection(), FakeTransport()

    async def connect() -> None:
        connection.connection_made(transport)

    try:
        loop.run_until_complete(connect())
        yield Bench(service, listener, connection, transport, loop)
    finally:
        loop.close()


def get(path: str, *lines: str, version: str = "1.1") -> bytes:
    return "\r\n".join((f"GET {path} HTTP/{version}", "Host: h", *lines, "", "")).encode()


def post(path: str, body: bytes, *lines: str) -> bytes:
    return (
        "\r\n".join((f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *lines, "", "")).encode()
        + body
    )
