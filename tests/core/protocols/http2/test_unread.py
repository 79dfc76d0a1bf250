"""Responses that a client does not read: given up in time, and never while it reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.http2.unread import GiveUp, UnreadResponses, Waiting

PATIENCE_S = 60.0


def silent(stream: str, *, in_turn: bool = False) -> Waiting[str]:
    return Waiting(stream, 0, in_turn)


def test_a_stream_whose_window_stays_closed_is_given_up_alone() -> None:
    unread = UnreadResponses[str]()
    for now, late in ((0.0, []), (60.0, []), (61.0, ["closed"]), (62.0, [])):
        waiting = [silent("closed"), Waiting("read", now, False)]
        assert unread.due(now, PATIENCE_S, now, waiting, bound=True) == GiveUp(late, False)


def test_a_stream_that_waits_for_its_turn_is_given_up_only_when_nothing_moves() -> None:
    unread = UnreadResponses[str]()
    for now in range(0, 500, 5):
        assert unread.due(now, PATIENCE_S, now, [silent("last", in_turn=True)], bound=False) == GiveUp([], False)
    assert unread.due(555.0, PATIENCE_S, 495, [silent("last", in_turn=True)], bound=False) == GiveUp([], False)
    assert unread.due(556.0, PATIENCE_S, 495, [silent("last", in_turn=True)], bound=False) == GiveUp(["last"], False)


def test_a_connection_of_which_nothing_moves_is_given_up_if_it_is_bound() -> None:
    for bound in (False, True):
        unread = UnreadResponses[str]()
        for now, late in ((10.0, False), (70.0, False), (71.0, True)):
            assert unread.due(now, PATIENCE_S, 7, [], bound=bound) == GiveUp([], late and bound)


def test_the_patience_counts_from_the_begin_of_the_wait() -> None:
    unread = UnreadResponses[str]()
    unread.due(0.0, PATIENCE_S, 7, [silent("a")], bound=True)
    unread.clear()
    assert unread.due(100.0, PATIENCE_S, 7, [silent("a")], bound=True) == GiveUp([], False)


@given(
    st.lists(st.tuples(st.floats(0.1, 50.0), st.lists(st.booleans(), min_size=3, max_size=3)), max_size=40),
    st.booleans(),
)
def test_what_is_given_up_has_not_moved_for_the_patience(steps: list[tuple[float, list[bool]]], bound: bool) -> None:
    unread, now = UnreadResponses[int](), 0.0
    moved_at = [0.0, 0.0, 0.0]
    stamps = [0, 0, 0]
    unread.due(0.0, PATIENCE_S, 0, [Waiting(each, 0, each == 2) for each in range(3)], bound=bound)
    gone: set[int] = set()
    for step_s, moves in steps:
        now += step_s
        for each, moving in enumerate(moves):
            if moving and each not in gone:
                moved_at[each], stamps[each] = now, stamps[each] + 1
        waiting = [Waiting(each, stamps[each], each == 2) for each in range(3) if each not in gone]
        late, closes = unread.due(now, PATIENCE_S, sum(stamps), waiting, bound=bound)
        nothing_moves = now - max(moved_at) > PATIENCE_S
        assert closes == (bound and nothing_moves)
        due = {each for each in range(3) if now - moved_at[each] > PATIENCE_S and (each != 2 or nothing_moves)}
        assert set(late) == due - gone
        gone |= set(late)
