"""The model to which a body goes that a thread has decoded: the one found for it, or its successor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from remora.engine import Engine
from remora.errors import RetiredError
from remora.models.served_model import ServedModel
from remora.protocols.http1 import Head
from remora.protocols.rest.infer import InferCodec
from remora.server.http.exchange import Exchange
from remora.server.http.large_bodies import LARGE_BYTES, LargeBodies
from remora.server.http.rest import RestService
from remora.server.loop import LoopMailbox
from support.engine.fakes import FakeExchange
from support.servers.live_server import write_version

ROWS = LARGE_BYTES // 4
TENSOR = {"name": "IN", "datatype": "INT32", "shape": [ROWS, 1], "data": [123_456] * ROWS}
BODY = json.dumps({"inputs": [TENSOR]}).encode()
PATIENCE_S = 60.0


async def until(holds: Callable[[], bool]) -> None:
    """Run the loop until something holds."""

    async def wait() -> None:
        while not holds():
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), PATIENCE_S)


class Retired:
    """A model that is replaced while a body for it is decoded."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def submit(self, *_: object, **__: object) -> None:
        raise RetiredError("replaced")


class CountingEngine(Engine):
    """Engine that counts the look-ups of models, of which the first may find one that is replaced then."""

    looked_up = 0
    replaces = False

    def resolve(self, model: str, version: int = -1) -> ServedModel:
        self.looked_up += 1
        found = super().resolve(model, version)
        return cast(ServedModel, Retired(found)) if self.replaces and self.looked_up == 1 else found


@pytest.mark.parametrize("replaces", [False, True])
def test_a_decoded_body_goes_to_the_model_that_was_found_or_its_successor(tmp_path: Path, replaces: bool) -> None:
    write_version(tmp_path / "models", 1)
    config = tmp_path / "models" / "m" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 8", f"max_batch_size: {2 * ROWS}"))

    async def play(engine: CountingEngine) -> None:
        engine.looked_up, engine.replaces = 0, replaces
        loop, exchange = asyncio.get_running_loop(), FakeExchange()
        rest = RestService(engine, InferCodec(), LoopMailbox(loop), never_later, large=LargeBodies(loop))
        rest.handle(Head("POST", "/v2/models/m/infer", ((b"Host", b"h"),)), BODY, exchange)
        await until(lambda: bool(exchange.answers))
        assert (exchange.answers[0].status, engine.looked_up) == (200, 1 + replaces)

    models = (tmp_path / "models",)
    with CountingEngine(model_repository=models, backend_config=("python,isolation=thread",)) as engine:
        asyncio.run(play(cast(CountingEngine, engine)))


def never_later(work: object, exchange: Exchange, *, lasts: bool = False) -> None:
    raise AssertionError("nothing else runs in a thread")
