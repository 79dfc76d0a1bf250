"""Connections that discard the rest of a request after its answer; over real sockets, and with TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer
from remora.server.http import lingering
from remora.server.http.exchange import Exchange
from remora.server.http.http1_listener import Listener
from remora.server.tls import make_self_signed
from support.process.eventually import eventually_in_loop

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


async def _closed(listener: Listener) -> None:
    """Wait until the listener has no connection and their sockets are closed."""
    await eventually_in_loop(lambda: not (listener.connections or listener.lingering))
    await asyncio.sleep(0)


class Echo:
    """Service that reads bodies and answers 200."""

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> None:
        exchange.respond(HttpAnswer(200, (), [bytes(body)]))


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
        self._asked = asked
        reader, self._writer = await self.connect()
        return reader, self._writer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return another connection."""
        port, name = self._server.sockets[0].getsockname()[1], "localhost" if self._asked else None
        return await asyncio.open_connection("127.0.0.1", port, ssl=self._asked, server_hostname=name)

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        self._server.close()
        async with asyncio.timeout(PATIENCE_S):
            await self._server.wait_closed()
            await _closed(self.listener)


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


@pytest.mark.parametrize("client", ["ends", "goes on"])
def test_a_body_of_unknown_length_is_discarded_until_the_client_ends_or_the_limit(
    client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if client == "goes on":
        monkeypatch.setattr(lingering, "MOST_BYTES", 1_000_000)

    async def ask() -> None:
        async with asyncio.timeout(PATIENCE_S):
            served = Client(Refusal())
            async with served as (reader, writer):
                writer.write(b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
                for _ in range(200):
                    writer.write(b"x" * 4_000)
                    await writer.drain()
                assert await reader.read() == ANSWER
                if client == "ends":
                    writer.write_eof()
                else:
                    with pytest.raises(ConnectionError):
                        await _send_without_end(writer)
                await _closed(served.listener)

    asyncio.run(ask())


@pytest.mark.parametrize(
    "wire",
    [
        b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 8000000\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n7a1200\r\n",
        b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /a HTTP/1.1\r\nContent-Length: 8000000\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01",
        b"POST /" + b"a" * 70_000,
    ],
)
def test_a_client_that_writes_all_before_it_reads_gets_its_refusal(wire: bytes) -> None:
    """A blocking client, as most are, over the loopback, whose buffers are smaller than the body."""

    def ask(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
            client.sendall(wire + b"x" * 8_000_000)
            client.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := client.recv(65_536):
                answer += piece
            return answer

    async def serve() -> bytes:
        listener = Listener(Echo(), max_body_bytes=2_000)
        server = await asyncio.get_running_loop().create_server(listener.connection, "127.0.0.1", 0)
        async with asyncio.timeout(PATIENCE_S), server:
            answer = await asyncio.to_thread(ask, server.sockets[0].getsockname()[1])
            await _closed(listener)
        return answer

    answer = asyncio.run(serve())
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 ", b"HTTP/1.1 501 "))
    assert answer.count(b"\r\nConnection: close\r\n") == 1


def test_the_oldest_of_too_many_clients_that_still_send_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "MOST_CONNECTIONS", 1)

    async def ask() -> None:
        async with asyncio.timeout(PATIENCE_S):
            served = Client(Refusal())
            async with served as (reader, writer):
                writer.write(BEGUN)
                await reader.readexactly(len(ANSWER))
                (first,) = served.listener.lingering
                second_reader, second = await served.connect()
                second.write(BEGUN)
                await second_reader.readexactly(len(ANSWER))
                await eventually_in_loop(lambda: first not in served.listener.lingering)
                assert len(served.listener.lingering) == 1
                assert served.listener.abort_lingering()
                second.close()
                with suppress(ConnectionError):
                    await second.wait_closed()

    asyncio.run(ask())


def test_an_answer_that_comes_later_is_written_while_the_body_arrives() -> None:
    assert run(Refusal(waits=True), (BEGUN, b"x" * 500)) == ANSWER


def test_tls_discards_the_rest_too(tmp_path: Path) -> None:
    assert run(Refusal(), (BEGUN, b"x" * 997), tls=make_self_signed(tmp_path)) == ANSWER


def test_a_client_that_sends_nothing_more_is_closed_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "SILENCE_S", 0.01)

    async def wait() -> None:
        async with asyncio.timeout(PATIENCE_S):
            client = Client(Refusal())
            async with client as (reader, writer):
                writer.write(BEGUN)
                assert await reader.read() == ANSWER
                await _closed(client.listener)
                with pytest.raises(ConnectionError):
                    await _send_without_end(writer)

    asyncio.run(wait())


def test_a_client_that_sends_for_ever_is_closed_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "SILENCE_S", 0.01)
    monkeypatch.setattr(lingering, "_MOST_S", 0.05)

    async def wait() -> None:
        async with asyncio.timeout(PATIENCE_S):
            async with Client(Refusal(), 1 << 40) as (_, writer):
                writer.write(b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
                with pytest.raises(ConnectionError):
                    await _send_without_end(writer)

    asyncio.run(wait())


async def _send_without_end(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0)
