"""Ticket queues: first in first out, or by priority level with timeouts [D07-D12].

Both iterate over their tickets in the order in which they should run. Time is an argument; neither is thread-safe.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from itertools import chain, islice
from typing import Protocol

from remora.config import BatchPolicy, QueuePolicy
from remora.errors import QueueFullError, about
from remora.messages import Ticket

_NS_PER_US = 1000
_SLACK = 64
"""Removed tickets are purged from a heap above twice the queued tickets plus this number."""

_EMPTY_LEVELS = 64
"""Number of priority levels up to which empty ones are kept."""


class Waiting(Protocol):
    """Tickets in the order in which they should run."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Ticket]: ...

    def push(self, ticket: Ticket) -> None:
        """Queue a ticket. Raises QueueFullError [D12]."""

    def take(self, count: int) -> list[Ticket]:
        """Remove and return the first ``count`` tickets."""

    def discard_all(self, dead: Collection[Ticket]) -> None:
        """Remove these tickets, wherever they are queued. Cheap near the front."""

    def expire(self, now_ns: int) -> list[Ticket]:
        """Remove and return the tickets that timed out [D10, D11].

        Those that may still run are demoted instead.
        """

    def next_expiry_ns(self) -> int:
        """Return when the next ticket times out, or 0.

        It is then removed or demoted, and both change the next batch.
        """

    def next_refusal_ns(self) -> int:
        """Return when the next ticket is refused, or 0."""

    def oldest_ns(self) -> int:
        """Return the arrival of the ticket that has waited longest, or 0."""

    def drain(self) -> list[Ticket]:
        """Remove and return all tickets."""


def waiting_for(policy: BatchPolicy) -> Waiting:
    """Return the simplest queue that implements the policy.

    Without a batcher no queue policy applies [D01].
    """
    usual = policy.queue_at(1)
    if not policy.dynamic:
        return Line()
    if policy.levels == 1 and not usual.default_timeout_ns:
        return Line(usual.max_size)
    return Levels(policy)


class Line(deque[Ticket]):
    """FIFO queue without timeouts.

    ``max_size`` limits the number of requests, 0 for no limit.
    """

    __slots__ = ("max_size",)

    def __init__(self, max_size: int = 0) -> None:
        super().__init__()
        self.max_size = max_size

    def push(self, ticket: Ticket) -> None:
        if self.max_size and len(self) >= self.max_size:
            raise queue_full(ticket)
        self.append(ticket)

    def take(self, count: int) -> list[Ticket]:
        if count == len(self):
            tickets = list(self)
            self.clear()
            return tickets
        take = self.popleft
        return [take() for _ in range(count)]

    def discard_all(self, dead: Collection[Ticket]) -> None:
        remaining = set(dead)
        kept: list[Ticket] = []
        while remaining and self:
            ticket = self.popleft()
            if ticket in remaining:
                remaining.discard(ticket)
            else:
                kept.append(ticket)
        self.extendleft(reversed(kept))

    def expire(self, now_ns: int) -> list[Ticket]:  # no ticket has a timeout
        return []

    def next_expiry_ns(self) -> int:
        return 0

    def next_refusal_ns(self) -> int:
        return 0

    def oldest_ns(self) -> int:
        return self[0].arrival_ns if self else 0

    def drain(self) -> list[Ticket]:
        return self.take(len(self))


