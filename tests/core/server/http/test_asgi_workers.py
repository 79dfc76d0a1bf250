"""Models in worker processes, called from event loops that end or block while a request is in flight."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from remora.engine import Engine
from remora.options import EngineOptions, ServerOptions
from remora.server.http.asgi import V2App
from remora.server.http.asgi_transfers import Message
from remora.server.startup import with_workers
from support.process.eventually import eventually, eventually_in_loop

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has memory that a loop can watch")

PATIENCE_S = 60.0
CONFIG = """
name: "m" backend: "python"
input [{ name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }]
"""
MODEL = """
import pathlib
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            if request.request_id() == "slow":
                pathlib.Path("{begun}").touch()
                open("{end}").close()  # waits until the test opens this pipe too
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array * 2)]))
        return answers
"""


class Slow:
    """An engine with a model that doubles; a request with the id "slow" runs until the test ends it."""

    def __init__(self, engine: Engine, begun: Path, end: Path) -> None:
        self.engine = engine
        self.begun = begun
        self._end = end

    def end(self) -> None:
        """Let the model answer."""
        eventually(lambda: os.close(os.open(self._end, os.O_WRONLY | os.O_NONBLOCK)) is None)

    async def begin(self, app: V2App) -> asyncio.Task[list[int]]:
        """Return a request that the model runs."""
        task = asyncio.create_task(infer(app, 1, id="slow"))
        await eventually_in_loop(self.begun.exists)
        return task

    def infer(self, value: int) -> list[int]:
        """Run a request from this thread."""
        return list(self.engine.infer("m", {"IN": [value]}, timeout_s=PATIENCE_S)["OUT"])


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    begun, end, root = tmp_path / "begun", tmp_path / "end", tmp_path / "models"
    os.mkfifo(end)
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "config.pbtxt").write_text(CONFIG)
    (root / "m" / "1" / "model.py").write_text(MODEL.format(begun=begun, end=end))
    with Engine(options=with_workers(EngineOptions(paths=(str(root),)))) as engine:
        yield Slow(engine, begun, end)


async def infer(app: V2App, value: int, id: str = "") -> list[int]:
    """Return the output of a request through the app."""
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [value]}
    messages = [{"type": "http.request", "body": json.dumps({"id": id, "inputs": [tensor]}).encode()}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    path = "/v2/models/m/infer"
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    await app({**scope, "root_path": "", "query_string": b"", "headers": []}, receive, send)
    return list(json.loads(b"".join(message["body"] for message in sent[1:]))["outputs"][0]["data"])


async def in_time(app: V2App, value: int) -> list[int]:
    return await asyncio.wait_for(infer(app, value), PATIENCE_S)


@contextmanager
def left_loop(slow: Slow, app: V2App, how: str) -> Iterator[None]:
    """Run a loop and leave it while the model runs a request. A stopped one runs again at the end."""
    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(slow.begin(app))
    if how == "closed":  # as `asyncio.run` does it
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
        loop.close()
    yield
    eventually(lambda: slow.engine.running == 0)
    if how == "stopped":
        assert loop.run_until_complete(asyncio.wait_for(task, PATIENCE_S)) == [2]
        loop.close()


@pytest.mark.parametrize("how", ["closed", "stopped"])
@pytest.mark.parametrize("ends", ["before the next call", "during the next call"])
def test_a_call_of_the_next_loop_is_answered_after_a_loop_has_left_its_request(slow: Slow, how: str, ends: str) -> None:
    app = V2App(slow.engine, ServerOptions())

    async def call() -> None:
        asked = asyncio.create_task(in_time(app, 3))
        if ends == "during the next call":
            await eventually_in_loop(lambda: slow.engine.running > 1)
            slow.end()
        assert await asked == [6]

    with left_loop(slow, app, how):
        if ends == "before the next call":
            slow.end()
        asyncio.run(call())
        assert asyncio.run(in_time(app, 4)) == [8]


@pytest.mark.parametrize("how", ["closed", "stopped"])
def test_a_call_of_a_thread_is_answered_after_a_loop_has_left_its_request(slow: Slow, how: str) -> None:
    with left_loop(slow, V2App(slow.engine, ServerOptions()), how):
        slow.end()
        assert slow.infer(3) == [6]
        assert slow.infer(4) == [8]


def test_a_call_that_blocks_the_loop_is_answered_while_the_model_runs_a_request_of_the_loop(slow: Slow) -> None:
    app = V2App(slow.engine, ServerOptions())

    async def main() -> None:
        task = await slow.begin(app)
        slow.end()
        assert slow.infer(3) == [6]
        assert await asyncio.wait_for(task, PATIENCE_S) == [2]

    asyncio.run(main())


def test_loops_in_two_threads_are_answered_at_the_same_time(slow: Slow) -> None:
    turns = threading.Barrier(2, timeout=PATIENCE_S)
    results: list[list[list[int]]] = []

    async def call() -> list[list[int]]:
        app = V2App(slow.engine, ServerOptions())
        await asyncio.to_thread(turns.wait)
        found = [await in_time(app, value) for value in range(50)]
        found += await asyncio.gather(*(in_time(app, value) for value in range(50)))
        await asyncio.to_thread(turns.wait)  # neither loop ends before the other has its answers
        return found

    threads = [threading.Thread(target=lambda: results.append(asyncio.run(call()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[[2 * value] for value in range(50)] * 2] * 2
    assert slow.infer(3) == [6]
