"""How long a reader polls: never beyond the limit, only at short intervals, and not where it loses its processor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.backends.worker.polling import LOST_NS, Look, LoopPoll, PollBudget, poll_limit_ns
from support.engine.fakes import FakeClock

LIMIT_NS = 500_000
MS = 1_000_000


def used_to(wait_ns: int, limit_ns: int = LIMIT_NS) -> PollBudget:
    budget = PollBudget(limit_ns)
    for _ in range(40):
        budget.record_wait(wait_ns)
    return budget


@pytest.mark.parametrize(("cpus", "expected"), [(0.5, 0), (1, 0), (1.5, 0), (2, LIMIT_NS), (16, LIMIT_NS)])
def test_a_process_with_less_than_two_processors_does_not_poll(cpus: float, expected: int) -> None:
    assert poll_limit_ns(LIMIT_NS, cpus) == expected


def test_nothing_is_polled_before_messages_arrive_at_short_intervals() -> None:
    budget = PollBudget(LIMIT_NS)
    assert budget.allowance(0) == 0
    budget.record_wait(100_000)
    assert budget.allowance(0) == 0
    for _ in range(10):
        budget.record_wait(100_000)
    assert budget.allowance(0) > 100_000


@pytest.mark.parametrize(("wait_ns", "polls"), [(50_000, True), (499_000, True), (600_000, False), (10 * MS, False)])
def test_a_reader_polls_only_if_the_usual_wait_is_within_the_limit(wait_ns: int, polls: bool) -> None:
    assert bool(used_to(wait_ns).allowance(0)) is polls


def test_a_poll_lasts_about_twice_the_usual_wait() -> None:
    assert used_to(100_000).allowance(0) == pytest.approx(240_000, rel=0.01)


def test_a_limit_of_zero_never_polls() -> None:
    assert used_to(0, limit_ns=0).allowance(0) == 0


def test_one_long_pause_ends_polling_until_the_waits_are_short_again() -> None:
    budget = used_to(100_000)
    budget.record_wait(3_600_000 * MS)
    assert budget.allowance(0) == 0
    for _ in range(3):
        budget.record_wait(100_000)
    assert budget.allowance(0) > 0


def test_a_lost_processor_pauses_polls_for_a_doubling_time_up_to_a_second() -> None:
    budget, now = used_to(100_000), 0
    pauses = []
    for _ in range(12):
        budget.record_loss(now)
        step = next(ms for ms in range(1, 2000) if budget.allowance(now + ms * MS))
        pauses.append(step)
        now += step * MS
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 640, 1000, 1000, 1000, 1000]


def test_polls_that_find_messages_shorten_the_pause_after_the_next_loss() -> None:
    budget = used_to(100_000)
    for _ in range(5):
        budget.record_loss(0)
    for _ in range(64):
        budget.record_found()
    budget.record_loss(1000 * MS)
    assert budget.allowance(1005 * MS - 1) == 0
    assert budget.allowance(1005 * MS) > 0


@given(st.lists(st.one_of(st.integers(0, 1 << 50), st.sampled_from(["found", "lost"])), max_size=200))
def test_no_poll_is_longer_than_the_limit_whatever_happened(events: list[int | str]) -> None:
    budget, now = PollBudget(LIMIT_NS), 0
    for event in events:
        if event == "found":
            budget.record_found()
        elif event == "lost":
            budget.record_loss(now)
            assert budget.allowance(now) == 0
        else:
            assert isinstance(event, int)
            now += event
            budget.record_wait(event)
        assert 0 <= budget.allowance(now) <= LIMIT_NS


class Loop:
    """Loop whose turns the test takes, each a microsecond after the other, and what a look finds."""

    def __init__(self, wait_ns: int = 100_000) -> None:
        self.clock = FakeClock()
        self.due: list[Callable[[], None]] = []
        self.looks: list[bool] = []
        self.found_at = 0
        self.budget = used_to(wait_ns)
        self.poll = LoopPoll(self.budget, self.call_next, self.look, self.clock.monotonic_ns)

    def watch(self, fd: int, work: Callable[[int], None]) -> Callable[[], None]:
        raise AssertionError("nothing to watch")

    def is_current(self) -> bool:
        return True

    def call_next(self, work: Callable[[], None]) -> None:
        self.due.append(work)

    def look(self, *, last: bool) -> Look:
        self.looks.append(last)
        if len(self.looks) == self.found_at:
            return Look.FOUND
        return Look.ENDED if last else Look.NOTHING

    def turn(self, ns: int = 1000) -> bool:
        self.clock.advance(ns)
        due, self.due = self.due, []
        for work in due:
            work()
        return bool(self.due)


def test_a_loop_looks_once_a_turn_until_it_finds_a_message() -> None:
    loop = Loop()
    loop.found_at = 4
    loop.poll.begin(loop.clock.now_ns)
    while loop.turn():
        assert loop.poll.active
    assert loop.looks == [False] * 4
    assert not loop.poll.active


def test_a_poll_of_a_loop_ends_with_a_last_look_at_the_end_of_its_time() -> None:
    loop = Loop()
    allowed_ns = loop.budget.allowance(loop.clock.now_ns)
    loop.poll.begin(loop.clock.now_ns)
    while loop.turn():
        pass
    assert loop.looks == [*[False] * ((allowed_ns - 1) // 1000), True]


def test_a_turn_that_comes_late_ends_the_poll_and_pauses_polling() -> None:
    loop = Loop()
    loop.poll.begin(loop.clock.now_ns)
    assert loop.turn()
    assert not loop.turn(LOST_NS + 1)
    assert loop.looks == [False, True]
    loop.poll.begin(loop.clock.now_ns)
    assert not loop.due


def test_a_late_turn_that_finds_a_message_is_no_loss() -> None:
    loop = Loop()
    loop.found_at = 1
    loop.poll.begin(loop.clock.now_ns)
    assert not loop.turn(LOST_NS + 1)
    loop.poll.begin(loop.clock.now_ns)
    assert loop.due


def test_a_poll_begun_during_another_does_not_add_turns() -> None:
    loop = Loop()
    loop.poll.begin(loop.clock.now_ns)
    loop.poll.begin(loop.clock.now_ns)
    assert len(loop.due) == 1


def test_a_loop_without_allowance_schedules_nothing() -> None:
    loop = Loop(wait_ns=10 * MS)
    loop.poll.begin(loop.clock.now_ns)
    assert not loop.due
    assert not loop.poll.active
