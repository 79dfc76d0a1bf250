"""Token buckets: never more than the rate and the burst, and no longer a wait than needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.rates import PeerBudget, TokenBucket

STEPS = st.lists(st.floats(0, 5), max_size=60)
RATES = st.floats(0.1, 50)


@given(STEPS, RATES, st.integers(1, 10))
def test_a_bucket_gives_no_more_than_its_burst_and_its_rate(steps: list[float], rate: float, burst: int) -> None:
    bucket, now, taken = TokenBucket(rate, burst, 0.0), 0.0, 0
    for step in steps:
        now += step
        taken += bucket.take(now) == 0
        assert taken <= burst + now * rate + 1e-6


@given(STEPS, RATES, st.integers(1, 10))
def test_a_token_is_there_after_the_wait_and_not_before(steps: list[float], rate: float, burst: int) -> None:
    bucket, now = TokenBucket(rate, burst, 0.0), 0.0
    for step in steps:
        now += step
        wait_s = bucket.take(now)
        if wait_s:
            assert bucket.wait_s(now + wait_s * 0.99) > 0
            assert bucket.wait_s(now + wait_s) == pytest.approx(0, abs=1e-6)
            now += wait_s


def test_peers_have_buckets_of_their_own_and_their_number_is_bounded() -> None:
    budget = PeerBudget(1.0, 2, most_peers=3)
    assert [budget.take("a", 0.0) for _ in range(3)] == [0, 0, 1]
    assert budget.wait_s("a", 0.0) == 1
    assert budget.wait_s("b", 0.0) == 0
    assert budget.take("b", 0.0) == 0
    for number in range(10):
        budget.take(f"peer {number}", 0.5)
        assert len(budget) <= 3


def test_full_buckets_are_forgotten_before_others() -> None:
    budget = PeerBudget(1.0, 2, most_peers=2)
    for peer, now in (("a", 0.0), ("b", 0.0), ("a", 3.0), ("a", 3.0), ("c", 3.0)):
        budget.take(peer, now)
    assert budget.wait_s("a", 3.0) == 1


def test_without_a_full_bucket_the_oldest_is_forgotten() -> None:
    budget = PeerBudget(1.0, 1, most_peers=2)
    for peer in ("a", "b", "c"):
        budget.take(peer, 0.0)
    assert [budget.wait_s(peer, 0.0) for peer in ("a", "b", "c")] == [0, 1, 1]
