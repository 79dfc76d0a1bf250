"""Runs of copies on a shadow: comparisons, times, and a primary that is never slowed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from eventually import eventually
from fakes import FakeClock
from remora.errors import InternalError
from remora.messages import Data, InferForm, Response, Streamed, Tensor
from remora.models.recordings import MAX_WAITING, Step
from remora.models.shadow_targets import Answered
from remora.models.shadowing import Primary, Shadowing
from remora.system.clock import Clock, SystemClock
from remora.tracing.differences import Difference
from remora.traffic.comparing import Comparison, difference
from remora.traffic.pacing import LULL_NS

EXACT = partial(difference, how=Comparison())


class _Target:
    """Destination whose answers are the test's."""

    threads = 1

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.asked: list[InferForm] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.cost_ns = 0

    def refusal(self, primary: Any) -> str:
        return ""

    def answer(self, form: InferForm, data: list[Data]) -> Answered:
        self.asked.append(form)
        self.goes_on.wait()
        found = self.answers.pop(0) if self.answers else 1
        if isinstance(found, Exception):
            raise found
        return Answered([_outputs(value) for value in (found if isinstance(found, list) else [found])], self.cost_ns)

    def end_thread(self) -> None:
        pass


def _outputs(value: float) -> list[Tensor]:
    return [Tensor("y", "FP32", np.array([value], np.float32))]


@contextmanager
def _shadowing(
    target: _Target,
    compare: Callable[..., str] = EXACT,
    log: Callable[[Difference], None] | None = None,
    *,
    is_busy: Callable[[], bool] = lambda: False,
    processors: float = 1.0,
    clock: Clock | None = None,
) -> Iterator[Shadowing]:
    primary = Primary(is_busy, lambda: 0, 1.0, processors)
    shadowing = Shadowing(target, compare, primary, clock or SystemClock(), log, "version 3")
    try:
        yield shadowing
    finally:
        target.goes_on.set()
        shadowing.close()


def _request(shadowing: Shadowing, id: str = "", *values: float) -> bool:
    """Let the primary answer a request, and return True if it was recorded."""
    reply = shadowing.recorder.begin(InferForm((), id=id), [], lambda *_: None, "m", "2")
    for value in values[:-1]:
        reply(None, Streamed(Response(_outputs(value)), False))  # type: ignore[arg-type]
    last = Response(_outputs(values[-1] if values else 1))
    reply(None, Streamed(last, True) if len(values) > 1 else last)  # type: ignore[arg-type]
    return isinstance(reply, Step)


def test_answers_are_compared_and_differences_sampled() -> None:
    target = _Target()
    target.answers = [1, 3, InternalError("broken"), RuntimeError("any")]
    with _shadowing(target) as shadowing:
        for id in ("same", "other", "bad", "worse"):
            _request(shadowing, id)
        eventually(lambda: shadowing.compared == 4)
        found = shadowing.document()
        assert (found["differing"], found["failed"], found["dropped"]) == (3, 2, 0)
        assert found["samples"] == [
            "other: y: 1 of 1 elements differ, by at most 2",
            "bad: the shadow failed: broken",
            "worse: the shadow failed: any",
        ]
        assert shadowing.rate == (3, 4)


def test_streams_are_compared_answer_by_answer() -> None:
    rows: list[Difference] = []
    target = _Target()
    target.answers = [[1, 2], [1, 9], [1], [1, 2, 3]]
    with _shadowing(target, log=rows.append) as shadowing:
        for _ in range(4):
            _request(shadowing, "", 1, 2)
        eventually(lambda: shadowing.compared == 4 and len(rows) == 3)
        assert [*shadowing.samples] == [
            "answer 2: y: 1 of 1 elements differ, by at most 7",
            "answers: 1, expected 2",
            "answers: 3, expected 2",
        ]
    assert (rows[0].expected[0].data[0], rows[0].found[0].data[0]) == (2, 9)
    assert (rows[1].expected[0].data[0], rows[1].found) == (2, ())
    assert (rows[2].expected, rows[2].found[0].data[0]) == ((), 3)


def _sequence(shadowing: Shadowing, length: int) -> None:
    for number in range(length):
        form = InferForm((), sequence_id=7, sequence_start=not number, sequence_end=number == length - 1)
        recorder = shadowing.recorder
        reply = (
            recorder.go_on(form, [], lambda *_: None, "2")
            if number
            else recorder.begin(form, [], lambda *_: None, "m", "2")
        )
        reply(None, Response(_outputs(number)))  # type: ignore[arg-type]


