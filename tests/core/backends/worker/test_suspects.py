"""Memory of the requests that were running when a worker's process ended."""

from __future__ import annotations

import numpy as np
import pytest

from remora.backends.worker import suspects
from remora.backends.worker.suspects import Suspects, Verdict, parts_of
from remora.messages import Array, InferForm, Request


def request(value: object) -> Request:
    array: Array = np.array([value], object if isinstance(value, bytes) else None)
    return Request(InferForm(()), {"IN": array}, (), 1, None)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("one", "other"), [(1, 2), (b"a", b"b"), (1, np.int32(1)), (b"", b"\0")])
def test_a_request_is_suspected_then_refused_and_others_are_not(one: object, other: object) -> None:
    known = Suspects(Clock())
    assert known.verdicts([request(one)]) is None
    known.record_end([request(one)])
    assert known.verdicts([request(other)]) is None
    assert known.verdicts([request(other), request(one)]) == [Verdict.TRUSTED, Verdict.SUSPECTED]
    known.record_end([request(one)])
    assert known.verdicts([request(one)]) == [Verdict.REFUSED]


def test_a_suspect_that_has_run_alone_is_trusted_again() -> None:
    known = Suspects(Clock())
    known.record_end([request(1), request(2)])
    known.clear(request(1))
    assert known.verdicts([request(1), request(2)]) == [Verdict.TRUSTED, Verdict.SUSPECTED]


def test_what_is_known_is_forgotten_after_a_time() -> None:
    clock = Clock()
    known = Suspects(clock)
    known.record_end([request(1)])
    clock.now_s = suspects.FORGET_S
    assert known.verdicts([request(1)]) is None


def test_few_and_no_large_requests_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "MOST", 2)
    monkeypatch.setattr(suspects, "MOST_BYTES", 8)
    known = Suspects(Clock())
    known.record_end([request(number) for number in range(3)])
    for large in (Request(InferForm(()), {"IN": np.zeros(2)}, (), 1, None), request(b"a long text")):
        known.record_end([large])
        known.record_end([large])
        assert known.verdicts([request(0), large]) is None
    assert known.verdicts([request(1), request(2)]) == [Verdict.SUSPECTED] * 2


def test_trusted_neighbours_run_together_and_each_other_request_alone() -> None:
    trusted, suspected, refused = Verdict
    assert parts_of([trusted, trusted, suspected, suspected, trusted, refused]) == [
        (0, 2),
        (2, 3),
        (3, 4),
        (4, 5),
        (5, 6),
    ]
