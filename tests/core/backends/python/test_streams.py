"""Decoupled Python models: the contract of the response sender, with real model files [Y09]."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from google.protobuf import text_format

from remora.backends import Execution, Placement, Source
from remora.backends.python import PythonBackend, PythonInstance
from remora.errors import InternalError, RemoraError
from remora.messages import InferForm, Outcome, Request, Response, Streamed
from remora.proto.model_config_pb2 import ModelConfig

PATIENCE_S = 30.0
CONFIG = """
name: "m" backend: "python" model_transaction_policy { decoupled: true }
input [{ name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "MORE" data_type: TYPE_INT32 dims: [ -1 ] }]
"""
HEAD = """
import asyncio, threading
import numpy as np
import triton_python_backend_utils as pb_utils
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def answer(value, name="OUT", **more):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array([value], np.int32))], **more)

class TritonPythonModel:
    kept = []
"""


class Sent:
    """Where an execution's answers end up; a second thread may send, too."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.arrived: SimpleQueue[tuple[int, Streamed]] = SimpleQueue()
        self.execution = Execution(
            requests,
            lambda index, streamed: self.arrived.put((index, streamed)),
            lambda index, streamed: self.arrived.put((index, streamed)),
        )

    def all(self) -> list[tuple[int, object, bool]]:
        """What has come until every request had its final answer: request, value or error, final?"""
        found: list[tuple[int, object, bool]] = []
        while sum(final for _, _, final in found) < len(self.execution.requests):
            index, streamed = self.arrived.get(timeout=PATIENCE_S)
            found.append((index, value(streamed.outcome), streamed.final))
        assert self.arrived.empty()
        return found

    def values(self) -> list[object]:
        return [seen for _, seen, _ in self.all()]


def value(outcome: Response | RemoraError | None) -> object:
    if isinstance(outcome, Response):
        return {tensor.name: tensor.data.tolist() for tensor in outcome.outputs}
    return outcome


Start = Callable[..., PythonInstance]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    opened: list[PythonInstance] = []

    def start_model(code: str) -> PythonInstance:
        path = tmp_path / "m" / "1" / "model.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEAD + code, encoding="utf-8")
        config = text_format.Parse(CONFIG, ModelConfig())
        model = PythonBackend().open(Source("m", 1, path.parents[1], path.parent, tmp_path), config)
        instance = model.instance(config, Placement("m_0_0"))
        assert isinstance(instance, PythonInstance)
        opened.append(instance)
        return instance

    yield start_model
    for instance in opened:
        if instance._model is not None:
            instance.close()


def request(requested: tuple[str, ...] = ("OUT", "MORE"), number: int = 0) -> Request:
    return Request(InferForm(()), {"IN": np.array([number], np.int32)}, requested, 1, None)


def run(instance: PythonInstance, *requests: Request) -> Sent:
    sent = Sent(requests or (request(),))
    outcomes: Sequence[Outcome | None] = instance.execute(sent.execution)
    assert list(outcomes) == [None] * len(sent.execution.requests)
    return sent


def test_answers_go_out_as_they_are_sent(start: Start) -> None:
    sent = run(
        start("""
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for n in range(2):
                sender.send(answer(n))
            sender.send(flags=FINAL)
""")
    )
    assert sent.all() == [(0, {"OUT": [0]}, False), (0, {"OUT": [1]}, False), (0, None, True)]


def test_a_response_may_be_the_final_one_and_carry_parameters(start: Start) -> None:
    sent = run(
        start("""
    def execute(self, requests):
        requests[0].get_response_sender().send(answer(1, parameters={"k": 1}), flags=FINAL)
""")
    )
    _, streamed = sent.arrived.get(timeout=PATIENCE_S)
    assert streamed.final
    assert isinstance(streamed.outcome, Response)
    assert streamed.outcome.parameters == {"k": 1}


def test_undeclared_and_unrequested_outputs_are_left_out(start: Start) -> None:
    instance = start("""
    def execute(self, requests):
        tensors = [pb_utils.Tensor(name, np.array([1], np.int32)) for name in ("OUT", "MORE", "NONE")]
        requests[0].get_response_sender().send(pb_utils.InferenceResponse(tensors), FINAL)
""")
    assert run(instance, request(("MORE",))).values() == [{"MORE": [1]}]


