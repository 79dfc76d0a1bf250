"""What a decider would do with a stream of requests: the decider itself, on a simulated clock. Pure and repeatable.

The law: nothing of a decider is written here again. Requests are the engine's own tickets without data, batches are the
plans of the very queue that serves, and only the instances are pretended.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from remora.messages import InferForm, Request, Ticket
from remora.scheduling.batching import Plan

Cost = Callable[[int], float]
"""Rows of a batch -> nanoseconds that it takes."""

_FORM = InferForm(())


class Queue(Protocol):
    """The part of a decider that a simulation needs; see `batching.BatchQueue`."""

    def push(self, ticket: Ticket) -> None: ...

    def poll(self, now_ns: int) -> Plan: ...


@dataclass(slots=True)
class Simulated:
    """What became of a stream. Lists have one item for each request that ran, in the order of their batches.

    ``waits_ns`` is from arrival to the start of its batch, ``answers_ns`` from arrival to the end of it. ``batches``
    are the rows of each batch, ``ends_ns`` when each ended; ``reasons`` counts why they went. ``dropped`` never ran,
    ``refused`` were not taken, ``late`` were answered after their deadline. ``end_ns`` is when the last batch ended.
    """

    waits_ns: list[int] = field(default_factory=list)
    answers_ns: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    ends_ns: list[int] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    refused: int = 0
    late: int = 0
    end_ns: int = 0


def request_at(now_ns: int, rows: int = 1, *, deadline_ns: int = 0) -> Ticket:
    """A request without data that arrives at ``now_ns``; ``deadline_ns`` 0 for none."""
    ticket = Ticket(Request(_FORM, {}, (), rows, None), lambda _ticket, _outcome: None, arrival_ns=now_ns)
    ticket.deadline_ns = deadline_ns
    return ticket


def arrivals(
    per_s: float, count: int, *, rows: Iterable[int] = (1,), seed: int = 0, timeout_ns: int = 0
) -> list[Ticket]:
    """Requests that come independently of each other (Poisson), ``per_s`` requests a second on average.

    ``rows`` are what requests have, drawn with equal chance; the same seed gives the same stream.
    """
    random = Random(seed)
    sizes = tuple(rows)
    now = 0.0
    found: list[Ticket] = []
    for _ in range(count):
        now += random.expovariate(per_s) * 1e9
        at = int(now) + 1  # 0 would mean "not arrived"
        found.append(request_at(at, random.choice(sizes), deadline_ns=at + timeout_ns if timeout_ns else 0))
    return found


def simulate(queue: Queue, tickets: Iterable[Ticket], cost: Cost, instances: int = 1) -> Simulated:
    """Let ``instances`` of a model serve a stream of tickets, ascending by arrival, until nothing waits any more.

    A push that raises counts as refused. The queue must be fresh, and its clock begins at 0.
    """
    return _Run(queue, iter(tickets), cost, instances).run()


class _Run:
    def __init__(self, queue: Queue, coming: Iterator[Ticket], cost: Cost, instances: int) -> None:
        self._queue = queue
        self._coming = coming
        self._cost = cost
        self._idle = instances
        self._ends: list[int] = []
        self._next = next(coming, None)
        self._found = Simulated()

    def run(self) -> Simulated:
        now = wake_ns = 0
        while True:
            times = [wake_ns] if wake_ns and self._idle else []
            if self._ends:
                times.append(self._ends[0])
            if self._next is not None:
                times.append(self._next.arrival_ns)
            if not times:
                self._found.end_ns = now
                return self._found
            now = max(min(times), now)
            self._advance(now)
            wake_ns = self._dispatch(now)

    def _advance(self, now_ns: int) -> None:
        """Free the instances that are done, and take in what has arrived."""
        while self._ends and self._ends[0] <= now_ns:
            heapq.heappop(self._ends)
            self._idle += 1
        while self._next is not None and self._next.arrival_ns <= now_ns:
            try:
                self._queue.push(self._next)
            except Exception:  # whatever a decider refuses a request with
                self._found.refused += 1
            self._next = next(self._coming, None)

    def _dispatch(self, now_ns: int) -> int:
        """Give batches to idle instances; when to look again if nothing happens before, 0 for never."""
        found = self._found
        while self._idle:
            plan = self._queue.poll(now_ns)
            found.dropped += len(plan.dropped)
            if not plan.tickets:
                return plan.wake_ns
            end_ns = now_ns + max(int(self._cost(plan.rows)), 1)
            heapq.heappush(self._ends, end_ns)
            self._idle -= 1
            found.batches.append(plan.rows)
            found.ends_ns.append(end_ns)
            found.reasons[plan.reason] = found.reasons.get(plan.reason, 0) + 1
            for ticket in plan.tickets:
                found.waits_ns.append(now_ns - ticket.arrival_ns)
                found.answers_ns.append(end_ns - ticket.arrival_ns)
                found.late += 0 < ticket.deadline_ns < end_ns
        return 0
