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


PEERS = st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 2)), max_size=80)


@given(PEERS, RATES, st.integers(1, 4), st.integers(1, 4))
def test_no_peer_gets_more_than_its_budget_unless_it_was_evicted(
    steps: list[tuple[str, float]], rate: float, burst: int, most_peers: int
) -> None:
    budget, now = PeerBudget(rate, burst, most_peers), 0.0
    since: dict[str, tuple[float, int]] = {}
    for peer, step in steps:
        now += step
        began, taken = since.pop(peer, (now, 0))
        held = peer in budget
        if not held:
            began, taken = now, 0
        taken += budget.take(peer, now) == 0
        since[peer] = began, taken
        assert taken <= burst + (now - began) * rate + 1e-6
        assert peer in budget
        assert len(budget) <= most_peers


@given(PEERS, RATES, st.integers(1, 4))
def test_a_peer_is_evicted_only_for_want_of_room(steps: list[tuple[str, float]], rate: float, burst: int) -> None:
    budget, now = PeerBudget(rate, burst, most_peers=6), 0.0
    for peer, step in steps:
        now += step
        budget.take(peer, now)
    assert len(budget) == len({peer for peer, _ in steps})


def test_full_buckets_are_searched_for_at_most_once_a_second() -> None:
    budget = PeerBudget(10.0, 1, most_peers=3)
    for peer, now in (("a", 0.0), ("b", 0.0), ("c", 0.0), ("d", 0.0), ("e", 0.9)):
        budget.take(peer, now)
    assert len(budget) == 3, "b alone was evicted at 0.9 s, although all buckets were full"
    budget.take("f", 1.0)
    assert len(budget) == 2, "c and d were full at 1.0 s"


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("2001:db8::1", "2001:db8:0:0:ffff::2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("unix:one", "unix:two", False),
    ],
)
def test_addresses_of_a_network_of_64_bits_are_one_peer(first: str, second: str, same: bool) -> None:
    budget = PeerBudget(1.0, 1)
    assert budget.take(first, 0.0) == 0
    assert budget.wait_s(second, 0.0) == (1 if same else 0)
    assert (budget.take(second, 0.0) > 0) is same
