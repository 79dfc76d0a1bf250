"""Copies for a shadow: comparisons, bounds, and a primary that is never slowed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from eventually import eventually
from remora.errors import InternalError
from remora.messages import Data, InferForm, Outcome, Response, Tensor
from remora.models.shadowing import MAX_UNANSWERED, MAX_WAITING, Copy, Shadowing, copied
from remora.tracing.differences import Difference
from remora.traffic.comparing import Comparison, difference

EXACT = partial(difference, how=Comparison())


class _Target:
    """Destination whose answers are the test's."""

    threads = 1

    def __init__(self) -> None:
        self.replies: list[Callable[[Outcome], None]] = []
        self.fault: Exception | None = None

    def send(self, form: InferForm, data: list[Data], answered: Callable[[Outcome], None]) -> None:
        if self.fault is not None:
            raise self.fault
        self.replies.append(answered)

    def end_thread(self) -> None:
        pass


def _outputs(value: float) -> list[Tensor]:
    return [Tensor("y", "FP32", np.array([value], np.float32))]


def _copy(id: str = "") -> Copy:
    return Copy(InferForm((), id=id), [], _outputs(1), "m", "2")


def test_answers_are_compared_and_differences_sampled() -> None:
    target = _Target()
    shadowing = Shadowing(target, EXACT)
    for id in ("same", "other", "bad"):
        shadowing.offer(_copy(id))
    eventually(lambda: len(target.replies) == 3)
    for reply, outcome in zip(
        target.replies, (Response(_outputs(1)), Response(_outputs(3)), InternalError("broken")), strict=True
    ):
        reply(outcome)
    eventually(lambda: shadowing.compared == 3)
    found = shadowing.document()
    assert (found["differing"], found["failed"], found["dropped"]) == (2, 1, 0)
    assert found["samples"] == [
        "other: y: 1 of 1 elements differ, by at most 2",
        "bad: the shadow failed: broken",
    ]
    assert shadowing.rate == (2, 3)


def test_a_shadow_that_hangs_gets_no_more_copies_than_the_limit() -> None:
    target = _Target()
    shadowing = Shadowing(target, EXACT)
    for _ in range(MAX_UNANSWERED + 5):
        shadowing.offer(_copy())
    eventually(lambda: len(target.replies) + shadowing.dropped == MAX_UNANSWERED + 5)
    assert len(target.replies) == MAX_UNANSWERED
    assert not shadowing.has_room()
    target.replies[0](Response(_outputs(1)))
    eventually(shadowing.has_room)
    shadowing.offer(_copy())
    eventually(lambda: len(target.replies) == MAX_UNANSWERED + 1)


def test_copies_beyond_the_queue_are_dropped_before_their_tensors_are_copied() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def hang(*_: Any) -> str:
        begun.set()
        goes_on.wait()
        return ""

    target = _Target()
    shadowing = Shadowing(target, hang)
    try:
        shadowing.offer(_copy())
        eventually(lambda: len(target.replies) == 1)
        target.replies[0](Response(_outputs(1)))
        assert begun.wait(60)  # the only thread is in the function that compares
        for _ in range(MAX_WAITING):
            assert shadowing.has_room()
            shadowing.offer(_copy())
        assert not shadowing.has_room()
        shadowing.offer(_copy())
        assert shadowing.dropped == 2
    finally:
        goes_on.set()


def test_a_shadow_that_raises_counts_as_failed() -> None:
    target = _Target()
    shadowing = Shadowing(target, EXACT)
    target.fault = RuntimeError("any")
    shadowing.offer(_copy())
    eventually(lambda: shadowing.compared == 1)
    assert shadowing.failed == 1
    assert shadowing.document()["samples"] == ["the shadow failed: RuntimeError: any"]


def test_a_comparison_or_a_log_that_fails_ends_nothing() -> None:
    def fail(*_: Any) -> str:
        raise ValueError("of the function")

    def log(found: Difference) -> None:
        raise OSError("no space")

    target = _Target()
    shadowing = Shadowing(target, fail, log)
    for expected in (1, 2):
        shadowing.offer(_copy())
        eventually(lambda count=expected: len(target.replies) == count)  # type: ignore[misc]
        target.replies[-1](Response(_outputs(1)))
        eventually(lambda count=expected: shadowing.compared == count)  # type: ignore[misc]
    assert shadowing.failed == 2
    assert shadowing.samples[-1] == "the answers cannot be compared: ValueError: of the function"


def test_differences_are_logged_with_both_answers() -> None:
    rows: list[Difference] = []
    target = _Target()
    shadowing = Shadowing(target, EXACT, rows.append, "version 3")
    shadowing.offer(_copy("r"))
    eventually(lambda: len(target.replies) == 1)
    target.replies[0](Response(_outputs(3)))
    eventually(lambda: len(rows) == 1)
    assert (rows[0].model, rows[0].version, rows[0].shadow, rows[0].form.id) == ("m", "2", "version 3", "r")
    assert (rows[0].expected[0].data[0], rows[0].found[0].data[0]) == (1, 3)


def test_inputs_are_copied_because_their_buffers_may_be_reused() -> None:
    buffer, array = bytearray(b"abc"), np.array([1, 2])
    data = copied([memoryview(buffer), array, [b"x"], None, b"y"])
    buffer[:] = b"xyz"
    array[:] = 9
    assert data[0] == b"abc"
    assert np.array_equal(data[1], [1, 2])  # type: ignore[arg-type]
    assert data[2:] == [[b"x"], None, b"y"]
