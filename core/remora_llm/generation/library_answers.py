"""Answers of engines that schedule by themselves: text, ends and measurements.

An adapter opens the choices of a task here, passes on the tokens that its library has written, and stops the answers
that are complete. Stop strings and the limits are applied here, so that all engines cut an answer at the same place.

Invariant: each choice gets exactly one end, its last piece.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from remora.errors import RemoraError
from remora_llm.generation import Sink, Tokens
from remora_llm.generation.answering import Answer, Outbox
from remora_llm.generation.measurements import Measurements
from remora_llm.generation.tasks import End, EndReason, EngineStats, ModelFacts, Piece, Task, TokenLogprob, Usage


class LibraryAnswer:
    """One choice that has not ended. ``key`` is the library's name of it."""

    __slots__ = (
        "_answer",
        "arrival_ns",
        "cached",
        "choice",
        "first_ns",
        "key",
        "last_ns",
        "sink",
        "started_ns",
        "task",
    )

    def __init__(self, key: Hashable, task: Task, choice: int, sink: Sink, arrival_ns: int, answer: Answer) -> None:
        self.key = key
        self.task = task
        self.choice = choice
        self.sink = sink
        self.arrival_ns = arrival_ns
        self.started_ns = 0
        """When the library got the choice."""
        self.first_ns = 0
        self.last_ns = 0
        self.cached = 0
        """Number of tokens of the prompt that the library's prefix cache saved."""
        self._answer = answer

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self._answer.count

    def append(self, token: int, logprob: TokenLogprob | None) -> tuple[str, EndReason | None, str | int | None]:
        """Append a token. Return the text to show, the end's reason, and what stopped the answer."""
        written = self._answer.append(token, logprob)
        return written.text, written.reason, written.stop

    def rest(self) -> str:
        """Return the text that was held back."""
        return self._answer.finish()


class LibraryAnswers:
    """Open choices of one engine. Only one thread uses it, except for `stats`.

    Args:
        name: of the model.
        facts: of the model.
        tokens: its tokenizer.
        now_ns: monotonic clock, the one of the tasks' deadlines.
        cancel: cancels a task whose sink failed.
    """

    def __init__(
        self,
        name: str,
        facts: ModelFacts,
        tokens: Tokens,
        now_ns: Callable[[], int],
        cancel: Callable[[Task], None],
    ) -> None:
        self.measurements = Measurements(facts.context)
        self._facts = facts
        self._tokens = tokens
        self._now = now_ns
        self._outbox = Outbox(name, cancel)
        self._open: dict[Hashable, LibraryAnswer] = {}
        self._stats = EngineStats()

    @property
    def open(self) -> Iterable[LibraryAnswer]:
        """The open choices, oldest first."""
        return list(self._open.values())

    def of(self, task: Task) -> list[LibraryAnswer]:
        """Return the open choices of a task."""
        return [each for each in self._open.values() if each.task is task]

    def add(self, key: Hashable, task: Task, choice: int, sink: Sink, arrival_ns: int) -> LibraryAnswer:
        """Open a choice that the library gets now."""
        answer = LibraryAnswer(key, task, choice, sink, arrival_ns, Answer(task, choice, self._facts, self._tokens))
        answer.started_ns = self._now()
        self._open[key] = answer
        return answer

    def write(self, answer: LibraryAnswer, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> bool:
        """Post the tokens that the library has written. Return True if the answer has ended.

        Tokens behind the end are dropped, such as those that the library wrote behind a stop string.
        """
        if answer.key not in self._open or not tokens:
            return answer.key not in self._open
        now_ns = self._now()
        if not answer.first_ns:
            answer.first_ns = now_ns
            self.measurements.record_first(answer.task, answer.arrival_ns, now_ns)
            self._stats = replace(self._stats, prompt_tokens=self._stats.prompt_tokens + len(answer.task.prompt))
        else:
            self.measurements.record_next(now_ns - answer.last_ns)
        answer.last_ns = now_ns
        text, reason, stop, count = "", None, None, 0
        for place, token in enumerate(tokens):
            shown, reason, stop = answer.append(token, logprobs[place] if logprobs else None)
            text += shown
            count += 1
            if reason is not None:
                break
        self._stats = replace(self._stats, generated_tokens=self._stats.generated_tokens + count)
        piece = Piece(answer.task, answer.choice, tuple(tokens[:count]), text, tuple(logprobs[:count]))
        if reason is None:
            self._outbox.post(answer.sink, piece)
            return False
        self._finish(answer, reason, piece, stop=stop)
        return True

    def end(self, answer: LibraryAnswer, reason: EndReason, error: RemoraError | None = None) -> None:
        """End a choice for a reason outside of its tokens; nothing happens if it has ended."""
        if answer.key in self._open:
            text = answer.rest() if reason != "error" else ""
            self._finish(answer, reason, Piece(answer.task, answer.choice, text=text), error=error)

    def end_late(self) -> list[LibraryAnswer]:
        """End the choices whose deadline has passed, and return them."""
        now_ns = self._now()
        late = [each for each in self._open.values() if each.task.deadline_ns and each.task.deadline_ns <= now_ns]
        for each in late:
            self.end(each, "deadline")
        return late

    def deliver(self) -> None:
        """Give each sink its pieces, in one call."""
        self._outbox.deliver()

    def stats(self) -> EngineStats:
        """Return the counters; gauges of the library are 0. Any thread may call this."""
        answers = tuple(self._open.values())
        running = [each.task.adapter for each in answers if each.first_ns]
        waiting = [each.task.adapter for each in answers if not each.first_ns]
        return replace(
            self._stats,
            running=len(running),
            waiting=len(waiting),
            running_adapters=tuple(sorted({*running} - {""})),
            waiting_adapters=tuple(sorted({*waiting} - {""})),
        )

    def _finish(
        self,
        answer: LibraryAnswer,
        reason: EndReason,
        piece: Piece,
        *,
        stop: str | int | None = None,
        error: RemoraError | None = None,
    ) -> None:
        now_ns = self._now()
        first_ns = answer.first_ns or now_ns
        usage = Usage(
            prompt_tokens=len(answer.task.prompt),
            generated_tokens=answer.count,
            cached_tokens=answer.cached,
            queue_ns=answer.started_ns - answer.arrival_ns,
            prefill_ns=first_ns - answer.started_ns,
            decode_ns=now_ns - first_ns,
            steps=answer.count,
        )
        end = End(reason, usage, stop, error)
        del self._open[answer.key]
        self.measurements.record_end(answer.task, answer.choice, end, answer.arrival_ns, now_ns)
        ended = self._stats.ended
        self._stats = replace(self._stats, ended={**ended, reason: ended.get(reason, 0) + 1})
        self._outbox.post(answer.sink, piece._replace(end=end))
