"""Models that decide themselves whether they are ready."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import Serving
from remora.backends import model_readiness
from remora.backends.model_readiness import SharedAnswer, are_ready
from remora.backends.worker.model import WorkerInstance
from remora.backends.worker.wire import MessageKind
from remora.calls import ModelReady
from remora.engine import Engine
from support.servers.live_server import status_of

MODEL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def is_ready(self):
        {body}

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("O", pb_utils.get_input_tensor_by_name(r, "I").as_numpy())])
            for r in requests
        ]
"""
CONFIG = """
backend: "python"
input {{ name: "I" data_type: TYPE_INT32 dims: 1 }} output {{ name: "O" data_type: TYPE_INT32 dims: 1 }}
parameters {{ key: "ISOLATION" value {{ string_value: "{isolation}" }} }}
instance_group {{ count: 2 kind: KIND_CPU }}
"""
BODIES = {
    "ready": "return True",
    "busy": "return False",
    "broken": "raise ValueError('no weights')",
    "odd": "return 'yes'",
}


@pytest.fixture(params=["thread", "process"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for name, body in BODIES.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text(MODEL.format(body=body))
        (tmp_path / name / "config.pbtxt").write_text(CONFIG.format(isolation=request.param))
    return tmp_path


@pytest.fixture
def engine(repository: Path) -> Iterator[Engine]:
    with Engine(repository) as engine:
        yield engine


def test_a_model_is_ready_only_if_it_says_so(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = {name: engine.perform(ModelReady(name)) for name in BODIES}
    assert found == {"ready": True, "busy": False, "broken": False, "odd": False}
    assert "model 'broken' is not ready: is_ready of 'broken_0_0' failed: " in caplog.text
    assert "ValueError: no weights" in caplog.text
    assert "is_ready of 'odd_0_0' returned str, expected True or False" in caplog.text


def test_a_model_that_is_not_ready_still_answers_requests(engine: Engine) -> None:
    import numpy as np

    assert engine.infer("busy", {"I": np.array([7], "i4")})["O"].tolist() == [7]


@pytest.mark.parametrize("flags", [(), ("--frontends=2",)], ids=["one process", "front processes"])
def test_both_front_ends_ask_the_model(repository: Path, serving: Serving, flags: tuple[str, ...]) -> None:
    grpc = pytest.importorskip("tritonclient.grpc")
    with serving(repository, *flags) as server, grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as asking:
        for name, ready in {"ready": True, "busy": False, "broken": False}.items():
            assert status_of(server.http, f"/v2/models/{name}/ready") == (200 if ready else 400)
            assert asking.is_model_ready(name) is ready
        assert status_of(server.http, "/v2/health/ready") == 200


class Question:
    """Model that answers once it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.begun = 0

    def __call__(self) -> bool:
        self.begun += 1
        return self.released.wait(10)


def test_questions_at_the_same_time_share_an_answer() -> None:
    shared, question = SharedAnswer(), Question()
    first, second = shared.get(question, "m"), shared.get(question, "m")
    assert first is second
    question.released.set()
    assert first.result(10)
    assert question.begun == 1
    assert shared.get(question, "m") is not first


def test_a_question_that_cannot_be_asked_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bool:
        raise RuntimeError("the worker is gone")

    shared = SharedAnswer()
    assert not are_ready("m", [lambda: shared.get(fail, "m")])
    assert "model 'm' is not ready: the worker is gone" in caplog.text


def test_without_a_thread_to_ask_in_a_model_is_not_ready(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Future[bool]:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(model_readiness, "run_in_daemon", refuse)
    assert not are_ready("m", [lambda: SharedAnswer().get(lambda: True, "m")])
    assert "model 'm' is not ready: can't start new thread" in caplog.text


def test_a_model_that_hangs_is_not_ready_and_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    shared, question = SharedAnswer(), Question()
    for _ in range(3):
        assert not are_ready("m", [lambda: shared.get(question, "m")], limit_s=0.0)
    assert "its is_ready has not returned for 0 s" in caplog.text
    late = shared.get(question, "m")
    question.released.set()
    assert are_ready("m", [lambda: late])
    assert question.begun == 1


def test_workers_without_a_process_are_waited_for_together() -> None:
    workers = [object.__new__(WorkerInstance) for _ in range(2)]
    question = Question()

    def request(_: MessageKind) -> list[Any]:
        return [SimpleNamespace(head=SimpleNamespace(fields={"ready": question()}))]

    for worker in workers:
        worker.name, worker._readiness = "m_0", SharedAnswer()
        worker.supervisor = SimpleNamespace(request=request)  # type: ignore[assignment]
    answers = [worker._ask_ready() for worker in workers]
    assert [answer.done() for answer in answers] == [False, False]
    question.released.set()
    assert [answer.result(10) for answer in answers] == [True, True]
