"""Tests of ``remora_llm.generation.step_loop``."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from remora.errors import InternalError, QueueFullError, UnavailableError
from remora_llm.generation import Extension, Stepper
from remora_llm.generation.rows import Run
from remora_llm.generation.step_loop import LoopSettings, StepLoop
from remora_llm.generation.tasks import ParameterError, Piece, Sampling, Task
from remora_llm.testing import ENGINE_CHECKS, ByteTokens, Collector, EngineCheck, EngineExample, ScriptedStepper
from support.process.no_threads import refuse_threads

EXAMPLE = EngineExample(prompt=tuple(b"Once upon a time"), other=tuple(b"The quick brown fox jumps over it"))
GREEDY = Sampling(temperature=0)


class Clock:
    """Clock that tests set."""

    def __init__(self) -> None:
        self.now_ns = 1000

    def __call__(self) -> int:
        return self.now_ns


def loop_of(stepper: Stepper, clock: Clock | None = None, **settings: object) -> StepLoop:
    made = replace(LoopSettings("m", sequences=stepper.rows - 1, prefill_chunk=8, step_tokens=16), **settings)  # type: ignore[arg-type]
    return StepLoop(stepper, ByteTokens(), made, clock or Clock(), threaded=False)


def run(loop: StepLoop, *tasks: Task, limit: int = 10_000) -> Collector:
    sink = Collector()
    for task in tasks:
        loop.begin(task, sink)
    for _ in range(limit):
        if all(len(sink.ends(task)) == task.choices for task in tasks):
            return sink
        loop.turn()
    raise AssertionError("the tasks did not end")


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_the_loop_passes_the_conformance_kit(check: EngineCheck) -> None:
    def open_engine() -> StepLoop:
        settings = LoopSettings("m", sequences=3, prefill_chunk=8, step_tokens=16)
        return StepLoop(ScriptedStepper(), ByteTokens(), settings, time.monotonic_ns)

    check(open_engine, EXAMPLE)


def sampled(text: bytes, seed: int, tokens: int = 24, **more: object) -> Task:
    task = Task(tuple(text), tokens, Sampling(seed=seed), logprobs=2, ignore_end=True)
    return replace(task, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_tokens_and_logprobs_are_equal_alone_in_company_and_after_preemption(prefix_cache: bool) -> None:
    prompts = [b"a", b"ab", b"abc", b"the first of them", b"the first of those is long" * 3, b"x" * 50]
    alone = {}
    for place, prompt in enumerate(prompts):
        task = sampled(prompt, place)
        sink = run(loop_of(ScriptedStepper(rows=2)), task)
        alone[place] = (sink.tokens(task), sink.logprobs(task), sink.text(task))
    # room for fewer tokens than the runs need, so that some are put back
    loop = loop_of(ScriptedStepper(rows=7), cache_tokens=190, prefix_cache=prefix_cache)
    for _ in range(2):
        tasks = [sampled(prompt, place, user=f"{place % 2}") for place, prompt in enumerate(prompts)]
        sink = run(loop, *tasks)
        for place, task in enumerate(tasks):
            assert (sink.tokens(task), sink.logprobs(task), sink.text(task)) == alone[place]
    stats = loop.stats()
    assert stats.preemptions > 0
    assert (stats.prefix_hits > 0) == prefix_cache
    assert (stats.running, stats.waiting) == (0, 0)


def test_a_seen_prefix_is_not_computed_again() -> None:
    stepper = ScriptedStepper()
    loop = loop_of(stepper)
    prompt = b"a system prompt that all requests share: " * 2
    run(loop, sampled(prompt + b"first", 1))
    before = len(stepper.steps)
    second = sampled(prompt + b"second", 2)
    sink = run(loop, second)
    computed = sum(len(each.tokens) for step in stepper.steps[before:] for each in step if len(each.tokens) > 1)
    assert computed == len(b"second")
    assert sink.ends(second)[0].usage.cached_tokens == len(prompt)


def test_choices_share_the_prompt_and_differ_in_their_tokens() -> None:
    stepper = ScriptedStepper()
    task = sampled(b"one prompt for all of the choices", 4, choices=3)
    sink = run(loop_of(stepper), task)
    assert len({tuple(sink.tokens(task, choice)) for choice in range(3)}) == 3
    parts = [each for step in stepper.steps for each in step if len(each.tokens) > 1]
    assert sum(len(each.tokens) for each in parts) == len(task.prompt) + 2 * 2


def test_a_cancelled_task_gets_no_token_after_the_step_in_progress() -> None:
    stepper = ScriptedStepper(rows=3)
    loop = loop_of(stepper)
    sink = Collector()
    tasks = [sampled(b"first", 1, 500), sampled(b"second", 2, 500), sampled(b"third", 3, 500)]
    for task in tasks:
        loop.begin(task, sink)
    while len(sink.tokens(tasks[1])) < 3:
        loop.turn()
    count = len(sink.tokens(tasks[0]))
    loop.cancel(tasks[0])
    steps = len(stepper.steps)
    loop.turn()
    assert len(sink.tokens(tasks[0])) == count
    assert [end.reason for end in sink.ends(tasks[0])] == ["cancelled"]
    # the third, which had waited for a row, is in the very next step
    assert [each.tokens for each in stepper.steps[steps] if len(each.tokens) > 1] == [list(b"thi")]


def test_a_task_cancelled_during_a_step_gets_no_token_of_it() -> None:
    loop: StepLoop
    task = sampled(b"first", 1)

    def cancel(extensions: Sequence[Extension]) -> None:
        loop.cancel(task)

    loop = loop_of(ScriptedStepper(before_step=cancel))
    sink = run(loop, task)
    assert sink.tokens(task) == []
    assert sink.ends(task)[0].reason == "cancelled"


def test_a_task_that_begins_and_is_cancelled_while_the_loop_takes_others_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sink = loop_of(ScriptedStepper()), Collector()
    first, second = sampled(b"first", 1), sampled(b"second", 2, 500)
    add = loop._planner.add

    def add_beside_a_caller(run: Run) -> None:
        add(run)
        if run.task is first:
            loop.begin(second, sink)
            loop.cancel(second)

    monkeypatch.setattr(loop._planner, "add", add_beside_a_caller)
    loop.begin(first, sink)
    for _ in range(3):
        loop.turn()
    assert [end.reason for end in sink.ends(second)] == ["cancelled"]


def test_the_end_of_a_cancelled_task_does_not_wait_for_the_next_step() -> None:
    sink = Collector()
    tasks = [sampled(b"first", 1, 500), sampled(b"second", 2, 500)]
    ended: list[bool] = []
    loop = loop_of(ScriptedStepper(before_step=lambda _extensions: ended.append(bool(sink.ends(tasks[0])))))
    for task in tasks:
        loop.begin(task, sink)
    loop.turn()
    loop.cancel(tasks[0])
    loop.turn()
    assert ended == [False, True]


def test_a_step_that_raises_ends_its_tasks_with_the_reason_and_the_others_continue() -> None:
    failures = [RuntimeError("out of memory")]

    def fail(extensions: Sequence[Extension]) -> None:
        if failures and len(stepper.steps) == 3:
            raise failures.pop()

    stepper = ScriptedStepper(rows=2, before_step=fail)
    loop = loop_of(stepper)
    first, second = sampled(b"first", 1), sampled(b"second", 2)
    sink = run(loop, first, second)
    (end,) = sink.ends(first)
    assert end.reason == "error"
    assert isinstance(end.error, InternalError)
    assert "out of memory" in end.error.message
    assert sink.ends(second)[0].reason == "length"
    assert len(sink.tokens(second)) == 24
    assert loop.trouble == ""


def test_repeated_failures_open_the_stepper_again_and_a_failure_of_that_is_the_engines_trouble() -> None:
    def fail(extensions: Sequence[Extension]) -> None:
        raise RuntimeError("device lost")

    made = [ScriptedStepper()]

    def reopen() -> Stepper:
        if not made:
            raise RuntimeError("no device")
        assert broken.closed, "two steppers would not fit into memory"
        return made.pop()

    broken = ScriptedStepper(before_step=fail)
    loop = StepLoop(
        broken,
        ByteTokens(),
        LoopSettings("m"),
        Clock(),
        reopen=reopen,
        threaded=False,
    )
    for seed in range(2):
        task = sampled(b"first", seed)
        assert run(loop, task).ends(task)[0].reason == "error"
    assert broken.closed
    task = sampled(b"first", 1)
    assert run(loop, task).ends(task)[0].reason == "length"
    for stepper in (loop._stepper,):
        stepper._before_step = fail  # type: ignore[attr-defined]
    for seed in range(2):
        task = sampled(b"first", seed)
        assert run(loop, task).ends(task)[0].reason == "error"
    assert "no device" in loop.trouble
    with pytest.raises(UnavailableError, match="device lost"):
        loop.begin(sampled(b"first", 1), Collector())


def test_a_lost_device_is_the_engines_trouble_at_once_and_nothing_is_opened_again() -> None:
    def fail(_extensions: Sequence[Extension]) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def reopen() -> Stepper:
        raise AssertionError("the process can use no device")

    reasons = ["", "error 700: restart the server"]
    loop = StepLoop(
        ScriptedStepper(before_step=fail),
        ByteTokens(),
        LoopSettings("m"),
        Clock(),
        reopen=reopen,
        lost=lambda: reasons.pop(0),
        threaded=False,
    )
    assert run(loop, task := sampled(b"a", 1)).ends(task)[0].reason == "error"
    assert loop.trouble == ""
    assert run(loop, task := sampled(b"a", 1)).ends(task)[0].reason == "error"
    assert loop.trouble == "error 700: restart the server"
    with pytest.raises(UnavailableError, match="restart the server"):
        loop.begin(sampled(b"b", 1), Collector())


def test_logits_that_are_not_numbers_fail_their_row_alone() -> None:
    stepper = ScriptedStepper()
    stepper.poison.add(tuple(b"poison"))
    bad, good = sampled(b"poison", 1), sampled(b"good", 1)
    sink = run(loop_of(stepper), bad, good)
    (end,) = sink.ends(bad)
    assert end.error is not None
    assert "nan" in end.error.message
    assert sink.ends(good)[0].reason == "length"


def test_a_sink_that_raises_loses_its_own_tasks_only() -> None:
    class Broken:
        def take(self, pieces: Sequence[Piece]) -> None:
            raise RuntimeError("gone")

    loop = loop_of(ScriptedStepper())
    loop.begin(sampled(b"first", 1, 1000), Broken())
    task = sampled(b"second", 2)
    sink = run(loop, task)
    assert len(sink.tokens(task)) == 24
    loop.turn()
    assert loop.stats().running == 0


def test_a_deadline_ends_a_task_with_what_it_has() -> None:
    clock = Clock()
    loop = loop_of(ScriptedStepper(rows=2), clock)
    sink = Collector()
    running, waiting = sampled(b"first", 1, 500, deadline_ns=2000), sampled(b"second", 2, deadline_ns=1500)
    loop.begin(running, sink)
    loop.begin(waiting, sink)
    for _ in range(5):
        loop.turn()
    clock.now_ns = 1600
    loop.turn()
    assert [end.reason for end in sink.ends(waiting)] == ["deadline"]
    assert sink.ends(running) == []
    clock.now_ns = 2000
    loop.turn()
    assert [end.reason for end in sink.ends(running)] == ["deadline"]
    assert len(sink.tokens(running)) == 5
    assert loop.stats().running == 0


def test_a_task_that_can_never_fit_is_refused_with_both_numbers() -> None:
    loop = loop_of(ScriptedStepper(), cache_tokens=100)
    with pytest.raises(ParameterError, match=r"121 tokens.*room for 100"):
        loop.begin(sampled(b"x" * 21, 1, 100), Collector())


def test_a_full_queue_refuses_tasks() -> None:
    loop = loop_of(ScriptedStepper(rows=2), max_waiting=2)
    sink = Collector()
    loop.begin(sampled(b"a", 1), sink)
    loop.turn()
    loop.begin(sampled(b"b", 1), sink)
    loop.begin(sampled(b"c", 1), sink)
    with pytest.raises(QueueFullError, match="2 waiting"):
        loop.begin(sampled(b"d", 1), sink)


def test_a_caller_fills_at_most_half_of_the_queue() -> None:
    loop = loop_of(ScriptedStepper(rows=2), max_waiting=4)
    sink = Collector()
    loop.begin(sampled(b"a", 1, caller="one"), sink)
    loop.turn()
    for _ in range(2):
        loop.begin(sampled(b"b", 1, caller="one"), sink)
    with pytest.raises(QueueFullError, match="this key has 2 waiting"):
        loop.begin(sampled(b"c", 1, caller="one"), sink)
    loop.turn()
    with pytest.raises(QueueFullError, match="this key has 2 waiting"):
        loop.begin(sampled(b"c", 1, caller="one"), sink)
    loop.begin(sampled(b"d", 1, caller="two"), sink)


def test_end_tokens_stop_strings_and_lengths_have_their_reasons() -> None:
    def answer(**more: object) -> tuple[str, str, object]:
        task = replace(Task(tuple(b"p"), 50, GREEDY), **more)  # type: ignore[arg-type]
        sink = run(loop_of(ScriptedStepper(script="Hello, wörld!")), task)
        (end,) = sink.ends(task)
        return sink.text(task), end.reason, end.stop

    assert answer() == ("Hello, wörld!", "stop", None)
    assert answer(max_tokens=5) == ("Hello", "length", None)
    assert answer(max_tokens=9) == ("Hello, w\ufffd", "length", None)
    assert answer(stop=("wör",)) == ("Hello, ", "stop", "wör")
    assert answer(stop=("!",)) == ("Hello, wörld", "stop", "!")
    assert answer(stop=("d!!",)) == ("Hello, wörld!", "stop", None)
    assert answer(stop_tokens=frozenset({ord(",")})) == ("Hello", "stop", ord(","))
    assert answer(stop=("H",), min_tokens=3)[:2] == ("Hello, wörld!", "stop")
    assert answer(max_tokens=0) == ("", "length", None)


def test_prompt_scores_come_with_the_first_piece_whatever_the_parts() -> None:
    def scores(chunk: int) -> object:
        task = Task(tuple(b"scores of a prompt"), 2, GREEDY, prompt_logprobs=1)
        sink = run(loop_of(ScriptedStepper(), prefill_chunk=chunk), task)
        return next(each.prompt_logprobs for each in sink.pieces if each.tokens)

    whole = scores(64)
    assert len(whole) == len(b"scores of a prompt")  # type: ignore[arg-type]
    assert whole[0] is None  # type: ignore[index]
    assert scores(4) == whole


def test_times_of_an_answer_sum_to_its_duration() -> None:
    clock = Clock()

    def tick(extensions: Sequence[Extension]) -> None:
        clock.now_ns += 10

    loop = loop_of(ScriptedStepper(before_step=tick), clock)
    task = sampled(b"the prompt has three parts", 1, 5)
    usage = run(loop, task).ends(task)[0].usage
    assert usage.queue_ns + usage.prefill_ns + usage.decode_ns == clock.now_ns - 1000
    assert usage.prefill_ns == 40
    assert usage.steps == 4 + 4


@pytest.mark.parametrize("cancels", [False, True])
def test_an_answer_that_has_ended_is_no_more_among_the_running_ones(cancels: bool) -> None:
    class Looking(Collector):
        def take(self, pieces: Sequence[Piece]) -> None:
            super().take(pieces)
            if pieces[-1].end is not None:
                stats = loop.stats()
                seen.append((stats.running, stats.waiting))

    seen: list[tuple[int, int]] = []
    loop, task, sink = loop_of(ScriptedStepper()), sampled(b"first", 1), Looking()
    loop.begin(task, sink)
    for _ in range(3):
        loop.turn()
    assert loop.stats().running == 1
    if cancels:
        loop.cancel(task)
    while not sink.ends(task):
        loop.turn()
    assert seen == [(0, 0)]


def test_all_pieces_of_a_step_reach_a_sink_in_one_call() -> None:
    class Counting(Collector):
        calls = 0

        def take(self, pieces: Sequence[Piece]) -> None:
            self.calls += 1
            super().take(pieces)

    loop = loop_of(ScriptedStepper())
    sink = Counting()
    tasks = [sampled(b"ab", seed, 10) for seed in range(4)]
    for task in tasks:
        loop.begin(task, sink)
    for _ in range(11):
        loop.turn()
    assert all(sink.ends(task) for task in tasks)
    assert sink.calls <= 11


def test_the_thread_starts_with_the_first_task_and_ends_with_the_loop() -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "remora counted steps"]

    loop = StepLoop(ScriptedStepper(), ByteTokens(), LoopSettings("counted"), lambda: 0)
    assert threads() == []
    task = sampled(b"first", 1)
    sink = Collector()
    loop.begin(task, sink)
    sink.wait(task)
    assert threads() == ["remora counted steps"]
    loop.close()
    assert threads() == []


def test_a_task_for_which_no_thread_can_start_is_refused_and_the_next_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = StepLoop(ScriptedStepper(), ByteTokens(), LoopSettings("m", sequences=3), time.monotonic_ns)
    sink, refused, task = Collector(), sampled(b"first", 1), sampled(b"second", 2)
    with monkeypatch.context() as without_threads:
        refuse_threads(without_threads)
        with pytest.raises(UnavailableError, match="can't start new thread"):
            loop.begin(refused, sink)
    assert loop.stats().waiting == 0
    loop.begin(task, sink)
    sink.wait(task)
    loop.close()
    assert sink.ends(refused) == []
