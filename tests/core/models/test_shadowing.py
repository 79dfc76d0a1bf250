"""Shadow versions: copies, comparisons, and a primary that is never slowed."""

from __future__ import annotations

from typing import Any

import numpy as np

from eventually import eventually
from remora.errors import InternalError
from remora.messages import InferForm, Response, Tensor
from remora.models.shadowing import MAX_UNANSWERED, MAX_WAITING, Copy, Shadowing, copied
from remora.traffic.comparing import Comparison


class _Version:
    """Model version whose answers are the test's."""

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.fault: Exception | None = None

    def submit(self, form: InferForm, data: object, reply: Any) -> None:
        if self.fault is not None:
            raise self.fault
        self.replies.append(reply)


def _response(value: float) -> Response:
    return Response([Tensor("y", "FP32", np.array([value], np.float32))])


def _copy(model: Any, id: str = "") -> Copy:
    return Copy(model, InferForm((), id=id), [], {"y": np.array([1], np.float32)})


def test_answers_are_compared_and_differences_sampled() -> None:
    model, shadowing = _Version(), Shadowing(Comparison())
    for id in ("same", "other", "bad"):
        shadowing.offer(_copy(model, id))
    eventually(lambda: len(model.replies) == 3)
    for reply, outcome in zip(model.replies, (_response(1), _response(3), InternalError("broken")), strict=True):
        reply(None, outcome)
    found = shadowing.document()
    assert (found["compared"], found["differing"], found["failed"], found["dropped"]) == (3, 2, 1, 0)
    assert found["samples"] == [
        "other: y: 1 of 1 elements differ, by at most 2",
        "bad: the shadow failed: broken",
    ]
    assert shadowing.rate == (2, 3)


def test_a_shadow_that_hangs_gets_no_more_copies_than_the_limit() -> None:
    model, shadowing = _Version(), Shadowing(Comparison())
    for _ in range(MAX_UNANSWERED + 5):
        shadowing.offer(_copy(model))
    eventually(lambda: len(model.replies) + shadowing.dropped == MAX_UNANSWERED + 5)
    assert len(model.replies) == MAX_UNANSWERED
    model.replies[0](None, _response(1))
    shadowing.offer(_copy(model))
    eventually(lambda: len(model.replies) == MAX_UNANSWERED + 1)


def test_copies_beyond_the_queue_are_dropped_at_once() -> None:
    shadowing = Shadowing(Comparison())
    shadowing._runs = True  # no thread takes them
    for _ in range(MAX_WAITING + 3):
        shadowing.offer(_copy(_Version()))
    assert shadowing.dropped == 3


def test_a_shadow_that_raises_counts_as_failed() -> None:
    model, shadowing = _Version(), Shadowing(Comparison())
    model.fault = RuntimeError("any")
    shadowing.offer(_copy(model))
    eventually(lambda: shadowing.compared == 1)
    assert shadowing.failed == 1


def test_inputs_are_copied_because_their_buffers_may_be_reused() -> None:
    buffer, array = bytearray(b"abc"), np.array([1, 2])
    data = copied([memoryview(buffer), array, [b"x"], None, b"y"])
    buffer[:] = b"xyz"
    array[:] = 9
    assert data[0] == b"abc"
    assert np.array_equal(data[1], [1, 2])  # type: ignore[arg-type]
    assert data[2:] == [[b"x"], None, b"y"]