def test_an_error_is_one_of_the_answers_and_the_stream_goes_on(start: Start) -> None:
    sent = run(
        start("""
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        error = pb_utils.TritonError("not this one", pb_utils.TritonError.NOT_FOUND)
        sender.send(pb_utils.InferenceResponse([], error))
        sender.send(answer(2), FINAL)
""")
    )
    (_, error, first_final), (_, second, second_final) = sent.all()
    assert isinstance(error, RemoraError)
    assert (error.code, error.message, error.answered) == ("NOT_FOUND", "not this one", True)
    assert (first_final, second, second_final) == (False, {"OUT": [2]}, True)


def test_what_is_sent_after_the_final_answer_is_refused_with_tritons_text(start: Start) -> None:
    instance = start("""
    texts = []
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        sender.send(answer(1), FINAL)
        for response, flags in ((answer(2), 0), (None, FINAL), (None, 0), (answer(2), 7)):
            try:
                sender.send(response, flags)
            except pb_utils.TritonModelException as error:
                self.texts.append(str(error))
""")
    assert run(instance).values() == [{"OUT": [1]}]
    assert instance._model.texts == [
        "Unable to send response. Response sender has been closed.",
        "Unable to send response. Response sender has been closed.",
        "Inference Response object must be provided when the response flags is set to zero.",
        "Unable to send response. Unsupported flag provided.",
    ]


def test_an_output_is_what_it_was_when_it_was_sent(start: Start) -> None:
    sent = run(
        start("""
    def execute(self, requests):
        sender, buffer = requests[0].get_response_sender(), np.zeros(1, np.int32)
        for n in range(3):
            buffer[0] = n
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", buffer)]))
        sender.send(flags=FINAL)
""")
    )
    assert sent.values() == [{"OUT": [0]}, {"OUT": [1]}, {"OUT": [2]}, None]


def test_another_thread_may_go_on_after_execute_has_returned(start: Start) -> None:
    instance = start("""
    go = threading.Event()
    def execute(self, requests):
        def later(sender):
            self.go.wait()
            sender.send(answer(5))
            sender.send(flags=FINAL)
        for request in requests:
            threading.Thread(target=later, args=(request.get_response_sender(),)).start()
""")
    sent = run(instance, request(), request())
    assert sent.arrived.empty()
    instance._model.go.set()
    found = sent.all()
    assert [row for row in found if row[0] == 0] == [(0, {"OUT": [5]}, False), (0, None, True)]
    assert [row for row in found if row[0] == 1] == [(1, {"OUT": [5]}, False), (1, None, True)]


@pytest.mark.parametrize("body", ["pass", "requests[0].get_response_sender().send(answer(1))"])
def test_a_sender_that_is_dropped_ends_the_stream_with_an_error(start: Start, body: str) -> None:
    values = run(start(f"    def execute(self, requests):\n        {body}\n")).values()
    assert isinstance(values[-1], InternalError)
    assert "let go of a request's response sender without a final response" in values[-1].message


def test_a_sender_in_a_circle_ends_its_stream_when_the_collector_finds_it(start: Start) -> None:
    instance = start("""
    def execute(self, requests):
        circle = [requests.pop().get_response_sender()]
        circle.append(circle)
""")
    gc.disable()
    try:
        sent = run(instance)
        assert sent.arrived.empty()
        gc.collect()
    finally:
        gc.enable()
    (error,) = sent.values()
    assert isinstance(error, InternalError)


def test_a_request_that_is_kept_can_give_its_sender_later(start: Start) -> None:
    instance = start("    def execute(self, requests):\n        self.kept.extend(requests)\n")
    sent = run(instance)
    assert sent.arrived.empty()
    later = instance._model.kept.pop()
    later.get_response_sender().send(flags=1)
    del later
    assert sent.values() == [None]


def test_a_sender_released_by_a_cancelled_request_reports_the_cancellation(start: Start) -> None:
    cancelled = request()
    cancelled.cancelled = True
    (error,) = run(start("    def execute(self, requests):\n        pass\n"), cancelled).values()
    assert isinstance(error, RemoraError)
    assert error.code == "CANCELLED"


def test_responses_to_a_cancelled_request_are_dropped_before_the_final_one(start: Start) -> None:
    instance = start("""
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        for value in range(100_000):
            sender.send(answer(value))
        sender.send(answer(-1), flags=FINAL)
""")
    gone = request()
    gone.cancelled = True
    assert run(instance, gone).all() == [(0, {"OUT": [-1]}, True)]


