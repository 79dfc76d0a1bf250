"""Models that call other models: business logic scripting, through a whole engine and real model files."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora import Engine
from remora.backends.calling import executing
from remora.errors import CancelledError, RemoraError
from remora.messages import InferForm, InputSpec, Outcome, Request, Response, Streamed, Ticket
from remora.models.calls import _Caller

WAIT_S = 20.0
HEAD = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils


def values(request, name="IN"):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def answer(array, name="OUT"):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.asarray(array))])


def ask(model, array, **more):
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", array)], **more
    )


class TritonPythonModel:
"""
CONFIG = """
backend: "python" {more}
input {{ name: "IN" data_type: TYPE_INT32 dims: -1 }}
output {{ name: "OUT" data_type: {out} dims: -1 }}
"""
DOUBLER = "    def execute(self, requests):\n        return [answer(values(request) * 2) for request in requests]\n"
CHAIN = """
    def execute(self, requests):
        responses = []
        for request in requests:
            middle = ask("doubler", values(request)).exec()
            if middle.has_error():
                raise pb_utils.TritonModelException(middle.error().message())
            responses.append(answer(pb_utils.get_output_tensor_by_name(middle, "OUT").as_numpy() + 1))
        return responses
"""
COUNTER = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(values(request)[0])):
                sender.send(answer(np.array([number], np.int32)))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
"""
TELL = """
    def execute(self, requests):
        return [answer(np.array([self.tell(request).encode()], object)) for request in requests]

    def tell(self, request):
"""


class Repository:
    """Writes models and serves them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.engine: Engine | None = None

    def model(self, name: str, methods: str, *, more: str = "", out: str = "TYPE_INT32") -> None:
        folder = self.root / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(HEAD + methods)
        (folder.parent / "config.pbtxt").write_text(CONFIG.format(more=more, out=out))

    def teller(self, name: str, body: str, **settings: str) -> None:
        """A model that answers with a text; ``body`` are the lines of ``tell(self, request)``."""
        lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
        self.model(name, TELL + lines, out="TYPE_STRING", **settings)

    def serve(self, **settings: Any) -> Engine:
        self.engine = Engine(self.root, **settings)
        return self.engine.start()


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    made = Repository(tmp_path)
    yield made
    if made.engine is not None:
        assert made.engine.stop(WAIT_S)


def infer(engine: Engine, model: str, *values: int, **more: Any) -> Any:
    return engine.infer(model, {"IN": np.array(values, np.int32)}, timeout_s=WAIT_S, **more)["OUT"].tolist()


def told(engine: Engine, model: str, *values: int) -> str:
    return str(infer(engine, model, *(values or (3,)))[0].decode())


# -- calls ----------------------------------------------------------------------------------------------------------


def test_a_chain_of_models_answers(repository: Repository) -> None:
    repository.model("doubler", DOUBLER)
    repository.model("chain", CHAIN)
    engine = repository.serve()
    assert infer(engine, "chain", 1, 2) == [3, 5]
    assert [(model.name, model.statistics.snapshot(model.name, "1").success.count) for model in engine.models()] == [
        ("chain", 1),
        ("doubler", 1),
    ]


def test_the_thread_that_calls_runs_a_quick_model_itself_but_nobody_elses_batch_after_it() -> None:
    done: list[str] = []
    caller = _Caller(lambda outcome: None)
    assert caller.defer(lambda: done.append("mine"))
    assert not caller.defer(lambda: done.append("theirs"))
    caller.run()
    assert done == ["mine"]
    assert not caller.defer(lambda: done.append("late"))


