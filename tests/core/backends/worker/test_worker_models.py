"""Python models in real worker processes: what a model can do to its process, and what its server makes of it."""

from __future__ import annotations

import gc
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from held import Held
from remora import custom_metrics
from remora.backends import Execution, Placement, Source
from remora.backends.python import PythonBackend
from remora.backends.worker import supervisor as supervisors
from remora.backends.worker.logs import LINES_PER_SECOND
from remora.backends.worker.model import WorkerInstance, WorkerModel
from remora.errors import ConfigError, InternalError, InvalidArgumentError, NotFoundError
from remora.messages import InferForm, Outcome, Request, Response, Streamed
from remora.proto.model_config_pb2 import ModelConfig
from remora.testing import backend

CONFIG = """
name: "m" backend: "python"
input [{ name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }]
"""
HEAD = """
import logging, os, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

def answer(value=7):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))])

class TritonPythonModel:
"""
ANSWER = "    def execute(self, requests):\n        return [answer() for _ in requests]\n"
SHARED = hasattr(os, "memfd_create")


def once(fault: str) -> str:
    """A model with a fault that only a request called "now" brings out."""
    lines = "".join(f"            {line}\n" for line in fault.splitlines())
    return (
        "    def execute(self, requests):\n        if requests[0].request_id() == 'now':\n"
        + lines
        + "        return [answer() for _ in requests]\n"
    )


def write_model(root: Path, code: str) -> Path:
    path = root / "m" / "1" / "model.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + code, encoding="utf-8")
    return path


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Models:
    """Opens models in worker processes."""

    def __init__(self, root: Path, transport: str) -> None:
        self.root = root
        self.settings = {"isolation": "process", "transport": transport}
        self.opened: list[WorkerModel | WorkerInstance] = []

    def open(self, code: str, config: str = CONFIG, **settings: str) -> WorkerModel:
        path = write_model(self.root, code)
        chosen = {**self.settings, **{key.replace("_", "-"): value for key, value in settings.items()}}
        source = Source("m", 1, path.parents[1], path.parent, self.root, chosen)
        model = PythonBackend().open(source, text_format.Parse(config, ModelConfig()))
        assert isinstance(model, WorkerModel)
        self.opened.append(model)
        return model

    def start(self, code: str, config: str = CONFIG, **settings: str) -> WorkerInstance:
        model = self.open(code, config, **settings)
        instance = model.instance(text_format.Parse(config, ModelConfig()), Placement("m_0_0"))
        assert isinstance(instance, WorkerInstance)
        self.opened.append(instance)
        return instance


@pytest.fixture(params=["memory", "pipe"] if SHARED else ["pipe"])
def models(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Models]:
    opened = Models(tmp_path, request.param)
    yield opened
    for each in reversed(opened.opened):
        each.close()


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Models]:
    """As ``models``, over the transport that the system prefers."""
    opened = Models(tmp_path, "auto")
    yield opened
    for each in reversed(opened.opened):
        each.close()


def request(id: str = "", array: Any = None) -> Request:
    values = np.arange(3, dtype=np.int32) if array is None else array
    return Request(InferForm((), id=id), {"IN": values}, ("OUT",), 1, None)


def run(instance: WorkerInstance, *requests: Request) -> list[Outcome | None]:
    return backend.run(instance, *(requests or (request(),)))


def values(outcome: Outcome | None) -> list[Any]:
    assert isinstance(outcome, Response), outcome
    return list(outcome.outputs[0].data.tolist())


def failure(instance: WorkerInstance, *requests: Request) -> str:
    with pytest.raises(InternalError) as caught:
        run(instance, *requests)
    assert caught.value.from_model
    return str(caught.value)


def gone(pid: int) -> bool:
    """Has the process ended, also for its parent?"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ends(pid: int) -> bool:
    """Does a process that is nobody's child here end, by now or soon?"""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    try:
        return bool(poller.poll(10_000))
    finally:
        os.close(handle)


# -- what models do every day -----------------------------------------------------------------------------------------


