"""Tests of ``remora_llm.backends.vllm.engine`` with a fake of vLLM's ``AsyncLLM``; test_vllm.py has vLLM itself."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from remora.errors import InternalError, InvalidArgumentError, QueueFullError, RemoraError, UnavailableError
from remora_llm.backends.vllm.engine import GRAMMARS, UNSUPPORTED, CacheGauges, Library, LoopThread, VllmEngine
from remora_llm.generation.task_book import MAX_WAITING
from remora_llm.generation.tasks import Grammar, ModelFacts, ParameterError, Sampling, Task
from remora_llm.testing import BYTE_VOCABULARY, ByteTokens, Collector
from support.process.eventually import eventually

FACTS = ModelFacts(
    context=2000,
    vocabulary=BYTE_VOCABULARY,
    grammars=frozenset(GRAMMARS),
    unsupported=UNSUPPORTED,
    adapters=("french", "legal"),
)


class RefusedError(Exception):
    """vLLM's error for a request that it does not accept."""


def sampling_params(**values: Any) -> SimpleNamespace:
    if values["temperature"] == 99:
        raise RefusedError("too hot")
    return SimpleNamespace(**values)


@dataclass
class FakeLlm:
    """``AsyncLLM`` that writes the letters of the adapter's name, one in each turn of the loop.

    It writes the first ``most_tokens`` of an answer, and waits for the others forever.
    """

    begun: list[tuple[str, Any]] = field(default_factory=list)
    salts: list[str | None] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    errored = False
    dead_error = "EngineDeadError"
    fails_after = most_tokens = 1 << 30
    closed = False
    output_handler: asyncio.Future[None] | None = None
    reads_at_shutdown = False

    async def generate(
        self, prompt: dict[str, Any], parameters: Any, key: str, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        self.begun.append((key, lora_request))
        self.salts.append(prompt.get("cache_salt"))
        self.output_handler = self.output_handler or asyncio.get_running_loop().create_future()
        name = lora_request.name if lora_request is not None else "base"
        for place in range(parameters.max_tokens):
            await asyncio.sleep(0)
            if place >= self.most_tokens:
                await asyncio.Event().wait()
            if place >= self.fails_after:
                self.errored = True
                raise RuntimeError("the worker was killed")
            last = place + 1 == parameters.max_tokens
            made = SimpleNamespace(
                token_ids=[ord(name[place % len(name)])], logprobs=None, finish_reason="length" if last else None
            )
            yield SimpleNamespace(outputs=[made], num_cached_tokens=0)

    async def abort(self, key: str) -> None:
        self.aborted.append(key)

    def shutdown(self) -> None:
        self.closed = True
        self.reads_at_shutdown = self.output_handler is not None and not self.output_handler.done()


@pytest.fixture
def llm() -> FakeLlm:
    return FakeLlm()


@pytest.fixture
def engine(llm: FakeLlm) -> Iterator[VllmEngine]:
    adapters = {name: SimpleNamespace(name=name) for name in FACTS.adapters}
    library = Library(sampling_params, "delta", SimpleNamespace, (RefusedError,), adapters)
    made = VllmEngine(
        "m", llm, library, LoopThread("m"), FACTS, ByteTokens(), time.monotonic_ns, CacheGauges(), capacity=2000
    )
    yield made
    if not llm.closed:
        made.close()


def task_of(**changes: Any) -> Task:
    return Task(tuple(b"prompt"), **{"max_tokens": 12, **changes})


def answered(engine: VllmEngine, task: Task) -> Collector:
    sink = Collector()
    engine.begin(task, sink)
    sink.wait(task)
    return sink


def test_an_adapter_is_passed_to_vllm_by_its_name(engine: VllmEngine, llm: FakeLlm) -> None:
    tasks = [task_of(adapter=name) for name in ("", "french", "legal")]
    assert [answered(engine, task).text(task) for task in tasks] == ["base" * 3, "french" * 2, "legallegalle"]
    assert [None if request is None else request.name for _, request in llm.begun] == [None, "french", "legal"]
    with pytest.raises(ParameterError, match="no adapter 'spanish'; available: french, legal"):
        engine.begin(task_of(adapter="spanish"), Collector())


def test_vllm_reuses_prompts_for_the_same_caller_alone(engine: VllmEngine, llm: FakeLlm) -> None:
    for caller in ("", "ann", "bob"):
        answered(engine, task_of(caller=caller))
    assert llm.salts == [None, "ann", "bob"]


def test_a_client_that_leaves_has_its_requests_aborted(engine: VllmEngine, llm: FakeLlm) -> None:
    llm.most_tokens = 10
    task, sink = task_of(max_tokens=1900, choices=2), Collector()
    engine.begin(task, sink)
    eventually(lambda: sink.pieces)
    engine.cancel(task)
    sink.wait(task)
    assert [end.reason for end in sink.ends(task)] == ["cancelled"] * 2
    eventually(lambda: len(llm.aborted) == 2)
    assert engine.stats().running == 0


def test_tasks_beyond_the_queues_bound_are_refused(engine: VllmEngine, llm: FakeLlm) -> None:
    llm.most_tokens = 0
    tasks, sink = [task_of(choices=64, caller=f"{number}") for number in range(MAX_WAITING // 64)], Collector()
    for task in tasks:
        engine.begin(task, sink)
    with pytest.raises(QueueFullError, match=f"'m' has {MAX_WAITING} waiting requests"):
        engine.begin(task_of(), sink)
    engine.cancel(tasks[0])
    sink.wait(tasks[0])
    engine.begin(task_of(), sink)


def test_a_failed_process_of_vllm_ends_its_answers_with_the_reason_and_the_engine_runs_no_more(
    engine: VllmEngine, llm: FakeLlm
) -> None:
    llm.fails_after = 3
    task = task_of()
    sink = answered(engine, task)
    (end,) = sink.ends(task)
    assert isinstance(end.error, InternalError)
    assert "the worker was killed" in end.error.message
    assert sink.text(task) == "bas"
    assert "EngineDeadError" in engine.trouble
    with pytest.raises(UnavailableError, match="reload it"):
        engine.begin(task_of(), Collector())


def test_what_vllm_refuses_is_the_clients_mistake(engine: VllmEngine) -> None:
    with pytest.raises(InvalidArgumentError, match="too hot"):
        engine.begin(task_of(sampling=Sampling(temperature=99)), Collector())
    for changes in ({"priority": 1}, {"prompt_logprobs": 0}):
        with pytest.raises(ParameterError, match="does not support"):
            engine.begin(task_of(**changes), Collector())


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (Grammar("json_object"), {"json_object": True}),
        (Grammar("choice", '["a", "b"]'), {"choice": ["a", "b"]}),
        (Grammar("json_schema", "{}"), {"json": "{}"}),
        (Grammar("regex", "a+"), {"regex": "a+"}),
        (Grammar("lark", "start: x"), {"grammar": "start: x"}),
    ],
)
def test_grammars_have_vllms_names(
    engine: VllmEngine, llm: FakeLlm, grammar: Grammar, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    generate = llm.generate

    def watched(prompt: Any, parameters: Any, key: str) -> Any:
        seen.append(vars(parameters.structured_outputs))
        return generate(prompt, parameters, key)

    monkeypatch.setattr(llm, "generate", watched)
    answered(engine, task_of(grammar=grammar))
    assert seen == [expected]


def test_closing_ends_what_runs_and_shuts_vllm_down(engine: VllmEngine, llm: FakeLlm) -> None:
    llm.most_tokens = 10
    task, sink = task_of(max_tokens=1900), Collector()
    engine.begin(task, sink)
    eventually(lambda: sink.pieces)
    engine.close()
    (end,) = sink.ends(task)
    assert isinstance(end.error, RemoraError)
    assert "was unloaded" in end.error.message
    assert llm.closed
    assert not llm.reads_at_shutdown  # else vLLM logs the end of its processes as a failure
    with pytest.raises(UnavailableError, match="being unloaded"):
        engine.begin(task_of(), Collector())


def test_closing_the_loop_ends_the_tasks_that_vllm_left_there() -> None:
    thread = LoopThread("m")
    left: list[asyncio.Task[None]] = []

    async def leave() -> None:
        left.append(asyncio.create_task(asyncio.sleep(3600)))

    thread.run(leave())
    thread.close()
    assert left[0].cancelled()


def test_a_task_of_vllm_that_ignores_its_cancellation_does_not_stop_the_unload(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thread = LoopThread("m", end_s=0.05)
    left: list[asyncio.Task[None]] = []

    async def stay() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def leave() -> None:
        left.append(asyncio.create_task(stay()))
        await asyncio.sleep(0)  # begins the task

    thread.run(leave())
    thread.close()
    assert "a task of vLLM did not end within 0.05 s" in caplog.text
    assert thread.loop.is_closed()
    left.clear()
    gc.collect()  # asyncio logs the task here, and not during a later test


def test_a_failed_shutdown_of_vllm_still_ends_the_loop(
    engine: VllmEngine, llm: FakeLlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        llm.closed = True
        raise RuntimeError("a process is gone")

    monkeypatch.setattr(llm, "shutdown", fail)
    with pytest.raises(RuntimeError, match="a process is gone"):
        engine.close()
    assert engine._thread.loop.is_closed()