def test_a_call_to_a_quick_model_is_answered(repository: Repository) -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    node = helper.make_node("Identity", ["IN"], ["OUT"])
    tensors = [helper.make_tensor_value_info(name, onnx.TensorProto.INT32, [2]) for name in ("IN", "OUT")]
    graph = helper.make_graph([node], "g", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (repository.root / "same" / "1").mkdir(parents=True)
    onnx.save(model, repository.root / "same" / "1" / "model.onnx")
    repository.teller("asks", "return str(ask('same', values(request)).exec().output_tensors()[0].as_numpy().tolist())")
    engine = repository.serve()
    assert [told(engine, "asks", 5, number) for number in range(20)] == [f"[5, {number}]" for number in range(20)]


def test_an_array_reaches_the_callee_without_a_copy_and_read_only(repository: Repository) -> None:
    repository.model(
        "looks",
        "    def execute(self, requests):\n"
        "        array = requests[0]._request.inputs['IN']\n"
        "        writable, place = array.flags.writeable, array.__array_interface__['data'][0]\n"
        "        return [answer(np.array([writable, place % 2**31], np.int32))]\n",
    )
    repository.teller(
        "asks",
        "array = np.arange(8, dtype=np.int32)\n"
        "seen = ask('looks', array).exec().output_tensors()[0].as_numpy().tolist()\n"
        "return str(seen == [0, array.__array_interface__['data'][0] % 2**31])",
    )
    assert told(repository.serve(), "asks") == "True"


def test_a_callee_that_writes_into_its_input_does_not_change_the_callers_array(repository: Repository) -> None:
    writes = "array = values(requests[0])\n        array[:] = 7\n        return [answer(array)]"
    repository.model("writes", f"    def execute(self, requests):\n        {writes}\n")
    repository.teller(
        "asks",
        "array = np.arange(2, dtype=np.int32)\n"
        "out = ask('writes', array).exec().output_tensors()[0].as_numpy()\n"
        "return f'{array.tolist()} {out.tolist()}'",
    )
    assert told(repository.serve(), "asks") == "[0, 1] [7, 7]"


def test_coroutines_gather_calls_that_run_side_by_side(repository: Repository) -> None:
    repository.model("doubler", DOUBLER)
    repository.model(
        "gathers",
        """
    async def execute(self, requests):
        asked = [ask("doubler", values(request) + extra).async_exec() for request in requests for extra in range(3)]
        got = await asyncio.gather(*asked)
        return [answer(np.concatenate([each.output_tensors()[0].as_numpy() for each in got]))]
""",
    )
    assert infer(repository.serve(), "gathers", 5) == [10, 12, 14]


@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_decoupled_callee_is_iterated_and_an_empty_final_is_an_empty_response(
    repository: Repository, times: int
) -> None:
    repository.model("counter", COUNTER, more="model_transaction_policy { decoupled: true }")
    repository.teller(
        "asks",
        """
answers = ask("counter", values(request)).exec(decoupled=True)
first = [[tensor.as_numpy().tolist() for tensor in each.output_tensors()] for each in answers]
again = [[tensor.as_numpy().tolist() for tensor in each.output_tensors()] for each in answers]
return f"{first} {first == again}"
""",
    )
    expected = [*([[number]] for number in range(times)), []]
    assert told(repository.serve(), "asks", times) == f"{expected} True"


def test_coroutines_iterate_a_decoupled_callee_without_blocking_their_loop(repository: Repository) -> None:
    repository.model("counter", COUNTER, more="model_transaction_policy { decoupled: true }")
    repository.model(
        "asks",
        """
    async def execute(self, requests):
        seen = []
        async for each in await ask("counter", values(requests[0])).async_exec(decoupled=True):
            seen += [tensor.as_numpy()[0] for tensor in each.output_tensors()]
        return [answer(np.array(seen, np.int32))]
""",
    )
    assert infer(repository.serve(), "asks", 3) == [0, 1, 2]


def test_a_plain_model_may_be_asked_as_if_it_were_decoupled(repository: Repository) -> None:
    repository.model("doubler", DOUBLER)
    repository.teller(
        "asks",
        "answers = ask('doubler', values(request)).exec(decoupled=True)\n"
        "return str([each.output_tensors()[0].as_numpy().tolist() for each in answers])",
    )
    assert told(repository.serve(), "asks", 4) == "[[8]]"


REFUSED = "Model {} - Error when running inference: {}"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            "ask('nope', values(request))",
            "INTERNAL "
            + REFUSED.format("nope", "Failed for execute the inference request. Model 'nope' is not ready."),
        ),
        (
            "ask('doubler', values(request), model_version=7)",
            "INTERNAL "
            + REFUSED.format("doubler", "Failed for execute the inference request. Model 'doubler' is not ready."),
        ),
        (
            "ask('doubler', values(request).astype(np.int64), request_id='r1')",
            "INTERNAL "
            + REFUSED.format(
                "doubler",
                "[request id: r1] inference input 'IN' data-type is 'INT64', but model 'doubler' expects 'INT32'",
            ),
        ),
        (
            "pb_utils.InferenceRequest(model_name='doubler', requested_output_names=['X'], inputs=request.inputs())",
            "INTERNAL " + REFUSED.format("doubler", "unexpected inference output 'X' for model 'doubler'"),
        ),
        (
            "ask('counter', values(request))",
            "INTERNAL "
            + REFUSED.format(
                "counter",
                "Model counter is using the decoupled. The current BLS request call doesn't support models using the "
                "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' "
                "calls for decoupled models.'",
            ),
        ),
        ("ask('refuses', values(request))", "UNAVAILABLE not today"),
    ],
)
def test_what_goes_wrong_with_a_call_is_its_answer(repository: Repository, call: str, expected: str) -> None:
    repository.model("doubler", DOUBLER)
    repository.model("counter", COUNTER, more="model_transaction_policy { decoupled: true }")
    refusal = "pb_utils.TritonError('not today', pb_utils.TritonError.UNAVAILABLE)"
    repository.model(
        "refuses",
        f"    def execute(self, requests):\n        return [pb_utils.InferenceResponse([], {refusal})]\n",
    )
    repository.teller("asks", f"error = {call}.exec().error()\nreturn f'{{error.code().name}} {{error.message()}}'")
    assert told(repository.serve(), "asks") == expected