def test_a_model_answers_from_another_process(models: Models) -> None:
    instance = models.start(
        "    def execute(self, requests):\n        return [answer(os.getpid()) for _ in requests]\n"
    )
    outcomes = run(instance, request(), request())
    assert [values(outcome) for outcome in outcomes] == [[instance.supervisor.pid]] * 2
    assert instance.supervisor.pid != os.getpid()
    assert not instance.quick


@pytest.mark.parametrize("count", [0, 1, 100, 5_000, 3_000_000])
def test_tensors_of_any_size_go_both_ways(models: Models, count: int) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        "        inputs = [r.inputs()[0].as_numpy() for r in requests]\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', i + 1)]) for i in inputs]\n"
    )
    array = np.arange(count, dtype=np.int32)
    for outcome in run(instance, request("a" * 1000, array), request("b", array[::-1])):
        assert isinstance(outcome, Response)
    first, second = run(instance, request("", array), request("", array[::-1]))
    assert values(first) == (array + 1).tolist()
    assert values(second) == (array[::-1] + 1).tolist()


def test_answers_stay_as_they_are_when_the_model_goes_on(fast: Models) -> None:
    instance = fast.start(
        "    def execute(self, requests):\n"
        "        x = requests[0].inputs()[0].as_numpy()\n"
        "        x += 1\n"
        "        self.kept = getattr(self, 'kept', []) + [x]\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', self.kept[0])])]\n"
    )
    arrays = [np.full(10_000, number, np.int32) for number in range(20)]
    outcomes = [run(instance, request("", array))[0] for array in arrays]
    assert [set(values(outcome)) for outcome in outcomes] == [{1}] * 20
    assert [int(array[0]) for array in arrays] == list(range(20))


def test_bytes_and_parameters_go_both_ways(models: Models) -> None:
    config = CONFIG.replace("TYPE_INT32", "TYPE_STRING")
    instance = models.start(
        "    def execute(self, requests):\n"
        "        r = requests[0]\n"
        "        out = pb_utils.Tensor('OUT', r.inputs()[0].as_numpy()[::-1])\n"
        "        return [pb_utils.InferenceResponse([out], parameters={'seen': r.parameters()})]\n",
        config,
    )
    array = np.array([b"one", b"", b"\xff" * 5000], object)
    (outcome,) = instance.execute(
        Execution([Request(InferForm((), parameters={"p": "ü"}), {"IN": array}, ("OUT",), 1, None)])
    )
    assert values(outcome) == [b"\xff" * 5000, b"", b"one"]
    assert isinstance(outcome, Response)
    assert outcome.parameters == {"seen": '{"p":"ü"}'}


def test_a_model_completes_its_configuration_in_its_process(fast: Models) -> None:
    model = fast.open(
        "    @staticmethod\n    def auto_complete_config(config):\n"
        "        config.set_max_batch_size(8)\n"
        "        config.add_input({'name': 'IN', 'data_type': 'TYPE_INT32', 'dims': [1]})\n"
        "        return config\n" + ANSWER,
        'name: "m" backend: "python"',
    )
    config = text_format.Parse('name: "m" backend: "python"', ModelConfig())
    model.complete(config)
    assert (config.max_batch_size, config.input[0].name) == (8, "IN")


def test_a_decoupled_model_streams_its_answers(models: Models) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        "        def send(sender):\n"
        "            for i in range(100):\n"
        "                sender.send(answer(i))\n"
        "            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)\n"
        "        for r in requests:\n"
        "            threading.Thread(target=send, args=(r.get_response_sender(),)).start()\n",
        CONFIG + "model_transaction_policy { decoupled: true }",
    )
    answers: dict[int, list[Streamed]] = {0: [], 1: []}
    ended = [threading.Event(), threading.Event()]

    def send(index: int, streamed: Streamed) -> None:
        answers[index].append(streamed)
        if streamed.final:
            ended[index].set()

    assert list(instance.execute(Execution([request(), request()], send))) == [None, None]
    for index in (0, 1):
        assert ended[index].wait(20)
        assert [values(each.outcome) for each in answers[index][:-1]] == [[number] for number in range(100)]
        assert answers[index][-1] == Streamed(None, True)


