"""Times at which copies for a shadow may run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.traffic.pacing import LOOK_NS, LULL_NS, MOST_REST_NS, PATIENCE_NS, rest_ns, wait_ns

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("now", "offered", "ran", "rested", "busy", "expected"),
    [
        (0, 0, -SECOND, 0, False, LULL_NS),  # the answer is being sent
        (LULL_NS, 0, -SECOND, 0, False, 0),
        (LULL_NS, 0, 0, 30 * LULL_NS, False, 29 * LULL_NS),
        (30 * LULL_NS, 0, 0, 30 * LULL_NS, False, 0),
        (LULL_NS, 0, -SECOND, 0, True, LOOK_NS),
        (PATIENCE_NS - 1, 0, -SECOND, 0, True, LOOK_NS),
        (PATIENCE_NS, 0, -SECOND, 0, True, 0),  # a model that is always busy is compared as well
        (PATIENCE_NS, 0, 1, 0, True, LOOK_NS),  # but once a second only
    ],
)
def test_a_copy_waits_for_a_lull_a_rest_and_an_idle_model(
    now: int, offered: int, ran: int, rested: int, busy: bool, expected: int
) -> None:
    assert wait_ns(now, offered_ns=offered, ran_ns=ran, rested_ns=rested, busy=busy) == expected


@given(st.integers(0, 10**9), st.floats(0.001, 1))
def test_copies_use_at_most_their_part_of_a_processor(cost_ns: int, processors: float) -> None:
    rest = rest_ns(cost_ns, processors)
    assert rest == MOST_REST_NS or cost_ns <= (cost_ns + rest + 1) * processors * 1.000001


def test_no_rest_follows_where_copies_may_use_a_whole_processor() -> None:
    assert rest_ns(5 * SECOND, 1.0) == 0
    assert rest_ns(5 * SECOND, 0.001) == MOST_REST_NS