def test_a_request_keeps_its_id_correlation_timeout_and_parameters(repository: Repository) -> None:
    repository.teller(
        "callee",
        "return ' '.join(map(str, (request.request_id(), request.correlation_id(), request.flags(), "
        "request.timeout(), request.parameters(), request.model_name(), request.model_version())))",
    )
    repository.teller(
        "asks",
        "inner = ask('callee', values(request), request_id='a7', correlation_id=9, flags=3, timeout=5000000,\n"
        "    parameters={'n': 1, 'x': 'y', 'ok': True},\n"
        "    preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0), trace=request.trace())\n"
        "return inner.exec().output_tensors()[0].as_numpy()[0].decode()",
    )
    assert told(repository.serve(), "asks") == 'a7 9 3 5000000 {"n":1,"x":"y","ok":true} callee 1'


@pytest.mark.parametrize("who", ["threading.Thread(target=work)", "pool.submit(ask('doubler', array).exec)"])
def test_threads_that_a_model_starts_may_call_too(repository: Repository, who: str) -> None:
    repository.model("doubler", DOUBLER)
    repository.teller(
        "asks",
        f"""
import threading
from concurrent.futures import ThreadPoolExecutor
array, got = values(request), []
def work():
    got.append(ask("doubler", array).exec())
with ThreadPoolExecutor(1) as pool:
    task = {who}
    if isinstance(task, threading.Thread):
        task.start()
        task.join()
    else:
        got.append(task.result())
return str(got[0].output_tensors()[0].as_numpy().tolist())
""",
    )
    assert told(repository.serve(), "asks", 2) == "[4]"


# -- circles --------------------------------------------------------------------------------------------------------

SELF = """
    def execute(self, requests):
        left = int(values(requests[0])[0])
        if not left:
            return [answer(np.array([0], np.int32))]
        response = ask("itself", np.array([left - 1], np.int32)).exec()
        if response.has_error():
            return [pb_utils.InferenceResponse([], response.error())]
        return [answer(response.output_tensors()[0].as_numpy() + 1)]
"""


def test_a_model_that_calls_itself_answers_as_deep_as_it_has_instances(repository: Repository) -> None:
    repository.model("itself", SELF, more="instance_group { count: 3 kind: KIND_CPU }")
    engine = repository.serve()
    assert infer(engine, "itself", 2) == [2]
    with pytest.raises(RemoraError, match="'itself' would wait for itself: its 3 instances are busy"):
        infer(engine, "itself", 3)
    assert infer(engine, "itself", 2) == [2], "nothing is left behind"


def test_a_circle_of_two_models_is_refused_and_not_waited_for(repository: Repository) -> None:
    for name, other in (("ping", "pong"), ("pong", "ping")):
        repository.model(name, SELF.replace('"itself"', f'"{other}"'))
    engine = repository.serve()
    assert infer(engine, "ping", 1) == [1]
    with pytest.raises(RemoraError, match="model 'ping' would wait for itself: its 1 instance is busy"):
        infer(engine, "ping", 2)


