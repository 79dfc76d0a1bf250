"""A front process with its orders: what it takes over, and when it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from remora.options import ServerOptions
from remora.protocols.api_keys import KeyEntry, print_entries
from remora.server import key_check
from remora.server.fronts import codec
from remora.server.fronts.codec import Kind, Message
from remora.system import logs
from support.process.eventually import eventually, eventually_in_loop

channels = pytest.importorskip("remora.server.fronts.channel", reason="needs mmap and event fds")
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has anonymous shared memory")

PATIENCE_S = 60.0
LOG = {"log_file": "", "log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0,
       "log_format": "default"}  # fmt: skip
HTTP = {
    "address": "0.0.0.0",
    "grpc": False,
    "infers": True,
    "http2": False,
    "tls": False,
    "shares": True,
    "most_bytes": 1,
    "routes": [],
}


class Conductor:
    """The engine's side of a front that runs on the same loop."""

    def __init__(self, **options: Any) -> None:
        from remora.server.fronts.process import Front

        self.got: list[Message] = []
        self.control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (self.control, remote):
            each.setblocking(False)
        ours, theirs = channels.create(1 << 20)
        self.channel = channels.LoopChannel(ours, self.got.append, print, serves=True)
        self.front = Front(remote, theirs)
        self.front.start()
        self.order(b"O", {"options": codec.plain_options(ServerOptions(**options)), "log": LOG})

    def order(self, kind: bytes, content: Any) -> None:
        self.control.send(kind + json.dumps(content).encode())

    def hand(self, port: int) -> socket.socket:
        """Hand a connection over and return the client's end."""
        client, server = socket.socketpair()
        socket.send_fds(self.control, [b"C%c" % port], [server.fileno()])
        server.close()
        client.setblocking(False)
        return client

    async def message(self, kind: Kind) -> Message:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for message in self.got:
                    if message.kind == kind:
                        self.got.remove(message)
                        return message
                await asyncio.sleep(0.001)

    async def counts(self, wanted: list[int]) -> None:
        while codec.from_json((await self.message(Kind.COUNTS)).parts[0]) != wanted:
            pass


def test_a_front_serves_the_connections_that_it_is_given() -> None:
    async def main() -> None:
        conductor, loop = Conductor(), asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_S):
            assert await loop.sock_recv(conductor.control, 8) == b"R"
        conductor.order(b"P", HTTP)
        client = conductor.hand(0)
        await conductor.counts([1, 0, 1, 0])
        await loop.sock_sendall(client, b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n")
        request = await conductor.message(Kind.REQUEST)
        assert codec.decode_request_head(request.parts[0])[0].path == "/v2"
        conductor.channel.send(Kind.RESPOND, request.number, [b'[["A","b"]]', b"answer"], ref=200)
        async with asyncio.timeout(PATIENCE_S):
            assert (await loop.sock_recv(client, 4096)).endswith(b"answer")
        conductor.channel.send(Kind.DRAIN)
        async with asyncio.timeout(PATIENCE_S):
            assert await loop.sock_recv(client, 4096) == b""
            assert await conductor.front.wait() == 0
        client.close()
        conductor.channel.close()
        conductor.control.close()

    asyncio.run(main())


def test_a_front_leaves_the_log_of_changed_keys_to_the_engines_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(print_entries((KeyEntry("ann", ("infer",), "0" * 64),)))
    caplog.set_level(logging.DEBUG, "remora.keys")
    monkeypatch.setattr(key_check, "_LOOK_S", 0.001)

    async def main() -> None:
        conductor = Conductor(api_keys_file=str(keys))
        await eventually_in_loop(lambda: conductor.front._keys is not None)
        keys.write_text("")
        await eventually_in_loop(lambda: "the API keys stay as they were" in caplog.text)
        conductor.control.close()
        await conductor.front.wait()

    asyncio.run(main())
    assert {each.levelno for each in caplog.records if each.name == "remora.keys"} == {logging.DEBUG}


def test_a_front_ends_when_the_engines_process_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        conductor = Conductor()
        conductor.control.close()
        async with asyncio.timeout(PATIENCE_S):
            assert await conductor.front.wait() == 1
        conductor.channel.close()

    asyncio.run(main())
    assert "the engine's process has ended" in caplog.text


def test_a_front_ends_when_it_cannot_read_what_the_engine_sends(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        conductor = Conductor()
        conductor.channel.send(Kind.ANSWER, 1, [], ref=77)
        async with asyncio.timeout(PATIENCE_S):
            assert await conductor.front.wait() == 1
        conductor.channel.close()
        conductor.control.close()

    asyncio.run(main())
    assert "unknown head 77" in caplog.text


def test_a_call_that_the_end_of_a_front_cuts_off_has_a_line_in_the_access_log(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")
    from support.wire.grpc_calls import PONG, UNFINISHED

    written: list[str] = []
    monkeypatch.setattr(logs.OURS, "write", written.append)

    async def main() -> None:
        conductor, loop = Conductor(access_log="all"), asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_S):
            assert await loop.sock_recv(conductor.control, 8) == b"R"
        conductor.order(b"P", {**HTTP, "grpc": True, "most_bytes": 1 << 20})
        client, received = conductor.hand(0), b""
        await loop.sock_sendall(client, UNFINISHED)
        async with asyncio.timeout(PATIENCE_S):
            while PONG not in received:
                received += await loop.sock_recv(client, 4096)
            conductor.channel.send(Kind.CLOSE)
            assert await conductor.front.wait() == 0
        client.close()
        conductor.channel.close()
        conductor.control.close()

    asyncio.run(main())
    eventually(lambda: written)  # the end waits for the thread that writes for a second at most
    (line,) = written
    assert " POST /inference.GRPCInferenceService/ModelInfer 1 bytes=0 " in line


def test_a_connection_that_was_handed_over_before_the_drain_is_served() -> None:
    async def main() -> None:
        conductor, loop = Conductor(), asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_S):
            assert await loop.sock_recv(conductor.control, 8) == b"R"
        conductor.order(b"P", HTTP)
        await eventually_in_loop(lambda: conductor.front._ports)
        client = conductor.hand(0)
        client.send(b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n")
        conductor.front._obey(Message(Kind.DRAIN, 0, 0, 0, 0, 0, []))
        request = await conductor.message(Kind.REQUEST)
        conductor.channel.send(Kind.RESPOND, request.number, [b'[["A","b"]]', b"answer"], ref=200)
        async with asyncio.timeout(PATIENCE_S):
            assert (await loop.sock_recv(client, 4096)).endswith(b"answer")
            assert await conductor.front.wait() == 0
        client.close()
        conductor.channel.close()
        conductor.control.close()

    asyncio.run(main())
