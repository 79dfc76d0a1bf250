"""Loop that runs the tasks of one model: a planner, a stepper and the sinks.

One thread per model is the only one that touches planner, stepper and answers; ``begin`` and ``cancel`` leave notes for
it in the task book. The thread starts with the first task.

Invariants: each choice gets exactly one end. After a cancellation at most the step in progress computes for the task,
and its row is free before the next one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from remora.errors import InternalError, RemoraError
from remora_llm.generation import Extension, Logits, Sink, Stepper, StepResult, Tokens
from remora_llm.generation.answering import Answer, Matcher
from remora_llm.generation.planner import Planner, PlannerLimits, StepPlan
from remora_llm.generation.rows import Run
from remora_llm.generation.task_book import MAX_WAITING, EngineThread, TaskBook, trouble_after
from remora_llm.generation.tasks import (
    End,
    EndReason,
    EngineStats,
    Grammar,
    ParameterError,
    Piece,
    Task,
    Usage,
    check_task,
)

_log = logging.getLogger("remora.generation")

_FAILURES_BEFORE_REOPENING = 2


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Settings of a model's step loop.

    Attributes:
        name: of the model, for errors and the thread.
        sequences: maximum number of choices that run at once.
        cache_tokens: maximum number of tokens in memory; 0 for all that the stepper's rows hold.
        prefill_chunk: maximum number of prompt tokens of one choice in a step.
        step_tokens: maximum number of tokens of a step.
        prefix_cache: prompts of ended tasks are reused.
        max_waiting: see `TaskBook`.
    """

    name: str
    sequences: int = 16
    cache_tokens: int = 0
    prefill_chunk: int = 128
    step_tokens: int = 256
    prefix_cache: bool = True
    max_waiting: int = MAX_WAITING


class _Open:
    """One choice that has not ended."""

    __slots__ = ("answer", "run", "sink")

    def __init__(self, run: Run, sink: Sink, answer: Answer) -> None:
        self.run = run
        self.sink = sink
        self.answer = answer


class _Prepared(NamedTuple):
    """Answers of a task, made in the caller's thread, and the time that its grammar took."""

    answers: list[Answer]
    grammar_ns: int


@dataclass(slots=True)
class _StepTimes:
    """Begin of the last step's turn, and the part of it that the model took."""

    began_ns: int = 0
    spent_ns: int = 0

    def until(self, now_ns: int) -> int:
        """Return the time since the begin of the turn that the model did not take."""
        return now_ns - self.began_ns - self.spent_ns


class _Recovery:
    """Steppers of a model after failed steps.

    Args:
        name: of the model, for the log.
        reopen, lost: see `StepLoop`.
    """

    def __init__(self, name: str, reopen: Callable[[], Stepper] | None, lost: Callable[[], str] | None) -> None:
        self.failures = 0
        """Number of failed steps since the last one that succeeded."""
        self._name = name
        self._reopen = reopen
        self._lost = lost

    def next_stepper(self, stepper: Stepper, error: Exception) -> tuple[Stepper, str]:
        """Return the stepper to use after a failed step, and why it cannot be used, "" if it can."""
        self.failures += 1
        if self._lost is not None and (lost := self._lost()):
            return stepper, lost
        if self.failures < _FAILURES_BEFORE_REOPENING or self._reopen is None:
            return stepper, ""
        try:
            stepper.close()  # first, because two would not fit into memory
            stepper = self._reopen()
        except Exception as again:
            _log.exception("model '%s' cannot be opened again", self._name)
            return stepper, trouble_after(error, again)
        self.failures = 0
        return stepper, ""


