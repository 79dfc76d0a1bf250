"""Where tickets wait: first in first out, or by level with timeouts [D07-D12]; the law: time is an argument.

Both kinds of queue list their tickets in the order in which they should run. Neither is thread-safe.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Protocol

from remora.config import BatchPolicy, QueuePolicy
from remora.errors import QueueFullError, about
from remora.messages import Ticket

_NS_PER_US = 1000
_SLACK = 64
"""A heap may hold this many more than twice the tickets that wait before it is cleared of those that have left."""

_EMPTY_LEVELS = 64
"""So many priority levels are kept whether anything waits there or not."""


class Waiting(Protocol):
    """Tickets in the order in which they should run."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Ticket]: ...

    def push(self, ticket: Ticket) -> None:
        """Let a ticket wait. Raises QueueFullError [D12]."""

    def take(self, count: int) -> list[Ticket]:
        """Take the first ``count`` tickets out."""

    def discard_all(self, dead: Collection[Ticket]) -> None:
        """Take these tickets out, wherever they wait; cheap when they are near the front."""

    def expire(self, now_ns: int) -> list[Ticket]:
        """Take out the tickets to refuse whose timeout is over, and put back those to run last [D10, D11]."""

    def next_expiry_ns(self) -> int:
        """When the next ticket is to be refused; 0 for never."""

    def drain(self) -> list[Ticket]:
        """Everything that waits, taken out."""


def waiting_for(policy: BatchPolicy) -> Waiting:
    """The simplest queue that does what the policy asks for; without a batcher no queue policy counts [D01]."""
    usual = policy.queue_at(1)
    if not policy.dynamic:
        return Line()
    if policy.levels == 1 and not usual.default_timeout_ns:
        return Line(usual.max_size)
    return Levels(policy)


class Line(deque[Ticket]):
    """One level without timeouts. ``max_size`` counts requests; 0 is no limit."""

    __slots__ = ("_max_size",)

    def __init__(self, max_size: int = 0) -> None:
        super().__init__()
        self._max_size = max_size

    def push(self, ticket: Ticket) -> None:
        if self._max_size and len(self) >= self._max_size:
            raise queue_full(ticket)
        self.append(ticket)

    def take(self, count: int) -> list[Ticket]:
        take = self.popleft
        return [take() for _ in range(count)]

    def discard_all(self, dead: Collection[Ticket]) -> None:
        left = set(dead)
        kept: list[Ticket] = []
        while left and self:
            ticket = self.popleft()
            if ticket in left:
                left.discard(ticket)
            else:
                kept.append(ticket)
        self.extendleft(reversed(kept))

    def expire(self, now_ns: int) -> list[Ticket]:  # nothing has a timeout here
        return []

    def next_expiry_ns(self) -> int:
        return 0

    def drain(self) -> list[Ticket]:
        return self.take(len(self))


class Level:
    """The tickets of one priority level: those in time, then those that are late but may run.

    Any ticket leaves in a few steps, wherever it waits and however many do.
    """

    __slots__ = ("_expiries", "_fresh", "_late", "_policy", "_pushed")

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._fresh: OrderedDict[Ticket, int] = OrderedDict()  # -> when its time is over; 0 for never
        self._late: OrderedDict[Ticket, int] = OrderedDict()
        self._expiries: list[tuple[int, int, Ticket]] = []  # a heap; may hold tickets that have left
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._late)

    def __iter__(self) -> Iterator[Ticket]:
        return chain(self._fresh, self._late)

    def push(self, ticket: Ticket) -> None:
        """Raises QueueFullError [D12]."""
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

    def take(self, count: int) -> list[Ticket]:
        """Take the first ``count`` tickets out, or all there are."""
        taken: list[Ticket] = []
        for tickets in (self._fresh, self._late):
            while tickets and len(taken) < count:
                taken.append(tickets.popitem(last=False)[0])
        return taken

    def discard(self, ticket: Ticket) -> None:
        """Take a ticket out if it waits here."""
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
        """See `Waiting.next_expiry_ns`: a ticket that will merely be put back wakes nobody."""
        if not self._policy.reject_on_timeout:
            return 0
        while self._expiries and self._expiries[0][2] not in self._fresh:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else 0


class Levels:
    """Tickets by priority: a higher level is emptied before the next one's turn [D07].

    Only levels in use cost anything: there may be 2**64-1.

    Args:
        policy: with at least one level; 1 is the highest.
    """

    __slots__ = ("_levels", "_numbers", "_policy", "_room")

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._levels: dict[int, Level] = {}
        self._numbers: list[int] = []  # of `_levels`, ascending
        self._room = _EMPTY_LEVELS

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[Ticket]:
        return chain.from_iterable(self._ordered())

    def _ordered(self) -> Iterator[Level]:
        return map(self._levels.__getitem__, self._numbers)

    def _add(self, number: int) -> Level:
        """Make the queue of a level, and drop the empty ones when there are many."""
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

    def drain(self) -> list[Ticket]:
        return self.take(len(self))


def level_of(ticket: Ticket, levels: int, default: int) -> int:
    """The priority level of a request: what it asks for, or the default where there is no such level [D07]."""
    wanted = ticket.request.form.priority
    return wanted if 0 < wanted <= levels else default


def timeout_of(policy: QueuePolicy, ticket: Ticket) -> int:
    """How long a request may wait, in nanoseconds; its own timeout can only shorten the level's [D09]."""
    usual_ns = policy.default_timeout_ns
    own_ns = ticket.request.form.timeout_us * _NS_PER_US
    return own_ns if policy.allow_override and 0 < own_ns < usual_ns else usual_ns


def queue_full(ticket: Ticket) -> QueueFullError:
    """The answer of a request that found no room [D12]."""
    return QueueFullError(about(ticket.request.form.id, "Exceeds maximum queue size"))
