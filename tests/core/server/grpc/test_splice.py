"""Connections handed on: every byte, both ends, never more in memory than a buffer's worth; over real sockets."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import pytest

from fakes import FakeService
from remora.protocols.http1 import HTTP2_PREFACE
from remora.server.grpc.splice import NoServerError, Splices
from remora.server.http.http1 import Listener

if sys.platform != "linux":
    pytest.skip("the sockets between are in Linux's abstract namespace", allow_module_level=True)

PATIENCE_S = 30.0
PREFACE = HTTP2_PREFACE + b"SM\r\n\r\n"
GREETING = b"settings"
"""What the server says before it has heard anything, as servers of HTTP/2 may."""
MUCH = secrets.token_bytes(20 << 20)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Bench(NamedTuple):
    """A listener whose connections of HTTP/2 are handed to a server that the test plays."""

    splices: Splices
    listener: Listener
    dial: Callable[[], Awaitable[Streams]]
    accepted: asyncio.Queue[Streams]

    async def joined(self) -> tuple[Streams, Streams]:
        """A client that has sent the preface, and the server's end, which has read it."""
        client = await self.dial()
        client[1].write(PREFACE)
        server = await self.accepted.get()
        assert await server[0].readexactly(len(PREFACE)) == PREFACE
        assert await client[0].readexactly(len(GREETING)) == GREETING
        return client, server


@asynccontextmanager
async def benches(*, on: bool = True, failure: Exception | None = None) -> AsyncIterator[Bench]:
    name = f"remora-test-{secrets.token_hex(8)}"
    accepted: asyncio.Queue[Streams] = asyncio.Queue()
    ends: list[asyncio.StreamWriter] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(writer)
        writer.write(GREETING)
        accepted.put_nowait((reader, writer))

    async def open_server() -> str:
        if failure is not None:
            raise failure
        return name

    splices = Splices(open_server)
    listener = Listener(FakeService(), max_body_bytes=1 << 20, http2=splices.take if on else None)
    inner = await asyncio.start_unix_server(take, f"\0{name}")
    outer = await asyncio.get_running_loop().create_server(listener.connection, "127.0.0.1", 0)
    port = outer.sockets[0].getsockname()[1]

    async def dial() -> Streams:
        streams = await asyncio.open_connection("127.0.0.1", port)
        ends.append(streams[1])
        return streams

    try:
        async with asyncio.timeout(PATIENCE_S):
            yield Bench(splices, listener, dial, accepted)
    finally:
        splices.abort()
        for writer in ends:
            if not writer.is_closing():
                writer.transport.abort()
        for server in (inner, outer):
            server.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_bytes_go_both_ways_whole_and_in_order() -> None:
    async def test() -> None:
        async with benches() as bench:
            client, server = await bench.joined()
            for there, here in ((client, server), (server, client)):
                there[1].write(MUCH)
                assert await here[0].readexactly(len(MUCH)) == MUCH
            assert len(bench.splices) == 1
            assert not bench.listener.connections

    run(test)


@pytest.mark.parametrize("cut", [1, 4, 17, 18, 20])
def test_a_preface_in_pieces_is_one_all_the_same(cut: int) -> None:
    async def test() -> None:
        async with benches() as bench:
            _, writer = await bench.dial()
            writer.write(PREFACE[:cut])
            while not (any(each._rest for each in bench.listener.connections) or len(bench.splices)):
                await asyncio.sleep(0)  # until the first piece was received
            writer.write(PREFACE[cut:])
            server = await bench.accepted.get()
            assert await server[0].readexactly(len(PREFACE)) == PREFACE

    run(test)


def test_a_client_that_sends_no_more_is_still_answered_and_a_server_that_does_not_has_ended() -> None:
    async def test() -> None:
        async with benches() as bench:
            client, server = await bench.joined()
            client[1].write_eof()
            assert await server[0].read() == b""
            server[1].write(MUCH)
            assert await client[0].readexactly(len(MUCH)) == MUCH
            server[1].close()
            assert await client[0].read() == b""
            client, server = await bench.joined()
            server[1].write(MUCH)
            server[1].write_eof()
            assert await client[0].read() == MUCH
            while len(bench.splices):
                await asyncio.sleep(0)

    run(test)


