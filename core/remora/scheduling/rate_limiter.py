"""Lets instances of all models take turns at what they share; the law: it decides nothing, `rate_limiting` does.

One limiter for an engine, made only when the operator turns it on. Each instance's thread waits here for its turn.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from remora.config import RatePolicy
from remora.errors import ConfigError

Resource = tuple[str, int | None]
"""A resource's name and device; None for one that all devices share, and, in settings, for "on every device"."""


def capacities(policies: Iterable[RatePolicy], stated: Mapping[Resource, int]) -> dict[Resource, int]:
    """How much there is of each resource that instances ask for.

    Args:
        policies: of all instances.
        stated: what the operator gave (see `remora.options.rate_limits`). With nothing stated there is as much of each
            resource as the most demanding instance asks for; otherwise there is none of what is not stated.

    Raises ConfigError with Triton's texts [I09]: too little for an instance, or a name shared and of a device.
    """
    most: dict[Resource, int] = {}
    for policy in policies:
        for resource, count in policy.resources:
            most[resource] = max(count, most.get(resource, 0))
    for (name, device), count in most.items() if stated else ():
        there = max(
            (amount for (other, place), amount in stated.items() if other == name and _covers(place, device)), default=0
        )
        if there < count:
            raise ConfigError(
                f'Resource count for "{name}" is limited to {there} which will prevent scheduling of one or more model '
                f"instances, the minimum required count is {count}"
            )
        most[name, device] = there
    for name, device in most:
        if device is not None and (name, None) in most:
            raise ConfigError(
                f'Resource "{name}" is present as both global and device-specific resource in the model configuration.'
            )
    return most


def _covers(stated: int | None, device: int | None) -> bool:
    """Whether what was stated for a device, or every device, counts for this one; a shared resource takes any."""
    return device is None or stated is None or stated == device


class Seat:
    """One instance's place: what it asks for, and the number of its next turn."""

    __slots__ = ("policy", "turn")

    def __init__(self, policy: RatePolicy) -> None:
        self.policy = policy
        self.turn = 0
        """Lower goes first. Each run adds the priority, so that priority 2 gets half the turns of priority 1."""


class Turns:
    """Who waits, who runs, and what that takes. Not thread-safe: the limiter's lock guards it."""

    def __init__(self, stated: Mapping[Resource, int]) -> None:
        self._stated = stated
        self._capacities: dict[Resource, int] = {}
        self._seats: dict[Seat, None] = {}
        self._waiting: dict[Seat, None] = {}
        self._running: dict[Seat, None] = {}
        self._now = 0

    def join(self, policies: Sequence[RatePolicy]) -> list[Seat]:
        """Seats for the instances of one model. Raises ConfigError when they cannot all be served; then none joins."""
        self._capacities = capacities([seat.policy for seat in self._seats] + list(policies), self._stated)
        seats = [Seat(policy) for policy in policies]
        self._seats.update(dict.fromkeys(seats))
        return seats

    def leave(self, seat: Seat) -> None:
        """Forget a seat, and what it waits for or holds. Twice is once."""
        for seats in (self._seats, self._waiting, self._running):
            seats.pop(seat, None)
        self._capacities = capacities([other.policy for other in self._seats], self._stated)

    def ask(self, seat: Seat) -> None:
        """A seat wants to run. Turns that it did not want are not saved up: it begins where the others are."""
        seat.turn = max(seat.turn, self._now)
        self._waiting[seat] = None

    def grant(self) -> list[Seat]:
        """Those that may run now; they hold what they asked for until `done`."""
        free = dict(self._capacities)
        for seat in self._running:
            _take(free, seat)
        granted: list[Seat] = []
        for seat in sorted(self._waiting, key=lambda seat: seat.turn):  # of equals, who asked first
            fits = all(free[resource] >= count for resource, count in seat.policy.resources)
            _take(free, seat)  # also when it has to wait: those behind it may have only what it leaves
            if fits:
                granted.append(seat)
        for seat in granted:
            del self._waiting[seat]
            self._running[seat] = None
            self._now = max(self._now, seat.turn)
        return granted

    def done(self, seat: Seat, *, ran: bool) -> None:
        """A seat gives back what it holds; its turn counts if it ran."""
        if seat in self._running:
            del self._running[seat]
            seat.turn += max(seat.policy.priority, 1) if ran else 0


def _take(free: dict[Resource, int], seat: Seat) -> None:
    for resource, count in seat.policy.resources:
        free[resource] -= count


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
        """A turn for each instance of a model. Raises ConfigError when what they ask for is not there [I09]."""
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
