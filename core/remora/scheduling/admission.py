"""Admission queue that refuses on arrival what could not be answered in time.

It wraps another queue, so that models without admission control pay nothing for it (docs/decisions/0012-admission.md).
The prediction uses the queued rows, the running batches and the durations of earlier batches; without a prediction the
request is accepted. No clock and no lock: time is an argument.
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
"""Fraction added to a predicted time, because half of the requests predicted to be just in time would be late."""

_PACES = (0.5, 4.0)
"""Bounds of the ratio of a measured batch duration to the learned one; measurements are clamped to them."""


class AdmittingQueue:
    """Requests of one model, limited to those that can be answered in time. Not thread-safe.

    Args:
        inner: the queue that holds them.
        policy: the inner queue's.
        costs: durations of batches, learned by the scheduler.
        instances: number of batches that run at the same time.
    """

    def __init__(self, inner: Queue, policy: BatchPolicy, costs: CostModel, instances: int) -> None:
        self._inner = inner
        self._policy = policy
        self._costs = costs
        self._rows: Counter[int] = Counter()  # queued rows by level; levels without rows are removed
        self._busy = [_Run(0, 0.0)] * instances
        self._pace = 1.0  # measured over predicted duration of batches under load

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def oldest_ns(self) -> int:
        return self._inner.oldest_ns

    @property
    def rows_ahead(self) -> int:
        return self._inner.rows_ahead

    def push(self, ticket: Ticket) -> None:
        """Queue a ticket. See `BatchQueue.push`.

        Raises QueueFullError also for a request that would be answered too late.
        """
        level = level_of(ticket, self._policy.levels, self._policy.default_level)
        if ticket.deadline_ns or self._policy.queue_at(level).default_timeout_ns:
            self._check(ticket, level)
        self._inner.push(ticket)
        self._rows[ticket.level] += ticket.request.rows

    def poll(self, now_ns: int) -> Plan:
        loaded = self._rows.total() >= max(self._policy.max_batch_size, 1)
        plan = self._inner.poll(now_ns)
        self._subtract_rows([*plan.tickets, *(ticket for ticket, _ in plan.dropped)])
        if plan.tickets:
            self._begin(plan.rows, now_ns, loaded=loaded)
        return plan

    def _begin(self, rows: int, now_ns: int, *, loaded: bool) -> None:
        """Record a batch.

        The polling instance is idle, so the batch replaces the one that should have ended first.
        """
        place = min(range(len(self._busy)), key=lambda at: self._busy[at].begin_ns + self._busy[at].cost_ns)
        before = self._busy[place]
        if loaded and before.cost_ns:
            least, most = _PACES
            seen = min(max((now_ns - before.begin_ns) / before.cost_ns, least), most)
            self._pace += 0.1 * (seen - self._pace)
        cost_ns = self._costs.predict(rows)
        self._busy[place] = _Run(now_ns, cost_ns if math.isfinite(cost_ns) else 0.0)

    def _subtract_rows(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._rows[ticket.level] -= ticket.request.rows
            if not self._rows[ticket.level]:
                del self._rows[ticket.level]

    def drop_cancelled(self) -> list[tuple[Ticket, RemoraError]]:
        dropped = self._inner.drop_cancelled()
        self._subtract_rows(ticket for ticket, _ in dropped)
        return dropped

    @property
    def has_timeouts(self) -> bool:
        return self._inner.has_timeouts

    def next_refusal_ns(self) -> int:
        return self._inner.next_refusal_ns()

    def drop_expired(self, now_ns: int) -> list[tuple[Ticket, RemoraError]]:
        dropped = self._inner.drop_expired(now_ns)
        self._subtract_rows(ticket for ticket, _ in dropped)
        return dropped

    def stop_waiting(self) -> None:
        self._inner.stop_waiting()

    def drain(self) -> list[Ticket]:
        self._rows.clear()
        return self._inner.drain()

    def expected(self, ticket: Ticket, level: int) -> tuple[float, float]:
        """Return when a request of this level, arriving now, would start and be answered.

        Both times are on the clock of the ticket's arrival. Queue delays for larger batches and later arrivals of a
        higher level are not included.
        """
        now_ns = ticket.arrival_ns
        rows = ticket.request.rows
        ahead = sum(rows for at, rows in self._rows.items() if at <= level)
        # Without a batcher requests run singly; those ahead are assumed to have the size of this one.
        size = max(self._policy.max_batch_size, 1) if self._policy.dynamic else max(rows, 1)
        batches, rest = divmod(ahead, size)
        if rest + rows > size:
            batches, rest = batches + 1, 0
        pace = self._pace
        free = sorted(max(run.begin_ns + run.cost_ns * pace, now_ns) for run in self._busy)
        each = self._costs.predict(size) * pace if batches else 0.0
        rounds, place = divmod(batches, len(free))
        start_ns = free[place] + rounds * each
        # If more rows are queued than fit one batch, the request's own batch will be full.
        return start_ns, start_ns + (each or self._costs.predict(rest + rows) * pace)

    def _check(self, ticket: Ticket, level: int) -> None:
        start_ns, end_ns = self.expected(ticket, level)
        if not math.isfinite(end_ns):
            return  # no prediction before the first batch
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
                f"{late_ns / 1e6:.0f} ms too late; {len(self)} requests are queued",
            ),
            retry_after_s=max(math.ceil(late_ns / 1e9), 1),
        )
