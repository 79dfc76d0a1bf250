"""Conformance kit for engines of language models, and a stepper that computes nothing.

    from remora_llm.testing import EngineExample, check_engine

    check_engine(open_engine, EngineExample(prompt=(1, 2, 3), other=(4, 5)))

Each check is a function of ``open_engine`` (returns a new engine) and an example, and raises AssertionError with a
sentence that names the fault. ``ENGINE_CHECKS`` lists them. Both owners of the schedule pass them: engines that remora
schedules, and libraries with their own scheduler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from remora.errors import RemoraError, UnavailableError
from remora_llm.generation import Detokenizer, Extension, Logits, StepResult, TokenEngine
from remora_llm.generation.tasks import End, ModelFacts, ParameterError, Piece, Sampling, Task
from remora_llm.generation.tokenizing import ByteDetokenizer, refuse_long

LIMIT_S = 60.0
"""Time within which a task must end, in seconds."""

_ATTEMPTS = 3

BYTE_VOCABULARY = 260
_BLOCK = 4
END_TOKEN = 258
"""Token by which `ScriptedStepper` ends an answer; 256 to 259 are special tokens without text."""


class ByteTokens:
    """Tokenizer in which each byte is a token."""

    longest = 5
    """Bytes of the names of tokens beyond the bytes, such as ``<256>``."""

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, most: int = 0
    ) -> tuple[int, ...]:
        """Return the bytes of the text."""
        if most:
            refuse_long(text, most, self.longest, len)
        return tuple(text.encode())

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of bytes."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the byte of a token."""
        return bytes([token]) if token < 256 else f"<{token}>".encode()

    def token_name(self, token: int) -> str:
        """Return the character of a byte."""
        return chr(token)

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """Return a detokenizer for one answer."""
        return ByteDetokenizer([self.token_bytes(token) for token in range(BYTE_VOCABULARY)], range(256, 260))


