"""Keepalive pings of the server, ping strikes of clients, and the maximum age of connections."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.http2.keepalive import Keepalive, KeepaliveAction, KeepalivePolicy

TERMS = KeepalivePolicy(silence_s=10.0, answer_s=2.0, ping_interval_s=5.0)


def test_silence_is_followed_by_a_ping_and_a_ping_without_an_answer_by_the_end() -> None:
    upkeep = Keepalive(TERMS, 100.0)
    assert upkeep.due(100.0, 1) == KeepaliveAction(110.0)
    upkeep.last_received = 104.0
    assert upkeep.due(110.0, 1) == KeepaliveAction(114.0)
    assert upkeep.due(114.0, 1) == KeepaliveAction(116.0, ping=True)
    assert upkeep.due(115.0, 1) == KeepaliveAction(116.0)
    assert upkeep.due(116.0, 1) == KeepaliveAction(inf, close_reason="a keepalive ping was not answered")


def test_every_ping_is_answered() -> None:
    upkeep = Keepalive(TERMS, 0.0)
    assert upkeep.due(10.0, 1).ping
    upkeep.last_received = 10.0
    assert upkeep.due(12.0, 1) == KeepaliveAction(20.0)


@pytest.mark.parametrize("without_calls", [False, True])
def test_a_connection_without_calls_is_pinged_only_where_that_is_permitted(without_calls: bool) -> None:
    upkeep = Keepalive(replace(TERMS, without_calls=without_calls), 0.0)
    assert upkeep.due(10.0, 0).ping == without_calls
    assert upkeep.due(20.0, 1).ping != without_calls


def test_only_so_many_pings_are_sent_before_data() -> None:
    upkeep = Keepalive(replace(TERMS, pings=2), 0.0)

    def pings(begin: int) -> list[bool]:
        found = []
        for now in range(begin, begin + 40, 10):
            found.append(upkeep.due(now, 1).ping)
            upkeep.last_received = now
        return found

    assert pings(10) == [True, True, False, False]
    upkeep.record_sent()
    assert pings(50) == [True, True, False, False]


def test_with_no_limit_pings_are_sent_for_ever() -> None:
    upkeep = Keepalive(replace(TERMS, pings=0), 0.0)
    for now in range(10, 1000, 10):
        assert upkeep.due(now, 1).ping
        upkeep.last_received = now


def test_a_client_that_pings_too_often_gets_strikes_and_then_is_refused() -> None:
    upkeep = Keepalive(TERMS, 0.0)
    assert [upkeep.is_excess_ping(now, 1) for now in (0.0, 5.0, 6.0, 7.0, 8.0)] == [False, False, False, False, True]


def test_strikes_are_forgotten_when_something_is_sent() -> None:
    upkeep = Keepalive(TERMS, 0.0)
    for now in range(100):
        upkeep.record_sent()
        assert not upkeep.is_excess_ping(float(now), 1)


def test_without_calls_a_client_may_ping_every_two_hours_unless_more_is_permitted() -> None:
    often = [float(now) for now in range(0, 60, 6)]
    strict, free = Keepalive(TERMS, 0.0), Keepalive(replace(TERMS, without_calls=True), 0.0)
    assert [strict.is_excess_ping(now, 0) for now in often][:4] == [False, False, False, True]
    assert not any(free.is_excess_ping(now, 0) for now in often)


def test_without_a_limit_of_strikes_every_ping_is_accepted() -> None:
    upkeep = Keepalive(replace(TERMS, strikes=0), 0.0)
    assert not any(upkeep.is_excess_ping(0.0, 0) for _ in range(100))


def test_an_old_connection_is_left_once_and_ended_after_its_grace() -> None:
    upkeep = Keepalive(replace(TERMS, age_s=6.0, grace_s=3.0), 0.0, spread=1.5)
    assert upkeep.due(0.0, 1) == KeepaliveAction(9.0)
    assert upkeep.due(9.0, 1) == KeepaliveAction(10.0, drain=True)
    assert upkeep.due(10.0, 1) == KeepaliveAction(12.0, ping=True)
    assert upkeep.due(12.0, 1) == KeepaliveAction(inf, close_reason="the maximum connection age is exceeded")


def test_without_a_grace_running_calls_of_an_old_connection_take_their_time() -> None:
    upkeep = Keepalive(replace(TERMS, age_s=6.0, pings=0), 0.0)
    assert upkeep.due(6.0, 1).drain
    for now in range(10, 1000, 10):
        upkeep.last_received = now - 1.0
        assert not upkeep.due(float(now), 1).close_reason


@given(
    st.floats(0.01, 100),
    st.floats(0.01, 100),
    st.floats(0.01, 300),
    st.floats(0.01, 300),
    st.lists(st.integers(0, 1), max_size=30),
)
def test_a_client_that_answers_is_ended_by_nothing_but_its_age_and_no_wake_is_in_the_past(
    silence_s: float, answer_s: float, age_s: float, grace_s: float, calls: list[int]
) -> None:
    upkeep, now, left = (
        Keepalive(KeepalivePolicy(silence_s, answer_s, pings=0, age_s=age_s, grace_s=grace_s), 0.0),
        0.0,
        0,
    )
    for count in calls:
        due = upkeep.due(now, count)
        left += due.drain
        if due.close_reason:
            assert (now >= age_s + grace_s, due.close_reason, left) == (
                True,
                "the maximum connection age is exceeded",
                1,
            )
            return
        assert due.wake > now
        assert left == (now >= age_s)
        now = upkeep.last_received = due.wake
