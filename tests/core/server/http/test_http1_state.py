"""When an HTTP/1.1 connection times out, as a pure decision over what its sweeps see."""

from __future__ import annotations

import pytest

from remora.server.http.exchange import SILENCE_S
from remora.server.http.held_bytes import ROOM_WAIT_S, UNREAD_S
from remora.server.http.http1_state import Due, Progress, Timeouts

LIMIT_S, IDLE_S = 120.0, 600.0
FRESH = Progress(requests=0, is_idle=True, receiving_since=0.0, received=0, expected=0, unread=0)
SERVED = FRESH._replace(requests=1)


def due(timeouts: Timeouts, now: float, seen: Progress, *, memory_awaited: bool = False) -> Due:
    return timeouts.due(now, LIMIT_S, IDLE_S, seen, memory_awaited)


def test_a_connection_without_a_byte_has_the_time_of_a_request_and_one_that_was_served_the_idle_time() -> None:
    timeouts = Timeouts()
    assert due(timeouts, LIMIT_S, FRESH) is Due.NOTHING
    assert due(timeouts, LIMIT_S + 1, FRESH) is Due.SILENT
    timeouts = Timeouts()
    assert due(timeouts, 10.0, SERVED) is Due.NOTHING
    assert due(timeouts, 10.0 + IDLE_S, SERVED) is Due.NOTHING
    assert due(timeouts, 11.0 + IDLE_S, SERVED) is Due.IDLE


def test_a_shorter_idle_time_holds_for_the_first_byte_too() -> None:
    assert Timeouts().due(11.0, LIMIT_S, 10.0, FRESH, False) is Due.SILENT


def test_an_answer_that_takes_long_is_awaited_and_the_idle_time_begins_after_it() -> None:
    timeouts, answering = Timeouts(), SERVED._replace(is_idle=False)
    for now in (0.0, 10 * IDLE_S, 20 * IDLE_S):
        assert due(timeouts, now, answering) is Due.NOTHING
    assert due(timeouts, 21 * IDLE_S, SERVED) is Due.NOTHING
    assert due(timeouts, 21 * IDLE_S + 1, SERVED) is Due.IDLE


def test_each_request_between_two_sweeps_begins_the_idle_time_again() -> None:
    timeouts = Timeouts()
    for number in range(1, 5):
        assert due(timeouts, number * IDLE_S, FRESH._replace(requests=number)) is Due.NOTHING


def test_a_request_that_arrives_longer_than_the_limit_is_too_slow() -> None:
    seen = FRESH._replace(is_idle=False, receiving_since=5.0)
    assert due(Timeouts(), 5.0 + LIMIT_S, seen) is Due.NOTHING
    assert due(Timeouts(), 6.0 + LIMIT_S, seen) is Due.SLOW


@pytest.mark.parametrize(
    ("after_s", "received", "memory_awaited", "expected"),
    [
        (ROOM_WAIT_S + 1, 1, True, Due.REFUSE),
        (ROOM_WAIT_S + 1, 1, False, Due.NOTHING),
        (ROOM_WAIT_S - 1, 1, True, Due.NOTHING),
        (ROOM_WAIT_S + 1, 1000, True, Due.NOTHING),  # fast enough to be whole within the limit
    ],
)
def test_a_body_must_keep_its_rate_only_while_others_wait_for_memory(
    after_s: float, received: int, memory_awaited: bool, expected: Due
) -> None:
    seen = Progress(0, False, receiving_since=50.0, received=received, expected=1000, unread=0)
    assert due(Timeouts(), 50.0 + after_s, seen, memory_awaited=memory_awaited) is expected


def test_an_answer_of_which_nothing_is_read_is_given_up_and_one_that_is_read_slowly_is_not() -> None:
    stuck, slow = Timeouts(), Timeouts()
    for step, now in enumerate((0.0, UNREAD_S / 2, UNREAD_S)):
        assert due(stuck, now, SERVED._replace(is_idle=False, unread=1000)) is Due.NOTHING
        assert due(slow, now, SERVED._replace(is_idle=False, unread=1000 - step)) is Due.NOTHING
    assert due(stuck, UNREAD_S + 1, SERVED._replace(is_idle=False, unread=1000)) is Due.GIVE_UP
    assert due(slow, UNREAD_S + 1, SERVED._replace(is_idle=False, unread=998)) is Due.NOTHING
    assert due(slow, 2 * UNREAD_S + 1, SERVED._replace(is_idle=False, unread=998)) is Due.GIVE_UP


def test_a_client_that_reads_is_kept_although_more_waits_at_each_sweep() -> None:
    reading = Timeouts()
    for minute in range(5):
        assert due(reading, minute * UNREAD_S, SERVED._replace(is_idle=False, unread=1000 + minute)) is Due.NOTHING
        reading.note_read()
    reading = Timeouts()
    assert due(reading, 0.0, SERVED._replace(is_idle=False, unread=1000)) is Due.NOTHING
    assert due(reading, UNREAD_S + 1, SERVED._replace(is_idle=False, unread=1001)) is Due.GIVE_UP


def test_at_the_end_a_new_connection_is_awaited_for_a_moment_and_one_that_was_served_is_not() -> None:
    timeouts = Timeouts()
    assert timeouts.is_awaited(SILENCE_S, FRESH)
    assert not timeouts.is_awaited(SILENCE_S + 0.1, FRESH)
    assert not timeouts.is_awaited(0.0, SERVED)


def test_at_the_end_a_request_is_awaited_while_its_bytes_arrive() -> None:
    timeouts, seen = Timeouts(), FRESH._replace(is_idle=False, receiving_since=1.0)
    for now, received in ((1.0, 1), (1.0 + SILENCE_S, 1), (1.1 + SILENCE_S, 2), (1.0 + 2 * SILENCE_S, 2)):
        assert timeouts.is_awaited(now, seen._replace(received=received))
    assert not timeouts.is_awaited(1.2 + 2 * SILENCE_S, seen._replace(received=2))
