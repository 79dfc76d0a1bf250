"""Connections that discard the rest of a request after its answer; over real sockets, and with TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer
from remora.server.http import lingering
from remora.server.http.exchange import Exchange
from remora.server.http.http1_listener import Listener
from remora.server.tls import make_self_signed

PATIENCE_S = 60.0
ANSWER = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"
BEGUN = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\nabc"


class Refusal:
    """Service that answers by the head alone, at once or when `release` is called."""

    def __init__(self, *, waits: bool = False) -> None:
        self.waits = waits
        self.bodies: list[bytes] = []
        self.exchange: Exchange | None = None

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> None:
        self.bodies.append(bytes(body))
        self.exchange = exchange
        if not self.waits:
            self.release()

    def reads_body(self, head: Head) -> bool:
        return False

    def release(self) -> None:
        assert self.exchange is not None
        self.exchange.respond(HttpAnswer(401, (), [b"no"]))


class Client:
    """A connection to a service that refuses, with limits for the body."""

    def __init__(self, service: Refusal, most_bytes: int = 2_000, tls: tuple[Path, Path] | None = None) -> None:
        self.listener = Listener(service, max_body_bytes=most_bytes)
        self._tls = tls

    async def __aenter__(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        served = asked = None
        if self._tls is not None:
            served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            served.load_cert_chain(*self._tls)
            asked = ssl.create_default_context(cafile=str(self._tls[0]))
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self.listener.connection, "127.0.0.1", 0, ssl=served)
        port = self._server.sockets[0].getsockname()[1]
        reader, self._writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=asked, server_hostname="localhost" if asked else None
        )
        return reader, self._writer

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        self._server.close()
        async with asyncio.timeout(PATIENCE_S):
            await self._server.wait_closed()


def run(service: Refusal, pieces: tuple[bytes, ...], most_bytes: int = 2_000, **tls: tuple[Path, Path]) -> bytes:
    """Send a request in pieces, the later ones after the answer; return what came until the end."""

    async def ask() -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            client = Client(service, most_bytes, **tls)
            async with client as (reader, writer):
                writer.write(pieces[0])
                got = b""
                if not service.waits:
                    got = await reader.readexactly(len(ANSWER))
                    assert not client.listener.connections
                for piece in pieces[1:]:
                    writer.write(piece)
                    await writer.drain()
                if service.waits:
                    while service.exchange is None:
                        await asyncio.sleep(0)
                    service.release()
                return got + await reader.read()

    return asyncio.run(ask())


def test_the_answer_precedes_the_body_and_the_connection_closes_after_it() -> None:
    service = Refusal()
    assert run(service, (BEGUN, b"x" * 997)) == ANSWER
    assert service.bodies == [b""]


def test_a_request_behind_the_body_is_not_answered() -> None:
    assert run(Refusal(), (BEGUN, b"x" * 997 + BEGUN)) == ANSWER


def test_a_body_of_unknown_length_is_discarded_up_to_the_limit() -> None:
    chunked = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert run(Refusal(), (chunked, b"x" * 2_000)) == ANSWER


def test_an_answer_that_comes_later_is_written_while_the_body_arrives() -> None:
    assert run(Refusal(waits=True), (BEGUN, b"x" * 500)) == ANSWER


def test_tls_discards_the_rest_too(tmp_path: Path) -> None:
    assert run(Refusal(), (BEGUN, b"x" * 997), tls=make_self_signed(tmp_path)) == ANSWER


def test_a_client_that_sends_nothing_more_is_closed_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "_LINGER_S", 0.01)

    async def wait() -> None:
        async with asyncio.timeout(PATIENCE_S):
            client = Client(Refusal())
            async with client as (reader, writer):
                writer.write(BEGUN)
                assert await reader.read() == ANSWER
                with pytest.raises(ConnectionError):
                    await _send_without_end(writer)

    asyncio.run(wait())


async def _send_without_end(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0)
