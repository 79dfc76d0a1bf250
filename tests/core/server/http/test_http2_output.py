"""Output of HTTP/2 connections over sockets: counted, and given up only if the client does not read."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

from remora.protocols.http2.frames import (
    HEADERS,
    INITIAL_WINDOW,
    PREFACE,
    SETTING,
    SETTINGS,
    frame,
    pack,
    window_update,
)
from remora.protocols.rest.answer import HttpAnswer
from remora.server.http import http2
from remora.server.http.held_bytes import HeldBytes
from remora.server.http.http2 import ALPN, Http2Connection, Http2Listener
from remora.server.http.http2_output import Output, Progress
from remora.server.http.http2_requests import Requests
from remora.server.tls import make_self_signed
from support.engine.fakes import FakeClock, FakeService, FakeTransport
from support.process.eventually import eventually_in_loop
from support.servers.live_server import PATIENCE_S

ANSWERS, ANSWER_BYTES = 2, 10 << 20
LIMIT = 32 << 20
KERNEL_BYTES = 6 << 20
"""More than the buffers of both ends hold."""
HUGE = 1 << 30
GET = pack(((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/a"), (b":authority", b"h")))


class Client:
    """Client of a listener in the same loop, which asks for long answers.

    Args:
        window: bytes of answers that it lets the server send ahead.
        size: bytes of each answer.
    """

    def __init__(self, listener: Http2Listener, service: FakeService, window: int, size: int = ANSWER_BYTES) -> None:
        self._size = size
        self._listener = listener
        self._service = service
        self._window = window
        self._unconfirmed = 0

    async def connect(self, context: tuple[ssl.SSLContext, ssl.SSLContext] | None) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = context or (None, None)
        self._server = await loop.create_server(self._listener.connection, "127.0.0.1", 0, ssl=ours)
        self._server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        sock.setblocking(False)
        await loop.sock_connect(sock, self._server.sockets[0].getsockname())
        name = "localhost" if theirs else None
        self._reader, self._writer = await asyncio.open_connection(
            sock=sock, ssl=theirs, limit=65_536, server_hostname=name
        )

    async def ask(self) -> Http2Connection:
        """Ask for the answers and have them sent."""
        self._writer.write(PREFACE + frame(SETTINGS, 0, 0, SETTING.pack(INITIAL_WINDOW, self._window)))
        self._writer.write(window_update(0, self._window))
        for stream in range(1, 2 * ANSWERS, 2):
            self._writer.write(frame(HEADERS, 5, stream, GET))
        await eventually_in_loop(lambda: len(self._service.waiting) == ANSWERS)
        for exchange, _, _ in self._service.waiting:
            exchange.respond(HttpAnswer(200, (), [bytes(self._size)]))
        await asyncio.sleep(0)
        (connection,) = self._listener.connections
        return connection

    async def read(self, size: int) -> None:
        """Read bytes, and open the windows again once it has read half of them."""
        await self._reader.readexactly(size)
        self._unconfirmed += size
        if self._unconfirmed * 2 >= self._window:
            opened = (window_update(stream, self._unconfirmed) for stream in (0, *range(1, 2 * ANSWERS, 2)))
            self._writer.write(b"".join(opened))
            self._unconfirmed = 0
        for _ in range(5):
            await asyncio.sleep(0)

    async def read_all(self) -> int:
        """Read what comes until the server closes, a piece in a turn of the loop, and return its bytes."""
        size = 0
        while piece := await self._reader.read(8_192):
            size += len(piece)
            await asyncio.sleep(0)
        return size

    async def leave(self) -> None:
        self._writer.transport.abort()
        self._server.close()
        await eventually_in_loop(lambda: not self._listener.connections)


@pytest.fixture(scope="module", params=["plain", "tls"])
def contexts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """The contexts of server and client; None without TLS."""
    return None if request.param == "plain" else tls(tmp_path_factory.mktemp("tls"))


def tls(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    cert, key = make_self_signed(folder)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(cert, key)
    theirs = ssl.create_default_context(cafile=str(cert))
    for context in (ours, theirs):
        context.set_alpn_protocols([ALPN])
    return ours, theirs


def own_loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def uv_loop() -> asyncio.AbstractEventLoop:
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def run(make_loop: Callable[[], asyncio.AbstractEventLoop], work: Callable[[], Awaitable[Any]]) -> None:
    loop = make_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(work(), PATIENCE_S))
    finally:
        loop.close()


def listening(service: FakeService) -> Http2Listener:
    requests = Requests(service, 1 << 20, FakeClock().monotonic_ns)
    return Http2Listener(lambda _fields: lambda _stream: None, requests.open, held=HeldBytes(-1, LIMIT))


async def settle(connection: Http2Connection) -> None:
    """Wait until the client's system takes no more. TCP delays acknowledgements by up to 40 ms."""
    clock = asyncio.get_running_loop().time
    last, since = Progress(-1, -1), clock()

    def settled() -> bool:
        nonlocal last, since
        now = connection._output.progress()
        if now != last:
            last, since = now, clock()
        return clock() - since > 0.3

    await eventually_in_loop(settled)