class StepLoop:
    """`TokenEngine` over a `Stepper`.

    Args:
        stepper: closed by this object.
        tokens: the model's tokenizer.
        settings: see `LoopSettings`.
        now_ns: monotonic clock, the one of the tasks' deadlines.
        compile_grammar: returns the matcher of a caller's grammar; None if the model cannot enforce any.
        reopen: returns a new stepper after repeated failures, when the old one is closed; None to keep the old one.
        lost: returns after a failure why the process can use its device no more, "" if it can; None without a device.
        threaded: False for tests, which call `turn` themselves.
    """

    def __init__(
        self,
        stepper: Stepper,
        tokens: Tokens,
        settings: LoopSettings,
        now_ns: Callable[[], int],
        *,
        compile_grammar: Callable[[Grammar, str], Matcher] | None = None,
        reopen: Callable[[], Stepper] | None = None,
        lost: Callable[[], str] | None = None,
        threaded: bool = True,
    ) -> None:
        self.facts = stepper.facts
        self._stepper = stepper
        self._tokens = tokens
        self._settings = settings
        self._now = now_ns
        self._compile = compile_grammar
        self._recovery = _Recovery(settings.name, reopen, lost)
        self._capacity = settings.cache_tokens or stepper.rows * stepper.length
        self._planner = self._new_planner()
        self._thread = EngineThread(settings.name, self._run)
        self._book: TaskBook[_Prepared] = TaskBook(
            settings.name,
            self.facts.context,
            trouble=lambda: self.trouble,
            wake=self._thread.start if threaded else lambda: None,
            max_waiting=settings.max_waiting,
        )
        self.measurements = self._book.measurements
        self.trouble = ""
        """Why the engine cannot run tasks, empty if it can."""
        self._open: dict[Run, _Open] = {}
        self._order = 0
        self._times = _StepTimes()
        self._gaps: dict[int, int] = {}
        """Tokens of a step by the time since the answer's token before, which most rows share."""
        self._stats = EngineStats(cache_capacity=self._capacity)

    def _new_planner(self) -> Planner:
        settings, stepper = self._settings, self._stepper
        return Planner(
            PlannerLimits(
                rows=stepper.rows,
                sequences=min(settings.sequences, stepper.rows - 1),
                cache_tokens=self._capacity,
                prefill_chunk=settings.prefill_chunk,
                step_tokens=settings.step_tokens,
                prefix_cache=settings.prefix_cache,
                decode_first=stepper.decode_first,
            )
        )

    # -- Any thread ----------------------------------------------------------------------------------------------------

    def begin(self, task: Task, sink: Sink) -> None:
        """Queue a task; see `TokenEngine`."""
        check_task(task, self.facts)
        needed = len(task.prompt) + task.max_tokens
        if needed > self._capacity:
            raise ParameterError(
                "max_tokens",
                f"prompt and answer may have {needed} tokens, the cache of the model has room for {self._capacity}: "
                "shorten the prompt, reduce max_tokens or raise kv_cache_tokens",
            )
        arrival_ns = self._now()
        answers = []
        for choice in range(task.choices):
            matcher = None
            if task.grammar is not None and self._compile is not None:
                matcher = self._compile(task.grammar, task.caller)
            answers.append(Answer(task, choice, self.facts, self._tokens, matcher))
        grammar_ns = self._now() - arrival_ns if task.grammar is not None else 0
        self._book.enter(task, sink, arrival_ns, _Prepared(answers, grammar_ns))

    def cancel(self, task: Task) -> None:
        """End a task early; see `TokenEngine`."""
        self._book.cancel(task)

    def stats(self) -> EngineStats:
        """Return counters and gauges."""
        return replace(self._stats, waiting=sum(self._book.waiting().values()), ended=self._book.ended)

    def close(self) -> None:
        """End all tasks with UnavailableError and release the stepper."""
        self._book.close()
        if not self._thread.join():
            self._end_all()
        self._stepper.close()

    # -- The loop's thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._book.wait(lambda: self._planner.is_idle):
            self.turn()
        self._end_all()

    def turn(self) -> None:
        """Take what arrived, run one step and deliver its pieces. Never raises."""
        try:
            self._take_notes()
            self._step()
        except Exception as error:  # a fault of this module must not leave tasks without an end
            _log.exception("the step loop of model '%s' failed", self._settings.name)
            self._fail_all(InternalError(f"the step loop failed: {type(error).__name__}: {error}"))
            self._planner = self._new_planner()
        self._publish()  # before the delivery, because a client may read the statistics with its answer
        self._book.deliver()

    def _take_notes(self) -> None:
        entries, cancelled = self._book.take()
        for task, sink, arrival_ns, prepared in entries:
            leader: Run | None = None
            for choice, answer in enumerate(prepared.answers):
                run = Run(task, choice, self._order, arrival_ns, leader)
                run.queue.grammar_ns = prepared.grammar_ns
                self._order += 1
                leader = leader or run
                self._open[run] = _Open(run, sink, answer)
                self._planner.add(run)
        if cancelled:
            for opened in [each for each in self._open.values() if each.run.task in cancelled]:
                self._end(opened, "cancelled")
            self._publish()
            self._book.deliver()  # the ends need not wait for the next step

    def _step(self) -> None:
        begin_ns = self._now()
        between_ns = self._times.until(begin_ns)
        for run in self._planner.running:
            run.loop_ns += between_ns
        self._times = _StepTimes(begin_ns)
        plan = self._planner.plan(begin_ns)
        for run in plan.late:
            self._finish(self._open[run], "deadline")
        if not plan.extensions:
            return
        start_ns = self._now()
        try:
            for copy in plan.copies:
                self._stepper.copy(*copy)
            result = self._stepper.step(plan.extensions)
            if len(result.logits) != len(plan.extensions):
                raise InternalError(f"the stepper returned {len(result.logits)} of {len(plan.extensions)} results")
        except Exception as error:
            self._step_failed(error)
            return
        self._recovery.failures = 0
        now_ns = self._now()
        self._times.spent_ns = now_ns - start_ns
        self._count(plan)
        self._write(plan, result, now_ns)

    def _write(self, plan: StepPlan, result: StepResult, now_ns: int) -> None:
        cancelled = self._book.cancelled  # tasks that were cancelled during the step get no token of it
        for run, extension, logits in zip(plan.runs, plan.extensions, result.logits, strict=True):
            if run.task in cancelled:
                continue
            opened = self._open[run]
            try:
                self._advance(opened, extension, logits, now_ns)
            except RemoraError as error:
                self._end(opened, "error", error=error, keep=False)
            except Exception as error:
                _log.exception("model '%s': a row failed", self._settings.name)
                self._end(opened, "error", error=InternalError(f"{type(error).__name__}: {error}"), keep=False)
        for since_ns, tokens in self._gaps.items():
            self.measurements.record_next(since_ns, tokens)
        self._gaps.clear()

    def _advance(self, opened: _Open, extension: Extension, logits: Logits, now_ns: int) -> None:
        """Apply a row's logits to its answer."""
        run, answer, task = opened.run, opened.answer, opened.run.task
        scores = extension.wanted and task.prompt_logprobs is not None and extension.start < len(run.prompt)
        if scores:
            answer.score_prompt(extension.start, logits)
        if not extension.wanted or not run.decodes:
            return
        if not run.first_ns:
            run.first_ns = now_ns
            self.measurements.record_first(task, run.queue.arrival_ns, now_ns)
        else:
            since_ns = now_ns - run.last_ns
            self._gaps[since_ns] = self._gaps.get(since_ns, 0) + 1
        run.last_ns = now_ns
        prompt_scores = answer.prompt_scores if scores and run.choice == 0 else ()
        if not task.max_tokens:
            self._end(opened, "length", piece=Piece(task, run.choice, prompt_logprobs=prompt_scores))
            return
        written = answer.write(logits[-1])
        run.tokens.append(written.token)
        piece = Piece(
            task,
            run.choice,
            (written.token,),
            written.text,
            (written.logprob,) if written.logprob is not None else (),
            prompt_scores,
        )
        if written.reason is None:
            self._book.post(opened.sink, piece)
        else:
            self._end(opened, written.reason, stop=written.stop, piece=piece)

    # -- Ends ----------------------------------------------------------------------------------------------------------

    def _end(
        self,
        opened: _Open,
        reason: EndReason,
        *,
        stop: str | int | None = None,
        error: RemoraError | None = None,
        piece: Piece | None = None,
        keep: bool = True,
    ) -> None:
        """End a choice and free its row."""
        if opened.run.row >= 0:
            opened.run.loop_ns += self._times.until(self._now())
        self._planner.remove(opened.run, keep=keep)
        self._finish(opened, reason, stop=stop, error=error, piece=piece)

    def _finish(
        self,
        opened: _Open,
        reason: EndReason,
        *,
        stop: str | int | None = None,
        error: RemoraError | None = None,
        piece: Piece | None = None,
    ) -> None:
        """Post the end of a choice that the planner no longer has."""
        run = opened.run
        task = run.task
        if piece is None:
            piece = Piece(task, run.choice, text=opened.answer.finish() if reason != "error" else "")
        now_ns = self._now()
        end = End(reason, _usage(run, now_ns), stop, error)
        del self._open[run]
        self._book.end(opened.sink, piece, end, run.queue.arrival_ns, now_ns)

    def _step_failed(self, error: Exception) -> None:
        """End the tasks with rows, whose contents are undefined; waiting tasks continue."""
        name = self._settings.name
        _log.error("model '%s' failed in a step: %s: %s", name, type(error).__name__, error, exc_info=error)
        failure = self._book.failure(error)
        for run in self._planner.lose_rows():
            self._end(self._open[run], "error", error=failure)
        self._stepper, trouble = self._recovery.next_stepper(self._stepper, error)
        if trouble:
            self.trouble = trouble
            self._fail_all(self._book.unusable(trouble))

    def _fail_all(self, error: RemoraError) -> None:
        for opened in list(self._open.values()):
            try:
                self._end(opened, "error", error=error, keep=False)
            except Exception:  # of a planner in an undefined state
                if opened.run in self._open:
                    self._finish(opened, "error", error=error)

    def _end_all(self) -> None:
        self._take_notes()
        self._fail_all(self._book.unloaded())
        self._publish()
        self._book.deliver()

    # -- Statistics ----------------------------------------------------------------------------------------------------

    def _count(self, plan: StepPlan) -> None:
        stats, spent_ns = self._stats, self._times.spent_ns
        for run in self._planner.running:
            run.other_steps_ns += spent_ns
        prompt = generated = 0
        for run, extension in zip(plan.runs, plan.extensions, strict=True):
            run.other_steps_ns -= spent_ns
            if extension.start < len(run.prompt):
                prompt += len(extension.tokens)
                run.prompt_steps_ns += spent_ns
            else:
                run.answer_steps_ns += spent_ns
            if extension.wanted and run.decodes:
                generated += 1
        self._stats = replace(
            stats,
            steps=stats.steps + 1,
            prompt_tokens=stats.prompt_tokens + prompt,
            generated_tokens=stats.generated_tokens + generated,
            step_ns=stats.step_ns + spent_ns,
        )

    def _publish(self) -> None:
        planner = self._planner
        self._book.queued = Counter(planner.waiting_by_caller)
        self._stats = replace(
            self._stats,
            running=len(planner.running),
            cache_tokens=planner.cache_tokens,
            reusable_tokens=planner.reusable_tokens,
            prefix_queries=planner.prefix_queries,
            prefix_hits=planner.prefix_hits,
            preemptions=planner.preemptions,
        )


def _usage(run: Run, now_ns: int) -> Usage:
    """Return tokens and times of a choice that ends now."""
    queue = run.queue
    admitted_ns = queue.admitted_ns or now_ns
    first_ns = run.first_ns or now_ns
    return Usage(
        prompt_tokens=len(run.prompt),
        generated_tokens=run.generated,
        cached_tokens=run.cached,
        queue_ns=admitted_ns - queue.arrival_ns,
        prefill_ns=first_ns - admitted_ns,
        decode_ns=now_ns - first_ns,
        steps=run.steps,
        rows_beside=run.rows_beside,
        preemptions=queue.preemptions,
        grammar_ns=queue.grammar_ns,
        prompt_steps_ns=run.prompt_steps_ns,
        answer_steps_ns=run.answer_steps_ns,
        other_steps_ns=run.other_steps_ns,
        put_back_ns=queue.put_back_ns + (now_ns - queue.preempted_ns if queue.preempted_ns else 0),
        loop_ns=run.loop_ns,
    )
