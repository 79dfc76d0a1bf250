"""Times at which copies for a shadow may run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora_tools.rollout.pacing import (
    MAX_BUSY_WAIT_NS,
    MAX_STEP_WAIT_NS,
    POLL_NS,
    SETTLE_NS,
    rest_ns,
    step_wait_ns,
    wait_ns,
)

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("now", "offered", "ran", "rested", "busy", "expected"),
    [
        (0, 0, -SECOND, 0, False, SETTLE_NS),  # the answer is being sent
        (SETTLE_NS, 0, -SECOND, 0, False, 0),
        (SETTLE_NS, 0, 0, 30 * SETTLE_NS, False, 29 * SETTLE_NS),
        (30 * SETTLE_NS, 0, 0, 30 * SETTLE_NS, False, 0),
        (SETTLE_NS, 0, -SECOND, 0, True, POLL_NS),
        (MAX_BUSY_WAIT_NS - 1, 0, -SECOND, 0, True, POLL_NS),
        (MAX_BUSY_WAIT_NS, 0, -SECOND, 0, True, 0),  # a model that is always busy is compared as well
        (MAX_BUSY_WAIT_NS, 0, 1, 0, True, POLL_NS),  # but once a second only
    ],
)
def test_a_copy_waits_for_a_lull_a_rest_and_an_idle_model(
    now: int, offered: int, ran: int, rested: int, busy: bool, expected: int
) -> None:
    assert wait_ns(now, offered_ns=offered, ran_ns=ran, rested_ns=rested, busy=busy) == expected


@pytest.mark.parametrize(
    ("now", "busy", "expected"),
    [(0, False, 0), (0, True, POLL_NS), (MAX_STEP_WAIT_NS - 1, True, POLL_NS), (MAX_STEP_WAIT_NS, True, 0)],
)
def test_a_copy_within_a_sequence_waits_for_an_idle_model_for_a_short_time(now: int, busy: bool, expected: int) -> None:
    assert step_wait_ns(now, ran_ns=0, busy=busy) == expected


@given(st.integers(0, 10**13), st.floats(0.001, 1))
def test_copies_use_at_most_their_part_of_a_processor(cost_ns: int, processors: float) -> None:
    assert cost_ns <= (cost_ns + rest_ns(cost_ns, processors) + 1) * processors * 1.000001


def test_the_rest_after_a_long_stream_has_no_limit() -> None:
    assert rest_ns(60 * SECOND, 1.0) == 0
    assert rest_ns(60 * SECOND, 0.005) == 199 * 60 * SECOND
