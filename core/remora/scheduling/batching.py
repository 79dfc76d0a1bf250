"""Batching decisions: which queued requests run together, and when [D01-D13, D16].

This module has no threads, locks or clock: time is an argument and the decision is returned as data. `scheduler`
performs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from remora.config import BatchPolicy
from remora.errors import CancelledError, RemoraError, UnavailableError, about
from remora.messages import Ticket
from remora.scheduling.queues import Line, waiting_for

FULL = "full"
PREFERRED = "preferred_size"
DELAY = "delay_expired"
SHAPE = "shape_mismatch"
IDLE = "instance_idle"
SINGLE = "no_batching"
RESOURCES = "waited_for_resources"
REASONS = (FULL, PREFERRED, DELAY, SHAPE, IDLE, SINGLE, RESOURCES)
"""Why a batch was dispatched with its size; `explain` and the metrics count each reason."""


_TIMED_OUT = "Request timeout expired"
"""Triton's text for a queue timeout; unlike its other texts it does not name the request [D10]."""


class Plan(NamedTuple):
    """The decision of one poll.

    ``tickets`` run together (empty: no batch), ``rows`` is their total, ``reason`` one of REASONS. ``dropped`` tickets
    are not run; each is answered with its error. ``wake_ns`` is when to poll again if no request arrives before; 0
    means only after an arrival.
    """

    tickets: list[Ticket]
    rows: int = 0
    reason: str = ""
    dropped: list[tuple[Ticket, RemoraError]] = []  # noqa: RUF012 - never mutated: a Plan is built with its own list
    wake_ns: int = 0


class Walk(NamedTuple):
    """The tickets at the front of a queue that may share a batch.

    Attributes:
        tickets, rows: the number of tickets and of their rows.
        preferred_tickets, preferred_rows: those up to the largest preferred size reached, or 0.
        stop: FULL or SHAPE if the next ticket cannot join, else "".
        oldest_ns: arrival of the ticket that has waited longest.
    """

    tickets: int
    rows: int
    preferred_tickets: int
    preferred_rows: int
    stop: str
    oldest_ns: int


class Choice(NamedTuple):
    """The batch to form now.

    Its tickets, rows and reason, or no ticket and the time to poll again.
    """

    tickets: int
    rows: int = 0
    reason: str = ""
    wake_ns: int = 0


def choose(walk: Walk, now_ns: int, *, limit: int, largest: int, delay_ns: int) -> Choice:
    """Decide whether to run the tickets of a walk now, and how many of them.

    Args:
        walk: not empty.
        now_ns: the current time.
        limit: maximum number of rows of a batch.
        largest: number of rows beyond which waiting cannot reach a preferred size.
        delay_ns: how long the oldest ticket may wait for a larger batch; 0 for no delay.
    """
    expired = bool(delay_ns) and now_ns - walk.oldest_ns >= delay_ns
    if walk.preferred_tickets and not expired:
        reason = FULL if walk.preferred_rows >= limit else PREFERRED
        return Choice(walk.preferred_tickets, walk.preferred_rows, reason)
    if walk.stop:
        return Choice(walk.tickets, walk.rows, walk.stop)
    if expired:
        return Choice(walk.tickets, walk.rows, DELAY)
    if not delay_ns:
        return Choice(walk.tickets, walk.rows, IDLE)
    if walk.rows >= largest:
        return Choice(walk.tickets, walk.rows, PREFERRED)  # beyond every preferred size
    return Choice(0, wake_ns=walk.oldest_ns + delay_ns)


class Queue(Protocol):
    """Queued requests of one model as seen by a scheduler, whose lock guards them."""

    def __len__(self) -> int: ...

    @property
    def rows_ahead(self) -> int:
        """The maximum number of rows of the next batch."""

    def push(self, ticket: Ticket) -> None:
        """Queue a ticket. Raises UnavailableError if the queue refuses it."""

    def poll(self, now_ns: int) -> Plan:
        """Return the batch to run now on an idle instance, and remove its tickets."""

    def drop_cancelled(self) -> list[tuple[Ticket, RemoraError]]:
        """Remove the cancelled tickets and return each with its error."""

    @property
    def has_timeouts(self) -> bool:
        """True if queue timeouts may refuse tickets."""

    def next_refusal_ns(self) -> int:
        """Return when a queue timeout refuses the next ticket, or 0."""

    def drop_expired(self, now_ns: int) -> list[tuple[Ticket, RemoraError]]:
        """Remove the tickets that a queue timeout refuses and return each with its error."""

    @property
    def oldest_ns(self) -> int:
        """The arrival of the ticket that has waited longest, or 0."""

    def stop_waiting(self) -> None:
        """Dispatch without queue delays from now on, for a shutdown."""

    def drain(self) -> list[Ticket]:
        """Remove and return all tickets."""


