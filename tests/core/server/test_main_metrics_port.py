"""The metrics port: the page with and without a slash, and what is answered besides it [P01]."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fakes import FakeExchange
from remora.engine import Engine
from remora.protocols.http1 import Head
from remora.protocols.rest.infer import InferCodec
from remora.server.http.asgi import answer_in_thread
from remora.server.http.rest import METRICS_HEADERS, MetricsService, RestService
from remora.server.loop import LoopMailbox


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
            assert answer.headers == METRICS_HEADERS

    asyncio.run(talk())
