"""What is remembered of sequences that ended and of requests that were refused."""

from __future__ import annotations

import pytest

from remora.errors import InvalidArgumentError
from remora.messages import InferForm
from remora.scheduling.sequences.history import ENDED_LIMIT, REFUSED_LIMIT, SequenceHistory
from remora.scheduling.sequences.table import CANCELLED, DONE, IDLE, STOPPED, TIMEOUT, Ended, Place

ERROR = InvalidArgumentError("no")


def history() -> SequenceHistory:
    return SequenceHistory(["m_0_0", "m_0_1"], 5_000_000)


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        (
            Ended(7, Place(2, 1), IDLE),
            "in slot 2 of instance 'm_0_1': it was idle for longer than max_sequence_idle_microseconds (5000)",
        ),
        (Ended(7, Place(0, 0), DONE), "in slot 0 of instance 'm_0_0': it was complete"),
        (Ended(7, Place(0, 0), CANCELLED), "in slot 0 of instance 'm_0_0': one of its requests was cancelled"),
        (
            Ended(7, None, TIMEOUT),
            "while it waited for a slot: the timeout of a queued request expired",
        ),
        (Ended(7, Place(0, 0), STOPPED), "in slot 0 of instance 'm_0_0': the model was stopped"),
    ],
)
def test_a_refusal_is_explained_by_how_the_sequence_ended(ended: Ended, text: str) -> None:
    seen = history()
    seen.note([ended], 1_000_000_000)
    assert seen.refuse(InferForm((), sequence_id=7), ERROR, False, 3_500_000_000) == (
        f"sequence 7 ended 2.500 s ago {text}"
    )


def test_a_sequence_that_only_waits_for_its_end_explains_itself() -> None:
    explanation = history().refuse(InferForm((), sequence_id=7), ERROR, True, 1)
    assert explanation == "sequence 7 has received END or was cancelled: the next request must have START"


def test_the_explanation_names_an_unknown_sequence() -> None:
    assert "is unknown" in history().refuse(InferForm((), sequence_id="a"), ERROR, False, 1)


@pytest.mark.parametrize("form", [InferForm(()), InferForm((), sequence_id=7, sequence_start=True)])
def test_a_refusal_that_has_nothing_to_do_with_start_needs_no_explanation(form: InferForm) -> None:
    assert history().refuse(form, ERROR, False, 1) == ""


def test_the_last_ones_come_first_and_memory_is_bounded() -> None:
    seen = history()
    for number in range(2 * ENDED_LIMIT):
        seen.note([Ended(number, Place(0, 0), DONE)], number)
        seen.refuse(InferForm((), id=str(number), sequence_id=number), ERROR, False, number)
    now = 2 * ENDED_LIMIT
    assert [(row.id, row.ago_ns) for row in seen.ended(now)] == [(now - ago, ago) for ago in range(1, ENDED_LIMIT + 1)]
    assert [row.request_id for row in seen.refused(now)] == [str(now - ago) for ago in range(1, REFUSED_LIMIT + 1)]
    assert seen.refused(now)[0].ago_ns == 1


def test_a_sequence_that_ends_twice_is_remembered_once() -> None:
    seen = history()
    seen.note([Ended(7, Place(0, 0), DONE), Ended(8, Place(1, 0), DONE), Ended(7, Place(0, 1), IDLE)], 1)
    assert [(row.id, row.instance, row.slot, row.why) for row in seen.ended(1)] == [
        (7, "m_0_1", 0, "idle"),
        (8, "m_0_0", 1, "done"),
    ]