def test_a_sequence_runs_in_order_and_is_compared_once() -> None:
    target = _Target()
    target.answers = [0, 5, 6, 0, 1, 2, 0, InternalError("broken")]
    with _shadowing(target) as shadowing:
        _sequence(shadowing, 3)
        _sequence(shadowing, 3)
        eventually(lambda: shadowing.compared == 2)
        assert [*shadowing.samples] == ["request 2 of the sequence: y: 1 of 1 elements differ, by at most 4"]
        assert [(form.sequence_id, form.sequence_start, form.sequence_end) for form in target.asked[:3]] == [
            (7, True, False),
            (7, False, False),
            (7, False, True),
        ]
        _sequence(shadowing, 3)
        eventually(lambda: shadowing.compared == 3)
        assert shadowing.samples[-1] == "request 2 of the sequence: the shadow failed: broken"
        assert len(target.asked) == 8  # the rest of a sequence that failed is not sent


def test_a_shadow_that_hangs_gets_one_copy_and_further_requests_are_not_copied() -> None:
    target = _Target()
    target.goes_on.clear()
    with _shadowing(target) as shadowing:
        _request(shadowing)
        eventually(lambda: target.asked)
        assert [_request(shadowing) for _ in range(MAX_WAITING + 3)] == [True] * MAX_WAITING + [False] * 3
        assert not shadowing.recorder.is_open
        assert shadowing.recorder.dropped == 3
        assert len(target.asked) == 1
        target.goes_on.set()
        eventually(lambda: shadowing.compared == MAX_WAITING + 1)
        assert shadowing.recorder.is_open


def test_copies_wait_while_the_primary_is_busy() -> None:
    looks, is_busy = threading.Semaphore(0), threading.Event()
    is_busy.set()

    def look() -> bool:
        looks.release()
        return is_busy.is_set()

    target = _Target()
    with _shadowing(target, is_busy=look) as shadowing:
        _request(shadowing)
        for _ in range(5):
            assert looks.acquire(timeout=60)
        assert target.asked == []
        is_busy.clear()
        eventually(lambda: shadowing.compared == 1)


def test_copies_rest_in_proportion_to_their_cost() -> None:
    looks, clock, target = threading.Semaphore(0), FakeClock(), _Target()

    def look() -> bool:
        looks.release()
        return False

    def wait_for_looks() -> None:
        while looks.acquire(blocking=False):
            pass
        for _ in range(3):
            assert looks.acquire(timeout=60)

    target.cost_ns = 3_000_000_000
    with _shadowing(target, is_busy=look, processors=0.25, clock=clock) as shadowing:
        _request(shadowing)
        clock.advance(LULL_NS)
        rested_ns = clock.now_ns + 9_000_000_000
        eventually(lambda: shadowing._rested_ns == rested_ns)
        clock.advance(9_000_000_000 - LULL_NS - 1)
        _request(shadowing)
        clock.advance(LULL_NS)
        wait_for_looks()
        assert len(target.asked) == 1
        clock.advance(1)
        eventually(lambda: shadowing.compared == 2)


def test_a_shadow_that_ends_drops_the_copies_that_wait() -> None:
    target = _Target()
    target.goes_on.clear()
    with _shadowing(target) as shadowing:
        for _ in range(3):
            _request(shadowing)
        eventually(lambda: target.asked)
        shadowing.close()
        target.goes_on.set()
        eventually(lambda: shadowing.compared == 1)
        _request(shadowing)
        eventually(lambda: shadowing._threads == 0)
        assert len(target.asked) == 1


def test_a_comparison_or_a_log_that_fails_ends_nothing() -> None:
    def fail(*_: Any) -> str:
        raise ValueError("of the function")

    def log(found: Difference) -> None:
        raise OSError("no space")

    with _shadowing(_Target(), fail, log) as shadowing:
        for expected in (1, 2):
            _request(shadowing)
            eventually(lambda count=expected: shadowing.compared == count)  # type: ignore[misc]
        assert shadowing.failed == 2
        assert shadowing.samples[-1] == "the answers cannot be compared: ValueError: of the function"


def test_differences_are_logged_with_both_answers() -> None:
    rows: list[Difference] = []
    target = _Target()
    target.answers = [3]
    with _shadowing(target, log=rows.append) as shadowing:
        _request(shadowing, "r")
        eventually(lambda: len(rows) == 1)
        assert (rows[0].model, rows[0].version, rows[0].shadow, rows[0].form.id) == ("m", "2", "version 3", "r")
        assert (rows[0].expected[0].data[0], rows[0].found[0].data[0]) == (1, 3)
