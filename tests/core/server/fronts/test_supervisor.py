"""Front processes under their supervisor: started, given connections, restarted, counted and drained."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from remora.engine import Engine
from remora.models import loader as loading
from remora.options import ServerOptions
from remora.server.main import Server
from support.engine.fakes import FakeBackend, write_model

pytest.importorskip("remora.server.fronts.channel", reason="needs mmap and event fds")
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has anonymous shared memory")

PATIENCE_S = 60.0
BODY = b'{"inputs":[{"name":"IN","shape":[1,1],"datatype":"INT32","data":[4]}]}'
INFER = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


async def ask(port: int, request: bytes = INFER) -> bytes:
    """Send one request on a new connection and return its status line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Server], Awaitable[None]]], None]:
    """Return a function that runs a story with a server of two fronts."""
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_model(tmp_path, "m")

    def run_story(story: Callable[[Server], Awaitable[None]]) -> None:
        async def main() -> None:
            options = ServerOptions(
                http_port=0, allow_grpc=False, metrics_port=0, frontends="2", http_address="127.0.0.1"
            )
            server = Server(Engine(tmp_path, exit_timeout_secs=30), options)
            await server.start()
            try:
                await story(server)
            finally:
                assert await server.stop(announce=False)

        asyncio.run(main())

    return run_story


Run = Callable[[Callable[[Server], Awaitable[None]]], None]


def test_fronts_serve_what_the_engine_has_loaded_and_end_with_it(run: Run) -> None:
    pids: list[int] = []

    async def story(server: Server) -> None:
        assert server._fronts is not None
        pids.extend(server._fronts.pids)
        assert len(set(pids)) == 2
        for _ in range(4):
            assert await ask(server.ports.http) == b"HTTP/1.1 200 OK\r\n"
        assert await ask(server.ports.metrics, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n") == (
            b"HTTP/1.1 200 OK\r\n"
        )

    run(story)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_open_connections_are_counted_over_all_fronts(run: Run) -> None:
    async def story(server: Server) -> None:
        assert server._fronts is not None
        fronts = server._fronts
        opened = [await asyncio.open_connection("127.0.0.1", server.ports.http) for _ in range(5)]
        await until(lambda: fronts.count() == {"http1": 5, "http2": 0})
        for _, writer in opened:
            writer.close()
            await writer.wait_closed()
        await until(lambda: fronts.count() == {"http1": 0, "http2": 0})

    run(story)


def test_a_front_that_ends_is_started_again_and_the_others_serve_meanwhile(run: Run) -> None:
    async def story(server: Server) -> None:
        assert server._fronts is not None
        fronts = server._fronts
        before = fronts.pids
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: before[0] not in fronts.pids)
        assert await ask(server.ports.http) == b"HTTP/1.1 200 OK\r\n"
        await until(lambda: len(fronts.pids) == 2)
        assert before[1] in fronts.pids

    run(story)


def test_connections_wait_while_all_fronts_start_again(run: Run) -> None:
    async def story(server: Server) -> None:
        assert server._fronts is not None
        fronts = server._fronts
        before = fronts.pids
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not fronts.pids)
        async with asyncio.timeout(PATIENCE_S):
            answers = await asyncio.gather(*(ask(server.ports.http) for _ in range(100)))
        assert set(answers) == {b"HTTP/1.1 200 OK\r\n"}

    run(story)


def test_a_front_that_sends_nonsense_is_ended(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def story(server: Server) -> None:
        assert server._fronts is not None
        fronts = server._fronts
        before = fronts.pids

        def has_ended() -> bool:
            if before[0] in fronts.pids:  # again, because the front may write its next record over it
                fronts._fronts[0].channel._in._words[0] += 1 << 40  # as a front with a fault might do
                os.eventfd_write(fronts._fronts[0].channel._ends.wake, 1)
                return False
            return len(fronts.pids) == 2

        await until(has_ended)
        assert await ask(server.ports.http) == b"HTTP/1.1 200 OK\r\n"

    run(story)
    assert "front 0 sends what cannot be read" in caplog.text


def test_requests_in_flight_are_answered_before_the_fronts_end(run: Run) -> None:
    async def story(server: Server) -> None:
        opened = [await asyncio.open_connection("127.0.0.1", server.ports.http) for _ in range(20)]
        for _, writer in opened:
            writer.write(INFER)
        assert await server.stop(drain=True, announce=False)
        assert {await reader.readline() for reader, _ in opened} == {b"HTTP/1.1 200 OK\r\n"}
        for _, writer in opened:
            writer.close()
            await writer.wait_closed()

    run(story)
