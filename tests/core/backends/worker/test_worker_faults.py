"""Faults of Python models in real worker processes, and their limits."""

from __future__ import annotations

import logging
import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from remora.backends import Execution
from remora.backends.worker import connection as connections
from remora.backends.worker import supervisor as supervisors
from remora.backends.worker.logs import LINES_PER_SECOND
from remora.backends.worker.model import WorkerInstance, WorkerModel
from remora.errors import ConfigError, InternalError, InvalidArgumentError, NotFoundError, RemoraError, UnavailableError
from remora.messages import Request, Response, Streamed
from remora.proto.model_config_pb2 import ModelConfig
from support.models.process_models import ANSWER, CONFIG, Models, ends, gone, once, request, run, values


def failure(instance: WorkerInstance, *requests: Request) -> str:
    with pytest.raises(InternalError) as caught:
        run(instance, *requests)
    assert caught.value.from_model
    return str(caught.value)


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
        assert asked.wait(60)
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
    said = failure(instance, request("now"))
    assert said.startswith("Stub process 'm_0_0' is not healthy: ")
    assert text in said
    assert values(run(instance)[0]) == [7]
    assert instance.supervisor.pid != pid
    assert gone(pid)
    assert instance.capabilities.trouble == ""


def unavailable(instance: WorkerInstance, *requests: Request) -> UnavailableError:
    with pytest.raises(UnavailableError) as caught:
        run(instance, *requests)
    return caught.value


def test_a_worker_that_dies_before_it_has_answered_anything_is_started_later_and_requests_may_be_repeated(
    fast: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_DELAY_S", "LONGEST_DELAY_S"):  # longer than this test
        monkeypatch.setattr(supervisors, name, 1000.0)
    instance = fast.start(once("os._exit(3)"))
    failure(instance, request("now"))
    failure(instance, request("now"))
    error = unavailable(instance, request("", np.zeros(1, np.int32)))
    assert 990 < error.retry_after_s <= 1000
    assert "exit code 3" in str(error)
    assert re.search(r"starts it again in \d+\.\d s", str(error))
    assert "exit code 3" in instance.capabilities.trouble
    instance.close()


def test_a_worker_that_has_answered_is_started_again_at_once_however_often_it_dies(
    fast: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_DELAY_S", "LONGEST_DELAY_S"):
        monkeypatch.setattr(supervisors, name, 1000.0)
    instance = fast.start(once("os._exit(3)"))
    for number in range(3):
        assert values(run(instance)[0]) == [7]
        failure(instance, request("now", np.array([number], np.int32)))
    assert values(run(instance)[0]) == [7]


def test_a_request_that_has_ended_two_workers_is_refused_and_its_neighbours_run(fast: Models) -> None:
    instance = fast.start(once("os._exit(3)"))
    poison, good = np.array([666], np.int32), request("good", np.array([1], np.int32))
    error = unavailable(instance, request("now", poison), good)
    assert "exit code 3" in str(error), "any of them may have been the cause"
    assert error.retry_after_s == 1
    third = request("", np.array([2], np.int32))
    assert values(run(instance, third)[0]) == [7]
    ended, *others = run(instance, request("now", poison), good, third)
    assert [values(other) for other in others] == [[7], [7]]
    assert isinstance(ended, InternalError)
    pid = instance.supervisor.wait_for_connection().process.pid
    with pytest.raises(InvalidArgumentError, match="is refused"):
        run(instance, request("again", poison))
    refused, answered = run(instance, request("now", poison), good)
    assert values(answered) == [7]
    assert isinstance(refused, InvalidArgumentError)
    assert "[request id: now] the request is refused: the model's process has ended twice" in str(refused)
    assert instance.supervisor.pid == pid
    assert values(run(instance, request("", poison.repeat(2)))[0]) == [7]


def test_a_worker_that_does_not_come_back_is_refused_with_the_reason(fast: Models) -> None:
    marker = fast.root / "started"
    instance = fast.start(
        f"    def initialize(self, args):\n        assert not os.path.exists({str(marker)!r}), 'once is enough'\n"
        f"        open({str(marker)!r}, 'w').close()\n" + once("os._exit(3)")
    )
    failure(instance, request("now"))
    assert "once is enough" in str(unavailable(instance, request("", np.zeros(1, np.int32))))
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
    assert ended.wait(60)
    assert values(answers[0].outcome) == [7]
    assert "exit code 3" in str(answers[-1].outcome)


def test_a_model_that_never_returns_is_ended_when_its_time_is_over(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = models.root / "runs"
    clock = SimpleNamespace(monotonic=lambda: 1001.0 if runs.exists() else 0.0)
    monkeypatch.setattr(connections, "time", clock)
    fault = f"open({str(runs)!r}, 'w').close()\nwhile True: pass"
    instance = models.start(once(fault), execute_timeout="1000")
    assert "did not answer within 1000 s" in failure(instance, request("now"))
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


def test_a_request_too_large_for_the_worker_fails_alone(fast: Models) -> None:
    instance = fast.start(ANSWER, transfer_limit_byte_size=str(1 << 16))
    large = request("", np.zeros(1 << 16, np.int32))
    outcomes = run(instance, request(), large, request())
    assert [values(outcome) for outcome in (outcomes[0], outcomes[2])] == [[7], [7]]
    assert isinstance(outcomes[1], InternalError)
    assert "more than the 65536" in str(outcomes[1])


def test_requests_too_large_for_one_message_run_in_several(fast: Models) -> None:
    instance = fast.start(ANSWER, transfer_limit_byte_size=str(1 << 16))
    outcomes = run(instance, *(request("", np.zeros(9_000, np.int32)) for _ in range(5)))
    assert [values(outcome) for outcome in outcomes] == [[7]] * 5


def test_bytes_too_large_for_the_worker_are_refused_without_waiting_for_room(fast: Models) -> None:
    instance = fast.start(ANSWER, transfer_limit_byte_size=str(1 << 16))
    large = np.empty(1, object)
    large[0] = b"x" * (1 << 17)
    with pytest.raises(InternalError, match="more than the 65536"):
        run(instance, request("", large))


def test_an_answer_too_large_for_a_message_fails_alone(fast: Models) -> None:
    big = "    def execute(self, requests):\n        sizes = [1 << 16, 1, 9000, 9000]\n" + (
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.zeros(n, np.int32))]) for n in sizes]\n"
    )
    instance = fast.start(big, transfer_limit_byte_size=str(1 << 16))
    late: dict[int, Any] = {}
    arrived = threading.Semaphore(0)

    def take(index: int, streamed: Streamed) -> None:
        late[index] = str(streamed.outcome) if isinstance(streamed.outcome, RemoraError) else values(streamed.outcome)
        arrived.release()

    execution = Execution([request() for _ in range(4)], take)
    outcomes = list(instance.execute(execution))
    assert outcomes == [None] * 4
    assert execution.late == {0, 1, 2, 3}
    for _ in range(4):
        assert arrived.acquire(timeout=60)
    assert "transfer-limit-byte-size" in late[0]
    assert [len(late[index]) for index in (1, 2, 3)] == [1, 9000, 9000]


def test_an_answer_that_cannot_be_encoded_fails_alone(fast: Models) -> None:
    instance = fast.start(
        "    def execute(self, requests):\n        first, second = answer(), answer()\n"
        "        first._parameters = {'a': object()}\n        return [first, second]\n"
    )
    first, second = run(instance, request(), request())
    assert "cannot be sent" in str(first)
    assert values(second) == [7]


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