def test_a_slow_client_holds_up_its_own_stream_alone(fast: Models) -> None:
    instance = fast.start(
        "    def execute(self, requests):\n"
        "        def send(r, sender):\n"
        "            for i in range(100):\n"
        "                sender.send(answer(i))\n"
        "                print('sent', r.request_id(), i)\n"
        "            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)\n"
        "        for r in requests:\n"
        "            threading.Thread(target=send, args=(r, r.get_response_sender())).start()\n",
        CONFIG + "model_transaction_policy { decoupled: true }",
    )
    seen: dict[int, int] = {0: 0, 1: 0}
    reads, fast_one_ended, slow_one_ended = threading.Event(), threading.Event(), threading.Event()

    def send(index: int, streamed: Streamed) -> None:
        if index == 0:
            assert reads.wait(20)
        seen[index] += 1
        if streamed.final:
            (fast_one_ended if index else slow_one_ended).set()

    instance.execute(Execution([request("slow"), request("fast")], send))
    assert fast_one_ended.wait(20)
    assert seen == {0: 0, 1: 101}
    reads.set()
    assert slow_one_ended.wait(20)
    assert seen[0] == 101


def test_a_cancelled_request_can_be_seen_in_the_worker(models: Models) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        "        while not requests[0].is_cancelled():\n"
        "            time.sleep(0.001)\n"
        "        return [answer()]\n"
    )
    asked = request()
    threading.Timer(0.05, asked.cancel).start()
    assert values(run(instance, asked)[0]) == [7]


def test_finalize_is_called(models: Models) -> None:
    marker = models.root / "finalized"
    instance = models.start(ANSWER + f"    def finalize(self):\n        open({str(marker)!r}, 'w').close()\n")
    pid = instance.supervisor.pid
    instance.close()
    assert marker.exists()
    assert gone(pid)


def test_metrics_of_a_worker_are_the_servers(models: Models) -> None:
    instance = models.start(
        "    def initialize(self, args):\n"
        "        self.family = pb_utils.MetricFamily('worker_things', 'things', pb_utils.MetricFamily.COUNTER)\n"
        "        self.metric = self.family.Metric({'kind': 'a'})\n"
        "    def execute(self, requests):\n"
        "        self.metric.increment(2)\n"
        "        return [answer(int(self.metric.value())) for _ in requests]\n"
    )
    run(instance)
    assert values(run(instance)[0]) == [4]
    (family,) = [family for family in custom_metrics.snapshot() if family.name == "worker_things"]
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"kind": "a"}, 4.0)]
    instance.close()
    assert not [family for family in custom_metrics.snapshot() if family.name == "worker_things"]


def test_a_metric_that_cannot_be_made_is_the_models_exception(fast: Models) -> None:
    with pytest.raises(InternalError, match=r"TritonModelException.*not a metric name"):
        fast.start(
            ANSWER + "    def initialize(self, args):\n"
            "        pb_utils.MetricFamily('not a name', 'x', pb_utils.MetricFamily.GAUGE)\n"
        )


