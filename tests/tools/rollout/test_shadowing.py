"""Runs of copies on a shadow: comparisons, times, and a primary that is never slowed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from remora.errors import InternalError
from remora.messages import Data, InferForm, Request, Response, Streamed, Tensor, Ticket
from remora.system.clock import Clock, SystemClock
from remora_tools.rollout.comparing import Comparison, difference
from remora_tools.rollout.differences import Difference
from remora_tools.rollout.pacing import SETTLE_NS
from remora_tools.rollout.recordings import MAX_WAITING, Step
from remora_tools.rollout.shadowing import Answered, Primary, Shadowing
from support.engine.fakes import FakeClock
from support.process.eventually import eventually

TICKET = Ticket(Request(InferForm(()), {}, (), 1, None), lambda *_: None)
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
        self.closes = 0

    def refusal(self, primary: Any) -> str:
        return ""

    def answer(self, form: InferForm, data: list[Data]) -> Answered:
        self.asked.append(form)
        self.goes_on.wait()
        found = self.answers.pop(0) if self.answers else 1
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, Answered):
            return found
        return Answered([_outputs(value) for value in (found if isinstance(found, list) else [found])], self.cost_ns)

    def end_thread(self) -> None:
        pass

    def close(self) -> None:
        self.closes += 1


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
        reply(TICKET, Streamed(Response(_outputs(value)), False))
    last = Response(_outputs(values[-1] if values else 1))
    reply(TICKET, Streamed(last, True) if len(values) > 1 else last)
    return isinstance(reply, Step)


def _counted(shadowing: Shadowing, count: int) -> None:
    """Wait until the result of so many copies is known in all parts, which `compared` alone does not say."""
    eventually(lambda: shadowing.rate[1] == count)


def test_answers_are_compared_and_differences_sampled() -> None:
    target = _Target()
    target.answers = [1, 3, InternalError("broken"), RuntimeError("any")]
    with _shadowing(target) as shadowing:
        for id in ("same", "other", "bad", "worse"):
            _request(shadowing, id)
        _counted(shadowing, 4)
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
            recorder.continue_sequence(form, [], lambda *_: None, "2")
            if number
            else recorder.begin(form, [], lambda *_: None, "m", "2")
        )
        reply(TICKET, Response(_outputs(number)))


def test_a_sequence_runs_in_order_with_an_id_of_the_copy_and_is_compared_once() -> None:
    target = _Target()
    target.answers = [0, 5, 6, 0, 1, 2]
    with _shadowing(target) as shadowing:
        _sequence(shadowing, 3)
        _sequence(shadowing, 3)
        _counted(shadowing, 2)
        assert [*shadowing.samples] == ["request 2 of the sequence: y: 1 of 1 elements differ, by at most 4"]
        first, second = target.asked[:3], target.asked[3:]
        for forms in (first, second):
            assert len({form.sequence_id for form in forms}) == 1
            assert [(form.sequence_start, form.sequence_end) for form in forms] == [
                (True, False),
                (False, False),
                (False, True),
            ]
        ids = [first[0].sequence_id, second[0].sequence_id]
        assert ids[0] != ids[1]
        assert all(1 << 62 <= id < 1 << 63 for id in ids)  # type: ignore[operator]


def test_a_sequence_with_a_text_as_id_gets_another_text() -> None:
    target = _Target()
    with _shadowing(target) as shadowing:
        form = InferForm((), sequence_id="a", sequence_start=True, sequence_end=True)
        reply = shadowing.recorder.begin(form, [], lambda *_: None, "m", "2")
        reply(TICKET, Response(_outputs(1)))
        _counted(shadowing, 1)
    (sent,) = target.asked
    assert isinstance(sent.sequence_id, str)
    assert len(sent.sequence_id) > 30


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("failure", [InternalError("broken"), Answered((), 0, InternalError("broken"))])
def test_a_sequence_that_fails_at_the_shadow_ends_there(failing: int, failure: Any) -> None:
    target = _Target()
    target.answers = [*range(failing), failure]
    with _shadowing(target) as shadowing:
        _sequence(shadowing, 4)
        _counted(shadowing, 1)
        assert [*shadowing.samples] == [f"request {failing + 1} of the sequence: the shadow failed: broken"]
    assert [form.sequence_end for form in target.asked] == [False] * (failing + 1) + [True]


def test_a_sequence_whose_comparison_fails_is_sent_to_its_end() -> None:
    def fail(*_: Any) -> str:
        raise ValueError("of the function")

    target = _Target()
    with _shadowing(target, fail) as shadowing:
        _sequence(shadowing, 3)
        _counted(shadowing, 1)
        assert (shadowing.failed, shadowing.differing) == (1, 1)
    assert [form.sequence_end for form in target.asked] == [False, False, True]


def test_a_sequence_ends_at_the_shadow_when_its_shadow_ends() -> None:
    target = _Target()
    target.goes_on.clear()
    with _shadowing(target) as shadowing:
        _sequence(shadowing, 5)
        eventually(lambda: target.asked)
        shadowing.close()
        target.goes_on.set()
        eventually(lambda: shadowing._threads == 0)
    assert [form.sequence_end for form in target.asked] == [False, True]
    assert (shadowing.compared, target.closes > 0) == (0, True)


def test_requests_of_a_sequence_ask_whether_the_primary_is_busy() -> None:
    target = _Target()
    checks: list[int] = []

    def is_busy() -> bool:
        checks.append(len(target.asked))
        return False

    with _shadowing(target, is_busy=is_busy) as shadowing:
        _sequence(shadowing, 3)
        _counted(shadowing, 1)
    assert {1, 2} <= {*checks}


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
        _counted(shadowing, MAX_WAITING + 1)
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
        _counted(shadowing, 1)


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
        clock.advance(SETTLE_NS)
        rested_ns = clock.now_ns + 9_000_000_000
        eventually(lambda: shadowing._rested_ns == rested_ns)
        clock.advance(9_000_000_000 - SETTLE_NS - 1)
        _request(shadowing)
        clock.advance(SETTLE_NS)
        wait_for_looks()
        assert len(target.asked) == 1
        clock.advance(1)
        _counted(shadowing, 2)


def test_a_shadow_that_ends_drops_the_copies_that_wait() -> None:
    target = _Target()
    target.goes_on.clear()
    with _shadowing(target) as shadowing:
        for _ in range(3):
            _request(shadowing)
        eventually(lambda: target.asked)
        shadowing.close()
        target.goes_on.set()
        eventually(lambda: shadowing._threads == 0)
        assert not _request(shadowing)
        assert (len(target.asked), shadowing.compared) == (1, 0)


@pytest.mark.parametrize("error", [SystemExit(1), ValueError("x")])
def test_a_function_that_ends_its_thread_ends_no_copies(error: BaseException) -> None:
    def fail(*_: Any) -> str:
        raise error

    with _shadowing(_Target(), fail) as shadowing:
        for count in (1, 2):
            _request(shadowing)
            _counted(shadowing, count)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_is_replaced_for_the_copies_that_wait() -> None:
    target = _Target()
    target.answers = [SystemExit(1)]
    target.goes_on.clear()
    with _shadowing(target) as shadowing:
        _request(shadowing)
        eventually(lambda: target.asked)
        _request(shadowing)
        target.goes_on.set()
        _counted(shadowing, 1)
        assert len(target.asked) == 2
    eventually(lambda: not _threads())


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "remora shadow"]


def test_a_thread_that_cannot_start_costs_the_copies_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []

    class Exhausted(threading.Thread):
        def start(self) -> None:
            starts.append(1)
            if len(starts) < 3:
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr("remora_tools.rollout.shadowing.threading.Thread", Exhausted)
    with _shadowing(_Target()) as shadowing:
        for _ in range(2):
            _request(shadowing)
        assert (shadowing._threads, shadowing.recorder.dropped) == (0, 2)
        _request(shadowing)
        _counted(shadowing, 1)


def test_a_comparison_or_a_log_that_fails_ends_nothing() -> None:
    def fail(*_: Any) -> str:
        raise ValueError("of the function")

    def log(found: Difference) -> None:
        raise OSError("no space")

    with _shadowing(_Target(), fail, log) as shadowing:
        for expected in (1, 2):
            _request(shadowing)
            _counted(shadowing, expected)
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