def test_a_model_sees_that_its_caller_has_left(start: Start) -> None:
    instance = start("""
    def execute(self, requests):
        request = requests[0]
        sender = request.get_response_sender()
        sender.send(answer(int(request.is_cancelled()) + 2 * int(sender.is_cancelled())), FINAL)
""")
    gone = request()
    gone.cancelled = True
    assert run(instance).values() == [{"OUT": [0]}]
    assert run(instance, gone).values() == [{"OUT": [3]}]


# -- Failures -------------------------------------------------------------------------------------------------------


def failure(instance: PythonInstance, sent: Sent) -> str:
    with pytest.raises(InternalError) as caught:
        instance.execute(sent.execution)
    assert caught.value.from_model
    return caught.value.message


def test_an_exception_fails_the_execution_and_nothing_else_is_sent(start: Start, tmp_path: Path) -> None:
    instance = start("""
    def execute(self, requests):
        requests[0].get_response_sender().send(answer(1))
        raise ValueError("boom")
""")
    sent = Sent((request(), request()))
    text = failure(instance, sent)
    assert text.startswith("Failed to process the request(s) for model 'm_0_0', message: ValueError: boom\n\nAt:\n  ")
    assert text.endswith("): execute\n")
    assert sent.arrived.qsize() == 1  # the scheduler ends the streams with what was raised, not the lost senders


def test_returning_something_is_refused_with_tritons_text(start: Start) -> None:
    instance = start("    def execute(self, requests):\n        return [answer(1)]\n")
    assert failure(instance, Sent((request(),))) == (
        "Failed to process the request(s) for model 'm_0_0', message: Python model 'm_0_0' is using the decoupled mode "
        "and the execute function must return None."
    )


def test_a_failure_that_no_client_hears_of_is_logged(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    instance = start("""
    def execute(self, requests):
        requests[0].get_response_sender().send(flags=FINAL)
        raise ValueError("too late")
""")
    failure(instance, Sent((request(),)))
    assert "execute of 'm_0_0' failed after it had answered: ValueError: too late" in caplog.text


def test_rescheduling_ends_that_stream_with_a_clear_refusal(start: Start) -> None:
    instance = start("""
    def execute(self, requests):
        requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        requests[0].get_response_sender().send(answer(1))
        requests[1].get_response_sender().send(answer(2), FINAL)
""")
    found = run(instance, request(), request()).all()
    assert found[:2] == [(0, {"OUT": [1]}, False), (1, {"OUT": [2]}, True)]
    index, error, final = found[2]
    assert isinstance(error, RemoraError)
    assert (index, error.code, final) == (0, "UNSUPPORTED", True)


# -- Coroutines -----------------------------------------------------------------------------------------------------

ASYNC = """
    async def initialize(self, args):
        self.gate = asyncio.Event()
    async def finalize(self):
        self.kept.append("finalized")
    async def execute(self, requests):
        sender = requests[0].get_response_sender()
        number = int(requests[0].inputs()[0].as_numpy()[0])
        if number == 0:
            await self.gate.wait()
        elif number == 1:
            self.gate.set()
        elif number == 2:
            raise SystemExit("no")
        elif number == 3:
            return [answer(0)]
        elif number == 4:
            await asyncio.get_running_loop().create_future()
        sender.send(answer(number), FINAL)
"""


def test_executions_that_are_coroutines_run_side_by_side(start: Start) -> None:
    instance = start(ASYNC)
    waiting = run(instance, request(number=0))
    assert run(instance, request(number=1)).values() == [{"OUT": [1]}]
    assert waiting.values() == [{"OUT": [0]}]


@pytest.mark.parametrize(("number", "text"), [(2, "SystemExit: no"), (3, "must return None.")])
def test_a_coroutine_that_fails_ends_its_streams(start: Start, number: int, text: str) -> None:
    instance = start(ASYNC)
    (error,) = run(instance, request(number=number)).values()
    assert isinstance(error, InternalError)
    assert error.message.startswith("Failed to process the request(s) for model 'm_0_0', message: ")
    assert text in error.message
    assert run(instance, request(number=9)).values() == [{"OUT": [9]}]


def test_closing_finalizes_cancels_and_ends_the_thread(start: Start) -> None:
    instance = start(ASYNC)
    kept = instance._model.kept
    endless = run(instance, request(number=4))
    instance.close()
    (error,) = endless.values()
    assert isinstance(error, InternalError)
    assert kept == ["finalized"]
    assert not [thread for thread in threading.enumerate() if thread.name == "remora m_0_0 coroutines"]