def test_what_a_model_prints_and_logs_reaches_the_log_with_the_requests_id(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    instance = models.start(
        once(
            "print('printed')\nprint('complained', file=sys.stderr)\n"
            "logging.getLogger('lib').warning('a %s', 'warning')\n"
            "pb_utils.Logger.log_error('an error')"
        )
    )
    run(instance, request("now"))
    instance.close()
    lines = {record.getMessage(): record for record in caplog.records if record.name == "remora.model.m"}
    said = {text.removeprefix("m_0_0: "): record.levelname for text, record in lines.items()}
    assert said["lib: a warning [request now]"] == "WARNING"
    assert said["an error [request now]"] == "ERROR"
    assert any(text.startswith("printed") and level == "INFO" for text, level in said.items())
    assert any(text.startswith("complained") and level == "WARNING" for text, level in said.items())


# -- what models do wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("    def execute(self, requests:\n", InternalError, "SyntaxError"),
        (ANSWER + "    def initialize(self, args):\n        raise ValueError('no')\n", InternalError, "ValueError: no"),
        (ANSWER + "    def initialize(self, args):\n        os._exit(4)\n", InternalError, "exit code 4"),
        ("    pass\n", InternalError, "does not implement `execute`"),
    ],
)
def test_a_model_that_does_not_start_says_why(models: Models, code: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        models.start(code)
    assert "starts it again" not in str(caught.value)


def test_a_load_waits_longer_for_its_process_than_a_request_for_a_new_one(
    fast: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, start, link = threading.Event(), supervisors.WorkerProcess, supervisors.Supervisor.wait_for_connection

    def started_late(*arguments: Any) -> Any:
        assert asked.wait(30)
        return start(*arguments)

    def ask(self: supervisors.Supervisor) -> Any:
        asked.set()
        return link(self)

    monkeypatch.setattr(supervisors, "WorkerProcess", started_late)
    monkeypatch.setattr(supervisors.Supervisor, "wait_for_connection", ask)
    monkeypatch.setattr(supervisors, "RESTART_WAIT_S", 0.0)
    assert values(run(fast.start(ANSWER))[0]) == [7]


def test_a_file_that_is_not_there_is_named(fast: Models) -> None:
    with pytest.raises(NotFoundError, match=r"other\.py"):
        fast.open(ANSWER, CONFIG + 'default_model_filename: "other.py"')


def test_a_configuration_that_contradicts_the_model_is_refused_in_tritons_words(fast: Models) -> None:
    model = fast.open(
        "    @staticmethod\n    def auto_complete_config(config):\n"
        "        config.add_input({'name': 'IN', 'data_type': 'TYPE_FP32', 'dims': [1]})\n"
        "        return config\n" + ANSWER
    )
    with pytest.raises(InternalError, match="configuration expects datatype TYPE_INT32 for input 'IN'"):
        model.complete(text_format.Parse(CONFIG, ModelConfig()))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raise ValueError('raised')", r"message: ValueError: raised\n\nAt:\n  .*model\.py\(\d+\): execute"),
        ("return []", r"InferenceRequest\(s\) size is:1, and InferenceResponse\(s\) size is:0"),
        ("return [answer()] * 2", r"and InferenceResponse\(s\) size is:2"),
        ("return 'text'", "Expected a list"),
        ("sys.exit(1)", "SystemExit: 1"),
    ],
)
def test_a_fault_fails_its_own_requests(models: Models, fault: str, text: str) -> None:
    instance = models.start(once(fault))
    with pytest.raises(InternalError, match=text) as caught:
        run(instance, request("now"))
    assert "m_0_0" in str(caught.value)
    pid = instance.supervisor.pid
    assert values(run(instance)[0]) == [7]
    assert instance.supervisor.pid == pid


def test_none_is_an_error_of_that_request(models: Models) -> None:
    instance = models.start("    def execute(self, requests):\n        return [None, answer()]\n")
    first, second = run(instance, request(), request())
    assert isinstance(first, InternalError)
    assert "gave no response" in str(first)
    assert values(second) == [7]


def test_another_datatype_than_declared_is_answered_as_it_is(models: Models) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.array([1.5]))])]\n"
    )
    (outcome,) = run(instance)
    assert isinstance(outcome, Response)
    assert (outcome.outputs[0].datatype, values(outcome)) == ("FP64", [1.5])


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("os._exit(3)", "exit code 3"),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
        ("os.abort()", "SIGABRT"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
    ],
)
def test_a_dead_worker_is_told_of_and_started_again(models: Models, fault: str, text: str) -> None:
    instance = models.start(once(fault))
    pid = instance.supervisor.pid
    said = failure(instance, request("now"), request("neighbour"))
    assert said.startswith("Stub process 'm_0_0' is not healthy: ")
    assert text in said
    assert values(run(instance)[0]) == [7]
    assert instance.supervisor.pid != pid
    assert gone(pid)
    assert instance.capabilities.trouble == ""


def test_a_worker_that_dies_again_and_again_is_refused_at_once_and_says_when_it_is_back(fast: Models) -> None:
    instance = fast.start(once("os._exit(3)"))
    failure(instance, request("now"))
    run(instance)
    failure(instance, request("now"))
    said = failure(instance)
    assert "exit code 3" in said
    assert "starts it again in 0." in said
    assert "exit code 3" in instance.capabilities.trouble
    instance.close()


