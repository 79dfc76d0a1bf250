"""Lets instances of all models take turns at what they share; the law: it decides nothing, `rate_limiting` does.

One limiter for an engine, made only when the operator turns it on. Each instance's thread waits here for its turn.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from remora.config import RatePolicy
from remora.scheduling.rate_limiting import Resource, Seat, Turns


class RateLimiter:
    """Gives out turns. Thread-safe; never calls anyone while it holds its lock.

    Args:
        stated: how much there is of each resource (see `rate_limiting.capacities`).
    """

    def __init__(self, stated: Mapping[Resource, int]) -> None:
        self._turns = Turns(stated)
        self._lock = threading.Lock()
        self._handed: dict[Seat, Turn] = {}

    def join(self, policies: Sequence[RatePolicy]) -> list[Turn]:
        """A turn for each instance of a model. Raises ConfigError when what they ask for is not there (spec I09)."""
        with self._lock:
            turns = [Turn(self, seat, threading.Condition(self._lock)) for seat in self._turns.join(policies)]
            self._handed.update((turn.seat, turn) for turn in turns)
            return turns

    def take(self, turn: Turn) -> bool:
        """See `Turn.take`."""
        with self._lock:
            if turn.seat not in self._handed:
                return False
            self._turns.ask(turn.seat)
            self._grant()
            waits = not turn.granted
            while not turn.granted and turn.seat in self._handed:
                turn.ready.wait()
            return waits

    def give_back(self, turn: Turn, *, ran: bool) -> None:
        """See `Turn.give_back`."""
        with self._lock:
            turn.granted = False
            self._turns.done(turn.seat, ran=ran)
            self._grant()

    def leave(self, turn: Turn) -> None:
        """See `Turn.leave`."""
        with self._lock:
            if self._handed.pop(turn.seat, None) is not None:
                self._turns.leave(turn.seat)
                turn.ready.notify_all()
                self._grant()

    def _grant(self) -> None:
        for seat in self._turns.grant():
            turn = self._handed[seat]
            turn.granted = True
            turn.ready.notify_all()


class Turn:
    """One instance's turns. One thread at a time takes and gives back; any thread may leave."""

    __slots__ = ("_limiter", "granted", "ready", "seat")

    def __init__(self, limiter: RateLimiter, seat: Seat, ready: threading.Condition) -> None:
        self._limiter = limiter
        self.seat = seat
        self.ready = ready
        self.granted = False

    def take(self) -> bool:
        """Wait until the instance may run; whether it had to wait. After `leave` nothing is waited for."""
        return self._limiter.take(self)

    def give_back(self, *, ran: bool) -> None:
        """What the instance held is free again; ``ran`` False when there was nothing to run after all."""
        self._limiter.give_back(self, ran=ran)

    def leave(self) -> None:
        """The instance takes no more turns, and what it asks for no longer counts."""
        self._limiter.leave(self)
