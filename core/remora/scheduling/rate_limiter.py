"""Rate limiter: schedules the instances of all models that share resources.

One limiter for an engine, created only if the operator enables it. Each instance's thread waits here for its turn.
`Turns` decides; `RateLimiter` locks and waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from remora.config import RatePolicy
from remora.errors import ConfigError

Resource = tuple[str, int | None]
"""A resource's name and device; None for a shared resource, and in settings for every device."""


def capacities(policies: Iterable[RatePolicy], stated: Mapping[Resource, int]) -> dict[Resource, int]:
    """Return the capacity of each resource that the instances require.

    Args:
        policies: of all instances.
        stated: the operator's settings (see `remora.options.rate_limits`). If empty, each resource has the capacity
            that the most demanding instance requires; otherwise a resource that is not listed has none.

    Raises ConfigError with Triton's texts [I09]: a capacity too small for an instance, or a name that is both shared
    and of a device.
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
    """Return True if a setting for a device, or for every device, applies to this one.

    A shared resource accepts any setting.
    """
    return device is None or stated is None or stated == device


class Seat:
    """Rate limiter state of one instance: its requirements and the number of its next turn."""

    __slots__ = ("policy", "turn")

    def __init__(self, policy: RatePolicy) -> None:
        self.policy = policy
        self.turn = 0
        """The lowest runs first. Each run adds the priority, so that priority 2 gets half the turns of priority 1."""


class Turns:
    """Waiting and running instances and their resources.

    Not thread-safe: the limiter's lock guards it.
    """

    def __init__(self, stated: Mapping[Resource, int]) -> None:
        self._stated = stated
        self._capacities: dict[Resource, int] = {}
        self._seats: dict[Seat, None] = {}
        self._waiting: dict[Seat, None] = {}
        self._running: dict[Seat, None] = {}
        self._now = 0

    def join(self, policies: Sequence[RatePolicy]) -> list[Seat]:
        """Return seats for the instances of one model.

        Raises ConfigError if the capacities cannot serve all of them; then none joins.
        """
        self._capacities = capacities([seat.policy for seat in self._seats] + list(policies), self._stated)
        seats = [Seat(policy) for policy in policies]
        self._seats.update(dict.fromkeys(seats))
        return seats

    def leave(self, seat: Seat) -> None:
        """Remove a seat with its resources and requests. A second call has no effect."""
        for seats in (self._seats, self._waiting, self._running):
            seats.pop(seat, None)
        self._capacities = capacities([other.policy for other in self._seats], self._stated)

    def ask(self, seat: Seat) -> None:
        """Queue a seat to run.

        Unused turns are not accumulated: its number is raised to the current one.
        """
        seat.turn = max(seat.turn, self._now)
        self._waiting[seat] = None

    def grant(self) -> list[Seat]:
        """Return the seats that may run now. They hold their resources until `done`."""
        free = dict(self._capacities)
        for seat in self._running:
            _take(free, seat)
        granted: list[Seat] = []
        for seat in sorted(self._waiting, key=lambda seat: seat.turn):  # the sort is stable: first come, first served
            fits = all(free[resource] >= count for resource, count in seat.policy.resources)
            _take(free, seat)  # also if it has to wait, because later seats may use only the rest
            if fits:
                granted.append(seat)
        for seat in granted:
            del self._waiting[seat]
            self._running[seat] = None
            self._now = max(self._now, seat.turn)
        return granted

    def done(self, seat: Seat, *, ran: bool) -> None:
        """Release the resources of a seat. Its turn counts if it ran."""
        if seat in self._running:
            del self._running[seat]
            seat.turn += max(seat.policy.priority, 1) if ran else 0


def _take(free: dict[Resource, int], seat: Seat) -> None:
    for resource, count in seat.policy.resources:
        free[resource] -= count


class RateLimiter:
    """Thread-safe interface to `Turns` that blocks instances until their turn.

    It calls no other object while it holds its lock.

    Args:
        stated: the operator's capacities (see `capacities`).
    """

    def __init__(self, stated: Mapping[Resource, int]) -> None:
        self._turns = Turns(stated)
        self._lock = threading.Lock()
        self._turn_of: dict[Seat, Turn] = {}

    def join(self, policies: Sequence[RatePolicy]) -> list[Turn]:
        """Return a turn for each instance of a model. Raises ConfigError [I09]."""
        with self._lock:
            turns = [Turn(self, seat, threading.Condition(self._lock)) for seat in self._turns.join(policies)]
            self._turn_of.update((turn.seat, turn) for turn in turns)
            return turns

    def acquire(self, turn: Turn) -> bool:
        """Wait for a turn. See `Turn.acquire`."""
        with self._lock:
            if turn.seat not in self._turn_of:
                return False
            self._turns.ask(turn.seat)
            self._grant()
            waits = not turn.granted
            while not turn.granted and turn.seat in self._turn_of:
                turn.ready.wait()
            return waits

    def release(self, turn: Turn, *, ran: bool) -> None:
        """Return a turn. See `Turn.release`."""
        with self._lock:
            turn.granted = False
            self._turns.done(turn.seat, ran=ran)
            self._grant()

    def leave(self, turn: Turn) -> None:
        """Remove an instance. See `Turn.leave`."""
        with self._lock:
            if self._turn_of.pop(turn.seat, None) is not None:
                self._turns.leave(turn.seat)
                turn.ready.notify_all()
                self._grant()

    def _grant(self) -> None:
        for seat in self._turns.grant():
            turn = self._turn_of[seat]
            turn.granted = True
            turn.ready.notify_all()


class Turn:
    """The turns of one instance.

    One thread at a time acquires and releases; any thread may call `leave`.
    """

    __slots__ = ("_limiter", "granted", "ready", "seat")

    def __init__(self, limiter: RateLimiter, seat: Seat, ready: threading.Condition) -> None:
        self._limiter = limiter
        self.seat = seat
        self.ready = ready
        self.granted = False

    def acquire(self) -> bool:
        """Wait until the instance may run, and return True if it had to wait.

        After `leave` this returns at once.
        """
        return self._limiter.acquire(self)

    def release(self, *, ran: bool) -> None:
        """Release the instance's resources.

        ``ran`` is False if there was no batch to run.
        """
        self._limiter.release(self, ran=ran)

    def leave(self) -> None:
        """Stop taking turns and drop the instance's requirements."""
        self._limiter.leave(self)
