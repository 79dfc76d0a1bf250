"""Answers of engines that schedule by themselves: text, ends and measurements.

An adapter enters its tasks in the book, takes their choices here, passes on the tokens that its library has written,
and stops the answers that are complete. Stop strings and the limits are applied here, so that all engines cut an answer
at the same place.

Invariant: each choice gets exactly one end, its last piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic

from remora.errors import RemoraError
from remora_llm.generation import Sink, Tokens
from remora_llm.generation.answering import Answer
from remora_llm.generation.task_book import Entry, P, TaskBook
from remora_llm.generation.tasks import End, EndReason, EngineStats, ModelFacts, Piece, Task, TokenLogprob, Usage


class LibraryAnswer:
    """One choice that has not ended. ``number`` is the engine's name of it."""

    __slots__ = (
        "_answer",
        "arrival_ns",
        "cached",
        "choice",
        "first_ns",
        "last_ns",
        "number",
        "sink",
        "started_ns",
        "task",
    )

    def __init__(self, number: int, task: Task, choice: int, sink: Sink, arrival_ns: int, answer: Answer) -> None:
        self.number = number
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


class LibraryAnswers(Generic[P]):
    """Open choices of one engine. Only one thread uses it, except for `stats` and the book.

    Args:
        name: of the model.
        facts: of the model.
        tokens: its tokenizer.
        now_ns: monotonic clock, the one of the tasks' deadlines.
        trouble, wake: see `TaskBook`.
    """

    def __init__(
        self,
        name: str,
        facts: ModelFacts,
        tokens: Tokens,
        now_ns: Callable[[], int],
        *,
        trouble: Callable[[], str],
        wake: Callable[[], None],
    ) -> None:
        self.book: TaskBook[P] = TaskBook(name, facts.context, trouble=trouble, wake=wake)
        self._facts = facts
        self._tokens = tokens
        self._now = now_ns
        self._number = 0
        self._open: dict[int, LibraryAnswer] = {}
        self._stats = EngineStats()

    @property
    def open(self) -> list[LibraryAnswer]:
        """The open choices, oldest first."""
        return list(self._open.values())

    def take(self) -> tuple[list[tuple[LibraryAnswer, P]], list[LibraryAnswer]]:
        """Open the choices of tasks that entered and end those that were cancelled.

        Return the choices that the library gets now, with what the engine prepared for their tasks, and those that it
        has to stop.
        """
        entries, cancelled = self.book.take()
        stopped = [each for each in self._open.values() if each.task in cancelled] if cancelled else []
        opened = [(self._add(each, choice), each.prepared) for each in entries for choice in range(each.task.choices)]
        for answer in stopped:
            self.end(answer, "cancelled")
        for answer, _ in opened:
            if answer.task in cancelled:
                self.end(answer, "cancelled")
            elif not answer.task.max_tokens:
                self.end(answer, "length")
        return [each for each in opened if each[0].number in self._open], stopped

    def _add(self, entry: Entry[P], choice: int) -> LibraryAnswer:
        task, self._number = entry.task, self._number + 1
        text = Answer(task, choice, self._facts, self._tokens)
        answer = LibraryAnswer(self._number, task, choice, entry.sink, entry.arrival_ns, text)
        answer.started_ns = self._now()
        self._open[answer.number] = answer
        return answer

    def write(self, answer: LibraryAnswer, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> bool:
        """Post the tokens that the library has written. Return True if the answer has ended.

        Tokens behind the end are dropped, such as those that the library wrote behind a stop string.
        """
        if answer.number not in self._open or not tokens:
            return answer.number not in self._open
        now_ns = self._now()
        if not answer.first_ns:
            answer.first_ns = now_ns
            self.book.count_started(answer.task)
            self.book.measurements.record_first(answer.task, answer.arrival_ns, now_ns)
            self._stats = replace(self._stats, prompt_tokens=self._stats.prompt_tokens + len(answer.task.prompt))
        else:
            self.book.measurements.record_next(now_ns - answer.last_ns)
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
            self.book.post(answer.sink, piece)
            return False
        self._finish(answer, reason, piece, stop=stop)
        return True

    def end(self, answer: LibraryAnswer, reason: EndReason, error: RemoraError | None = None) -> None:
        """End a choice for a reason outside of its tokens; nothing happens if it has ended."""
        if answer.number in self._open:
            text = answer.rest() if reason != "error" else ""
            self._finish(answer, reason, Piece(answer.task, answer.choice, text=text), error=error)

    def end_late(self) -> list[LibraryAnswer]:
        """End the choices whose deadline has passed, and return them."""
        now_ns = self._now()
        late = [each for each in self._open.values() if each.task.deadline_ns and each.task.deadline_ns <= now_ns]
        for each in late:
            self.end(each, "deadline")
        return late

    def end_all(self, error: RemoraError) -> None:
        """End all choices with an error."""
        for each in self.open:
            self.end(each, "error", error)

    def unload(self) -> None:
        """End all choices after the book was closed, those that were not taken included."""
        self.take()
        self.end_all(self.book.unloaded())
        self.book.deliver()

    def stats(self) -> EngineStats:
        """Return the counters; gauges of the library are 0. Any thread may call this."""
        answers = tuple(self._open.values())
        running = [each.task.adapter for each in answers if each.first_ns]
        waiting = [each.task.adapter for each in answers if not each.first_ns]
        return replace(
            self._stats,
            running=len(running),
            waiting=sum(self.book.waiting().values()),
            ended=self.book.ended,
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
        del self._open[answer.number]
        if not answer.first_ns:
            self.book.count_started(answer.task)
        self.book.end(answer.sink, piece, end, answer.arrival_ns, now_ns)