class Level:
    """Tickets of one priority level: those in time, then those that timed out but may run.

    Removing a ticket takes a few steps, wherever it is and however many are queued.
    """

    __slots__ = ("_expiries", "_fresh", "_late", "_policy", "_pushed")

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._fresh: OrderedDict[Ticket, int] = OrderedDict()  # -> expiry time; 0 for never
        self._late: OrderedDict[Ticket, int] = OrderedDict()
        self._expiries: list[tuple[int, int, Ticket]] = []  # a heap; may contain removed tickets
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._late)

    def __iter__(self) -> Iterator[Ticket]:
        return chain(self._fresh, self._late)

    def push(self, ticket: Ticket) -> None:
        """Queue a ticket. Raises QueueFullError [D12]."""
        if self._policy.max_size and len(self) >= self._policy.max_size:
            raise queue_full(ticket)
        timeout_ns = timeout_of(self._policy, ticket)
        expiry_ns = ticket.arrival_ns + timeout_ns if timeout_ns else 0
        self._fresh[ticket] = expiry_ns
        if expiry_ns:
            self._pushed += 1
            heapq.heappush(self._expiries, (expiry_ns, self._pushed, ticket))
            if len(self._expiries) > 2 * len(self._fresh) + _SLACK:
                self._expiries = [row for row in self._expiries if row[2] in self._fresh]
                heapq.heapify(self._expiries)

    def heads(self) -> Iterator[Ticket]:
        """Yield the first ticket of those in time, and of those that timed out."""
        for tickets in (self._fresh, self._late):
            yield from islice(tickets, 1)

    def take(self, count: int) -> list[Ticket]:
        """Remove and return the first ``count`` tickets, or all."""
        taken: list[Ticket] = []
        for tickets in (self._fresh, self._late):
            while tickets and len(taken) < count:
                taken.append(tickets.popitem(last=False)[0])
        return taken

    def discard(self, ticket: Ticket) -> None:
        """Remove a ticket if it is queued here."""
        self._fresh.pop(ticket, None)
        self._late.pop(ticket, None)

    def expire(self, now_ns: int) -> list[Ticket]:
        """See `Waiting.expire`."""
        refused: list[Ticket] = []
        while self._expiries and self._expiries[0][0] <= now_ns:
            ticket = heapq.heappop(self._expiries)[2]
            if self._fresh.pop(ticket, None) is None:
                continue
            if self._policy.reject_on_timeout:
                refused.append(ticket)
            else:
                self._late[ticket] = 0
        return refused

    def next_expiry_ns(self) -> int:
        """See `Waiting.next_expiry_ns`."""
        while self._expiries and self._expiries[0][2] not in self._fresh:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else 0

    def next_refusal_ns(self) -> int:
        """See `Waiting.next_refusal_ns`."""
        return self.next_expiry_ns() if self._policy.reject_on_timeout else 0


class Levels:
    """Tickets by priority: a higher level is emptied before the next one [D07].

    Only levels in use cost anything, because there may be 2**64-1.

    Args:
        policy: with at least one level; 1 is the highest.
    """

    __slots__ = ("_levels", "_numbers", "_policy", "_room")

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._levels: dict[int, Level] = {}
        self._numbers: list[int] = []  # keys of `_levels`, ascending
        self._room = _EMPTY_LEVELS

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[Ticket]:
        return chain.from_iterable(self._ordered())

    def _ordered(self) -> Iterator[Level]:
        return map(self._levels.__getitem__, self._numbers)

    def _add(self, number: int) -> Level:
        """Create the queue of a level, and drop empty ones if there are many."""
        if len(self._levels) >= self._room:
            self._levels = {known: level for known, level in self._levels.items() if level}
            self._numbers = sorted(self._levels)
            self._room = max(2 * len(self._levels), _EMPTY_LEVELS)
        level = self._levels[number] = Level(self._policy.queue_at(number))
        insort(self._numbers, number)
        return level

    def push(self, ticket: Ticket) -> None:
        ticket.level = number = level_of(ticket, self._policy.levels, self._policy.default_level)
        level = self._levels.get(number)
        (self._add(number) if level is None else level).push(ticket)

    def take(self, count: int) -> list[Ticket]:
        taken: list[Ticket] = []
        for level in self._ordered():
            if len(taken) == count:
                break
            taken += level.take(count - len(taken))
        return taken

    def discard_all(self, dead: Collection[Ticket]) -> None:
        for ticket in dead:
            if ticket.level in self._levels:
                self._levels[ticket.level].discard(ticket)

    def expire(self, now_ns: int) -> list[Ticket]:
        return [ticket for level in self._ordered() for ticket in level.expire(now_ns)]

    def next_expiry_ns(self) -> int:
        return min((ns for level in self._levels.values() if (ns := level.next_expiry_ns())), default=0)

    def next_refusal_ns(self) -> int:
        return min((ns for level in self._levels.values() if (ns := level.next_refusal_ns())), default=0)

    def oldest_ns(self) -> int:
        return min((ticket.arrival_ns for level in self._levels.values() for ticket in level.heads()), default=0)

    def drain(self) -> list[Ticket]:
        return self.take(len(self))


def level_of(ticket: Ticket, levels: int, default: int) -> int:
    """Return the priority level of a request, or the default if there is no such level [D07]."""
    wanted = ticket.request.form.priority
    return wanted if 0 < wanted <= levels else default


def timeout_of(policy: QueuePolicy, ticket: Ticket) -> int:
    """Return the queue timeout of a request in nanoseconds.

    The request's own timeout can only shorten the level's [D09].
    """
    usual_ns = policy.default_timeout_ns
    own_ns = ticket.request.form.timeout_us * _NS_PER_US
    return own_ns if policy.allow_override and 0 < own_ns < usual_ns else usual_ns


def queue_full(ticket: Ticket) -> QueueFullError:
    """Return the error of a request that found the queue full [D12]."""
    return QueueFullError(about(ticket.request.form.id, "Exceeds maximum queue size"))
