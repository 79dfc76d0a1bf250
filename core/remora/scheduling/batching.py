"""Which queued requests run together, and when (spec D01-D05, D12, D13).

This file knows no threads, no locks and no clock: time comes in as an argument and the decision goes out as data.
`scheduler` owns everything that moves.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from remora.config import BatchPolicy
from remora.errors import CancelledError, RemoraError, UnavailableError
from remora.messages import Ticket

FULL = "full"
PREFERRED = "preferred_size"
DELAY = "delay_expired"
SHAPE = "shape_mismatch"
IDLE = "instance_idle"
SINGLE = "no_batching"
REASONS = (FULL, PREFERRED, DELAY, SHAPE, IDLE, SINGLE)
"""Why a batch was dispatched with the size it had. `explain` and the metrics show how often each."""


class Plan(NamedTuple):
    """What to do now.

    ``tickets`` run together (empty: nothing to run), ``rows`` is their total, ``reason`` one of REASONS. ``dropped``
    never run; each is answered with the error beside it. ``wake_ns`` is when to ask again if nothing arrives before;
    0 for "only when something arrives".
    """

    tickets: list[Ticket]
    rows: int = 0
    reason: str = ""
    dropped: list[tuple[Ticket, RemoraError]] = []  # noqa: RUF012 - never mutated: a Plan is built with its own list
    wake_ns: int = 0


class BatchQueue:
    """Requests waiting for one model, first in first out. Not thread-safe: the scheduler's lock guards it."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._waiting: deque[Ticket] = deque()
        self._preferred = frozenset(policy.preferred)
        self._largest = max(policy.preferred, default=policy.max_batch_size)
        self._max_size = policy.queues[0].max_size if policy.dynamic else 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def rows_ahead(self) -> int:
        """Rows the next batch would have if it were formed now, without regard to shapes; a cheap upper bound."""
        if not self._policy.dynamic:
            return self._waiting[0].request.rows if self._waiting else 0
        if len(self._waiting) >= self._policy.max_batch_size:
            return self._policy.max_batch_size
        return min(sum(ticket.request.rows for ticket in self._waiting), self._policy.max_batch_size)

    def push(self, ticket: Ticket) -> None:
        """Queue a ticket. Raises UnavailableError when the queue is full (spec D12)."""
        if self._max_size and len(self._waiting) >= self._max_size:
            request_id = ticket.request.form.id or "<id_unknown>"
            raise UnavailableError(f"[request id: {request_id}] Exceeds maximum queue size")
        self._waiting.append(ticket)

    def poll(self, now_ns: int) -> Plan:
        """The batch to run now on an idle instance, if any. What is returned has left the queue."""
        dropped = self._drop_dead(now_ns)
        if not self._waiting:
            return Plan([], dropped=dropped)
        if not self._policy.dynamic:
            ticket = self._waiting.popleft()
            return Plan([ticket], ticket.request.rows, SINGLE, dropped)
        count, rows, reason = self._choose(now_ns)
        if not count:
            return Plan([], dropped=dropped, wake_ns=self._waiting[0].arrival_ns + self._policy.max_delay_ns)
        take = self._waiting.popleft
        return Plan([take() for _ in range(count)], rows, reason, dropped)

    def drain(self) -> list[Ticket]:
        """Everything that waits, taken out: for a stop that cannot wait."""
        tickets = list(self._waiting)
        self._waiting.clear()
        return tickets

    def _drop_dead(self, now_ns: int) -> list[tuple[Ticket, RemoraError]]:
        """Take cancelled and expired tickets out of the part of the queue that the next batch can reach."""
        dropped: list[tuple[Ticket, RemoraError]] = []
        kept: list[Ticket] = []
        reach = self._policy.max_batch_size if self._policy.dynamic else 1
        rows = 0
        while self._waiting and rows <= reach:
            ticket = self._waiting.popleft()
            if ticket.request.cancelled:
                dropped.append((ticket, cancelled_in_queue(ticket)))
            elif ticket.deadline_ns and ticket.deadline_ns <= now_ns:
                dropped.append((ticket, expired_error(ticket)))
            else:
                kept.append(ticket)
                rows += ticket.request.rows
        self._waiting.extendleft(reversed(kept))
        return dropped

    def _choose(self, now_ns: int) -> tuple[int, int, str]:
        """(how many tickets, their rows, why); 0 tickets to wait. The walk is strictly first in, first out."""
        limit = self._policy.max_batch_size
        key = self._waiting[0].request.shape_key
        count = rows = 0
        best_count = best_rows = 0
        stop = ""
        for ticket in self._waiting:
            request = ticket.request
            if rows + request.rows > limit and count:
                stop = FULL
                break
            if request.shape_key is not key and request.shape_key != key:
                stop = SHAPE
                break
            rows += request.rows
            count += 1
            if rows in self._preferred:
                best_count, best_rows = count, rows
            if rows >= limit:
                stop = FULL
                break
        delay_ns = self._policy.max_delay_ns
        expired = bool(delay_ns) and now_ns - self._waiting[0].arrival_ns >= delay_ns
        if best_count and not expired:
            return best_count, best_rows, FULL if best_rows >= limit else PREFERRED
        if stop:
            return count, rows, stop
        if expired:
            return count, rows, DELAY
        if not delay_ns:
            return count, rows, IDLE
        if rows >= self._largest:
            return count, rows, PREFERRED  # beyond every preferred size: waiting cannot make one any more
        return 0, 0, ""


def cancelled_in_queue(ticket: Ticket) -> CancelledError:
    """The answer of a request whose caller went away while it waited (spec D13)."""
    return CancelledError(
        f"[request id: {ticket.request.form.id or '<id_unknown>'}] request was cancelled before it ran"
    )


class ExpiredError(UnavailableError):
    """The request's own deadline passed before it was answered."""


def expired_error(ticket: Ticket) -> ExpiredError:
    """The answer of a request whose own deadline passed before there was another."""
    return ExpiredError(f"[request id: {ticket.request.form.id or '<id_unknown>'}] Request timeout expired")