def test_a_worker_that_does_not_come_back_is_refused_with_the_reason(fast: Models) -> None:
    marker = fast.root / "started"
    instance = fast.start(
        f"    def initialize(self, args):\n        assert not os.path.exists({str(marker)!r}), 'once is enough'\n"
        f"        open({str(marker)!r}, 'w').close()\n" + once("os._exit(3)")
    )
    failure(instance, request("now"))
    assert "once is enough" in failure(instance)
    assert "once is enough" in instance.capabilities.trouble


def test_a_stream_of_a_dead_worker_ends_with_an_error(models: Models) -> None:
    instance = models.start(
        "    def execute(self, requests):\n"
        "        self.sender = requests[0].get_response_sender()\n"
        "        self.sender.send(answer())\n"
        "        threading.Thread(target=die, args=(self.sender,)).start()\n"
        "def die(sender):\n"
        "    while not sender.is_cancelled():\n"
        "        time.sleep(0.002)\n"
        "    os._exit(3)\n",
        CONFIG + "model_transaction_policy { decoupled: true }",
    )
    answers: list[Streamed] = []
    ended = threading.Event()

    def send(_: int, streamed: Streamed) -> None:
        answers.append(streamed)
        if streamed.final:
            ended.set()

    asked = request()
    instance.execute(Execution([asked], send))
    asked.cancel()
    assert ended.wait(20)
    assert values(answers[0].outcome) == [7]
    assert "exit code 3" in str(answers[-1].outcome)


def test_a_model_that_never_returns_is_ended_when_its_time_is_over(models: Models) -> None:
    instance = models.start(once("while True: pass"), execute_timeout="0.3")
    assert "did not answer within 0.3 s" in failure(instance, request("now"))
    assert values(run(instance)[0]) == [7]


def test_closing_does_not_wait_for_a_finalize_that_never_returns(fast: Models) -> None:
    instance = fast.start(
        ANSWER + "    def finalize(self):\n        while True: time.sleep(1)\n", finalize_timeout="0.2"
    )
    pid = instance.supervisor.pid
    instance.close()
    assert gone(pid)


def test_what_a_model_has_started_ends_with_it(models: Models) -> None:
    instance = models.start(
        "    def initialize(self, args):\n"
        "        import subprocess\n"
        "        self.child = subprocess.Popen(['sleep', '1000'])\n"
        "        self.forked = os.fork()\n"
        "        if self.forked == 0:\n"
        "            time.sleep(1000)\n"
        "    def execute(self, requests):\n"
        "        pids = np.array([self.child.pid, self.forked])\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', pids)])]\n"
        "    def finalize(self):\n        os._exit(0)\n"
    )
    pids = values(run(instance)[0])
    instance.close()
    for pid in pids:
        assert ends(pid)


def test_a_fork_that_comes_back_from_the_model_answers_nothing(models: Models) -> None:
    instance = models.start(once("os.fork()"))
    assert values(run(instance, request("now"))[0]) == [7]
    assert values(run(instance)[0]) == [7]


def most_lines(seconds: float) -> float:
    """What may be logged in that time, which may touch two seconds more than it has; and what is said of the rest."""
    return LINES_PER_SECOND * (seconds + 2) * 1.1


