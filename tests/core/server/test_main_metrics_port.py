"""The metrics port: the page with and without a slash, and what is answered besides it [P01]."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from remora.calls import Metrics
from remora.engine import Engine
from remora.options import ServerOptions
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import METRICS
from remora.protocols.rest.infer import InferCodec
from remora.server.http import http1_state
from remora.server.http.asgi import answer_in_thread
from remora.server.http.port_services import MetricsService
from remora.server.http.rest import RestService
from remora.server.loop import LoopMailbox
from remora.server.main import Server
from support.engine.fakes import FakeExchange


@pytest.mark.parametrize(
    ("method", "path", "status", "beginning"),
    [
        ("GET", "/metrics", 200, b"# HELP"),
        ("GET", "/metrics/", 200, b"# HELP"),
        ("GET", "/", 200, b""),
        ("POST", "/metrics", 405, b'{"error":"Method Not Allowed"}'),
        ("HEAD", "/metrics", 405, b'{"error":"Method Not Allowed"}'),
    ],
)
def test_each_path_has_tritons_answer(tmp_path: Path, method: str, path: str, status: int, beginning: bytes) -> None:
    async def talk() -> None:
        loop, engine = asyncio.get_running_loop(), Engine(model_repository=(tmp_path,))
        rest = RestService(engine, InferCodec(), LoopMailbox(loop), answer_in_thread(loop))
        exchange = FakeExchange()
        MetricsService(rest).handle(Head(method, path, ()), b"", exchange)
        (answer,) = exchange.answers
        body = b"".join(answer.body)
        assert (answer.status, bool(body)) == (status, bool(beginning))
        assert body.startswith(beginning)
        if status == 200:
            assert answer.headers == (METRICS,)

    asyncio.run(talk())


def test_a_flood_of_requests_is_answered_over_many_turns_with_one_text_in_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port has the same budgets as the others: see `test_http1_turns` and `test_connection_turns`."""
    count, computed = 400, []
    perform = Engine.perform

    def counted(self: Engine, call: Any) -> Any:
        computed.extend([call] if isinstance(call, Metrics) else [])
        return perform(self, call)

    monkeypatch.setattr(Engine, "perform", counted)
    monkeypatch.setattr(http1_state, "TURN_NS", 60_000_000_000)  # so that only their number ends a turn

    async def talk() -> None:
        options = ServerOptions(allow_http=False, allow_grpc=False, metrics_port=0)
        server = Server(Engine(model_repository=(tmp_path,), exit_timeout_secs=5), options)
        await server.start()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.ports.metrics)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * count)
            turns = await _turns_until(_answers(reader, count))
            writer.close()
            assert len(computed) <= count // 8  # at most one in a turn
            assert turns >= count // 32  # the budget of requests
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(talk(), 60.0))


async def _answers(reader: asyncio.StreamReader, count: int) -> None:
    for _ in range(count):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        await reader.readexactly(int(re.findall(rb"(?i)content-length: (\d+)", head)[0]))


async def _turns_until(work: Coroutine[Any, Any, None]) -> int:
    """Return the number of turns of the loop that the work takes."""
    task, turns = asyncio.get_running_loop().create_task(work), 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    await task
    return turns
