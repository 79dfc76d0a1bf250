"""Responses that a client does not read: given up in time, and never while it reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.http2.unread import GiveUp, Patience, Seen, UnreadResponses, Waiting

USUAL_S, FULL_S, BYTES_S = 60.0, 20.0, 1_000.0
SWEEP_S = 5.0
NOTHING: GiveUp[str] = GiveUp([], False)


def unread() -> UnreadResponses[str]:
    return UnreadResponses(Patience(USUAL_S, FULL_S, BYTES_S))


def seen(
    moved: object = 0,
    taken: int = 0,
    end: int | None = None,
    *,
    unconfirmed: int = 0,
    full: bool = False,
    bound: bool = False,
) -> Seen:
    return Seen(moved, taken, taken if end is None else end, unconfirmed, full, bound or full)


def silent(stream: str, *, in_turn: bool = False) -> Waiting[str]:
    return Waiting(stream, 0, in_turn)


def test_a_stream_whose_window_stays_closed_is_given_up_alone_while_others_are_read() -> None:
    decider = unread()
    for now in range(0, 65, 5):
        waiting = [silent("closed"), Waiting("read", now, False)]
        assert decider.due(now, seen(now, full=True), waiting) == NOTHING
    assert decider.due(65.0, seen(65, full=True), waiting) == GiveUp(["closed"], False)
    assert decider.due(66.0, seen(66, full=True), [Waiting("read", 66, False)]) == NOTHING


def test_a_stream_waits_as_long_as_the_clients_system_takes_what_was_sent_of_it() -> None:
    decider = unread()
    for now in range(0, 365, 5):
        assert decider.due(now, seen(now, min(now, 300), 300), [silent("sent")]) == NOTHING
    assert decider.due(365.0, seen(365, 300), [silent("sent")]) == GiveUp(["sent"], False)


def test_a_stream_that_waits_for_its_turn_is_given_up_only_when_nothing_moves() -> None:
    decider = unread()
    waiting = [silent("last", in_turn=True)]
    for now in range(0, 500, 5):
        assert decider.due(now, seen(now), waiting) == NOTHING
    assert decider.due(555.0, seen(495), waiting) == NOTHING
    assert decider.due(556.0, seen(495), waiting) == GiveUp(["last"], False)


def test_a_connection_of_which_nothing_moves_is_given_up_if_it_is_bound() -> None:
    for bound in (False, True):
        decider = unread()
        for now, late in ((10.0, False), (70.0, False), (71.0, True)):
            assert decider.due(now, seen(7, bound=bound), []) == GiveUp([], late and bound)


def test_a_connection_that_becomes_full_has_the_shorter_patience_from_then_on() -> None:
    decider = unread()
    for now, full, closes in (
        (0.0, False, False), (25.0, False, False), (30.0, True, False), (50.0, True, False), (51.0, True, True),
    ):  # fmt: skip
        assert decider.due(now, seen(full=full), []).connection == closes


def test_a_connection_that_is_full_again_starts_anew() -> None:
    decider = unread()
    for now, full in ((0.0, True), (15.0, True), (18.0, False), (21.0, True), (41.0, True)):
        assert decider.due(now, seen(full=full), []) == NOTHING
    assert decider.due(42.0, seen(full=True), []).connection


def test_the_patience_counts_from_the_begin_of_the_wait() -> None:
    decider = unread()
    decider.due(0.0, seen(7, full=True), [silent("a")])
    decider.clear()
    assert decider.due(100.0, seen(7, full=True), [silent("a")]) == NOTHING


def test_the_answers_to_pings_of_a_client_that_reads_nothing_do_not_count() -> None:
    decider = unread()
    decider.due(0.0, seen(7, 100, 110, full=True), [])
    for now in (5.0, 10.0, 15.0, 20.0, 25.0):
        assert decider.due(now, seen(7, 110 + int(now), full=True), []) == NOTHING
    assert decider.due(26.0, seen(7, 200, full=True), []).connection


def test_a_client_that_may_hold_data_has_the_time_to_read_it() -> None:
    for unconfirmed, last in ((0, 20.0), (30_000, 50.0)):
        decider = unread()
        for now, closes in ((0.0, False), (last, False), (last + 1, True)):
            assert decider.due(now, seen(7, 50, unconfirmed=unconfirmed, full=True), []).connection == closes


def test_a_client_whose_system_takes_nothing_has_no_further_time() -> None:
    decider = unread()
    for now, closes in ((0.0, False), (20.0, False), (21.0, True)):
        assert decider.due(now, seen(7, 50, 60, unconfirmed=30_000, full=True), []).connection == closes


@given(
    window=st.integers(1_000, 1_000_000),
    system=st.integers(1_000, 200_000),
    size=st.integers(1_000, 2_000_000),
    rate=st.floats(BYTES_S, 100_000.0),
    shares=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=50),
    at_once=st.sampled_from((0.3, 0.5, 1.0)),
)
def test_a_client_that_reads_steadily_keeps_its_responses(
    window: int, system: int, size: int, rate: float, shares: list[float], at_once: float
) -> None:
    """The client opens a window again when it has read the part ``at_once`` of it.

    Its system holds up to ``system`` bytes. The connection is full in some of the sweeps.
    """
    decider, now, read, taken, opened, confirmed, sweeps = unread(), 0.0, 0, 0, 0, 0, 0
    while taken < size:
        sent = min(size, window + opened)
        taken = min(sent, read + system)
        full = shares[sweeps % len(shares)] < 0.5
        waiting = [Waiting("a", sent, False)] if sent < size else []
        what = seen((sent, opened), taken, sent, unconfirmed=sent - confirmed, full=full, bound=True)
        assert decider.due(now, what, waiting) == NOTHING
        now, sweeps = now + SWEEP_S, sweeps + 1
        read = min(taken, read + int(rate * SWEEP_S))
        if read - opened >= window * at_once:
            opened, confirmed = read, sent


@given(
    taken=st.lists(st.integers(0, 1_000), min_size=1, max_size=30),
    end=st.integers(1_000, 100_000),
    unconfirmed=st.integers(0, 50_000),
    full=st.booleans(),
    in_turn=st.booleans(),
)
def test_a_client_that_stops_to_read_is_given_up_in_time(
    taken: list[int], end: int, unconfirmed: int, full: bool, in_turn: bool
) -> None:
    decider, now = unread(), 0.0
    for each in sorted(taken):
        decider.due(now, seen(each, each, end, full=full, bound=True), [silent("a")])
        now += SWEEP_S
    last, most_s = max(taken), (FULL_S if full else USUAL_S) + unconfirmed / BYTES_S
    stopped = seen(last, last, end, unconfirmed=unconfirmed, full=full, bound=True)
    begin, given_up = now, NOTHING
    while not given_up.connection:
        assert now - begin <= most_s + 2 * SWEEP_S
        given_up = decider.due(now, stopped, [Waiting("a", 0, in_turn)])
        now += SWEEP_S
