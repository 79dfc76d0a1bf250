"""Clients that close their sending side, over real sockets: some still read, and some have gone."""

from __future__ import annotations

import asyncio

import pytest

from remora.server.http import half_close
from remora.server.http.http1_listener import Listener
from support.engine.fakes import FakeService
from support.process.eventually import eventually_in_loop
from support.wire.http1_bench import get

PATIENCE_S = 60.0


def run(*, leaves: bool, monkeypatch: pytest.MonkeyPatch, version: str = "1.1") -> tuple[bool, bytes]:
    """Half-close a connection whose answer takes long, or leave it.

    Returns whether the request was cancelled, and what the client has received.
    """
    monkeypatch.setattr(half_close, "_FIRST_S", 0.01)
    monkeypatch.setattr(half_close, "_REPLY_S", 0.01)

    async def ask() -> tuple[bool, bytes]:
        service = FakeService(wait=True)
        listener = Listener(service, max_body_bytes=1_000)
        server = await asyncio.get_running_loop().create_server(listener.connection, "127.0.0.1", 0)
        async with asyncio.timeout(PATIENCE_S), server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
            writer.write(get("/a", version=version))
            await eventually_in_loop(lambda: service.waiting)
            ((_, ticket, _),) = service.waiting
            if leaves:
                writer.close()
                await eventually_in_loop(lambda: not listener.connections)
                return ticket.request.cancelled, b""
            writer.write_eof()
            received = b""
            for _ in range(0 if version == "1.0" else 2):  # so that a check finds the client there
                received += await reader.readuntil(b"\r\n\r\n")
            await eventually_in_loop(lambda: next(iter(listener.connections))._ended)
            service.answer()
            received += await reader.read()
            writer.close()
            await eventually_in_loop(lambda: not listener.connections)
            return ticket.request.cancelled, received

    return asyncio.run(ask())


def test_a_client_that_has_gone_has_its_request_cancelled_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled, _ = run(leaves=True, monkeypatch=monkeypatch)
    assert cancelled


def test_a_client_that_still_reads_gets_its_answer_behind_interim_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled, received = run(leaves=False, monkeypatch=monkeypatch)
    assert not cancelled
    interim, _, answer = received.partition(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"/a ")
    assert interim.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") == b""
    assert interim


def test_a_client_of_http_1_0_gets_no_interim_response(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled, received = run(leaves=False, monkeypatch=monkeypatch, version="1.0")
    assert not cancelled
    assert received.startswith(b"HTTP/1.1 200 OK")
