"""Tests of ``remora_llm.generation.library_answers``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from remora.errors import InternalError
from remora_llm.generation.library_answers import LibraryAnswer, LibraryAnswers
from remora_llm.generation.tasks import ModelFacts, Sampling, Sink, Task, TokenLogprob
from remora_llm.testing import BYTE_VOCABULARY, END_TOKEN, ByteTokens, Collector

FACTS = ModelFacts(context=100, vocabulary=BYTE_VOCABULARY, end_tokens=frozenset({END_TOKEN}))
TASK = Task(tuple(b"Once"), 20, Sampling(temperature=0))


class Book:
    """Answers of one task, written by a test in the place of a library."""

    def __init__(self, **changes: object) -> None:
        self.now_ns = 1000
        self.task = replace(TASK, **changes)  # type: ignore[arg-type]
        self.answers: LibraryAnswers[str] = LibraryAnswers(
            "m", FACTS, ByteTokens(), lambda: self.now_ns, trouble=lambda: "", wake=lambda: None
        )
        self.sink = Collector()
        self.answer = self.add(self.task)

    def add(self, task: Task, sink: Sink | None = None) -> LibraryAnswer:
        self.answers.book.enter(task, sink or self.sink, 900, "prepared")
        ((answer, prepared),), stopped = self.answers.take()
        assert (prepared, stopped) == ("prepared", [])
        return answer

    def write(self, text: bytes | tuple[int, ...], logprobs: tuple[TokenLogprob, ...] = ()) -> bool:
        self.now_ns += 10
        done = self.answers.write(self.answer, tuple(text), logprobs)
        self.answers.book.deliver()
        return done

    def end(self) -> tuple[str, str | int | None]:
        (end,) = self.sink.ends(self.task)
        return end.reason, end.stop


def test_tokens_become_text_and_the_limit_ends_the_answer_wherever_the_library_is() -> None:
    book = Book(max_tokens=4)
    assert not book.write("h\u00e9".encode()[:2])
    assert book.sink.text(book.task) == "h"
    assert book.write("h\u00e9".encode()[2:] + b"llo")
    assert (book.sink.text(book.task), len(book.sink.tokens(book.task))) == ("h\u00e9l", 4)
    assert book.end() == ("length", None)
    assert book.write(b"more")
    assert len(book.sink.tokens(book.task)) == 4


def test_a_stop_string_that_spans_writes_is_not_shown_and_ends_the_answer() -> None:
    book = Book(stop=("END",))
    assert not book.write(b"one E")
    assert book.sink.text(book.task) == "one "
    assert book.write(b"ND and more")
    assert book.sink.text(book.task) == "one "
    assert book.end() == ("stop", "END")


def test_an_end_token_ends_the_answer_unless_it_is_ignored() -> None:
    book = Book()
    assert book.write((*b"yes", END_TOKEN, *b"no"))
    assert (book.sink.text(book.task), book.end()) == ("yes", ("stop", None))
    book = Book(ignore_end=True)
    assert not book.write((*b"yes", END_TOKEN, *b"no"))
    assert book.sink.text(book.task) == "yesno"


def test_the_adapters_of_running_and_waiting_answers_are_counted() -> None:
    book = Book(adapter="b")
    book.add(replace(TASK, adapter="a"))
    book.add(replace(TASK))
    stats = book.answers.stats()
    assert (stats.running_adapters, stats.waiting_adapters, stats.waiting) == ((), ("a", "b"), 3)
    book.write(b"x")
    stats = book.answers.stats()
    assert (stats.running_adapters, stats.waiting_adapters, stats.running) == (("b",), ("a",), 1)


def test_times_are_measured_and_sum_to_the_whole() -> None:
    book = Book(max_tokens=3)
    book.write(b"a")
    book.write(b"b")
    book.write(b"c")
    (end,) = book.sink.ends(book.task)
    assert (end.usage.queue_ns, end.usage.prefill_ns, end.usage.decode_ns) == (100, 10, 20)
    assert book.answers.stats().generated_tokens == 3
    assert book.answers.stats().ended == {"length": 1}
    (answered,) = book.answers.book.measurements.recent()
    assert answered.whole_ns == 130


def test_ends_from_outside_release_what_was_held_back_except_after_an_error() -> None:
    book = Book(stop=("END",))
    book.write(b"one EN")
    book.answers.end(book.answer, "cancelled")
    book.answers.end(book.answer, "cancelled")
    book.answers.book.deliver()
    assert (book.sink.text(book.task), book.end()) == ("one EN", ("cancelled", None))
    book = Book(stop=("END",))
    book.write(b"one EN")
    book.answers.end(book.answer, "error", InternalError("lost"))
    book.answers.book.deliver()
    assert (book.sink.text(book.task), book.end()) == ("one ", ("error", None))


def test_deadlines_end_what_is_late() -> None:
    book = Book(deadline_ns=1005)
    assert book.answers.end_late() == []
    book.now_ns = 1005
    assert book.answers.end_late() == [book.answer]
    book.answers.book.deliver()
    assert book.end() == ("deadline", None)


def test_a_sink_that_raises_has_its_task_cancelled() -> None:
    book = Book()

    class Broken(Collector):
        def take(self, pieces: object) -> None:
            raise RuntimeError("planted")

    other = replace(TASK)
    broken = book.add(other, Broken())
    book.answers.write(broken, tuple(b"a"))
    book.write(b"b")
    assert book.answers.book.cancelled == {other}
    assert book.sink.text(book.task) == "b"


@pytest.mark.parametrize("count", [1, 2])
def test_log_probabilities_belong_to_the_tokens_that_are_kept(count: int) -> None:
    book = Book(max_tokens=count, logprobs=0)
    scores = tuple(TokenLogprob(token, -0.5 * token, 1) for token in b"abc")
    assert book.write(b"abc", scores)
    assert book.sink.logprobs(book.task) == [-0.5 * token for token in b"abc"[:count]]


def test_a_task_that_is_cancelled_before_it_is_taken_never_reaches_the_library() -> None:
    book = Book()
    task = replace(TASK, choices=2)
    book.answers.book.enter(task, book.sink, 900, "prepared")
    book.answers.book.cancel(task)
    assert book.answers.take() == ([], [])
    book.answers.book.cancel(book.task)
    assert book.answers.take() == ([], [book.answer])
    book.answers.book.deliver()
    assert [end.reason for end in book.sink.ends(task)] == ["cancelled"] * 2
    assert book.end() == ("cancelled", None)


def test_a_task_without_an_answer_ends_at_once() -> None:
    book = Book()
    scored = replace(TASK, max_tokens=0)
    book.answers.book.enter(scored, book.sink, 900, "prepared")
    assert book.answers.take() == ([], [])
    book.answers.book.deliver()
    assert [end.reason for end in book.sink.ends(scored)] == ["length"]


def test_an_answer_waits_until_its_first_token_or_its_end() -> None:
    book = Book(caller="a")
    answer = book.add(replace(TASK, caller="b"))
    assert dict(book.answers.book.waiting()) == {"a": 1, "b": 1}
    book.write(b"x")
    assert dict(book.answers.book.waiting()) == {"b": 1}
    book.answers.end(answer, "deadline")
    book.answers.end(book.answer, "deadline")
    assert dict(book.answers.book.waiting()) == {}


def test_an_unload_ends_the_choices_that_were_taken_and_those_that_were_not() -> None:
    book = Book()
    late = replace(TASK, choices=2)
    book.answers.book.enter(late, book.sink, 900, "prepared")
    book.answers.book.close()
    book.answers.unload()
    ends = [*book.sink.ends(book.task), *book.sink.ends(late)]
    assert [end.error.message for end in ends if end.error is not None] == ["model 'm' was unloaded"] * 3
