"""How the requests of a Python model end, whatever its code does: in a thread of the server and in a worker process."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora import Engine
from remora.errors import RemoraError
from remora.messages import InferForm, InputSpec, Outcome, Response, Streamed, Ticket
from support.process.eventually import eventually

PATIENCE_S = 60.0
HEAD = """
import asyncio, gc, os, pathlib, threading, time, weakref
import numpy as np
import triton_python_backend_utils as pb_utils
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
HERE = pathlib.Path(__file__).parent

def values(request):
    return pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()

def answer(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.asarray(value, np.int32).reshape(-1))])

async def file(name):
    while not (HERE / name).exists():
        await asyncio.sleep(0.002)

def collect(garbage):
    while garbage() is not None:
        gc.collect()
        time.sleep(0.002)

class TritonPythonModel:
    kept = []
"""
CONFIG = """
backend: "python" {more}
input {{ name: "IN" data_type: TYPE_INT32 dims: -1 }}
output {{ name: "OUT" data_type: TYPE_INT32 dims: -1 }}
instance_group {{ kind: KIND_CPU count: {count} }}
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"


class Served:
    """Models in one kind of isolation, and what they answer."""

    def __init__(self, root: Path, isolation: str) -> None:
        self.root = root
        self.isolation = isolation
        self.engine: Engine | None = None

    def model(self, code: str, name: str = "m", *, more: str = "", count: int = 1) -> None:
        (self.root / name / "1").mkdir(parents=True)
        (self.root / name / "1" / "model.py").write_text(HEAD + code)
        (self.root / name / "config.pbtxt").write_text(CONFIG.format(more=more, count=count))

    def serve(self) -> Engine:
        self.engine = Engine(self.root, backend_config=(f"python,isolation={self.isolation}",)).start()
        return self.engine

    def ask(self, value: int = 1, model: str = "m") -> tuple[Ticket, Future[Any]]:
        """A request on its way, and its last outcome: the outputs' values or the error."""
        assert self.engine is not None
        future: Future[Any] = Future()
        values: list[int] = []

        def reply(_ticket: Ticket, outcome: Outcome) -> None:
            streamed = outcome if isinstance(outcome, Streamed) else Streamed(outcome, True)
            if isinstance(streamed.outcome, Response):
                values.extend(streamed.outcome.outputs[0].data.tolist())
            if streamed.final:
                future.set_result(streamed.outcome if isinstance(streamed.outcome, RemoraError) else values)

        form = InferForm((InputSpec("IN", "INT32", (1,)),))
        served = self.engine.resolve(model)
        return served.submit(form, [np.array([value], np.int32)], reply), future

    def touch(self, name: str, model: str = "m") -> None:
        (self.root / model / "1" / name).touch()

    def await_file(self, name: str, model: str = "m") -> None:
        eventually((self.root / model / "1" / name).exists)

    def pids(self) -> list[int]:
        assert self.engine is not None
        return [instance.supervisor.pid for instance in self.engine.resolve("m").instances]  # type: ignore[attr-defined]


@pytest.fixture(params=["thread", "process"])
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    made = Served(tmp_path, request.param)
    yield made
    if made.engine is not None:
        assert made.engine.stop(PATIENCE_S)


LATER = """
    async def execute(self, requests):
        for request in requests:
            self.kept.append(asyncio.ensure_future(self.later(request.get_response_sender(), values(request))))
        (HERE / "returned").touch()
        return {returned}

    async def later(self, sender, value):
        await file("go")
        sender.send(answer(value + 1), FINAL)
"""
IN_A_THREAD = """
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.later, args=(request.get_response_sender(), values(request))).start()
        (HERE / "returned").touch()

    def later(self, sender, value):
        asyncio.run(file("go"))
        sender.send(answer(value + 1), FINAL)
"""
BY_THE_REQUEST = """
    async def execute(self, requests):
        self.kept.append(asyncio.ensure_future(self.later(requests[0])))
        (HERE / "returned").touch()

    async def later(self, request):
        await file("go")
        request.get_response_sender().send(answer(values(request) + 1))
"""


@pytest.mark.parametrize(
    "code",
    [LATER.format(returned="None"), LATER.format(returned="[None] * len(requests)"), IN_A_THREAD, BY_THE_REQUEST],
    ids=["a task", "a task of a list", "a thread", "a sender taken later"],
)
def test_a_model_answers_after_execute_and_takes_more_requests_meanwhile(served: Served, code: str) -> None:
    served.model(code)
    engine = served.serve()
    asked = [served.ask(value)[1] for value in (1, 2, 3)]
    served.await_file("returned")
    eventually(lambda: engine.running == 3)  # they are in flight until they are answered
    served.touch("go")
    assert [each.result(PATIENCE_S) for each in asked] == [[2], [3], [4]]
    assert engine.resolve("m").stats().success.count == 3
    assert engine.stop(PATIENCE_S)
    assert engine.running == 0


def test_the_loop_of_an_instance_goes_on_between_executions(served: Served) -> None:
    served.model(
        """
    task = None
    async def execute(self, requests):
        if self.task is None:
            self.task = asyncio.ensure_future(self.tick())
        return [answer(self.task.done()) for _ in requests]

    async def tick(self):
        await file("go")
        (HERE / "ticked").touch()
"""
    )
    served.serve()
    assert served.ask()[1].result(PATIENCE_S) == [0]
    served.touch("go")
    served.await_file("ticked")


