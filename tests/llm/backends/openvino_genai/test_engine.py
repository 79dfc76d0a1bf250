"""Tests of ``remora_llm.backends.openvino_genai.engine`` with a fake; test_openvino_genai.py has the library itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from remora.errors import InternalError, QueueFullError, UnavailableError
from remora_llm.backends.openvino_genai.engine import UNSUPPORTED, Library, OpenVinoEngine
from remora_llm.generation.task_book import MAX_WAITING
from remora_llm.generation.tasks import ModelFacts, Sampling, Task
from remora_llm.testing import BYTE_VOCABULARY, ByteTokens, Collector
from support.process.eventually import eventually
from support.process.no_threads import refuse_threads

FACTS = ModelFacts(context=10_000, vocabulary=BYTE_VOCABULARY, unsupported=UNSUPPORTED)
STATUS = SimpleNamespace(RUNNING="running", FINISHED="finished", IGNORED="ignored")


@dataclass
class FakeHandle:
    """``GenerationHandle`` of one request."""

    limit: int
    written: list[int] = field(default_factory=list)
    count: int = 0
    cancelled: bool = False

    def can_read(self) -> bool:
        return bool(self.written)

    def read(self) -> dict[int, Any]:
        tokens, self.written = self.written, []
        return {0: SimpleNamespace(generated_ids=tokens, generated_log_probs=[])}

    def get_status(self) -> str:
        return STATUS.FINISHED if self.cancelled or self.count >= self.limit else STATUS.RUNNING

    def cancel(self) -> None:
        self.cancelled = True


class FakePipeline:
    """``ContinuousBatchingPipeline`` that writes an "x" for every request in a step, while ``goes`` is set."""

    def __init__(self) -> None:
        self.handles: dict[int, FakeHandle] = {}
        self.goes = threading.Event()
        self.goes.set()
        self.fault = ""

    def add_request(self, number: int, prompt: object, config: Any) -> FakeHandle:
        self.handles[number] = FakeHandle(config.max_new_tokens)
        return self.handles[number]

    def has_non_finished_requests(self) -> bool:
        return any(each.get_status() == STATUS.RUNNING for each in self.handles.values())

    def step(self) -> None:
        assert self.goes.wait(60)
        if self.fault:
            raise RuntimeError(self.fault)
        for each in self.handles.values():
            if each.get_status() == STATUS.RUNNING:
                each.written.append(ord("x"))
                each.count += 1

    def get_metrics(self) -> Any:
        return SimpleNamespace(cache_usage=50.0)


@pytest.fixture
def pipelines() -> list[FakePipeline]:
    """Pipelines that the library has left to open."""
    return [FakePipeline()]


@pytest.fixture
def engine(pipelines: list[FakePipeline]) -> Iterator[OpenVinoEngine]:
    genai = SimpleNamespace(GenerationConfig=SimpleNamespace, GenerationStatus=STATUS)
    library = Library(genai, lambda values: values, lambda: pipelines.pop())
    made = OpenVinoEngine("m", library, FACTS, ByteTokens(), time.monotonic_ns, capacity=2000)
    yield made
    made.close()


def task_of(**changes: Any) -> Task:
    return Task(tuple(b"prompt"), **{"max_tokens": 5, "sampling": Sampling(temperature=0), **changes})


def test_answers_are_read_as_the_library_writes_them(engine: OpenVinoEngine) -> None:
    tasks, sink = [task_of(choices=2), task_of(max_tokens=3), task_of(max_tokens=0)], Collector()
    for task in tasks:
        engine.begin(task, sink)
    for task in tasks:
        sink.wait(task)
    assert [sink.text(task) for task in tasks] == ["xxxxx", "xxx", ""]
    assert [[end.reason for end in sink.ends(task)] for task in tasks] == [["length"] * 2, ["length"], ["length"]]
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.ended, stats.cache_tokens) == (0, 0, {"length": 4}, 1000)


def test_a_cancelled_task_is_cancelled_in_the_library(engine: OpenVinoEngine) -> None:
    pipeline: FakePipeline = engine._pipeline
    task, sink = task_of(max_tokens=9000), Collector()
    engine.begin(task, sink)
    eventually(lambda: sink.pieces)
    engine.cancel(task)
    sink.wait(task)
    assert [end.reason for end in sink.ends(task)] == ["cancelled"]
    assert [each.cancelled for each in pipeline.handles.values()] == [True]


def test_a_failed_step_ends_its_answers_and_the_pipeline_is_opened_again(
    engine: OpenVinoEngine, pipelines: list[FakePipeline]
) -> None:
    pipelines.append(FakePipeline())
    engine._pipeline.fault = "out of memory"
    failed, task, sink = task_of(), task_of(), Collector()
    engine.begin(failed, sink)
    sink.wait(failed)
    (end,) = sink.ends(failed)
    assert isinstance(end.error, InternalError)
    assert end.error.message == "model 'm' failed in a step: RuntimeError: out of memory"
    engine.begin(task, sink)
    sink.wait(task)
    assert sink.text(task) == "xxxxx"


def test_a_pipeline_that_cannot_be_opened_again_refuses_tasks_with_the_reason(engine: OpenVinoEngine) -> None:
    engine._pipeline.fault = "out of memory"
    task, sink = task_of(), Collector()
    engine.begin(task, sink)
    sink.wait(task)
    eventually(lambda: engine.trouble)
    with pytest.raises(UnavailableError, match=r"cannot run: it failed in a step \(out of memory\) .*; reload it$"):
        engine.begin(task_of(), sink)


def test_tasks_beyond_the_queues_bound_are_refused(engine: OpenVinoEngine) -> None:
    engine._pipeline.goes.clear()
    sink, tasks = Collector(), [task_of(choices=64) for _ in range(MAX_WAITING // 64)]
    for task in tasks:
        engine.begin(task, sink)
    with pytest.raises(QueueFullError, match=f"'m' has {MAX_WAITING} waiting requests"):
        engine.begin(task_of(), sink)
    engine._pipeline.goes.set()
    sink.wait(tasks[-1])
    engine.begin(task := task_of(), sink)
    sink.wait(task)


def test_closing_ends_what_runs_and_what_waits(engine: OpenVinoEngine) -> None:
    pipeline: FakePipeline = engine._pipeline
    running, waiting, sink = task_of(max_tokens=9000), task_of(), Collector()
    engine.begin(running, sink)
    eventually(lambda: sink.pieces)
    pipeline.goes.clear()
    engine.begin(waiting, sink)
    closing = threading.Thread(target=engine.close)
    closing.start()
    pipeline.goes.set()
    closing.join()
    reasons = [str(end.error) for task in (running, waiting) for end in sink.ends(task)]
    assert reasons[0] == "model 'm' was unloaded"
    assert len(reasons) == 2
    with pytest.raises(UnavailableError, match="being unloaded"):
        engine.begin(task_of(), sink)


def test_a_task_for_which_no_thread_can_start_is_refused_and_the_next_runs(
    engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, sink = task_of(), Collector()
    with monkeypatch.context() as without_threads:
        refuse_threads(without_threads)
        with pytest.raises(UnavailableError, match="can't start new thread"):
            engine.begin(task_of(), sink)
    engine.begin(task, sink)
    sink.wait(task)