def test_a_circle_through_an_ensemble_is_refused_and_not_waited_for(repository: Repository) -> None:
    repository.model("itself", SELF.replace('ask("itself"', 'ask("around"'))
    folder = repository.root / "around"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        """
        platform: "ensemble"
        input { name: "IN" data_type: TYPE_INT32 dims: -1 }
        output { name: "OUT" data_type: TYPE_INT32 dims: -1 }
        ensemble_scheduling { step {
            model_name: "itself" model_version: -1
            input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" }
        } }
        """
    )
    engine = repository.serve()
    assert infer(engine, "around", 0) == [0]
    with pytest.raises(RemoraError, match="'itself' would wait for itself"):
        infer(engine, "itself", 1)


TOGETHER = """
    def initialize(self, args):
        self.name = args["model_instance_name"]

    async def execute(self, requests):
        import pathlib
        here = pathlib.Path(__file__).parent
        left = int(values(requests[0])[0])
        if not left:
            return [answer(np.array([0], np.int32))]
        (here / self.name).touch()
        while len(list(here.glob("itself_*"))) < 4:
            await asyncio.sleep(0.002)
        response = await ask("itself", np.array([left - 1], np.int32)).async_exec()
        if response.has_error():
            return [pb_utils.InferenceResponse([], response.error())]
        return [answer(response.output_tensors()[0].as_numpy() + 1)]
"""
LATER = """
    tasks = []
    async def execute(self, requests):
        left = int(values(requests[0])[0])
        if not left:
            return [answer(np.array([0], np.int32))]
        self.tasks.append(asyncio.ensure_future(self.later(requests[0].get_response_sender(), left)))

    async def later(self, sender, left):
        response = await ask("itself", np.array([left - 1], np.int32)).async_exec()
        if response.has_error():
            sender.send(pb_utils.InferenceResponse([], response.error()))
        else:
            sender.send(answer(response.output_tensors()[0].as_numpy() + 1))
"""
FOUR = "instance_group { count: 4 kind: KIND_CPU }"
ISOLATIONS = pytest.mark.parametrize("isolation", ["python,isolation=thread", "python,isolation=process"])


@ISOLATIONS
def test_requests_that_all_call_their_own_model_at_once_end_with_one_refusal_at_least(
    repository: Repository, isolation: str
) -> None:
    repository.model("itself", TOGETHER, more=FOUR)
    engine = repository.serve(backend_config=(isolation,))
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(infer(engine, "itself", 1))
        except RemoraError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    refused = [answer for answer in answers if answer != [1]]
    assert len(answers) == 4
    assert len(refused) == 1, answers
    assert "model 'itself' would wait for itself: its 4 instances are busy" in refused[0]
    assert infer(engine, "itself", 0) == [0]


@ISOLATIONS
def test_a_model_that_calls_itself_is_answered_by_an_idle_instance(repository: Repository, isolation: str) -> None:
    repository.model("itself", SELF, more=FOUR)
    engine = repository.serve(backend_config=(isolation,))
    assert [infer(engine, "itself", depth) for depth in (1, 2, 3)] == [[1], [2], [3]]
    with pytest.raises(RemoraError, match="model 'itself' would wait for itself: its 4 instances are busy"):
        infer(engine, "itself", 4)


@ISOLATIONS
def test_a_task_that_calls_its_own_model_after_execute_is_answered_by_its_own_instance(
    repository: Repository, isolation: str
) -> None:
    repository.model("itself", LATER)
    assert infer(repository.serve(backend_config=(isolation,)), "itself", 3) == [3]


# -- cancellation ---------------------------------------------------------------------------------------------------

PATIENT = """
    def execute(self, requests):
        import time
        (self.folder / "started").touch()
        end = time.monotonic() + 20
        while not requests[0].is_cancelled() and time.monotonic() < end:
            time.sleep(0.002)
        (self.folder / f"cancelled {requests[0].is_cancelled()}").touch()
        return [answer(values(requests[0]))]

    def initialize(self, args):
        import pathlib
        self.folder = pathlib.Path(args["model_repository"])
"""
RELAY = "    def execute(self, requests):\n        return [ask('patient', values(requests[0])).exec()]\n"