def test_a_flood_on_stdout_neither_blocks_nor_fills_the_log(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    instance = models.start(once("for _ in range(300):\n    print('x' * 100_000)\n    print('y\\n' * 1000)"))
    begin = time.monotonic()
    assert values(run(instance, request("now"))[0]) == [7]
    assert values(run(instance)[0]) == [7]
    instance.close()
    assert len(caplog.records) < most_lines(time.monotonic() - begin)


def test_a_flood_of_log_lines_neither_blocks_nor_fills_the_log(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    instance = models.start(once("for i in range(20_000): logging.warning('line %d', i)"))
    begin = time.monotonic()
    assert values(run(instance, request("now"))[0]) == [7]
    assert len(caplog.records) < most_lines(time.monotonic() - begin)


def test_memory_ends_at_the_limit(models: Models) -> None:
    instance = models.start(once("self.big = np.ones(3 << 30, np.uint8)"), memory_limit=str(2 << 30))
    assert "MemoryError" in failure(instance, request("now"))
    assert values(run(instance)[0]) == [7]


def test_inputs_larger_than_what_may_be_on_its_way_are_refused(fast: Models) -> None:
    instance = fast.start(ANSWER, transfer_limit_byte_size=str(1 << 16))
    said = r"more than the 65536.*transfer-limit-byte-size"
    with pytest.raises(InternalError, match=said):
        run(instance, request("", np.zeros(1 << 16, np.int32)))
    assert values(run(instance)[0]) == [7]


def test_outputs_larger_than_what_may_be_on_its_way_are_refused(fast: Models) -> None:
    big = "return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.zeros(1 << 16, np.int32))])]"
    instance = fast.start(once(big), transfer_limit_byte_size=str(1 << 16))
    assert "transfer-limit-byte-size" in failure(instance, request("now"))
    assert values(run(instance)[0]) == [7]


def test_a_model_waits_while_its_answers_are_not_taken_away(fast: Models) -> None:
    instance = fast.start(
        "    def execute(self, requests):\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.zeros(6000, np.int32))])]\n",
        transfer_limit_byte_size=str(1 << 16),
    )
    kept = [run(instance), run(instance)]
    threading.Timer(0.1, kept.clear).start()
    assert len(values(run(instance)[0])) == 6000


@pytest.mark.parametrize("value", ["fast", "-1"])
def test_a_setting_that_is_none_is_refused_by_name(fast: Models, value: str) -> None:
    with pytest.raises(ConfigError, match=f"execute-timeout={value}"):
        fast.open(ANSWER, execute_timeout=value)


def test_a_model_chooses_its_isolation_itself(fast: Models) -> None:
    config = CONFIG + 'parameters { key: "ISOLATION" value { string_value: "process" } }'
    fast.settings["isolation"] = "thread"
    assert isinstance(fast.open(ANSWER, config), WorkerModel)
    with pytest.raises(InvalidArgumentError, match="ISOLATION of model 'm': 'cloud' must be one of process, thread"):
        fast.open(ANSWER, CONFIG + 'parameters { key: "ISOLATION" value { string_value: "cloud" } }')


# -- what is left behind ----------------------------------------------------------------------------------------------


def test_no_memory_that_is_shared_with_a_worker_has_a_name_in_dev_shm(fast: Models) -> None:
    instance = fast.start(ANSWER)
    run(instance, request("", np.zeros(1 << 20, np.int32)))
    for pid in (os.getpid(), instance.supervisor.pid):
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "/memfd:" in mapped, "where what is shared is to be seen"
        assert "/dev/shm/" not in mapped


def test_fifty_lives_leave_neither_descriptors_nor_processes_nor_threads(tmp_path: Path) -> None:
    def cycle() -> int:
        models = Models(tmp_path, "auto")
        instance = models.start(ANSWER)
        pid = instance.supervisor.pid
        assert values(run(instance, request("", np.zeros(1 << 16, np.int32)))[0]) == [7]
        for each in reversed(models.opened):
            each.close()
        return pid

    for _ in range(5):
        cycle()
    gc.collect()
    before = Held.now()
    resident = resident_bytes()
    pids = [cycle() for _ in range(50)]
    gc.collect()
    assert before.grown() == ([], 0)
    assert all(gone(pid) for pid in pids)
    assert resident_bytes() - resident < 5 << 20


SERVER = """
import sys, time
from remora import Engine
engine = Engine(sys.argv[1], backend_config=("python,isolation=process",)).start()
print(engine.infer("m", {"IN": [0]})["OUT"][0], flush=True)
time.sleep(1000)
"""


def test_a_worker_ends_with_its_server_however_that_ends(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "    def execute(self, requests):\n        return [answer(os.getpid()) for _ in requests]\n",
    )
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    assert not gone(pid)
    server.kill()
    server.communicate()
    assert ends(pid)