class BatchQueue:
    """Queued requests of one model. Not thread-safe: the scheduler's lock guards it.

    Args:
        policy: of a valid configuration.
        hold: with a dynamic batcher, dispatch nothing until that many requests are queued at once [D16].
    """

    def __init__(self, policy: BatchPolicy, *, hold: int = 0) -> None:
        self._policy = policy
        self._waiting = waiting_for(policy)
        waiting = self._waiting
        self._append: Callable[[Ticket], None] = waiting.push
        if isinstance(waiting, Line) and not waiting.max_size:
            self._append = waiting.append  # saves a call for each request
        self._line = None if policy.dynamic or not isinstance(self._waiting, Line) else self._waiting
        self._preferred = frozenset(policy.preferred)
        self._largest = max(policy.preferred, default=policy.max_batch_size)
        self._delay_ns = policy.max_delay_ns
        self._hold = hold  # not used without a batcher
        self.has_timeouts = not isinstance(self._waiting, Line)
        self._rows = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest_ns(self) -> int:
        """The arrival of the ticket that has waited longest, or 0."""
        return self._waiting.oldest_ns()

    @property
    def rows_ahead(self) -> int:
        """Upper bound of the rows of a batch formed now, regardless of shapes."""
        if self._line is not None:
            return self._line[0].request.rows if self._line else 0
        rows, limit = self._rows, self._policy.max_batch_size
        return rows if rows < limit else limit

    def push(self, ticket: Ticket) -> None:
        """Queue a ticket and set its level. Raises QueueFullError if the level is full [D07, D12]."""
        self._append(ticket)
        self._rows += ticket.request.rows

    def poll(self, now_ns: int) -> Plan:
        """Return the batch to run now on an idle instance, and remove its tickets."""
        if self._line is not None:
            return self._next_of(self._line, now_ns)
        if self._hold:
            if len(self._waiting) < self._hold:
                return Plan([])
            self._hold = 0
        dropped = self._drop_dead(now_ns)
        if not len(self._waiting):
            return Plan([], dropped=dropped)
        limit = self._policy.max_batch_size
        choice = choose(self._walk(), now_ns, limit=limit, largest=self._largest, delay_ns=self._delay_ns)
        if not choice.tickets:
            return Plan([], dropped=dropped, wake_ns=min([choice.wake_ns, *self._changes_ns()]))
        self._rows -= choice.rows
        return Plan(self._waiting.take(choice.tickets), choice.rows, choice.reason, dropped)

    def _changes_ns(self) -> Iterator[int]:
        """Yield when time alone changes the tickets that may share the next batch.

        A ticket that times out is removed or goes behind the others, and these may then have a preferred size.
        """
        if self.has_timeouts and (expiry_ns := self._waiting.next_expiry_ns()):
            yield expiry_ns
        for ticket in self._waiting:  # a batch may have all of them, because otherwise it would run now
            if ticket.deadline_ns:
                yield ticket.deadline_ns

    def crowded(self, instances: int) -> bool:
        """Return True if `ahead` might return a batch.

        This is a cheap check: it may be True although `ahead` then returns none, never the reverse.
        """
        size = self._policy.max_batch_size if self._policy.dynamic else 1
        return size > 1 and len(self._waiting) >= size * instances and isinstance(self._waiting, Line)

    def ahead(self, now_ns: int, instances: int) -> Plan:
        """Return a batch to queue behind a running one.

        It is full, without deadlines and from a single-level queue, so later arrivals cannot change it. Enough requests
        for all ``instances`` must be queued, so that no instance idles while the batch waits. The caller may undo this
        with `put_back`.

        A single request is not dispatched ahead: its client may disconnect before its turn, and it must not run then
        [Q09]. Nor is a request for which an instance is blocked, because it might be queued behind that very instance.
        """
        if not self.crowded(instances):
            return Plan([])
        plan = self.poll(now_ns)
        bound = any(ticket.deadline_ns or ticket.request.blocking_instances for ticket in plan.tickets)
        if plan.reason == FULL and len(plan.tickets) > 1 and not bound:
            return plan
        self.put_back(plan.tickets)
        return Plan([], dropped=plan.dropped)

    def put_back(self, tickets: list[Ticket]) -> None:
        """Return the tickets removed last to the front of the queue."""
        if isinstance(self._waiting, Line):
            self._waiting.extendleft(reversed(tickets))
            self._rows += sum(ticket.request.rows for ticket in tickets)

    def _next_of(self, line: Line, now_ns: int) -> Plan:
        """Return the first ticket that may still run as a batch of one request."""
        dropped: list[tuple[Ticket, RemoraError]] = []
        while line:
            ticket = line.popleft()
            request = ticket.request
            self._rows -= request.rows
            if request.cancelled:
                dropped.append((ticket, cancelled_in_queue(ticket)))
            elif 0 < ticket.deadline_ns <= now_ns:
                dropped.append((ticket, expired_error(ticket)))
            else:
                return Plan([ticket], request.rows, SINGLE, dropped)
        return Plan([], dropped=dropped)

    def drop_cancelled(self) -> list[tuple[Ticket, RemoraError]]:
        dead = [ticket for ticket in self._waiting if ticket.request.cancelled]
        if dead:
            self._discard(dead)
        return [(ticket, cancelled_in_queue(ticket)) for ticket in dead]

    def stop_waiting(self) -> None:
        """Dispatch without queue delays from now on, for a shutdown."""
        self._delay_ns = self._hold = 0

    def drain(self) -> list[Ticket]:
        """Remove and return all tickets, for a shutdown that cannot wait."""
        self._rows = 0
        return self._waiting.drain()

    def _drop_dead(self, now_ns: int) -> list[tuple[Ticket, RemoraError]]:
        """Remove and return the tickets that can no longer run.

        These are all tickets that a queue timeout refuses, and cancelled or expired ones within reach of the next
        batch.
        """
        dropped = self.drop_expired(now_ns) if self.has_timeouts else []
        dead: list[Ticket] = []
        reach = self._policy.max_batch_size
        rows = 0
        for ticket in self._waiting:
            if ticket.request.cancelled:
                dropped.append((ticket, cancelled_in_queue(ticket)))
                dead.append(ticket)
            elif ticket.deadline_ns and ticket.deadline_ns <= now_ns:
                dropped.append((ticket, expired_error(ticket)))
                dead.append(ticket)
            else:
                rows += ticket.request.rows
                if rows > reach:
                    break
        if dead:
            self._discard(dead)
        return dropped

    def next_refusal_ns(self) -> int:
        """Return when a queue timeout refuses the next ticket, or 0."""
        return self._waiting.next_refusal_ns()

    def drop_expired(self, now_ns: int) -> list[tuple[Ticket, RemoraError]]:
        """Remove the tickets that a queue timeout refuses and return each with its error."""
        dropped: list[tuple[Ticket, RemoraError]] = []
        for ticket in self._waiting.expire(now_ns):
            error = cancelled_in_queue(ticket) if ticket.request.cancelled else ExpiredError(_TIMED_OUT)
            dropped.append((ticket, error))
            self._rows -= ticket.request.rows
        return dropped

    def _discard(self, dead: list[Ticket]) -> None:
        self._waiting.discard_all(dead)
        self._rows -= sum(ticket.request.rows for ticket in dead)

    def _walk(self) -> Walk:
        """Return the tickets at the front that may share a batch. No ticket is skipped."""
        limit = self._policy.max_batch_size
        beyond = self._largest if self._delay_ns and self._preferred else limit
        key: object = None
        count = rows = oldest_ns = 0
        best_count = best_rows = 0
        stop = ""
        for ticket in self._waiting:
            request = ticket.request
            if not count:
                key, oldest_ns = request.shape_key, ticket.arrival_ns
            else:
                if rows + request.rows > limit:
                    stop = FULL
                    break
                if request.shape_key is not key and request.shape_key != key:
                    stop = SHAPE
                    break
                if rows + request.rows > beyond and not best_count:
                    best_count, best_rows = count, rows  # because adding it would skip every preferred size
                if ticket.arrival_ns < oldest_ns:  # queued behind a higher level, or put back
                    oldest_ns = ticket.arrival_ns
            rows += request.rows
            count += 1
            if rows in self._preferred:
                best_count, best_rows = count, rows
            if rows >= limit:
                stop = FULL
                break
        return Walk(count, rows, best_count, best_rows, stop, oldest_ns)


def cancelled_in_queue(ticket: Ticket) -> CancelledError:
    """Return the error of a request that was cancelled while queued [D13]."""
    return CancelledError(about(ticket.request.form.id, "request was cancelled before it ran"))


class ExpiredError(UnavailableError):
    """The request's own deadline or its queue timeout passed before it was answered."""

    retry_after_s = 1


def expired_error(ticket: Ticket) -> ExpiredError:
    """Return the error of a request whose own deadline passed first."""
    return ExpiredError(about(ticket.request.form.id, _TIMED_OUT))
