"""Limits of waiting requests: they hold, urgent work passes, and every request ends."""

from __future__ import annotations

import threading

from remora.scheduling.backpressure import Backpressure

PATIENCE_S = 30.0
SOON_S = 0.01


def test_one_thing_is_let_in_whatever_its_size() -> None:
    allowance = Backpressure(items=8, size=10)
    assert allowance.take(1_000, SOON_S)
    assert not allowance.take(1, SOON_S)
    allowance.give(1_000)
    assert allowance.take(1, SOON_S)


def test_the_count_is_limited_too() -> None:
    allowance = Backpressure(items=2, size=10)
    assert allowance.take(0, SOON_S)
    assert allowance.take(0, SOON_S)
    assert not allowance.take(0, SOON_S)


def test_what_is_added_does_not_wait_but_counts() -> None:
    allowance = Backpressure(items=1, size=10)
    allowance.add(3)
    allowance.add(3)
    assert not allowance.take(0, SOON_S)
    allowance.give(3)
    assert not allowance.take(0, SOON_S)
    allowance.give(3)
    assert allowance.take(0, SOON_S)


def test_room_that_is_given_back_wakes_who_waits() -> None:
    allowance = Backpressure(items=1, size=10)
    allowance.add()
    taken: list[bool] = []
    waiting = threading.Thread(target=lambda: taken.append(allowance.take()))
    waiting.start()
    allowance.give()
    waiting.join(PATIENCE_S)
    assert taken == [True]


def test_closing_lets_everybody_go_with_nothing() -> None:
    allowance = Backpressure(items=1, size=10)
    allowance.add()
    taken: list[bool] = []
    waiting = threading.Thread(target=lambda: taken.append(allowance.take()))
    waiting.start()
    allowance.close()
    waiting.join(PATIENCE_S)
    assert taken == [False]
    assert not allowance.take()
