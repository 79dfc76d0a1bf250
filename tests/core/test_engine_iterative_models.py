"""Iterative sequences with Python models as people write them: one request, as many turns as the model asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from remora import Engine
from remora.errors import CancelledError, InternalError, RemoraError
from remora.messages import InferForm, InputSpec, Outcome, Streamed, Ticket
from support.process.eventually import eventually

WAIT_S = 60.0

CONFIG = """
backend: "python" max_batch_size: 4
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
output { name: "TURNS" data_type: TYPE_INT32 dims: 1 }
sequence_batching { iterative_sequence: true max_sequence_idle_microseconds: 60000000 %s
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
}
parameters { key: "ISOLATION" value { string_value: "%s" } }
%s
"""

HEAD = """
import pathlib
import time
import numpy as np
import triton_python_backend_utils as pb_utils


def value(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0]


def tensor(name, number):
    return pb_utils.Tensor(name, np.array([[number]], np.int32))
"""

COUNTDOWN = '''
class TritonPythonModel:
    """Takes IN turns for a request and tells how many rows each of them shared, at the most."""

    def initialize(self, args):
        self.turns = {}
        self.shared = {}

    def execute(self, requests):
        return [self.answer(request, len(requests)) for request in requests]

    def answer(self, request, rows):
        if not value(request, "READY"):
            return pb_utils.InferenceResponse([])
        number = request.correlation_id()
        assert bool(value(request, "START")) == (number not in self.turns)
        wanted = int(value(request, "IN"))
        if wanted < 0:
            raise pb_utils.TritonModelException("less than nothing")
        self.turns[number] = self.turns.get(number, 0) + 1
        self.shared[number] = max(self.shared.get(number, 0), rows)
        if self.turns[number] < wanted:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        turns, shared = self.turns.pop(number), self.shared.pop(number)
        return pb_utils.InferenceResponse([tensor("OUT", shared), tensor("TURNS", turns)])
'''
HELD = COUNTDOWN.replace("def execute", "def counted").replace(
    "    def initialize(self, args):",
    """    def execute(self, requests):
        while not self.may_begin.exists():
            time.sleep(0.002)
        return self.counted(requests)

    def initialize(self, args):
        self.may_begin = pathlib.Path(args["model_repository"], "may_begin")""",
)

STREAM = '''
class TritonPythonModel:
    """Says how many turns it has had after each of IN turns."""

    def initialize(self, args):
        self.turns = {}

    %(async)sdef execute(self, requests):
        for request in requests:
            number, wanted = request.correlation_id(), int(value(request, "IN"))
            sender = request.get_response_sender()
            turns = self.turns[number] = self.turns.get(number, 0) + 1
            sender.send(pb_utils.InferenceResponse([tensor("OUT", wanted), tensor("TURNS", turns)]))
            if turns < wanted:
                %(await)s
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                continue
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            if wanted == 7:  # and asks for more after the end
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
'''
PLAIN_STREAM = STREAM % {"async": "", "await": "pass"}
COROUTINE_STREAM = STREAM % {"async": "async ", "await": "await __import__('asyncio').sleep(0)"}

STATEFUL = '''
class TritonPythonModel:
    """Keeps no state: the server passes back what it sent last."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            turns, wanted = int(value(request, "TURN")) + 1, int(value(request, "IN"))
            outputs = [tensor("OUT", wanted), tensor("TURNS", turns), tensor("TURN_OUT", turns)]
            sender.send(pb_utils.InferenceResponse(outputs))
            if turns < wanted:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
STATE = 'state { input_name: "TURN" output_name: "TURN_OUT" data_type: TYPE_INT32 dims: 1 }'

