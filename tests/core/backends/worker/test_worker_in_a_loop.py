"""Batches that an event loop has real worker processes run, without a thread that waits for their end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from remora.backends import Execution, NotBegunError, Placement, Source
from remora.backends.python import PythonBackend
from remora.backends.worker import channel as channel_module
from remora.backends.worker import connection as connections
from remora.backends.worker import polling, suspects
from remora.backends.worker.model import LOOP_BYTES, WorkerInstance
from remora.backends.worker.polling import PollBudget
from remora.backends.worker.wire import MessageKind
from remora.errors import CancelledError, InternalError
from remora.messages import InferForm, Outcome, Request, Response
from remora.proto.model_config_pb2 import ModelConfig
from remora.server.loop import LoopMailbox
from support.engine.fakes import FakeClock
from support.process.eventually import eventually_in_loop
from support.process.held import Held

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has memory that the loop can watch")

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _no_suspects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspect no request, because those of these tests differ in their ids only."""
    monkeypatch.setattr(suspects, "MOST", 0)


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
                case "until told" | "until told again" | "until told to die":
                    print("it runs", flush=True)
                    word = request.request_id().replace("until told", "go")
                    while not os.path.exists(os.path.join(os.path.dirname(__file__), word)):
                        threading.Event().wait(0.002)
                    if word == "go to die":
                        os._exit(3)
                case "until cancelled":
                    print("it runs", flush=True)
                    while not request.is_cancelled():
                        threading.Event().wait(0.005)
                case "log" | "late log":
                    logging.getLogger().error("a line")
                case "count":
                    self.counted = getattr(self, "counted", 0) + 1
                case "how many":
                    counted = np.array([getattr(self, "counted", 0)], np.int32)
                    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", counted)]))
                    continue
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
        source = Source("m", 1, folder.parent, folder, folder.parents[1], chosen, cpus=2)
        self.model = PythonBackend().open(source, config)
        instance = self.model.instance(config, Placement("m_0_0"))
        assert isinstance(instance, WorkerInstance)
        self.instance = instance
        self.mailbox: LoopMailbox | None = None
        self.ends = 0

    def begin(self, *requests: Request, execution: Execution | None = None) -> asyncio.Future[Any] | None:
        """What the batch comes to; None when it could not be begun."""
        loop = asyncio.get_running_loop()
        self.mailbox = self.mailbox or LoopMailbox(loop)
        future: asyncio.Future[Any] = loop.create_future()

        def done(result: Sequence[Outcome | None] | Exception) -> None:
            self.ends += 1
            loop.call_soon_threadsafe(future.set_result, result)

        return future if self.instance.begin(execution or Execution(requests), self.mailbox, done) else None

    async def run(self, *requests: Request) -> Any:
        future = self.begin(*requests)
        assert future is not None
        return await asyncio.wait_for(future, PATIENCE_S)

    def close(self) -> None:
        self.instance.close()
        self.model.close()


