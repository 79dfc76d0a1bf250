"""Calls of other models in coroutines: an await ends when its result exists."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from remora.backends.python.calls import ModelCalls, ResponseIterator
from remora.backends.python.requests import InferenceRequest
from remora.messages import Outcome, Response, Streamed


class Engine:
    """An engine whose answers a test sends."""

    def __init__(self) -> None:
        self.reply: Callable[[Outcome], None] | None = None
        self.cancelled = 0

    def submit(self, call: Any, reply: Callable[[Outcome], None], origin: Any) -> Callable[[], None]:
        self.reply = reply
        return self.cancel

    def cancel(self) -> None:
        self.cancelled += 1


def begun(engine: Engine, *, decoupled: bool) -> asyncio.Task[Any]:
    calls = ModelCalls(engine, "caller")  # type: ignore[arg-type]
    return asyncio.ensure_future(
        calls.infer_async(InferenceRequest(model_name="m", inputs=[], requested_output_names=[]), decoupled=decoupled)
    )


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_awaiting_a_decoupled_call_ends_with_its_first_response() -> None:
    async def run() -> None:
        engine = Engine()
        task = begun(engine, decoupled=True)
        await turns()
        assert not task.done()
        assert engine.reply is not None
        engine.reply(Streamed(Response([]), False))
        answers = await asyncio.wait_for(task, 60)
        assert isinstance(answers, ResponseIterator)
        assert next(answers).output_tensors() == []
        engine.reply(Streamed(None, True))
        assert len(list(answers)) == 1, "the rest"
        assert not engine.cancelled

    asyncio.run(run())


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_coroutine_cancelled_while_it_waits_cancels_its_call(decoupled: bool) -> None:
    async def run() -> None:
        engine = Engine()
        task = begun(engine, decoupled=decoupled)
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.cancelled == 1

    asyncio.run(run())
