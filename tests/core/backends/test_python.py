"""Python models in a thread: the contract of a model's methods, with real model files."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.backends import Execution, Placement, Source
from remora.backends.python import PythonBackend, PythonInstance
from remora.errors import BY_CODE, ConfigError, InternalError, NotFoundError, RemoraError, UnsupportedError
from remora.messages import InferForm, Outcome, Request, Response
from remora.proto.model_config_pb2 import ModelConfig
from remora.testing import backend
from support.models.python_models import HEAD, Models, config_of

ANSWER = "pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.array([7], np.int32))])"


def request(requested: tuple[str, ...] = ("OUT", "MORE"), **form: Any) -> Request:
    return Request(InferForm((), **form), {"IN": np.arange(3, dtype=np.int32)}, requested, 1, None)


def run(instance: PythonInstance, *requests: Request) -> list[Outcome]:
    return backend.run(instance, *(requests or (request(),)))


def only(outcomes: list[Outcome]) -> Response:
    (outcome,) = outcomes
    assert isinstance(outcome, Response)
    return outcome


def failure(instance: PythonInstance, *requests: Request) -> InternalError:
    with pytest.raises(InternalError) as caught:
        run(instance, *requests)
    assert caught.value.from_model
    return caught.value


def test_a_model_answers_what_it_is_asked(models: Models) -> None:
    instance = models.start(f"    def execute(self, requests):\n        return [{ANSWER} for _ in requests]\n")
    outcomes = run(instance, request(), request())
    assert [outcome.outputs[0].data.tolist() for outcome in outcomes if isinstance(outcome, Response)] == [[7], [7]]
    assert not instance.quick


def test_initialize_gets_the_strings_that_triton_gives(models: Models) -> None:
    instance = models.start(
        "    def initialize(self, args):\n        self.args = args\n"
        "    def execute(self, requests):\n"
        "        text = __import__('json').dumps(self.args)\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.array([text], object))])]\n"
    )
    args = json.loads(only(run(instance)).outputs[0].data[0])
    assert json.loads(args.pop("model_config"))["input"][0]["name"] == "IN"
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
        "model_instance_name": "m_0_0",
        "model_repository": str(models.root / "m"),
        "model_version": "1",
        "model_name": "m",
    }


def test_every_instance_has_its_own_globals(models: Models) -> None:
    model = models.open(
        "calls = []\n" + HEAD + "    def execute(self, requests):\n        calls.append(1)\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.array([len(calls)]))])]\n"
    )
    first, second = (model.instance(config_of(), Placement(f"m_0_{number}")) for number in range(2))
    for instance, expected in ((first, 1), (first, 2), (second, 1)):
        assert isinstance(instance, PythonInstance)
        assert only(run(instance)).outputs[0].data.tolist() == [expected]
    first.close()
    second.close()


def test_undeclared_and_unwanted_outputs_are_dropped_and_the_models_order_is_kept(models: Models) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        "        tensors = [pb_utils.Tensor(n, np.array([1.5])) for n in ('MORE', 'NOT_DECLARED', 'OUT')]\n"
        "        return [pb_utils.InferenceResponse(tensors) for _ in requests]\n"
    )
    assert [(output.name, output.datatype) for output in only(run(instance)).outputs] == [
        ("MORE", "FP64"),
        ("OUT", "FP64"),
    ]
    assert [output.name for output in only(run(instance, request(("OUT", "NOT_DECLARED")))).outputs] == ["OUT"]


@pytest.mark.parametrize("code", [*BY_CODE, "default"])
def test_an_error_keeps_its_code_and_its_text_and_wins_over_outputs(models: Models, code: str) -> None:
    argument = "" if code == "default" else f", pb_utils.TritonError.{code}"
    instance = models.start(
        "    def execute(self, requests):\n"
        f"        good = {ANSWER}.output_tensors()\n"
        f"        return [pb_utils.InferenceResponse(good, pb_utils.TritonError('a \"b\"\\n'{argument}))]\n"
    )
    (outcome,) = run(instance)
    assert isinstance(outcome, RemoraError)
    assert (outcome.code, outcome.message, outcome.from_model) == (
        "INTERNAL" if code == "default" else code,
        'a "b"\n',
        True,
    )


def test_an_error_may_have_no_text_and_leaves_its_neighbours_alone(models: Models) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        f"        return [pb_utils.InferenceResponse([], pb_utils.TritonError('')), {ANSWER}]\n"
    )
    bad, good = run(instance, request(), request())
    assert isinstance(bad, RemoraError)
    assert bad.message == ""
    assert isinstance(good, Response)


def test_an_exception_shows_the_models_lines_innermost_first(models: Models) -> None:
    instance = models.start(
        "    def execute(self, requests):\n        return self.answer()\n"
        "    def answer(self):\n        raise ValueError('raised a value error')\n"
    )
    file = models.root / "m" / "1" / "model.py"
    error = failure(instance)
    assert error.message == (
        "Failed to process the request(s) for model 'm_0_0', message: ValueError: raised a value error\n\nAt:\n"
        f"  {file}(9): answer\n  {file}(7): execute\n"
    )
    assert error.__context__ is None, "the error must not keep the model's frames alive"


def test_only_lines_of_the_model_and_of_libraries_below_it_are_shown(models: Models) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        "        if len(requests) == 1:\n            __import__('json').loads('{')\n"
        "        pb_utils.deserialize_bytes_tensor(b'1')\n"
    )
    assert "decoder.py" in failure(instance).message
    assert failure(instance, request(), request()).message.endswith(f"At:\n  {models.root}/m/1/model.py(9): execute\n")


@pytest.mark.parametrize(
    "raised", ["SystemExit(3)", "KeyboardInterrupt()", "GeneratorExit()", "pb_utils.TritonModelException('no')"]
)
def test_nothing_that_a_model_raises_leaves_its_thread(models: Models, raised: str) -> None:
    instance = models.start(f"    def execute(self, requests):\n        raise {raised}\n")
    name = raised.removeprefix("pb_utils.").partition("(")[0]
    assert f"message: {name}: " in failure(instance).message


def test_an_exception_without_a_text_is_still_an_answer(models: Models) -> None:
    instance = models.start(
        "class Broken(Exception):\n    def __str__(self):\n        raise RuntimeError\n"
        "class TritonPythonModel:\n    def execute(self, requests):\n        raise Broken\n"
    )
    assert "Broken: <the exception has no text>" in failure(instance).message


def test_an_execute_of_the_wrong_form_is_an_error_without_lines(models: Models) -> None:
    instance = models.start("    def execute(self):\n        return []\n")
    assert failure(instance).message.endswith("takes 1 positional argument but 2 were given")


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (
            "[]",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0\n",
        ),
        ("{}", "Expected a list in the execute return, found type '<class 'dict'>'."),
        (
            "[5]",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'int'>'.",
        ),
    ],
)
def test_what_execute_must_not_return_is_refused_with_tritons_text(models: Models, returned: str, text: str) -> None:
    instance = models.start(f"    def execute(self, requests):\n        return {returned}\n")
    assert failure(instance).message == f"Failed to process the request(s) for model 'm_0_0', message: {text}"


@pytest.mark.parametrize("returned", ["None", "[None]"])
def test_no_response_is_an_error_and_not_a_hang(models: Models, returned: str) -> None:
    instance = models.start(f"    def execute(self, requests):\n        return {returned}\n")
    (outcome,) = run(instance)
    assert isinstance(outcome, InternalError)
    assert "gave no response" in outcome.message


def test_a_sender_that_is_dropped_is_an_error_and_not_a_hang(models: Models) -> None:
    instance = models.start("    def execute(self, requests):\n        requests[0].get_response_sender()\n")
    (outcome,) = run(instance)
    assert isinstance(outcome, InternalError)


def test_a_response_may_be_sent_from_another_thread_after_execute_has_returned(models: Models) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        "        sender = requests[0].get_response_sender()\n"
        "        def later():\n"
        f"            sender.send({ANSWER}, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)\n"
        "        __import__('threading').Thread(target=later).start()\n"
        "        return [None]\n"
    )
    assert only(run(instance)).outputs[0].data.tolist() == [7]


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (
            "send(flags=1)",
            "Unable to send response. Non-decoupled model cannot send complete final before sending a response.",
        ),
        ("send(good, 2)", "Unable to send response. Unsupported flag provided."),
        ("send()", "Inference Response object must be provided when the response flags is set to zero."),
    ],
)
def test_a_sender_refuses_what_is_no_answer(models: Models, calls: str, text: str) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        f"        good = {ANSWER}\n        s = requests[0].get_response_sender()\n        s.{calls}\n"
    )
    assert text in failure(instance).message


@pytest.mark.parametrize(
    ("then", "text"),
    [
        ("s.send(good)", "Unable to send response. Non-decoupled model cannot send more than one response."),
        ("return [good]", "Unable to send response. Non-decoupled model cannot send more than one response."),
        ("s.send(good, 1)", "Unable to send response. Non-decoupled model cannot send more than one response."),
        ("s.send(flags=1); s.send(flags=1)", "Unable to send response. Response sender has been closed."),
        ("return []", "Number of InferenceResponse objects do not match"),
        ("raise ValueError('late')", "ValueError: late"),
    ],
)
def test_what_is_sent_stays_the_answer_whatever_comes_after_it(
    models: Models, caplog: pytest.LogCaptureFixture, then: str, text: str
) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        f"        good = {ANSWER}\n        s = requests[0].get_response_sender()\n"
        f"        s.send(good)\n        {then}\n"
    )
    assert only(run(instance)).outputs[0].data.tolist() == [7]
    assert text in caplog.text


def test_a_failure_is_that_of_the_requests_that_have_no_answer_yet(models: Models) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        f"        requests[0].get_response_sender().send({ANSWER})\n        assert False\n"
    )
    sent, failed = run(instance, request(), request())
    assert isinstance(sent, Response)
    assert isinstance(failed, InternalError)
    assert "message: AssertionError: <EMPTY MESSAGE>\n\nAt:\n" in failed.message


def test_coroutines_are_run_and_keep_their_loop_between_executions(models: Models) -> None:
    instance = models.start(
        "    loop = None\n"
        "    async def execute(self, requests):\n"
        "        import asyncio\n"
        "        here = asyncio.get_running_loop()\n"
        "        same = self.loop is here\n        self.loop = here\n"
        "        await asyncio.sleep(0)\n"
        "        self.task = asyncio.ensure_future(asyncio.sleep(3600))\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.array([same]))])]\n"
    )
    assert only(run(instance)).outputs[0].data.tolist() == [False]
    assert only(run(instance)).outputs[0].data.tolist() == [True]


def test_a_coroutine_that_fails_shows_only_the_models_lines(models: Models) -> None:
    instance = models.start("    async def execute(self, requests):\n        raise ValueError('late')\n")
    file = models.root / "m" / "1" / "model.py"
    assert failure(instance).message.endswith(f"ValueError: late\n\nAt:\n  {file}(7): execute\n")


SEEN = """    def execute(self, requests):
        r = requests[0]
        seen = [r.request_id(), r.correlation_id(), r.flags(), r.timeout(), sorted(r.requested_output_names()),
                r.parameters(), r.model_name(), r.model_version(), r.is_cancelled(), [t.name() for t in r.inputs()],
                pb_utils.get_input_tensor_by_name(r, 'NOT_THERE'), r.trace().get_context(),
                r.preferred_memory().preferred_device_id]
        text = __import__('json').dumps(seen)
        out = pb_utils.Tensor('OUT', np.array([text], object))
        return [pb_utils.InferenceResponse([out], parameters={'a': 1, 'b': True, 'c': 'x', 'd': np.float32(0.5)})]
