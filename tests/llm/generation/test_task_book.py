"""Tests of ``remora_llm.generation.task_book``."""

from __future__ import annotations

from collections import Counter

import pytest

from remora.errors import InternalError, QueueFullError, UnavailableError
from remora_llm.generation.task_book import TaskBook
from remora_llm.generation.tasks import End, EndReason, Piece, Task, Usage
from remora_llm.testing import Collector


class Engine:
    """Engine that computes nothing, with a book of its tasks."""

    def __init__(self, max_waiting: int = 4) -> None:
        self.trouble = ""
        self.wakes = 0
        self.fault: RuntimeError | None = None
        self.sink = Collector()
        self.book: TaskBook[None] = TaskBook(
            "m",
            100,
            trouble=lambda: self.trouble,
            wake=self.wake,
            max_waiting=max_waiting,
        )

    def wake(self) -> None:
        if self.fault is not None:
            raise self.fault
        self.wakes += 1

    def enter(self, caller: str = "", choices: int = 1) -> Task:
        task = Task((1, 2), 5, choices=choices, caller=caller)
        self.book.enter(task, self.sink, 10, None)
        return task

    def end(self, task: Task, choice: int = 0, reason: EndReason = "stop") -> None:
        self.book.end(self.sink, Piece(task, choice), End(reason, Usage()), 10, 20)
        self.book.deliver()


def test_tasks_are_taken_once_in_their_order_and_each_wakes_the_engine() -> None:
    engine = Engine()
    tasks = [engine.enter(), engine.enter()]
    entries, cancelled = engine.book.take()
    assert [entry.task for entry in entries] == tasks
    assert (cancelled, engine.wakes) == (set(), 2)
    assert engine.book.take() == ([], set())


def test_a_cancellation_is_taken_with_its_task_or_later_and_never_before() -> None:
    engine = Engine()
    task = engine.enter()
    engine.book.cancel(task)
    entries, cancelled = engine.book.take()
    assert ([entry.task for entry in entries], cancelled) == ([task], {task})
    engine.book.cancel(task)
    assert engine.book.take() == ([], {task})


def test_a_task_is_forgotten_with_the_end_of_its_last_choice() -> None:
    engine = Engine()
    task = engine.enter(choices=2)
    engine.book.take()
    engine.end(task, 0)
    engine.book.cancel(task)
    assert engine.book.cancelled == {task}
    engine.end(task, 1, "cancelled")
    assert engine.book.cancelled == set()
    engine.book.cancel(task)
    engine.book.cancel(Task((1,), 1))
    assert engine.book.take() == ([], set())
    assert engine.book.ended == {"stop": 1, "cancelled": 1}
    assert [end.reason for end in engine.sink.ends(task)] == ["stop", "cancelled"]


def test_choices_that_wait_in_the_engine_and_in_the_book_fill_the_queue() -> None:
    engine = Engine()
    engine.book.queued = Counter({"a": 1})
    engine.enter("b", 2)
    assert dict(engine.book.waiting()) == {"a": 1, "b": 2}
    with pytest.raises(QueueFullError, match="'m' has 3 waiting requests"):
        engine.enter(choices=2)
    task = engine.enter()
    for _ in range(2):
        with pytest.raises(QueueFullError, match="has 4 waiting"):
            engine.enter()
        engine.book.take()  # without effect, because what is taken waits until it starts
    engine.book.count_started(task)
    engine.enter()
    engine.book.take()
    engine.book.queued.clear()
    engine.enter(choices=9)  # an empty queue admits any task
    engine.book.take()


def test_one_caller_has_half_of_the_queue_and_requests_without_a_caller_all_of_it() -> None:
    engine = Engine()
    engine.book.queued = Counter({"a": 1})
    engine.enter("a")
    with pytest.raises(QueueFullError, match="this key has 2 waiting"):
        engine.enter("a")
    engine.enter("b")
    engine.enter()
    engine.book.take()
    engine.book.queued = Counter({"": 3})
    engine.enter()


def test_a_task_is_refused_with_the_reason_if_the_engine_cannot_run_it() -> None:
    engine = Engine()
    engine.trouble = "no device; reload it"
    with pytest.raises(UnavailableError, match="'m' cannot run: no device; reload it"):
        engine.enter()
    engine.trouble = ""
    engine.fault = RuntimeError("can't start new thread")
    with pytest.raises(UnavailableError, match="'m' cannot run: can't start new thread"):
        engine.enter()
    assert engine.book.take() == ([], set())
    assert not engine.book.waiting()


def test_a_closed_book_admits_and_cancels_nothing_and_ends_the_wait() -> None:
    engine = Engine()
    task = engine.enter()
    assert engine.book.wait(lambda: True)
    engine.book.close()
    assert not engine.book.wait(lambda: True)
    engine.fault = RuntimeError("the loop is closed")
    engine.book.cancel(task)
    with pytest.raises(UnavailableError, match="being unloaded"):
        engine.enter()
    assert [entry.task for entry in engine.book.take()[0]] == [task]


def test_a_failure_of_the_model_is_the_models_unless_it_has_its_own_reason() -> None:
    book = Engine().book
    own = UnavailableError("gone")
    assert book.failure(own) is own
    failure = book.failure(ValueError("bad"))
    assert isinstance(failure, InternalError)
    assert failure.message == "model 'm' failed in a step: ValueError: bad"