def submitted(engine: Engine, model: str) -> tuple[Ticket, Callable[[], Outcome]]:
    done, outcomes = threading.Event(), list[Outcome]()

    def reply(_: Ticket, outcome: Outcome) -> None:
        outcomes.append(outcome)
        if not isinstance(outcome, Streamed) or outcome.final:
            done.set()

    form = InferForm((InputSpec("IN", "INT32", (1,)),))
    ticket = engine.resolve(model).submit(form, [np.zeros(1, np.int32)], reply)

    def outcome() -> Outcome:
        assert done.wait(WAIT_S)
        return outcomes[-1]

    return ticket, outcome


def until(there: Callable[[], bool]) -> None:
    """Wait for what another thread does to a file."""
    wake = threading.Event()
    for _ in range(int(WAIT_S / 0.002)):
        if there():
            return
        wake.wait(0.002)
    pytest.fail("it did not happen")


def test_cancelling_a_request_cancels_the_calls_that_are_made_for_it(repository: Repository) -> None:
    repository.model("patient", PATIENT)
    repository.model("relay", RELAY)
    repository.model("outer", RELAY.replace("patient", "relay"))
    engine = repository.serve()
    ticket, outcome = submitted(engine, "outer")
    until((repository.root / "patient" / "started").exists)
    ticket.cancel()
    outcome()
    assert (repository.root / "patient" / "cancelled True").exists()


def test_a_call_for_several_requests_goes_on_while_one_of_them_is_wanted() -> None:
    requests = [Request(InferForm(()), {}, (), 1, None) for _ in range(3)]
    child = Ticket(Request(InferForm(()), {}, (), 1, None), lambda ticket, outcome: None)
    caller = _Caller(lambda outcome: None)
    caller.follow(child, executing(requests[:2]))
    requests[0].cancel()
    assert not child.request.cancelled
    requests[1].cancel()
    assert child.request.cancelled
    late = Ticket(Request(InferForm(()), {}, (), 1, None), lambda ticket, outcome: None)
    caller = _Caller(lambda outcome: None)
    caller.follow(late, executing(requests[:2]))
    assert late.request.cancelled, "a call for requests that are cancelled already"
    caller.reply(late, Response([]))
    assert len(requests[0]._watchers) == 1, "that of the first call, which has no answer yet"


STREAM = """
    def execute(self, requests):
        import time
        sender, end = requests[0].get_response_sender(), time.monotonic() + 20
        while not sender.is_cancelled() and time.monotonic() < end:
            sender.send(answer(values(requests[0])))
            time.sleep(0.002)
        (self.folder / f"cancelled {sender.is_cancelled()}").touch()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def initialize(self, args):
        import pathlib
        self.folder = pathlib.Path(args["model_repository"])
"""


@pytest.mark.parametrize("how", ["answers.cancel()", "del answers"])
def test_an_iterator_that_is_cancelled_or_dropped_stops_the_callee(repository: Repository, how: str) -> None:
    repository.model("stream", STREAM, more="model_transaction_policy { decoupled: true }")
    repository.teller(
        "asks",
        f"answers = ask('stream', values(request)).exec(decoupled=True)\nfirst = next(answers)\n{how}\nreturn 'done'",
    )
    assert told(repository.serve(), "asks") == "done"
    until((repository.root / "stream" / "cancelled True").exists)


def test_a_cancelled_iterator_still_comes_to_its_end(repository: Repository) -> None:
    repository.model("stream", STREAM, more="model_transaction_policy { decoupled: true }")
    repository.teller(
        "asks",
        "answers = ask('stream', values(request)).exec(decoupled=True)\nfirst = next(answers)\nanswers.cancel()\n"
        "return str(len(list(answers)) >= 0)",
    )
    assert told(repository.serve(), "asks") == "True"


def test_a_cancelled_queued_call_answers_with_the_cancellation(repository: Repository) -> None:
    repository.model("patient", PATIENT)
    engine = repository.serve()
    first, first_outcome = submitted(engine, "patient")
    until((repository.root / "patient" / "started").exists)
    second, second_outcome = submitted(engine, "patient")
    second.cancel()
    first.cancel()
    first_outcome()
    assert isinstance(second_outcome(), CancelledError)


# -- model control --------------------------------------------------------------------------------------------------

