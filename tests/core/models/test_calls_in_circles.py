"""Models that call themselves, directly or through others."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from remora.errors import RemoraError
from support.models.calling_models import WAIT_S, Repository, infer

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