def test_at_the_end_a_client_that_stays_is_closed_once_it_has_what_was_sent() -> None:
    async def test() -> None:
        async with benches() as bench:
            client, server = await bench.joined()
            server[1].write(MUCH)
            for _ in range(2):  # whoever ends them may look again
                bench.splices.end()
            assert await server[0].read() == b""
            server[1].close()
            assert await client[0].read() == MUCH
            while len(bench.splices):
                await asyncio.sleep(0)

    run(test)


def test_an_end_that_is_lost_takes_the_other_with_it() -> None:
    def reset(writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def test() -> None:
        async with benches() as bench:
            for loses in (0, 1):
                ends = await bench.joined()
                reset(ends[loses][1])
                with suppress(ConnectionResetError):
                    assert await ends[1 - loses][0].read() == b""
            while len(bench.splices):
                await asyncio.sleep(0)

    run(test)


def test_who_does_not_read_holds_up_the_other_and_loses_nothing() -> None:
    async def test() -> None:
        async with benches() as bench:
            for swap in (False, True):
                client, server = await bench.joined()
                here, there = (server, client) if swap else (client, server)
                there[0]._transport.pause_reading()  # type: ignore[attr-defined]  # a peer that reads nothing
                here[1].write(MUCH)
                waiting = -1
                while waiting != (waiting := here[1].transport.get_write_buffer_size()):
                    for _ in range(50):
                        await asyncio.sleep(0)
                assert waiting > len(MUCH) // 2, "what the other does not read is taken in"
                there[0]._transport.resume_reading()  # type: ignore[attr-defined]
                assert await there[0].readexactly(len(MUCH)) == MUCH

    run(test)


def test_where_there_is_no_server_the_client_is_told_in_http2() -> None:
    async def test() -> None:
        async with benches(failure=NoServerError("gRPC is off")) as bench:
            reader, writer = await bench.dial()
            writer.write(PREFACE)
            said = await reader.read()
            assert said[:9] == b"\0\0\0\4\0\0\0\0\0"  # empty SETTINGS, which must come first
            assert (said[12], said[22:26], said[26:]) == (7, b"\0\0\0\r", b"gRPC is off")
            while len(bench.splices):
                await asyncio.sleep(0)

    run(test)


@pytest.mark.parametrize("failure", [ConnectionRefusedError("gone"), RuntimeError("a fault of ours")])
def test_where_the_server_cannot_be_opened_the_connection_ends(failure: Exception) -> None:
    async def test() -> None:
        async with benches(failure=failure) as bench:
            reader, writer = await bench.dial()
            writer.write(PREFACE)
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            while len(bench.splices):
                await asyncio.sleep(0)

    run(test)


def test_http2_is_a_version_that_is_not_spoken_where_it_is_off_or_comes_late() -> None:
    async def test() -> None:
        async with benches(on=False) as bench:
            reader, writer = await bench.dial()
            writer.write(PREFACE)
            assert (await reader.read()).startswith(b"HTTP/1.1 505 ")
        async with benches() as bench:
            reader, writer = await bench.dial()
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            writer.write(PREFACE)
            assert b"HTTP/1.1 505 " in await reader.read()
            reader, writer = await bench.dial()
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + PREFACE)
            assert b"HTTP/1.1 505 " in await reader.read()
            assert bench.accepted.empty()

    run(test)


def test_a_connection_that_is_aborted_while_the_server_is_opened_leaves_nothing_behind() -> None:
    async def test() -> None:
        opening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        splices = Splices(lambda: opening)
        listener = Listener(FakeService(), max_body_bytes=1, http2=splices.take)
        server = await asyncio.get_running_loop().create_server(listener.connection, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(PREFACE)
        while not len(splices):
            await asyncio.sleep(0)
        splices.abort()
        while len(splices) or not opening.done():
            await asyncio.sleep(0)
        assert opening.cancelled()
        writer.close()
        server.close()

    run(lambda: asyncio.wait_for(test(), PATIENCE_S))