"""


def test_a_request_tells_all_that_it_says(models: Models) -> None:
    asked = request(
        ("OUT",), id="r", sequence_id="s", sequence_start=True, sequence_end=True, timeout_us=5,
        parameters={"k": "é", "n": 1, "t": True, "f": 0.5},
    )  # fmt: skip
    asked.cancelled = True
    response = only(run(models.start(SEEN), asked))
    assert json.loads(response.outputs[0].data[0]) == [
        "r", "s", 3, 5, ["OUT"], '{"k":"é","n":1,"t":true,"f":0.5}', "m", 1, True, ["IN"], None, "", 0,
    ]  # fmt: skip
    assert response.parameters == {"a": 1, "b": True, "c": "x", "d": 0.5}


def test_inputs_are_shared_when_they_may_be_written_and_copied_when_not(models: Models) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        "        data = pb_utils.get_input_tensor_by_name(requests[0], 'IN').as_numpy()\n"
        "        data += 1\n"
        "        assert requests[0].inputs()[0].as_numpy() is data\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', data)])]\n"
    )
    shared = request()
    assert np.shares_memory(only(run(instance, shared)).outputs[0].data, shared.inputs["IN"])
    fixed = request()
    fixed.inputs["IN"].flags.writeable = False
    assert only(run(instance, fixed)).outputs[0].data.tolist() == [1, 2, 3]
    assert fixed.inputs["IN"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "output", ["self.kept", "self.kept[:2]", "self.kept.reshape(1, 4)[0]", "memoryview(self.kept)"]
)
def test_an_answer_does_not_change_when_the_model_reuses_its_memory(models: Models, output: str) -> None:
    instance = models.start(
        "    kept = np.zeros(4, np.int32)\n"
        "    def execute(self, requests):\n"
        "        self.kept += 1\n"
        f"        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.asarray({output}))])]\n"
    )
    first = only(run(instance)).outputs[0].data
    second = only(run(instance)).outputs[0].data
    assert (first[0], second[0]) == (1, 2)


def test_who_copies_the_answers_is_given_the_models_own_memory(models: Models) -> None:
    instance = models.start(
        "    kept = np.zeros(4, np.int32)\n"
        "    def execute(self, requests):\n"
        "        self.kept += 1\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', self.kept)])]\n"
    )
    answers = [only(instance.execute(Execution([request()], copied=True))).outputs[0].data for _ in range(2)]
    assert np.shares_memory(*answers)


def test_a_coroutine_that_exits_leaves_the_instance_usable(models: Models) -> None:
    instance = models.start(
        "    async def execute(self, requests):\n"
        f"        if len(requests) == 1:\n            raise SystemExit\n        return [{ANSWER}, {ANSWER}]\n"
    )
    assert "SystemExit" in failure(instance).message
    assert len(run(instance, request(), request())) == 2


def test_rescheduling_is_for_iterative_sequences_alone(models: Models) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        "        requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)\n"
        "        return [None]\n"
    )
    with pytest.raises(UnsupportedError, match="scheduled again"):
        run(instance)


@pytest.mark.parametrize("call", ["exec()", "exec(decoupled=True)", "async_exec().send(None)"])
def test_a_call_of_another_model_says_that_it_is_not_offered_yet(models: Models, call: str) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        "        pb_utils.InferenceRequest(model_name='other', inputs=requests[0].inputs(),\n"
        f"            requested_output_names=['X']).{call}\n"
    )
    assert "cannot call model 'other'" in failure(instance).message


def test_a_model_that_refuses_to_start_says_why(models: Models) -> None:
    with pytest.raises(InternalError) as caught:
        models.start(
            "    def initialize(self, args):\n        raise pb_utils.TritonModelException('never')\n"
            "    def execute(self, requests):\n        return []\n"
        )
    file = models.root / "m" / "1" / "model.py"
    assert caught.value.message == f"TritonModelException: never\n\nAt:\n  {file}(7): initialize\n"


def test_finalize_is_called_once_and_its_failure_is_logged(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    instance = models.start(
        "    def execute(self, requests):\n        return []\n"
        "    def finalize(self):\n        pb_utils.Logger.log_info('going')\n        raise SystemExit('stuck')\n"
    )
    models.open_ones.remove(instance)
    with caplog.at_level(logging.INFO):
        instance.close()
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("remora.model.m", "INFO"),
        ("remora.model.m", "ERROR"),
    ]
    assert "SystemExit: stuck" in caplog.records[1].getMessage()


def test_log_lines_have_the_models_name_file_and_level(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    instance = models.start(
        "    def execute(self, requests):\n        log = pb_utils.Logger\n"
        "        log.log('a %s'); log.log('b', log.VERBOSE); log.log_warn('c'); "
        "log.log_error('d'); log.log_verbose('e')\n"
        f"        return [{ANSWER}]\n"
    )
    with caplog.at_level(logging.DEBUG, logger="remora.model.m"):
        run(instance)
    assert [(record.getMessage(), record.levelname) for record in caplog.records] == [
        ("a %s", "INFO"), ("b", "DEBUG"), ("c", "WARNING"), ("d", "ERROR"), ("e", "DEBUG"),
    ]  # fmt: skip
    assert {(record.name, record.filename) for record in caplog.records} == {("remora.model.m", "model.py")}


def test_the_thread_of_an_execution_need_not_be_that_of_the_load(models: Models) -> None:
    instance = models.start(f"    async def execute(self, requests):\n        return [{ANSWER}]\n")
    outcomes: list[Outcome] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: outcomes.extend(run(instance)))
        thread.start()
        thread.join()
    assert [isinstance(outcome, Response) for outcome in outcomes] == [True, True]


def file_of(models: Models, change: Callable[[ModelConfig], None], path: Path) -> None:
    config = config_of()
    change(config)
    PythonBackend().open(Source("m", 1, models.root / "m", path, models.root), config).close()


def test_the_file_may_have_another_name_and_may_be_the_version_itself(models: Models) -> None:
    path = models.write(HEAD + "    def execute(self, requests):\n        return []\n", file="my-model.py")
    file_of(models, lambda config: setattr(config, "default_model_filename", "my-model.py"), path.parent)
    file_of(models, lambda config: None, path)


def test_a_missing_file_or_one_outside_of_the_folder_is_refused(models: Models) -> None:
    folder = models.write("").parent
    models.write(HEAD, name="other")
    with pytest.raises(NotFoundError, match=r"^unable to find '1/absent\.py' for model 'm'"):
        file_of(models, lambda config: setattr(config, "default_model_filename", "absent.py"), folder)
    with pytest.raises(ConfigError, match="leaves the version's directory"):
        file_of(models, lambda config: setattr(config, "default_model_filename", "../../other/1/model.py"), folder)