CONTROL = """
try:
    {}
except pb_utils.TritonModelException as error:
    return str(error)
"""
FAILED = "Failed to {}: Failed to process the request for model 'asks_0', message: {}"


def controlled(repository: Repository, code: str, mode: str = "explicit") -> str:
    repository.model("doubler", DOUBLER)
    repository.teller("asks", CONTROL.format(code))
    loads = {"load_model": ("asks",)} if mode == "explicit" else {}
    return told(repository.serve(model_control_mode=mode, **loads), "asks")


def test_a_model_loads_calls_and_unloads_another(repository: Repository) -> None:
    code = """seen = [pb_utils.is_model_ready("doubler")]
    pb_utils.load_model(model_name="doubler")
    seen += [pb_utils.is_model_ready("doubler", version) for version in ("", "1", "2")]
    seen.append(ask("doubler", values(request)).exec().output_tensors()[0].as_numpy().tolist())
    pb_utils.unload_model("doubler")
    return str([*seen, pb_utils.is_model_ready("doubler")])"""
    assert controlled(repository, code) == "[False, True, True, False, [6], False]"


def test_a_model_loads_another_with_a_configuration_of_its_own(repository: Repository) -> None:
    config = {
        "backend": "python",
        "max_batch_size": 5,
        "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}],
    }
    code = f"""pb_utils.load_model("doubler", config={json.dumps(config)!r})
    return str(ask("doubler", np.ones((2, 1), np.int32)).exec().output_tensors()[0].as_numpy().tolist())"""
    assert controlled(repository, code) == "[[2], [2]]"


@pytest.mark.parametrize(
    ("code", "mode", "expected"),
    [
        (
            "pb_utils.load_model('nope')",
            "explicit",
            FAILED.format("load model", "failed to load 'nope', failed to poll from model repository"),
        ),
        (
            "pb_utils.load_model('doubler')",
            "none",
            FAILED.format("load model", "explicit model load / unload is not allowed if polling is enabled"),
        ),
        (
            "pb_utils.unload_model('doubler')",
            "none",
            FAILED.format("unload model", "explicit model load / unload is not allowed if polling is enabled"),
        ),
        (
            "pb_utils.is_model_ready('doubler', 'x')",
            "none",
            FAILED.format(
                "check model readiness",
                "failed to get model version from specified version string 'x' (details: stol), version should be an "
                "integral value > 0",
            ),
        ),
    ],
)
def test_failed_model_control_raises_with_tritons_text(
    repository: Repository, code: str, mode: str, expected: str
) -> None:
    assert controlled(repository, code, mode) == expected


def test_files_of_another_type_are_refused(repository: Repository) -> None:
    code = "pb_utils.load_model('doubler', files={'file:1/model.py': 'text'})"
    repository.model("doubler", DOUBLER)
    repository.teller("asks", f"try:\n    {code}\nexcept TypeError as error:\n    return str(error)")
    said = told(repository.serve(model_control_mode="explicit", load_model=("asks",)), "asks")
    assert said == "load_model: files must map str to bytes, found 'file:1/model.py': str"


def test_a_model_that_loads_itself_while_it_loads_is_refused_and_not_waited_for(repository: Repository) -> None:
    for name, other in (("one", "two"), ("two", "one"), ("self", "self")):
        repository.model(name, DOUBLER + f"    def initialize(self, args):\n        pb_utils.load_model('{other}')\n")
    engine = repository.serve(model_control_mode="explicit")
    with pytest.raises(RemoraError, match="model 'one' is being loaded and waits for the code that requests this load"):
        engine.load("one")
    with pytest.raises(RemoraError, match="model 'self' is being loaded"):
        engine.load("self")


def test_a_model_may_call_others_while_it_is_initialized(repository: Repository) -> None:
    repository.model("doubler", DOUBLER)
    repository.teller("asks", "return self.seen")
    file = repository.root / "asks" / "1" / "model.py"
    file.write_text(
        file.read_text() + "\n    def initialize(self, args):\n        pb_utils.load_model('doubler')\n"
        "        response = ask('doubler', np.array([21], np.int32)).exec()\n"
        "        self.seen = str(response.output_tensors()[0].as_numpy().tolist())\n"
    )
    assert told(repository.serve(model_control_mode="explicit", load_model=("asks",)), "asks") == "[42]"