class ScriptedStepper:
    """Stepper whose logits are a hash of the row's contents, or follow a script.

    It keeps the tokens of each row and whether each was computed alone or in a block with others, and both enter the
    hash: an engine that mixes up rows, copies too little or computes tokens in another way gets other tokens. A step
    for a row whose length differs from ``start``, or for rows that decode behind a gap, raises AssertionError.

    Args:
        rows, length: see `Stepper`.
        script: text that every answer follows, then an end token; None for the hash.
        before_step: called with the extensions of each step; may raise, or change the logits that it returns.
    """

    decode_first = True

    def __init__(
        self,
        rows: int = 6,
        length: int = 4096,
        script: str | None = None,
        before_step: Callable[[Sequence[Extension]], None] | None = None,
    ) -> None:
        self.rows = rows
        self.length = length
        self.facts = ModelFacts(
            context=length,
            vocabulary=BYTE_VOCABULARY,
            end_tokens=frozenset({END_TOKEN}),
            batch_invariant=True,
            fingerprint="scripted",
        )
        self.steps: list[tuple[Extension, ...]] = []
        self.closed = False
        self.poison: set[tuple[int, ...]] = set()
        """Prompts whose logits are NaN."""
        self._script = None if script is None else [*script.encode(), END_TOKEN]
        self._before_step = before_step
        self._rows: list[list[tuple[int, bool]]] = [[] for _ in range(rows)]
        self._prompts: list[int] = [0] * rows

    def step(self, extensions: Sequence[Extension]) -> StepResult:
        """Append tokens to rows and return the logits."""
        assert not self.closed, "a closed stepper was used"
        assert len({each.row for each in extensions}) == len(extensions), "a row was extended twice in a step"
        self.steps.append(tuple(extensions))
        if self._before_step is not None:
            self._before_step(extensions)
        self._check_places(extensions)
        return StepResult([self._extend(extension) for extension in extensions])

    def _check_places(self, extensions: Sequence[Extension]) -> None:
        decoding = sorted(each.row for each in extensions if len(each.tokens) == 1 and each.start)
        assert decoding == list(range(len(decoding))), f"the rows {decoding} decode, which are not the first rows"

    def _extend(self, extension: Extension) -> Logits:
        row, start, tokens, wanted = extension
        held = self._rows[row]
        assert 0 <= start <= len(held), f"row {row} has {len(held)} tokens, the step begins at {start}"
        assert start + len(tokens) <= self.length, f"row {row} would have more than {self.length} tokens"
        assert 0 <= wanted <= len(tokens)
        del held[start:]
        if len(tokens) > 1 or not start:
            self._prompts[row] = start + len(tokens)
        first = len(tokens) - wanted
        logits = np.empty((wanted, BYTE_VOCABULARY), np.float32)
        for place, token in enumerate(tokens):
            held.append((token, place % _BLOCK == 0 and place == len(tokens) - 1))
            if place >= first:
                logits[place - first] = self._logits(row)
        return logits

    def _logits(self, row: int) -> Logits:
        held = self._rows[row]
        if self.poison and tuple(token for token, _ in held[: self._prompts[row]]) in self.poison:
            return np.full(BYTE_VOCABULARY, np.nan, np.float32)
        if self._script is not None:
            place = len(held) - self._prompts[row]
            wanted = self._script[min(place, len(self._script) - 1)]
            logits = np.zeros(BYTE_VOCABULARY, np.float32)
            logits[wanted] = 40.0
            return logits
        # a hash that Python's own seed does not change
        state = 2166136261
        for token, alone in held:
            state = ((state ^ (token * 2 + alone)) * 16777619) & 0xFFFFFFFF
        logits = np.random.Generator(np.random.Philox(key=state)).standard_normal(BYTE_VOCABULARY, np.float32) * 3
        logits[128:] = -40.0  # single bytes above 127 would be incomplete characters
        return logits

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` tokens of a row to another row."""
        assert source != target
        assert tokens <= len(self._rows[source]), f"row {source} has {len(self._rows[source])} tokens, not {tokens}"
        self._rows[target] = self._rows[source][:tokens]
        self._prompts[target] = min(self._prompts[source], tokens)

    def close(self) -> None:
        """Refuse further steps."""
        self.closed = True


class Collector:
    """Sink that keeps all pieces, for tests. Any thread may wait for the end."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._changed = threading.Condition()

    def take(self, pieces: Sequence[Piece]) -> None:
        """Keep the pieces."""
        with self._changed:
            self.pieces.extend(pieces)
            self._changed.notify_all()

    def wait(self, task: Task, limit_s: float = LIMIT_S) -> None:
        """Wait until all choices of a task have ended. Raises AssertionError after the limit."""
        with self._changed:
            done = self._changed.wait_for(lambda: len(self.ends(task)) >= task.choices, limit_s)
        assert done, f"the task did not end within {limit_s:g} seconds"

    def wait_for_tokens(self, task: Task, count: int, limit_s: float = LIMIT_S) -> None:
        """Wait until choice 0 has some tokens. Raises AssertionError after the limit."""
        with self._changed:
            done = self._changed.wait_for(lambda: len(self.tokens(task)) >= count, limit_s)
        assert done, f"the task had only {len(self.tokens(task))} tokens after {limit_s:g} seconds"

    def ends(self, task: Task) -> list[End]:
        """Return the ends of a task's choices so far, by choice."""
        ended = sorted((each for each in self.pieces if each.task is task and each.end), key=lambda each: each.choice)
        return [each.end for each in ended if each.end is not None]

    def tokens(self, task: Task, choice: int = 0) -> list[int]:
        """Return the tokens of a choice so far."""
        return [token for each in self._of(task, choice) for token in each.tokens]

    def text(self, task: Task, choice: int = 0) -> str:
        """Return the text of a choice so far."""
        return "".join(each.text for each in self._of(task, choice))

    def logprobs(self, task: Task, choice: int = 0) -> list[float]:
        """Return the log probabilities of a choice's tokens so far."""
        return [each.logprob for piece in self._of(task, choice) for each in piece.logprobs]

    def _of(self, task: Task, choice: int) -> list[Piece]:
        return [each for each in self.pieces if each.task is task and each.choice == choice]


@dataclass(frozen=True, slots=True)
class EngineExample:
    """Prompts for the checks.

    Args:
        prompt: tokens that the model continues with at least eight tokens when its end tokens are ignored.
        other: another prompt.
        tokens: number of tokens to generate; small for slow models.
    """

    prompt: tuple[int, ...]
    other: tuple[int, ...]
    tokens: int = 12

    def task(self, **changes: object) -> Task:
        """Return a new greedy task for the prompt."""
        greedy = Task(self.prompt, self.tokens, Sampling(temperature=0), ignore_end=True)
        return replace(greedy, **changes)  # type: ignore[arg-type]  # the names are checked by replace


OpenEngine = Callable[[], TokenEngine]


def _run(engine: TokenEngine, *tasks: Task) -> Collector:
    sink = Collector()
    for task in tasks:
        engine.begin(task, sink)
    for task in tasks:
        sink.wait(task)
    return sink


def check_each_choice_ends_once_and_last(open_engine: OpenEngine, example: EngineExample) -> None:
    """Check that each choice has one end, in its last piece, and counts that agree."""
    engine = open_engine()
    one, several = example.task(), example.task(choices=3, sampling=Sampling(seed=5))
    sink = _run(engine, one, several)
    engine.close()
    for task in (one, several):
        for choice in range(task.choices):
            pieces = [each for each in sink.pieces if each.task is task and each.choice == choice]
            ends = [place for place, each in enumerate(pieces) if each.end is not None]
            assert ends == [len(pieces) - 1], f"choice {choice} has its ends at {ends} of {len(pieces)} pieces"
            end = pieces[-1].end
            assert end is not None
            assert end.reason == "length", f"an answer of max_tokens tokens ended with {end.reason}"
            count = len(sink.tokens(task, choice))
            assert count == example.tokens == end.usage.generated_tokens, f"{count} tokens, usage {end.usage}"
            assert end.usage.prompt_tokens == len(task.prompt), f"usage has {end.usage.prompt_tokens} prompt tokens"


def check_a_seed_repeats(open_engine: OpenEngine, example: EngineExample) -> None:
    """Check that a seeded task gives the same tokens again, and another seed gives others."""
    engine = open_engine()
    first, again, other = (example.task(sampling=Sampling(seed=seed)) for seed in (7, 7, 8))
    sinks = [_run(engine, task) for task in (first, again, other)]
    engine.close()
    assert sinks[0].tokens(first) == sinks[1].tokens(again), "the same seed gave other tokens"
    assert sinks[0].tokens(first) != sinks[2].tokens(other), "another seed gave the same tokens"


def check_company_changes_nothing(open_engine: OpenEngine, example: EngineExample) -> None:
    """Check that tokens and log probabilities are the same in company, if the facts promise it."""
    engine = open_engine()
    if engine.facts.batch_invariant:
        alone = example.task(logprobs=0, sampling=Sampling(seed=3))
        expected = _run(engine, alone)
        tasks = [example.task(logprobs=0, sampling=Sampling(seed=3)) for _ in range(3)]
        beside = [example.task(prompt=example.other, user=f"{place}") for place in range(3)]
        sink = _run(engine, *(each for pair in zip(beside, tasks, strict=True) for each in pair))
        for task in tasks:
            assert sink.tokens(task) == expected.tokens(alone), "the tokens differ in company"
            assert sink.logprobs(task) == expected.logprobs(alone), "the log probabilities differ in company"
    engine.close()


def check_log_probabilities_are_a_distribution(open_engine: OpenEngine, example: EngineExample) -> None:
    """Check that log probabilities are at most 0 and sorted, and that greedy tokens are first."""
    engine = open_engine()
    if "logprobs" not in engine.facts.unsupported:
        count = min(engine.facts.max_logprobs, 5)
        task = example.task(logprobs=count)
        sink = _run(engine, task)
        scores = [each for piece in sink.pieces for each in piece.logprobs]
        assert [each.token for each in scores] == sink.tokens(task), "log probabilities belong to other tokens"
        for each in scores:
            values = [value for _, value in each.top]
            assert each.rank == 1, f"a greedy token has rank {each.rank}"
            assert values == sorted(values, reverse=True), "alternatives are not sorted"
            assert sum(np.exp(values)) <= 1 + 1e-4, "probabilities sum to more than 1"
            assert len(values) == count, f"{len(values)} alternatives instead of {count}"
    engine.close()


def check_a_cancelled_task_ends_and_frees_its_row(open_engine: OpenEngine, example: EngineExample) -> None:
    """Check that cancelling ends a task once, and that the engine is idle afterwards."""
    engine = open_engine()
    for _ in range(_ATTEMPTS):
        if _cancels_three_tasks(engine, example):
            break
    else:
        raise AssertionError(f"{_ATTEMPTS} times, answers of the model's whole context were complete before the cancel")
    engine.close()


def _cancels_three_tasks(engine: TokenEngine, example: EngineExample) -> bool:
    """Check one cancel of three long tasks.

    Returns False if one of them was complete before the cancel.
    """
    sink = Collector()
    room = engine.facts.context - len(example.prompt)
    tasks = [example.task(max_tokens=room, user=f"{place}") for place in range(3)]
    for task in tasks:
        engine.begin(task, sink)
    sink.wait_for_tokens(tasks[0], 1)
    for task in (*tasks, *tasks):
        engine.cancel(task)
    for task in tasks:
        sink.wait(task)
    _run(engine, example.task())
    cancelled = 0
    for task in tasks:
        ends = sink.ends(task)
        assert len(ends) == 1, f"the ends are {ends}"
        # A machine that suspends this thread for long enough lets an answer become complete.
        complete = ends[0].reason == "length" and len(sink.tokens(task)) == room
        assert complete or ends[0].reason == "cancelled", f"the ends are {ends}"
        cancelled += not complete
        last = [each for each in sink.pieces if each.task is task][-1]
        assert last.end is not None, "a piece followed the end"
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0), f"an idle engine has {stats.running} running tasks"
    engine.cancel(tasks[0])
    return cancelled == len(tasks)


def check_stop_strings_do_not_leak(open_engine: OpenEngine, example: EngineExample) -> None:
    """Check that a stop string taken from an answer cuts the text before it."""
    engine = open_engine()
    task = example.task()
    text = _run(engine, task).text(task)
    middle = len(text) // 2
    stop = text[middle : middle + 2]
    if stop:
        stopped = example.task(stop=(stop,))
        sink = _run(engine, stopped)
        shown = sink.text(stopped)
        (end,) = sink.ends(stopped)
        assert shown == text[: text.index(stop)], f"'{shown}' was shown of '{text}' with the stop string '{stop}'"
        assert (end.reason, end.stop) == ("stop", stop), f"the end is {end}"
    engine.close()


def check_bad_tasks_are_refused_before_anything_runs(open_engine: OpenEngine, example: EngineExample) -> None:
    """Check that a task beyond the context or the vocabulary raises ParameterError."""
    engine = open_engine()
    facts = engine.facts
    for task, parameter in (
        (example.task(max_tokens=facts.context), "max_tokens"),
        (example.task(prompt=(facts.vocabulary,)), "prompt"),
        (example.task(sampling=Sampling(temperature=-1)), "temperature"),
    ):
        named = ""
        try:
            engine.begin(task, Collector())
        except ParameterError as error:
            named = error.parameter
        assert named == parameter, f"the error of a task with a bad {parameter} names '{named}'"
    engine.close()


def check_closing_ends_everything(open_engine: OpenEngine, example: EngineExample) -> None:
    """Check that closing ends tasks with an error, refuses new ones and leaves no thread."""
    before = threading.active_count()
    for _ in range(_ATTEMPTS):
        if _closing_ends_a_task(open_engine(), example):
            break
    else:
        raise AssertionError(f"{_ATTEMPTS} times, an answer of the model's whole context was complete before the close")
    assert threading.active_count() <= before, "the engine left a thread behind"


def _closing_ends_a_task(engine: TokenEngine, example: EngineExample) -> bool:
    """Close an engine during a long task and check its end.

    Returns False if the task was complete before the close.
    """
    sink = Collector()
    room = engine.facts.context - len(example.prompt)
    task = example.task(max_tokens=room)
    engine.begin(task, sink)
    sink.wait_for_tokens(task, 1)
    engine.close()
    (end,) = sink.ends(task)
    try:
        engine.begin(example.task(), Collector())
    except RemoraError:
        pass
    else:
        raise AssertionError("a closed engine accepted a task")
    if end.reason == "length" and len(sink.tokens(task)) == room:
        return False  # on a machine that suspends this thread for long enough
    assert end.reason == "error", f"the end is {end}"
    assert isinstance(end.error, UnavailableError), f"the end is {end}"
    return True


def check_answers_are_measured(open_engine: OpenEngine, example: EngineExample) -> None:
    """Check that each token and each end is measured, with times that sum to the whole."""
    engine = open_engine()
    before = _observations(engine)
    task = example.task(id="measured")
    _run(engine, task)
    counts = {name: count - before[name] for name, count in _observations(engine).items()}
    (answered,) = [each for each in engine.measurements.recent() if each.id == "measured"]
    engine.close()
    assert counts["time_to_first_token_seconds"] == 1, "the first token was not measured"
    between = counts["inter_token_latency_seconds"]
    assert 1 <= between < example.tokens, f"{between} intervals between {example.tokens} tokens were measured"
    assert counts["e2e_request_latency_seconds"] == 1, "the end was not measured"
    usage = answered.end.usage
    phases = usage.queue_ns + usage.prefill_ns + usage.decode_ns
    assert abs(phases - answered.whole_ns) <= 0.02 * answered.whole_ns, f"{phases} ns of {answered.whole_ns} ns"


def _observations(engine: TokenEngine) -> dict[str, float]:
    """Return the number of observations of each histogram."""
    return {
        name: next(each.value for each in samples if each.suffix == "_count")
        for name, samples in engine.measurements.histograms()
    }


EngineCheck = Callable[[OpenEngine, EngineExample], None]

ENGINE_CHECKS: tuple[EngineCheck, ...] = (
    check_each_choice_ends_once_and_last,
    check_a_seed_repeats,
    check_company_changes_nothing,
    check_log_probabilities_are_a_distribution,
    check_a_cancelled_task_ends_and_frees_its_row,
    check_stop_strings_do_not_leak,
    check_bad_tasks_are_refused_before_anything_runs,
    check_closing_ends_everything,
    check_answers_are_measured,
)


def check_engine(open_engine: OpenEngine, example: EngineExample) -> None:
    """Run every check. Raises AssertionError with one line for each failed check."""
    wrong = []
    for check in ENGINE_CHECKS:
        try:
            check(open_engine, example)
        except Exception as error:
            wrong.append(f"{check.__name__}: {error or type(error).__name__}")
    if wrong:
        raise AssertionError("\n".join(wrong))