WRONG = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return [pb_utils.InferenceResponse([tensor("OUT", 1)]) for _ in requests]
"""

Start = Callable[..., Engine]


@pytest.fixture(params=["thread", "process"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """An engine with one iterative model `m`."""
    engines: list[Engine] = []

    def begin(code: str, *, strategy: str = "oldest { }", decoupled: bool = False) -> Engine:
        (tmp_path / "m" / "1").mkdir(parents=True)
        rest = "model_transaction_policy { decoupled: true }" if decoupled else ""
        (tmp_path / "m" / "config.pbtxt").write_text(CONFIG % (strategy, request.param, rest))
        (tmp_path / "m" / "1" / "model.py").write_text(HEAD + code)
        engines.append(Engine(tmp_path, backend_config=("python,isolation=process",)).start())
        return engines[0]

    yield begin
    for engine in engines:
        engine.stop()


def turns(number: int) -> dict[str, np.ndarray]:
    return {"IN": np.array([[number]], np.int32)}


@pytest.mark.parametrize("strategy", ["oldest { max_candidate_sequences: 4 }", "direct { }"])
def test_a_request_takes_as_many_turns_as_its_model_asks_for(start: Start, strategy: str) -> None:
    engine = start(COUNTDOWN, strategy=strategy)
    for wanted in (1, 2, 5):
        assert engine.infer("m", turns(wanted), timeout_s=WAIT_S)["TURNS"].tolist() == [[wanted]]
    (model,) = engine.models()
    stats = model.statistics.snapshot("m", "1", responses=False)
    assert (stats.inference_count, stats.execution_count, stats.success.count) == (3, 8, 3)


@pytest.mark.parametrize("strategy", ["oldest { max_candidate_sequences: 4 }", "direct { }"])
def test_short_requests_join_and_leave_the_batch_of_a_long_one(start: Start, strategy: str, tmp_path: Path) -> None:
    engine = start(HELD, strategy=strategy)
    long = engine.infer_async("m", turns(400))
    short = [engine.infer_async("m", turns(3)) for _ in range(20)]
    (tmp_path / "m" / "may_begin").touch()
    assert {future.result(WAIT_S)["TURNS"].item() for future in short} == {3}
    answer = long.result(WAIT_S)
    assert answer["TURNS"].item() == 400
    assert 1 < answer["OUT"].item() <= 4


def test_an_error_in_a_later_turn_answers_the_request_and_frees_its_slot(start: Start) -> None:
    engine = start(COUNTDOWN, strategy="oldest { max_candidate_sequences: 1 }")
    for _ in range(3):
        with pytest.raises(InternalError, match="less than nothing"):
            engine.infer("m", turns(-1), timeout_s=WAIT_S)
    assert engine.infer("m", turns(2), timeout_s=WAIT_S)["TURNS"].item() == 2


def test_a_response_beside_the_wish_for_another_turn_is_refused_with_tritons_text(start: Start) -> None:
    engine = start(WRONG)
    text = "Expected a None object in the execute function return list for reschduled request, found type"
    with pytest.raises(InternalError, match=text):
        engine.infer("m", turns(1), timeout_s=WAIT_S)


@pytest.mark.parametrize(("code", "state"), [(PLAIN_STREAM, ""), (COROUTINE_STREAM, ""), (STATEFUL, STATE)])
def test_a_decoupled_model_answers_in_every_turn(start: Start, code: str, state: str) -> None:
    engine = start(code, strategy=f"oldest {{ }} {state}", decoupled=True)
    for wanted in (1, 4, 7):
        answers = list(engine.infer_stream("m", turns(wanted)))
        assert [answer["TURNS"].item() for answer in answers] == list(range(1, wanted + 1))
        assert {name for answer in answers for name in answer} == {"OUT", "TURNS"}


def test_a_request_that_is_cancelled_between_two_turns_is_answered_and_frees_its_slot(start: Start) -> None:
    engine = start(PLAIN_STREAM, strategy="oldest { max_candidate_sequences: 1 }", decoupled=True)
    model = engine.resolve("m")
    outcomes: list[Outcome] = []

    def reply(ticket: Ticket, outcome: Outcome) -> None:
        outcomes.append(outcome)
        if len(outcomes) == 3:
            ticket.cancel()

    form = InferForm((InputSpec("IN", "INT32", (1, 1)),))
    model.submit(form, [np.array([[10**6]], np.int32)], reply)
    answers = list(engine.infer_stream("m", turns(2)))  # waits for the one slot
    assert [answer["TURNS"].item() for answer in answers] == [1, 2]

    def last() -> object:
        return outcomes[-1].outcome if isinstance(outcomes[-1], Streamed) else outcomes[-1]

    eventually(lambda: isinstance(last(), CancelledError))  # the slot may be free before the answer is delivered
    assert sum(isinstance(outcome, RemoraError) for outcome in outcomes) <= 1
