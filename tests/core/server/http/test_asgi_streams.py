"""Streams through an ASGI host, with a decoupled model whose answers are given by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.backends import Execution, Placement, Source
from remora.engine import Engine
from remora.messages import Response, Streamed, Tensor
from remora.models import loader as loading
from remora.options import ServerOptions
from remora.proto.model_config_pb2 import ModelConfig
from remora.server.http import asgi as asgi_bridge
from remora.server.http import asgi_transfers, http1_state
from remora.server.http.asgi import V2App
from remora.server.http.asgi_transfers import Message
from remora.server.http.held_bytes import FREE_BYTES
from support.engine.fakes import DOUBLER, FakeBackend, FakeBackendModel, FakeInstance, write_model
from support.process.eventually import eventually_in_loop

PATIENCE_S = 60.0
LEFT: Message = {"type": "http.disconnect"}
REQUEST: Message = {"type": "http.request", "body": b'{"IN":[1]}', "more_body": False}


class Talker(FakeInstance):
    """Takes executions and leaves their answers to the test."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun = threading.Event()
        self.execution: Execution | None = None

    def execute(self, execution: Execution) -> list[Any]:
        self.execution = execution
        self.begun.set()
        return [None] * len(execution.requests)

    def say(self, value: int, *, final: bool = False) -> None:
        assert self.execution is not None
        self.execution.send(0, Streamed(Response([Tensor("OUT", "INT32", np.array([[value]], np.int32))]), final))


class TalkingModel(FakeBackendModel):
    def instance(self, config: ModelConfig, placement: Placement) -> FakeInstance:
        made = Talker(placement.name)
        self.instances.append(made)
        return made


class TalkingBackend(FakeBackend):
    def open(self, source: Source, config: ModelConfig) -> FakeBackendModel:
        self.opened.append(TalkingModel(self, source))
        return self.opened[-1]


class Host:
    """An ASGI host around one request; what the app sends is looked at as it comes."""

    def __init__(self, engine: Engine) -> None:
        self.app = V2App(engine, ServerOptions())
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.may_send = asyncio.Event()
        self.may_send.set()

    async def speak(self) -> None:
        async def send(message: Message) -> None:
            await self.may_send.wait()
            self.sent.put_nowait(message)

        self.incoming.put_nowait(REQUEST)
        path = "/v2/models/m/generate_stream"
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        await self.app(scope, self.incoming.get, send)

    async def next(self) -> Message:
        return await asyncio.wait_for(self.sent.get(), PATIENCE_S)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    backend = TalkingBackend()
    monkeypatch.setattr(loading, "find_backend", backend.find)
    write_model(tmp_path, "m", config=DOUBLER + "model_transaction_policy { decoupled: true }")
    with Engine(tmp_path) as running:
        yield running


async def begun(engine: Engine) -> Talker:
    """The model's instance, once it has the request."""
    (model,) = engine.models()
    (talker,) = model.instances
    assert isinstance(talker, Talker)
    assert await asyncio.get_running_loop().run_in_executor(None, talker.begun.wait, PATIENCE_S)
    return talker


def event(value: int) -> bytes:
    return b'data: {"OUT":%d,"model_name":"m","model_version":"1"}\n\n' % value


def test_each_event_is_a_message_that_is_sent_when_it_comes(engine: Engine) -> None:
    async def talk() -> None:
        host = Host(engine)
        task = asyncio.ensure_future(host.speak())
        talker = await begun(engine)
        talker.say(1)
        start = await host.next()
        assert (start["type"], start["status"]) == ("http.response.start", 200)
        assert start["headers"] == [(b"content-type", b"text/event-stream; charset=utf-8")]
        assert await host.next() == {"type": "http.response.body", "body": event(1), "more_body": True}
        talker.say(2, final=True)
        assert await host.next() == {"type": "http.response.body", "body": event(2), "more_body": True}
        assert await host.next() == {"type": "http.response.body", "body": b"", "more_body": False}
        await asyncio.wait_for(task, PATIENCE_S)

    asyncio.run(talk())


def test_a_client_that_leaves_amid_a_stream_cancels_it(engine: Engine) -> None:
    async def talk() -> None:
        host = Host(engine)
        task = asyncio.ensure_future(host.speak())
        talker = await begun(engine)
        talker.say(1)
        await host.next()
        assert talker.execution is not None
        assert not talker.execution.requests[0].cancelled
        host.incoming.put_nowait(LEFT)
        await asyncio.wait_for(task, PATIENCE_S)
        assert talker.execution.requests[0].cancelled
        talker.say(2, final=True)

    asyncio.run(talk())


def test_a_host_that_does_not_take_the_events_is_given_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi_bridge, "STREAM_BACKLOG", 100)

    async def talk() -> None:
        host = Host(engine)
        host.may_send.clear()
        task = asyncio.ensure_future(host.speak())
        talker = await begun(engine)
        for number in range(8):
            talker.say(number)
        host.may_send.set()
        await asyncio.wait_for(task, PATIENCE_S)
        assert talker.execution is not None
        assert talker.execution.requests[0].cancelled
        talker.say(9, final=True)
        assert not [message for message in host.sent._queue if not message.get("more_body", True)]  # type: ignore[attr-defined]

    asyncio.run(talk())


@pytest.mark.parametrize("accepted", [0, 2], ids=["nothing", "an event"])
def test_the_unread_bytes_of_a_stream_are_held_until_its_client_reads_nothing_for_long(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, accepted: int
) -> None:
    monkeypatch.setattr(asgi_transfers, "SWEEP_S", 0.01)

    async def talk() -> None:
        host = Host(engine)
        if not accepted:
            host.may_send.clear()
        task = asyncio.ensure_future(host.speak())
        talker = await begun(engine)
        talker.say(0)
        for _ in range(accepted):
            await host.next()
        host.may_send.clear()
        for number in range(FREE_BYTES // len(event(0)) + 2):
            talker.say(number)
        assert host.app._open is not None
        held = host.app._open.transfers.held
        await eventually_in_loop(lambda: held.answers > FREE_BYTES)
        monkeypatch.setattr(http1_state, "UNREAD_S", 0.0)
        await asyncio.wait_for(task, PATIENCE_S)
        assert talker.execution is not None
        assert talker.execution.requests[0].cancelled
        assert held.total == 0
        talker.say(9, final=True)

    asyncio.run(talk())


def test_a_piece_that_comes_before_the_head_is_sent_is_held_too() -> None:
    async def talk() -> None:
        loop = asyncio.get_running_loop()
        transfers = asgi_transfers.Transfers(loop, ServerOptions())
        exchange = asgi_bridge._FutureExchange(loop, "", transfers)
        exchange.begin(200, ())
        exchange.send(bytes(FREE_BYTES + 1))
        exchange.transfer()
        assert transfers.held.answers == FREE_BYTES + 1
        exchange.close()
        assert transfers.held.total == 0

    asyncio.run(talk())