@pytest.mark.parametrize("make_loop", [own_loop, uv_loop])
@pytest.mark.parametrize("window", [4 << 20, HUGE])
def test_a_client_that_reads_slowly_but_steadily_gets_its_answers(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None,
    make_loop: Callable[[], asyncio.AbstractEventLoop],
    window: int,
) -> None:
    async def work() -> None:
        service = FakeService(wait=True)
        listener = listening(service)
        client = Client(listener, service, window)
        await client.connect(contexts)
        connection = await client.ask()
        now, step = 0.0, 512 << 10
        for at in range(0, ANSWERS * ANSWER_BYTES - step, step):
            now += 19.0
            connection.sweep(now, 1e9, 1e9)
            assert at > ANSWER_BYTES // 2 or listener.held.answers > listener.held.most_unread
            await client.read(step)
        assert not listener.closed
        await client.leave()
        assert listener.held.total == 0

    run(make_loop, work)


@pytest.mark.parametrize("make_loop", [own_loop, uv_loop])
@pytest.mark.parametrize("read", [0, 5 << 20])
def test_the_answers_of_a_client_that_stops_to_read_are_counted_and_it_is_given_up(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None,
    make_loop: Callable[[], asyncio.AbstractEventLoop],
    read: int,
) -> None:
    async def work() -> None:
        service = FakeService(wait=True)
        listener = listening(service)
        client = Client(listener, service, HUGE)
        await client.connect(contexts)
        connection = await client.ask()
        await client.read(read)
        await settle(connection)
        unread = ANSWERS * ANSWER_BYTES - read
        for now, given_up in ((0.0, False), (20.0, False), (21.0, True)):
            connection.sweep(now, 1e9, 1e9)
            assert given_up or unread - KERNEL_BYTES < listener.held.answers < unread + 100_000
            assert bool(listener.closed) == given_up
        assert listener.closed == {"unread_answer": 1}
        await eventually_in_loop(lambda: not listener.connections)
        assert listener.held.total == 0
        await client.leave()

    run(make_loop, work)


@pytest.mark.parametrize("make_loop", [own_loop, uv_loop])
@pytest.mark.parametrize("size", [90_000, 300_000])
def test_a_connection_that_leaves_waits_until_a_slow_client_has_read_its_answers(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None,
    make_loop: Callable[[], asyncio.AbstractEventLoop],
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        service = FakeService(wait=True)
        listener = listening(service)
        client = Client(listener, service, HUGE, size)
        await client.connect(contexts)
        await client.ask()
        listener.close_idle()
        assert await client.read_all() > ANSWERS * size
        await client.leave()

    monkeypatch.setattr(http2, "_GOODBYE_S", 0.0)
    run(make_loop, work)


class Blocking(FakeTransport):
    """Transport that pauses its writer after each write."""

    output: Output

    def write(self, data: Any) -> None:
        super().write(data)
        self.output.blocked = True


def test_a_long_output_over_tls_is_passed_on_in_pieces_as_the_transport_takes_them() -> None:
    transport = Blocking()
    transport.output = output = Output(transport, secured=True)
    data = bytes(range(256)) * 4_000
    output.write(data)
    output.write(b"more")
    assert 0 < len(transport.written) < len(data)
    assert output.unsent == len(data) + 4 - len(transport.written)
    assert output.progress() == Progress(len(transport.written), len(data) + 4)
    while output.unsent:
        assert not output.unblock()
    assert transport.written == data + b"more"
    assert max(map(len, transport.writes)) <= 262_144


def test_the_last_bytes_follow_whole_frames_only() -> None:
    for size, is_written in ((1, True), (300_000, False)):
        transport = Blocking()
        transport.output = output = Output(transport, secured=True)
        output.write(b"x" * size)
        output.write_last(b"end")
        assert output.unsent == 0
        assert transport.written.endswith(b"end") == is_written