@pytest.fixture(autouse=True)
def _patient_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a loop wait for a thread that sends, which a loaded machine may suspend: else a batch is not begun."""
    monkeypatch.setattr(channel_module, "_MOMENT_S", PATIENCE_S)


class EagerBudget(PollBudget):
    """Budget that always allows a poll, of two milliseconds, and counts the messages found."""

    allowed_ns = 2_000_000
    found = 0

    def allowance(self, now_ns: int) -> int:
        return self.allowed_ns

    def record_found(self) -> None:
        type(self).found += 1


@pytest.fixture(params=["wakes", "polls"])
def loop(folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    if request.param == "polls":
        monkeypatch.setattr(channel_module, "PollBudget", EagerBudget)
    made = Loop(folder, poll_us="0" if request.param == "wakes" else "500")
    yield made
    made.close()


def test_a_poll_finds_answers_that_arrive_within_its_time(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagerBudget, "allowed_ns", int(PATIENCE_S * 1e9))
    monkeypatch.setattr(polling, "LOST_NS", int(PATIENCE_S * 1e9))
    found = EagerBudget.found

    async def main() -> None:
        for _ in range(50):
            (outcome,) = await loop.run(request())
            assert values(outcome) == [0, 2, 4]

    go(main())
    channel = loop.instance.supervisor.wait_for_connection().channel
    assert isinstance(channel, channel_module.MemoryChannel)
    assert (EagerBudget.found > found) is isinstance(channel.budget, EagerBudget)


def test_an_answer_after_the_end_of_a_poll_wakes_the_loop(loop: Loop, folder: Path) -> None:
    async def main() -> None:
        future = loop.begin(request("until told"))
        assert future is not None
        poll = loop.instance.supervisor.wait_for_connection()._poll
        assert poll is not None
        while poll.active:
            await asyncio.sleep(0)  # lets the loop take the next turn
        (folder / "go").touch()
        (outcome,) = await asyncio.wait_for(future, PATIENCE_S)
        assert values(outcome) == [0, 2, 4]

    go(main())


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
        watching, loop.mailbox = loop.mailbox, None
        await asyncio.to_thread(go, second())
        loop.mailbox = watching
        await loop.run(request())

    async def second() -> None:
        assert loop.begin(request()) is None

    go(first())


def test_the_next_loop_watches_when_the_first_is_closed(loop: Loop) -> None:
    for _ in range(3):
        loop.mailbox = None
        go(_run_once(loop, request()))
    assert loop.ends == 3


def begin_held(loop: Loop) -> SimpleQueue[Any]:
    """Begin a batch that runs until "go" exists, and return the queue of its end."""
    results: SimpleQueue[Any] = SimpleQueue()
    mailbox = LoopMailbox(asyncio.get_running_loop())
    assert loop.instance.begin(Execution([request("until told")]), mailbox, results.put)
    return results


def test_an_answer_is_read_after_the_end_of_its_loop(loop: Loop, folder: Path) -> None:
    async def leave() -> SimpleQueue[Any]:
        return begin_held(loop)

    results = asyncio.run(leave())
    (folder / "go").touch()
    (outcome,) = results.get(timeout=PATIENCE_S)
    assert values(outcome) == [0, 2, 4]
    go(_run_once(loop, request()))


def test_an_answer_is_read_while_its_loop_is_blocked(loop: Loop, folder: Path) -> None:
    async def main() -> None:
        results = begin_held(loop)
        (folder / "go").touch()
        (outcome,) = results.get(timeout=PATIENCE_S)  # blocks the loop
        assert values(outcome) == [0, 2, 4]

    go(main())


def test_a_batch_begun_behind_that_of_a_closed_loop_runs_after_it(loop: Loop, folder: Path) -> None:
    async def leave() -> SimpleQueue[Any]:
        return begin_held(loop)

    async def main() -> None:
        behind = loop.begin(request())
        assert behind is not None
        (folder / "go").touch()
        (outcome,) = await asyncio.wait_for(behind, PATIENCE_S)
        assert values(outcome) == [0, 2, 4]

    results = asyncio.run(leave())
    go(main())
    assert not results.empty()


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
        await asyncio.to_thread(loop.instance.supervisor.wait_for_connection)
        (outcome,) = await loop.run(request())
        assert values(outcome) == [0, 2, 4]

    go(main())
    assert loop.ends == 2


def test_nothing_is_begun_in_a_worker_that_is_gone(loop: Loop) -> None:
    async def main() -> None:
        await loop.run(request())
        link = loop.instance.supervisor.wait_for_connection()
        os.kill(loop.instance.supervisor.pid, signal.SIGKILL)
        await asyncio.to_thread(link.ended.wait, PATIENCE_S)
        await asyncio.to_thread(loop.instance.supervisor.wait_for_connection)  # which follows the end of the first one
        assert not link.begin([], Execution([]), 0, loop.mailbox, lambda _: None)  # type: ignore[arg-type]

    go(main())


async def until_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    while not any("it runs" in record.getMessage() for record in caplog.records):
        await asyncio.sleep(0)


def test_a_cancelled_request_is_reported_to_the_worker(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def main() -> None:
        waits = request("until cancelled")
        future = loop.begin(waits)
        assert future is not None
        await until_it_runs(caplog)
        waits.cancel()
        (outcome,) = await asyncio.wait_for(future, PATIENCE_S)
        assert values(outcome) == [0, 2, 4]

    go(main())


def test_a_cancellation_is_not_sent_before_its_request_and_lost(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        link, waits = loop.instance.supervisor.wait_for_connection(), request("until cancelled")
        send = link.channel.send

        def leave_then_send(kind: MessageKind, *args: Any, **more: Any) -> bool:
            if kind is MessageKind.EXECUTE:
                waits.cancel()
                link.check_executions()  # as the supervisor does periodically
            return send(kind, *args, **more)

        monkeypatch.setattr(link.channel, "send", leave_then_send)
        future = loop.begin(waits)
        assert future is not None
        assert len(await asyncio.wait_for(future, PATIENCE_S)) == 1

    go(main())


def test_a_batch_that_never_ends_is_ended_when_its_time_is_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: clock.now_ns / 1e9))
    loop = Loop(folder, execute_timeout="100")

    async def main() -> None:
        future = loop.begin(request("forever"))
        assert future is not None
        clock.advance(101 * 10**9)
        assert "did not answer within 100 s" in str(await asyncio.wait_for(future, PATIENCE_S))

    go(main())
    loop.close()


# -- ahead ----------------------------------------------------------------------------------------------------------


async def both(*futures: asyncio.Future[Any] | None) -> list[Any]:
    """What batches come to that were begun one behind the other; they end in that order."""
    order: list[int] = []
    for index, future in enumerate(futures):
        assert future is not None
        future.add_done_callback(lambda _, index=index: order.append(index))  # type: ignore[misc]
    results = [await asyncio.wait_for(future, PATIENCE_S) for future in futures if future is not None]
    await asyncio.sleep(0)  # the callbacks' turn
    assert order == sorted(order)
    return results


def test_a_batch_begun_behind_another_runs_after_it(loop: Loop, folder: Path) -> None:
    async def main() -> None:
        first, second = loop.begin(request("until told")), loop.begin(request("count"), request(count=2))
        (folder / "go").touch()
        ((one,), (two, three)) = await both(first, second)
        assert [values(each) for each in (one, two, three)] == [[0, 2, 4], [0, 2, 4], [0, 2]]
        for _ in range(50):
            assert len(await both(*[loop.begin(request(count=count)) for count in range(2)])) == 2

    go(main())
    assert loop.ends == 102


def test_the_worker_says_when_it_went_from_one_batch_to_the_next(loop: Loop) -> None:
    async def main() -> None:
        executions = [Execution([request("a while")]) for _ in range(2)]
        await both(*[loop.begin(*execution.requests, execution=execution) for execution in executions])
        first, second = executions
        assert 0 < first.input_end_ns < first.output_start_ns <= second.input_end_ns < second.output_start_ns

    go(main())


def test_when_a_worker_dies_the_batch_behind_has_not_begun(loop: Loop, folder: Path) -> None:
    async def main() -> None:
        first, second = loop.begin(request("until told to die")), loop.begin(request("count"))
        (folder / "go to die").touch()
        died, never = await both(first, second)
        assert isinstance(died, InternalError)
        assert isinstance(never, NotBegunError)
        await asyncio.to_thread(loop.instance.supervisor.wait_for_connection)
        assert values((await loop.run(request("how many")))[0]) == [0]

    go(main())


def test_a_batch_that_had_its_turn_is_not_reported_as_never_begun(loop: Loop) -> None:
    async def main() -> None:
        (answer,), died = await both(loop.begin(request()), loop.begin(request("die")))
        assert values(answer) == [0, 2, 4]
        assert isinstance(died, InternalError)

    go(main())


def test_the_time_of_a_batch_behind_another_begins_when_that_has_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: clock.now_ns / 1e9))
    loop = Loop(folder, execute_timeout="100")

    async def ends_overdue(future: asyncio.Future[Any] | None) -> None:
        assert future is not None
        clock.advance(101 * 10**9)
        assert "did not answer within 100 s" in str(await asyncio.wait_for(future, PATIENCE_S))

    async def main() -> None:
        await loop.run(request())
        first, second = loop.begin(request("until told")), loop.begin(request("until told again"))
        assert first is not None
        clock.advance(70 * 10**9)
        (folder / "go").touch()
        await asyncio.wait_for(first, PATIENCE_S)
        clock.advance(70 * 10**9)
        loop.instance.supervisor.wait_for_connection().check_executions()
        (folder / "go again").touch()
        assert [values(each) for (each,) in await both(first, second)] == [[0, 2, 4], [0, 2, 4]]
        over, never = loop.begin(request("forever")), loop.begin(request())
        await ends_overdue(over)
        assert isinstance((await both(over, never))[1], NotBegunError)
        await asyncio.to_thread(loop.instance.supervisor.wait_for_connection)
        answered, over = loop.begin(request()), loop.begin(request("forever"))
        assert answered is not None
        await asyncio.wait_for(answered, PATIENCE_S)
        await ends_overdue(over)

    go(main())
    loop.close()


def test_what_is_cancelled_before_its_turn_does_not_run(loop: Loop) -> None:
    async def main() -> None:
        link = loop.instance.supervisor.wait_for_connection()

        async def behind(*cancelled: Request, others: Sequence[Request] = ()) -> Any:
            """Batches end in the order of their cancellations."""
            runs = request("until cancelled")
            first, second = loop.begin(runs), loop.begin(*cancelled, *others)
            for each in (*cancelled, runs):
                each.cancel()
                link.check_executions()
            return (await both(first, second))[1]

        gone, ran = await behind(request("count"), others=[request("count")])
        assert isinstance(gone, CancelledError)
        assert values(ran) == [0, 2, 4]
        assert [type(each) for each in await behind(request("count"), request("count"))] == [CancelledError] * 2
        assert values((await loop.run(request("how many")))[0]) == [1]

    go(main())


def test_a_cancellation_is_sent_at_once_because_the_worker_may_start_the_request_at_any_moment(
    loop: Loop, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def main() -> None:
        waits = request("count"), request("count")
        first, second = loop.begin(request("until told")), loop.begin(*waits)
        await until_it_runs(caplog)
        waits[0].cancel()
        outbox = loop.instance.supervisor.wait_for_connection()._outbox
        await eventually_in_loop(lambda: not outbox)  # the supervisor's thread may be sending it
        (folder / "go").touch()
        _, (gone, ran) = await both(first, second)
        assert isinstance(gone, CancelledError)
        assert values(ran) == [0, 2, 4]
        assert values((await loop.run(request("how many")))[0]) == [1]

    go(main())


def test_lines_of_a_batch_are_not_taken_for_those_of_the_batch_behind_it(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        await both(loop.begin(request("log")), loop.begin(request("late log")))

    go(main())
    lines = [record.getMessage() for record in caplog.records if "a line" in record.getMessage()]
    assert [line.partition("request ")[2] for line in lines] == ["log]", "late log]"]


def test_what_a_model_prints_names_the_request_that_runs_and_not_the_one_behind(
    loop: Loop, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def main() -> None:
        first, second = loop.begin(request("until told")), loop.begin(request("behind"))
        await until_it_runs(caplog)
        (folder / "go").touch()
        await both(first, second)

    go(main())
    (line,) = [record.getMessage() for record in caplog.records if "it runs" in record.getMessage()]
    assert "until told" in line
    assert "behind" not in line


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
        for _ in range(2):
            loop.mailbox = None
            go(_run_once(loop, request()))
        loop.close()
        gc.collect()

    cycle()
    before = Held.now()
    for _ in range(3):
        cycle()
    assert before.grown() == ([], 0)
