"""Python models in real worker processes: tensors, streams, logs, and no leftovers."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from remora import custom_metrics
from remora.backends import Execution
from remora.errors import InternalError
from remora.messages import InferForm, Request, Response, Streamed
from remora.proto.model_config_pb2 import ModelConfig
from support.models.process_models import ANSWER, CONFIG, Models, ends, gone, once, request, run, values, write_model
from support.process.eventually import eventually
from support.process.held import Held

PATIENCE_S = 60.0
LIVES = 50 if os.environ.get("REMORA_SOAK") else 15


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
        assert ended[index].wait(PATIENCE_S)
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
            assert reads.wait(PATIENCE_S)
        seen[index] += 1
        if streamed.final:
            (fast_one_ended if index else slow_one_ended).set()

    instance.execute(Execution([request("slow"), request("fast")], send))
    assert fast_one_ended.wait(PATIENCE_S)
    assert seen == {0: 0, 1: 101}
    reads.set()
    assert slow_one_ended.wait(PATIENCE_S)
    assert seen[0] == 101


def test_a_cancelled_request_can_be_seen_in_the_worker(models: Models) -> None:
    runs = models.root / "runs"
    instance = models.start(
        "    def execute(self, requests):\n"
        f"        open({str(runs)!r}, 'w').close()\n"
        "        while not requests[0].is_cancelled():\n"
        "            time.sleep(0.001)\n"
        "        return [answer()]\n"
    )
    asked = request()
    with ThreadPoolExecutor(1) as pool:
        outcomes = pool.submit(run, instance, asked)
        eventually(runs.exists)
        asked.cancel()
        assert values(outcomes.result(PATIENCE_S)[0]) == [7]


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


# -- what is left behind ----------------------------------------------------------------------------------------------


def test_no_memory_that_is_shared_with_a_worker_has_a_name_in_dev_shm(fast: Models) -> None:
    def mapped(pid: int, where: str) -> set[str]:
        return {line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if where in line}

    before = mapped(os.getpid(), "/dev/shm/")  # of earlier tests
    instance = fast.start(ANSWER)
    run(instance, request("", np.zeros(1 << 20, np.int32)))
    for pid in (os.getpid(), instance.supervisor.pid):
        assert mapped(pid, "/memfd:"), "where what is shared is to be seen"
        assert mapped(pid, "/dev/shm/") <= before


def test_worker_lives_leave_neither_descriptors_nor_processes_nor_threads(tmp_path: Path) -> None:
    def cycle() -> int:
        models = Models(tmp_path, "auto")
        instance = models.start(ANSWER)
        pid = instance.supervisor.pid
        assert values(run(instance, request("", np.zeros(1 << 16, np.int32)))[0]) == [7]
        for each in reversed(models.opened):
            each.close()
        return pid

    for _ in range(4):
        cycle()
    gc.collect()
    before = Held.now()
    growths: list[int] = []
    while len(growths) < 3 and (not growths or growths[-1] >= LIVES * (100 << 10)):
        resident = resident_bytes()
        pids = [cycle() for _ in range(LIVES)]
        gc.collect()
        assert before.grown() == ([], 0)
        assert all(gone(pid) for pid in pids)
        growths.append(resident_bytes() - resident)
    assert min(growths) < LIVES * (100 << 10), "a leak grows each time, what other threads allocate does not"


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
