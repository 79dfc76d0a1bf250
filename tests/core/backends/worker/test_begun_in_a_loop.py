"""Batches that an event loop has real worker processes run, without a thread that waits for their end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from remora.backends import Execution, Placement, Source
from remora.backends.python import PythonBackend
from remora.backends.worker.model import LOOP_BYTES, WorkerInstance
from remora.errors import InternalError
from remora.messages import InferForm, Outcome, Request, Response
from remora.proto.model_config_pb2 import ModelConfig
from remora.server.mailbox import LoopMailbox

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has memory that the loop can watch")

PATIENCE_S = 30.0
CONFIG = """
name: "m" backend: "python"
input [{ name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }]
"""
MODEL = """
import logging, os, threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            match request.request_id():
                case "die":
                    os._exit(3)
                case "raise":
                    raise pb_utils.TritonModelException("no, thanks")
                case "forever":
                    threading.Event().wait()
                case "until cancelled":
                    while not request.is_cancelled():
                        threading.Event().wait(0.005)
                case "log":
                    logging.getLogger().error("a line")
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array * 2)]))
        return answers
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    file = tmp_path / "m" / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text(MODEL, encoding="utf-8")
    return file.parent


class Loop:
    """A worker, and the loop that the test runs in."""

    def __init__(self, folder: Path, **settings: str) -> None:
        config = text_format.Parse(CONFIG, ModelConfig())
        chosen = {"isolation": "process", **{key.replace("_", "-"): value for key, value in settings.items()}}
        self.model = PythonBackend().open(Source("m", 1, folder.parent, folder, folder.parents[1], chosen), config)
        instance = self.model.instance(config, Placement("m_0_0"))
        assert isinstance(instance, WorkerInstance)
        self.instance = instance
        self.mailbox: LoopMailbox | None = None
        self.ends = 0

    def begin(self, *requests: Request) -> asyncio.Future[Any] | None:
        """What the batch comes to; None when it could not be begun."""
        loop = asyncio.get_running_loop()
        self.mailbox = self.mailbox or LoopMailbox(loop)
        future: asyncio.Future[Any] = loop.create_future()

        def done(result: Sequence[Outcome | None] | Exception) -> None:
            self.ends += 1
            loop.call_soon_threadsafe(future.set_result, result)

        return future if self.instance.begin(Execution(requests), self.mailbox, done) else None

    async def run(self, *requests: Request) -> Any:
        future = self.begin(*requests)
        assert future is not None
        return await asyncio.wait_for(future, PATIENCE_S)

    def close(self) -> None:
        self.instance.close()
        self.model.close()


@pytest.fixture
def loop(folder: Path) -> Iterator[Loop]:
    made = Loop(folder)
    yield made
    made.close()


def request(id: str = "", count: int = 3) -> Request:
    return Request(InferForm((), id=id), {"IN": np.arange(count, dtype=np.int32)}, ("OUT",), 1, None)


def values(outcome: Outcome | None) -> list[int]:
    assert isinstance(outcome, Response), outcome
    return list(outcome.outputs[0].data.tolist())


def go(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_batches_are_answered_one_after_the_other(loop: Loop) -> None:
    async def main() -> None:
        for size in (1, 16, 2):
            outcomes = await loop.run(*(request(count=count) for count in range(size)))
            assert [values(outcome) for outcome in outcomes] == [list(range(0, 2 * n, 2)) for n in range(size)]

    go(main())
    assert loop.ends == 3


def test_a_thread_and_the_loop_may_take_turns(loop: Loop) -> None:
    async def main() -> None:
        for _ in range(20):
            (outcome,) = await loop.run(request())
            assert values(outcome) == [0, 2, 4]
            (outcome,) = await asyncio.to_thread(loop.instance.execute, Execution([request()]))
            assert values(outcome) == [0, 2, 4]

    go(main())


def test_much_data_is_left_to_a_thread(loop: Loop) -> None:
    async def main() -> None:
        assert loop.begin(request(count=LOOP_BYTES)) is None
        (outcome,) = await asyncio.to_thread(loop.instance.execute, Execution([request(count=LOOP_BYTES)]))
        assert len(values(outcome)) == LOOP_BYTES

    go(main())


def test_a_second_loop_is_not_served_while_the_first_watches(loop: Loop) -> None:
    async def first() -> None:
        await loop.run(request())

    async def second() -> None:
        loop.mailbox = None
        assert loop.begin(request()) is None

    go(first())
    go(second())


def test_what_the_model_raises_comes_as_the_batchs_end(loop: Loop) -> None:
    async def main() -> None:
        error = await loop.run(request("raise"))
        assert isinstance(error, InternalError)
        assert "no, thanks" in str(error)
        (outcome,) = await loop.run(request())
        assert values(outcome) == [0, 2, 4]

    go(main())


def test_a_worker_that_dies_ends_its_batch_once_and_the_next_worker_is_watched_again(loop: Loop) -> None:
    async def main() -> None:
        error = await loop.run(request("die"))
        assert isinstance(error, InternalError)
        assert "is not healthy" in str(error)
        await asyncio.to_thread(loop.instance.keeper.link)
        (outcome,) = await loop.run(request())
        assert values(outcome) == [0, 2, 4]

    go(main())
    assert loop.ends == 2


def test_nothing_is_begun_in_a_worker_that_is_gone(loop: Loop) -> None:
    async def main() -> None:
        await loop.run(request())
        link = loop.instance.keeper.link()
        os.kill(loop.instance.keeper.pid, signal.SIGKILL)
        await asyncio.to_thread(link.ended.wait, PATIENCE_S)
        assert not link.begin([], Execution([]), 0, loop.mailbox, lambda _: None)  # type: ignore[arg-type]

    go(main())


def test_a_cancelled_request_is_told_to_the_worker(loop: Loop) -> None:
    async def main() -> None:
        waits = request("until cancelled")
        future = loop.begin(waits)
        assert future is not None
        waits.cancel()
        (outcome,) = await asyncio.wait_for(future, PATIENCE_S)
        assert values(outcome) == [0, 2, 4]

    go(main())


def test_a_batch_that_never_ends_is_ended_when_its_time_is_over(folder: Path) -> None:
    loop = Loop(folder, execute_timeout="0.05")

    async def main() -> None:
        error = await loop.run(request("forever"))
        assert "did not answer within 0.05 s" in str(error)

    go(main())
    loop.close()


def test_lines_that_a_model_logs_during_a_batch_arrive_with_its_request(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    go(_run_once(loop, request("log")))
    assert any("a line [request log]" in record.getMessage() for record in caplog.records)


async def _run_once(loop: Loop, asked: Request) -> None:
    await loop.run(asked)


def test_closing_after_loops_have_come_and_gone_leaves_no_descriptors_and_no_threads(folder: Path) -> None:
    def cycle() -> None:
        loop = Loop(folder)
        go(_run_once(loop, request()))
        loop.close()
        gc.collect()

    cycle()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        cycle()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