RELAY = """
    async def execute(self, requests):
        for request in requests:
            tensors = [pb_utils.Tensor("IN", values(request))]
            asked = pb_utils.InferenceRequest(model_name="gate", requested_output_names=["OUT"], inputs=tensors)
            response = await asked.async_exec()
            request.get_response_sender().send(answer(response.output_tensors()[0].as_numpy() + 1), FINAL)
"""
GATE = """
    async def execute(self, requests):
        for request in requests:
            (HERE / f"in {values(request)[0]}").touch()
        await file("go")
        return [answer(values(request) * 10) for request in requests]
"""


def test_requests_to_a_decoupled_coroutine_that_awaits_a_call_overlap(served: Served) -> None:
    served.model(RELAY, more=DECOUPLED)
    served.model(GATE, "gate", count=4)
    served.serve()
    asked = [served.ask(value)[1] for value in range(4)]
    for value in range(4):
        served.await_file(f"in {value}", "gate")
    served.touch("go", "gate")
    assert [each.result(PATIENCE_S) for each in asked] == [[1], [11], [21], [31]]


ENDINGS = {
    "nothing is returned": ("    def execute(self, requests):\n        return None\n", "gave no response"),
    "the sender is dropped": (
        "    def execute(self, requests):\n        requests[0].get_response_sender()\n",
        "gave no response",
    ),
    "the sender is dropped by a coroutine": (
        "    async def execute(self, requests):\n        requests[0].get_response_sender()\n",
        "gave no response",
    ),
    "a task raises with the sender": (
        "    async def execute(self, requests):\n"
        "        self.kept.append(asyncio.ensure_future(self.later(requests[0].get_response_sender())))\n"
        "    async def later(self, sender):\n"
        "        await asyncio.sleep(0)\n"
        "        raise ValueError('late')\n",
        "let go of|gave no response",
    ),
    "a task exits with the sender": (
        "    async def execute(self, requests):\n"
        "        self.kept.append(asyncio.ensure_future(self.later(requests[0].get_response_sender())))\n"
        "    async def later(self, sender):\n"
        "        await asyncio.sleep(0)\n"
        "        raise SystemExit(3)\n",
        "let go of|gave no response",
    ),
    "the sender becomes garbage in a cycle": (
        "    def execute(self, requests):\n"
        "        cycle = [requests[0].get_response_sender(), type(self)()]\n"
        "        cycle.append(cycle)\n"
        "        threading.Thread(target=collect, args=(weakref.ref(cycle[1]),)).start()\n",
        "let go of|gave no response",
    ),
    "a thread dies with the sender": (
        "    def execute(self, requests):\n"
        "        threading.excepthook = lambda args: None\n"
        "        threading.Thread(target=self.later, args=(requests[0].get_response_sender(),)).start()\n"
        "    def later(self, sender):\n"
        "        raise ValueError('late')\n",
        "let go of|gave no response",
    ),
    "execute raises": ("    def execute(self, requests):\n        raise ValueError('now')\n", "ValueError: now"),
    "a coroutine exits": ("    async def execute(self, requests):\n        raise SystemExit(3)\n", "SystemExit: 3"),
}
"""What a model's ``execute`` does, and what its client gets."""


@pytest.mark.parametrize("decoupled", [False, True], ids=["one answer", "decoupled"])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_that_can_no_longer_be_answered_ends_with_an_error(
    served: Served, ending: str, decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # which a model in a thread replaces
    code, text = ENDINGS[ending]
    served.model(code, more=DECOUPLED if decoupled else "")
    engine = served.serve()
    for _ in range(2):  # the instance goes on
        error = served.ask()[1].result(PATIENCE_S)
        assert isinstance(error, RemoraError)
        assert any(part in str(error) for part in (*text.split("|"), "let go of" if decoupled else text)), str(error)
        assert "m_0" in str(error), "it names the model"
    assert engine.stop(PATIENCE_S)
    assert engine.running == 0
    gc.collect()  # asyncio logs failed tasks here, and not during a later test


KEEPER = """
    def execute(self, requests):
        self.kept += [request.get_response_sender() for request in requests]
        (HERE / "returned").touch()

    def finalize(self):
        (HERE / "finalized").touch()
"""


def test_a_request_that_its_client_gives_up_ends_though_the_model_keeps_its_sender(served: Served) -> None:
    served.model(KEEPER)
    engine = served.serve()
    ticket, asked = served.ask()
    served.await_file("returned")
    ticket.cancel()
    error = asked.result(PATIENCE_S)
    assert isinstance(error, RemoraError)
    assert error.code == "CANCELLED"
    eventually(lambda: engine.running == 0)


@pytest.mark.parametrize("decoupled", [False, True], ids=["one answer", "decoupled"])
def test_a_request_that_is_never_answered_ends_with_the_shutdown(served: Served, decoupled: bool) -> None:
    served.model(KEEPER, more=DECOUPLED if decoupled else "")
    engine = served.serve()
    _, asked = served.ask()
    served.await_file("returned")
    eventually(lambda: engine.running == 1)
    assert not engine.stop(0.05), "it was in flight, and not all was finished in time"
    assert isinstance(asked.result(PATIENCE_S), RemoraError)
    served.engine = None


@pytest.mark.parametrize("decoupled", [False, True], ids=["one answer", "decoupled"])
def test_a_request_that_is_open_ends_with_its_worker(tmp_path: Path, decoupled: bool) -> None:
    served = Served(tmp_path, "process")
    served.model(KEEPER, more=DECOUPLED if decoupled else "")
    engine = served.serve()
    _, asked = served.ask()
    served.await_file("returned")
    (pid,) = served.pids()
    os.kill(pid, signal.SIGKILL)
    error = asked.result(PATIENCE_S)
    assert isinstance(error, RemoraError)
    assert "Stub process 'm_0_0' is not healthy" in str(error)
    eventually(lambda: engine.running == 0)
    assert engine.stop(PATIENCE_S)
