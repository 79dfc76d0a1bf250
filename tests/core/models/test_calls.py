"""Models that call other models: business logic scripting, through a whole engine and real model files."""

from __future__ import annotations

import pytest

from remora.models.calls import Caller
from support.models.calling_models import DOUBLER, Repository, infer, told

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


def test_a_chain_of_models_answers(repository: Repository) -> None:
    repository.model("doubler", DOUBLER)
    repository.model("chain", CHAIN)
    engine = repository.serve()
    assert infer(engine, "chain", 1, 2) == [3, 5]
    assert [(model.name, model.statistics.snapshot(model.name, "1").success.count) for model in engine.models()] == [
        ("chain", 1),
        ("doubler", 1),
    ]


def test_the_calling_thread_runs_a_quick_model_itself_but_no_other_batch_after_it() -> None:
    done: list[str] = []
    caller = Caller(lambda outcome: None)
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


def test_a_plain_model_can_be_called_like_a_decoupled_one(repository: Repository) -> None:
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
