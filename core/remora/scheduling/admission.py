"""Refuses on arrival what could not be answered in time (docs/decisions/0012-admission.md); the law: no clock, no lock.

A queue in front of another one, so that models without admission pay nothing for it. What it predicts comes from the
rows that wait, the batches that run and how long such batches took before; what it does not know it does not refuse.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from remora.config import BatchPolicy
from remora.errors import QueueFullError, RemoraError, about
from remora.messages import Ticket
from remora.scheduling.batching import Plan, Queue
from remora.scheduling.costs import CostModel
from remora.scheduling.queues import level_of, timeout_of


class _Run(NamedTuple):
    begin_ns: int
    cost_ns: float


MARGIN = 0.1
"""This part of a predicted time is added to it: what is predicted to be just in time would be late half of the time."""

_PACES = (0.5, 4.0)
"""How far what batches really take may differ from what was learned of them before it is not believed."""


class AdmittingQueue:
    """Requests waiting for one model, and no more of them than can be answered in time. Not thread-safe.

    Args:
        inner: keeps them.
        policy: the inner queue's.
        costs: how long batches take; learned by whoever runs them.
        instances: how many batches run at the same time.
    """

    def __init__(self, inner: Queue, policy: BatchPolicy, costs: CostModel, instances: int) -> None:
        self._inner = inner
        self._policy = policy
        self._costs = costs
        self._rows: Counter[int] = Counter()  # that wait, by level; no level has none
        self._busy = [_Run(0, 0.0)] * instances
        self._pace = 1.0  # real time from batch to batch under load, over what the batches should have taken

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def rows_ahead(self) -> int:
        """See `BatchQueue.rows_ahead`."""
        return self._inner.rows_ahead

    def push(self, ticket: Ticket) -> None:
        """See `BatchQueue.push`. Raises QueueFullError also for a request that would be answered too late."""
        level = level_of(ticket, self._policy.levels, self._policy.default_level)
        if ticket.deadline_ns or self._policy.queue_at(level).default_timeout_ns:
            self._check(ticket, level)
        self._inner.push(ticket)
        self._rows[ticket.level] += ticket.request.rows

    def poll(self, now_ns: int) -> Plan:
        """See `BatchQueue.poll`."""
        loaded = self._rows.total() >= max(self._policy.max_batch_size, 1)
        plan = self._inner.poll(now_ns)
        self._left([*plan.tickets, *(ticket for ticket, _ in plan.dropped)])
        if plan.tickets:
            self._begin(plan.rows, now_ns, loaded=loaded)
        return plan

    def _begin(self, rows: int, now_ns: int, *, loaded: bool) -> None:
        """Note a batch. Whoever polls is idle: it takes the place of the one that should have ended first."""
        place = min(range(len(self._busy)), key=lambda at: self._busy[at].begin_ns + self._busy[at].cost_ns)
        before = self._busy[place]
        if loaded and before.cost_ns:
            least, most = _PACES
            seen = min(max((now_ns - before.begin_ns) / before.cost_ns, least), most)
            self._pace += 0.1 * (seen - self._pace)
        cost_ns = self._costs.predict(rows)
        self._busy[place] = _Run(now_ns, cost_ns if math.isfinite(cost_ns) else 0.0)

    def _left(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._rows[ticket.level] -= ticket.request.rows
            if not self._rows[ticket.level]:
                del self._rows[ticket.level]

    def drop_cancelled(self) -> list[tuple[Ticket, RemoraError]]:
        """See `BatchQueue.drop_cancelled`."""
        dropped = self._inner.drop_cancelled()
        self._left(ticket for ticket, _ in dropped)
        return dropped

    def stop_waiting(self) -> None:
        """See `BatchQueue.stop_waiting`."""
        self._inner.stop_waiting()

    def drain(self) -> list[Ticket]:
        """See `BatchQueue.drain`."""
        self._rows.clear()
        return self._inner.drain()

    def expected(self, ticket: Ticket, level: int) -> tuple[float, float]:
        """When a request of this level, if it came in now, would begin to run and be answered (clock of its arrival).

        Waiting for company is not counted, nor what may still come in at a higher level.
        """
        now_ns = ticket.arrival_ns
        rows = ticket.request.rows
        ahead = sum(rows for at, rows in self._rows.items() if at <= level)
        # Without a batcher requests run one by one; those ahead count as of this one's size.
        size = max(self._policy.max_batch_size, 1) if self._policy.dynamic else max(rows, 1)
        batches, rest = divmod(ahead, size)
        if rest + rows > size:
            batches, rest = batches + 1, 0
        pace = self._pace
        free = sorted(max(run.begin_ns + run.cost_ns * pace, now_ns) for run in self._busy)
        each = self._costs.predict(size) * pace if batches else 0.0
        rounds, place = divmod(batches, len(free))
        start_ns = free[place] + rounds * each
        # Where more waits than fits one batch, its own will be full when it goes.
        return start_ns, start_ns + (each or self._costs.predict(rest + rows) * pace)

    def _check(self, ticket: Ticket, level: int) -> None:
        start_ns, end_ns = self.expected(ticket, level)
        if not math.isfinite(end_ns):
            return  # nothing has run yet
        policy = self._policy.queue_at(level)
        timeout_ns = timeout_of(policy, ticket) if policy.reject_on_timeout and self._policy.dynamic else 0
        waits_ns, takes_ns = ((at - ticket.arrival_ns) * (1 + MARGIN) for at in (start_ns, end_ns))
        late_ns = max(
            takes_ns - (ticket.deadline_ns - ticket.arrival_ns) if ticket.deadline_ns else 0.0,
            waits_ns - timeout_ns if timeout_ns else 0.0,
        )
        if late_ns <= 0:
            return
        raise QueueFullError(
            about(
                ticket.request.form.id,
                f"refused on arrival: it would be answered in {takes_ns / 1e6:.0f} ms, which is "
                f"{late_ns / 1e6:.0f} ms too late; {len(self)} requests wait",
            ),
            retry_after_s=max(math.ceil(late_ns / 1e9), 1),
        )
