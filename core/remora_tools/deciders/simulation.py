"""Simulation of a batching queue on a simulated clock. Pure and repeatable.

No decision is implemented twice: requests are the engine's own tickets without data, batches are the plans of the queue
that serves, and only the instances are simulated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from remora.api.models import Plan
from remora.messages import InferForm, Request, Ticket

Cost = Callable[[int], float]
"""Duration of a batch in nanoseconds by its rows."""

_FORM = InferForm(())


class Queue(Protocol):
    """The part of a queue that a simulation needs. See `batching.BatchQueue`."""

    def push(self, ticket: Ticket) -> None: ...

    def poll(self, now_ns: int) -> Plan: ...


@dataclass(slots=True)
class Simulated:
    """Result of a simulation. Lists have one item for each request that ran, in batch order.

    ``waits_ns`` is from arrival to the start of the batch, ``answers_ns`` from arrival to its end. ``batches`` are the
    rows of each batch, ``ends_ns`` the end of each; ``reasons`` counts the dispatch reasons. ``dropped`` requests were
    not run, ``refused`` ones not queued, ``late`` ones answered after their deadline. ``end_ns`` is the end of the last
    batch.
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
    """Return a request without data that arrives at ``now_ns``.

    ``deadline_ns`` 0 means no deadline.
    """
    ticket = Ticket(Request(_FORM, {}, (), rows, None), lambda _ticket, _outcome: None, arrival_ns=now_ns)
    ticket.deadline_ns = deadline_ns
    return ticket


def arrivals(
    per_s: float, count: int, *, rows: Iterable[int] = (1,), seed: int = 0, timeout_ns: int = 0
) -> list[Ticket]:
    """Return requests with independent (Poisson) arrivals, ``per_s`` per second on average.

    ``rows`` are the possible sizes, drawn with equal probability; the same seed gives the same stream.
    """
    random = Random(seed)
    sizes = tuple(rows)
    now = 0.0
    tickets: list[Ticket] = []
    for _ in range(count):
        now += random.expovariate(per_s) * 1e9
        at = int(now) + 1  # because 0 means "not arrived"
        tickets.append(request_at(at, random.choice(sizes), deadline_ns=at + timeout_ns if timeout_ns else 0))
    return tickets


def simulate(queue: Queue, tickets: Iterable[Ticket], cost: Cost, instances: int = 1) -> Simulated:
    """Serve a stream of tickets with ``instances`` until the queue is empty.

    The tickets must ascend by arrival. A push that raises counts as refused. The queue must be new, and its clock
    begins at 0.
    """
    return _Run(queue, iter(tickets), cost, instances).run()


class _Run:
    def __init__(self, queue: Queue, arrivals: Iterator[Ticket], cost: Cost, instances: int) -> None:
        self._queue = queue
        self._arrivals = arrivals
        self._cost = cost
        self._idle = instances
        self._ends: list[int] = []
        self._next = next(arrivals, None)
        self._result = Simulated()

    def run(self) -> Simulated:
        now = wake_ns = 0
        while True:
            times = [wake_ns] if wake_ns and self._idle else []
            if self._ends:
                times.append(self._ends[0])
            if self._next is not None:
                times.append(self._next.arrival_ns)
            if not times:
                self._result.end_ns = now
                return self._result
            now = max(min(times), now)
            self._advance(now)
            wake_ns = self._dispatch(now)

    def _advance(self, now_ns: int) -> None:
        """Free the instances whose batch has ended, and queue the requests that have arrived."""
        while self._ends and self._ends[0] <= now_ns:
            heapq.heappop(self._ends)
            self._idle += 1
        while self._next is not None and self._next.arrival_ns <= now_ns:
            try:
                self._queue.push(self._next)
            except Exception:  # any refusal of the queue
                self._result.refused += 1
            self._next = next(self._arrivals, None)

    def _dispatch(self, now_ns: int) -> int:
        """Dispatch batches to idle instances, and return when to poll again.

        0 means after the next event.
        """
        result = self._result
        while self._idle:
            plan = self._queue.poll(now_ns)
            result.dropped += len(plan.dropped)
            if not plan.tickets:
                return plan.wake_ns
            end_ns = now_ns + max(int(self._cost(plan.rows)), 1)
            heapq.heappush(self._ends, end_ns)
            self._idle -= 1
            result.batches.append(plan.rows)
            result.ends_ns.append(end_ns)
            result.reasons[plan.reason] = result.reasons.get(plan.reason, 0) + 1
            for ticket in plan.tickets:
                result.waits_ns.append(now_ns - ticket.arrival_ns)
                result.answers_ns.append(end_ns - ticket.arrival_ns)
                result.late += 0 < ticket.deadline_ns < end_ns
        return 0
