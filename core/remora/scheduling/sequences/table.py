"""Table of live sequences, their slots and their queued requests [S01-S06, S11, S12, S14].

This module has no threads, locks or clock: time is an argument and the decision is returned as data. Invariants:

1. A sequence keeps its slot until it has ended, was idle for too long or was cancelled.
2. Of each sequence at most one request is in flight, in the order of arrival.
3. Sequences get slots in the order in which they began.
4. Once its END has arrived a sequence accepts no more requests: START with its id begins a second sequence, as in
   Triton.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from remora.config import SequencePolicy
from remora.errors import InvalidArgumentError, RemoraError, UnavailableError
from remora.messages import Array, Ticket
from remora.scheduling.batching import cancelled_in_queue

_NS_PER_US = 1000

DONE = "done"
IDLE = "idle"
CANCELLED = "cancelled"
TIMEOUT = "timeout"
STOPPED = "stopped"


class Place(NamedTuple):
    """A slot: an instance, and a position in its batch."""

    slot: int
    instance: int


class SequenceStep(NamedTuple):
    """A request that may run now, with the START and END flags of its controls.

    ``states`` is the dictionary of the sequence's states [S13]: empty at its start, filled by the caller, and dropped
    with the sequence.
    """

    ticket: Ticket
    place: Place
    start: bool
    end: bool
    states: dict[str, Array]


class Ended(NamedTuple):
    """A sequence that has ended, its place and the reason, one of this module's constants.

    ``place`` is missing if it had no slot.
    """

    id: int | str
    place: Place | None
    why: str


class Orders(NamedTuple):
    """Consequences of an event: requests to run, requests to answer with an error, and ends."""

    steps: list[SequenceStep]
    dropped: list[tuple[Ticket, RemoraError]]
    ended: list[Ended]


class SequenceInfo(NamedTuple):
    """A live sequence, for reports.

    ``place`` is unset while it waits for a slot. ``quiet_ns`` is the time since when it has no request, 0 while it has
    one.
    """

    id: int | str
    place: Place | None
    pending: int
    running: bool
    quiet_ns: int


class _Sequence:
    __slots__ = ("doomed", "expires_ns", "fresh", "id", "place", "running", "states", "waiting")

    def __init__(self, sequence_id: int | str) -> None:
        self.id = sequence_id
        self.waiting: deque[Ticket] = deque()
        self.place: Place | None = None
        self.running: Ticket | None = None
        self.states: dict[str, Array] = {}
        self.doomed = False  # it ends with the request in flight
        self.fresh = True  # the next execution is the first of an iterative request
        self.expires_ns = 0  # when its wait for a slot times out; 0 for never


class SequenceTable:
    """The sequences of one model version. Not thread-safe.

    Args:
        policy: of the model.
        instances: number of instances.
        model: its name, for error texts.
        hold: nothing should run before that many requests have a slot, and ``backlog_hold`` wait for one [S15].
    """

    def __init__(
        self, policy: SequencePolicy, instances: int, model: str, *, hold: int = 0, backlog_hold: int = 0
    ) -> None:
        self._policy = policy
        self._model = model
        # The lowest slot of all instances first, because it keeps the padding of batches small.
        self._free = [Place(slot, instance) for slot in range(policy.slots) for instance in range(instances)]
        self._live: dict[_Sequence, None] = {}
        self._open: dict[int | str, _Sequence] = {}  # sequences that accept more requests
        self._ids: Counter[int | str] = Counter()  # number of live sequences by id
        self._backlog: OrderedDict[_Sequence, None] = OrderedDict()
        self._quiet: OrderedDict[_Sequence, int] = OrderedDict()  # -> idle since, the oldest first
        self._expiring: list[tuple[int, int, _Sequence]] = []
        self._in_flight: dict[Ticket, _Sequence] = {}
        self._entries = 0  # makes the heap's rows comparable
        self._count = 0
        self._waiting = 0
        self._closing = False
        self._hold = (hold, backlog_hold)
        self.held = hold > 0

    # -- events -----------------------------------------------------------------------------------------------------

    def admit(self, ticket: Ticket, now_ns: int) -> Orders:
        """Admit an arrived request. Raises InvalidArgumentError if it breaks a rule [S01-S03]."""
        self._check(ticket)
        form = ticket.request.form
        if not form.sequence_start and not self._policy.iterative and not self.can_continue(form.sequence_id, now_ns):
            raise InvalidArgumentError(  # before any change, because its orders would be lost
                f"inference request for sequence {form.sequence_id} to model '{self._model}' must specify the START "
                "flag on the first request of the sequence"
            )
        orders = Orders([], [], [])
        self._reap(now_ns, orders)
        sequence = self._open.get(form.sequence_id)
        if sequence is None:
            sequence = self._open[form.sequence_id] = _Sequence(form.sequence_id)
            self._live[sequence] = None
            self._ids[sequence.id] += 1
            self._backlog[sequence] = None
        if form.sequence_end and not self._policy.iterative:
            self._close(sequence)
        sequence.waiting.append(ticket)
        self._waiting += 1
        self._quiet.pop(sequence, None)
        if form.timeout_us and sequence.place is None:
            self._expire_at(sequence, now_ns + form.timeout_us * _NS_PER_US)
        self._advance(sequence, now_ns, orders)
        return orders

    def released(self, ticket: Ticket, now_ns: int, *, rescheduled: bool = False) -> Orders:
        """Record that a request has run or was dropped. ``rescheduled`` queues it again [S14]."""
        orders = Orders([], [], [])
        sequence = self._in_flight.pop(ticket, None)
        if sequence is None:
            return orders  # its sequence was removed in the meantime
        sequence.running = None
        if ticket.request.cancelled or sequence.doomed:
            if rescheduled:
                orders.dropped.append((ticket, cancelled_in_queue(ticket)))
            self._cancel(sequence, orders)
        elif rescheduled:
            sequence.waiting.appendleft(ticket)
            self._waiting += 1
            sequence.fresh = False
        elif self._policy.iterative or ticket.request.form.sequence_end:
            self._leave(sequence, DONE, orders)
        self._advance(sequence, now_ns, orders)
        return orders

    def reap(self, now_ns: int) -> Orders:
        """Handle timeouts. The cost is proportional to the sequences that end."""
        orders = Orders([], [], [])
        self._reap(now_ns, orders)
        return orders

    def sweep(self, now_ns: int) -> Orders:
        """Handle timeouts and cancelled requests."""
        orders = Orders([], [], [])
        cancelled = {
            sequence: None for sequence in self._live if any(ticket.request.cancelled for ticket in sequence.waiting)
        }
        for sequence in cancelled:
            self._cancel(sequence, orders)
            self._advance(sequence, now_ns, orders)
        self._reap(now_ns, orders)
        return orders

    def close(self, now_ns: int) -> Orders:
        """Begin the shutdown: sequences without requests release their slots from now on."""
        self._closing = True
        self.held = False
        return self.sweep(now_ns)

    def update_hold(self) -> None:
        """End the hold if enough requests are queued. It never begins again."""
        if self.held:
            behind = sum(len(sequence.waiting) for sequence in self._backlog)
            before = self._waiting - behind + len(self._in_flight)
            self.held = before < self._hold[0] or behind < self._hold[1]

    # -- queries ----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot or for the previous request of their sequence."""
        return self._waiting

    @property
    def oldest_ns(self) -> int:
        """Arrival of the request that has waited longest, or 0."""
        if not self._waiting:
            return 0
        return min(sequence.waiting[0].arrival_ns for sequence in self._live if sequence.waiting)

    @property
    def busy(self) -> bool:
        """True if any request is queued or in flight."""
        return bool(self._waiting or self._in_flight)

    @property
    def wake_ns(self) -> int:
        """When to call `sweep` if nothing happens before, or 0."""
        while self._expiring and not self._is_due(self._expiring[0]):
            heapq.heappop(self._expiring)
        times = [since + self._policy.idle_ns for since in islice(self._quiet.values(), 1)]
        times += [entry[0] for entry in self._expiring[:1]]
        return min(times, default=0)

    def slot_of(self, ticket: Ticket) -> int:
        """Return the batch position of a request in flight."""
        place = self._in_flight[ticket].place
        return place.slot if place is not None else 0

    def unused_id(self) -> int:
        """Return an id that no live sequence has, for a request without one [S14]."""
        self._count += 1
        while self._count in self._ids:
            self._count += 1
        return self._count

    def can_continue(self, sequence_id: int | str, now_ns: int) -> bool:
        """Return True if a request without START may continue the sequence of this id."""
        sequence = self._open.get(sequence_id)
        if sequence is None:
            return False
        if sequence in self._backlog:
            return not 0 < sequence.expires_ns <= now_ns
        return now_ns - self._quiet.get(sequence, now_ns) < self._policy.idle_ns

    def is_live(self, sequence_id: int | str) -> bool:
        """Return True if there is a sequence of this id, even if it accepts no more requests."""
        return sequence_id in self._ids

    @property
    def count(self) -> int:
        """Number of live sequences."""
        return len(self._live)

    @property
    def backlog(self) -> int:
        """Number of sequences that wait for a slot."""
        return len(self._backlog)

    def sequences(self, most: int | None = None) -> list[SequenceInfo]:
        """Return all live sequences, or the first ``most``, in the order in which they began."""
        return [
            SequenceInfo(row.id, row.place, len(row.waiting), row.running is not None, self._quiet.get(row, 0))
            for row in islice(self._live, most)
        ]

    def drain(self) -> list[Ticket]:
        """Remove and return all queued tickets, for a shutdown that cannot wait."""
        tickets = [ticket for sequence in self._live for ticket in sequence.waiting]
        for sequence in self._live:
            sequence.waiting.clear()
        self._backlog.clear()
        self._waiting = 0
        return tickets

    # -- rules ------------------------------------------------------------------------------------------------------

    def _check(self, ticket: Ticket) -> None:
        if ticket.request.rows > 1:
            raise InvalidArgumentError(
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of sequence "
                "batcher"
            )
        if not ticket.request.form.sequence_id:
            raise InvalidArgumentError(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID"
            )

    def _advance(self, sequence: _Sequence, now_ns: int, orders: Orders) -> None:
        """Advance a sequence, and assign free slots to the backlog."""
        self._go_on(sequence, now_ns, orders)
        while self._free and self._backlog:
            other, _ = self._backlog.popitem(last=False)
            other.place = heapq.heappop(self._free)
            other.expires_ns = 0
            self._go_on(other, now_ns, orders)

    def _go_on(self, sequence: _Sequence, now_ns: int, orders: Orders) -> None:
        if sequence.place is None or sequence.running is not None:
            return
        if sequence.waiting and sequence.waiting[0].request.cancelled:
            self._cancel(sequence, orders)
            return
        if not sequence.waiting:
            if self._closing:
                self._leave(sequence, STOPPED, orders)
            else:
                self._quiet[sequence] = now_ns
            return
        ticket = sequence.waiting.popleft()
        self._waiting -= 1
        sequence.running = ticket
        self._in_flight[ticket] = sequence
        form = ticket.request.form
        start = sequence.fresh if self._policy.iterative else form.sequence_start
        if start:
            sequence.states = {}
        orders.steps.append(SequenceStep(ticket, sequence.place, start, form.sequence_end, sequence.states))

    def _leave(self, sequence: _Sequence, why: str, orders: Orders) -> None:
        """Release the slot. Queued iterative requests of the same id go to the backlog."""
        orders.ended.append(Ended(sequence.id, sequence.place, why))
        self._quiet.pop(sequence, None)
        sequence.fresh = True
        if sequence.place is not None:
            heapq.heappush(self._free, sequence.place)
            sequence.place = None
        if sequence.waiting:
            self._backlog[sequence] = None
            for ticket in sequence.waiting:
                timeout_us = ticket.request.form.timeout_us
                if timeout_us:
                    self._expire_at(sequence, ticket.arrival_ns + timeout_us * _NS_PER_US)
        else:
            self._backlog.pop(sequence, None)
            self._forget(sequence)

    def _forget(self, sequence: _Sequence) -> None:
        """Remove a sequence that has ended and has no requests."""
        self._close(sequence)
        del self._live[sequence]
        self._ids[sequence.id] -= 1
        if not self._ids[sequence.id]:
            del self._ids[sequence.id]

    def _close(self, sequence: _Sequence) -> None:
        """Accept no further requests for a sequence."""
        if self._open.get(sequence.id) is sequence:
            del self._open[sequence.id]

    def _cancel(self, sequence: _Sequence, orders: Orders) -> None:
        """Cancel a sequence: one cancelled request drops all queued ones [S12].

        A running request is not interrupted.
        """
        orders.dropped.extend((ticket, cancelled_in_queue(ticket)) for ticket in self._emptied(sequence))
        if sequence.running is None:
            self._leave(sequence, CANCELLED, orders)
        else:
            sequence.doomed = True
            self._close(sequence)

    def _reap(self, now_ns: int, orders: Orders) -> None:
        """End the sequences that are idle or whose wait for a slot timed out [S05, S06].

        The end of an idle sequence produces no answer.
        """
        while self._quiet:
            sequence, since = next(iter(self._quiet.items()))
            if now_ns - since < self._policy.idle_ns and not self._closing:
                break
            self._leave(sequence, STOPPED if self._closing else IDLE, orders)
            self._advance(sequence, now_ns, orders)
        while self._expiring and (self._expiring[0][0] <= now_ns or not self._is_due(self._expiring[0])):
            entry = heapq.heappop(self._expiring)
            if self._is_due(entry):
                error = UnavailableError("timeout of the corresponding sequence has been expired")
                orders.dropped.extend((ticket, error) for ticket in self._emptied(entry[2]))
                self._leave(entry[2], TIMEOUT, orders)

    def _emptied(self, sequence: _Sequence) -> Iterator[Ticket]:
        while sequence.waiting:
            self._waiting -= 1
            yield sequence.waiting.popleft()

    def _expire_at(self, sequence: _Sequence, at_ns: int) -> None:
        if not sequence.expires_ns or at_ns < sequence.expires_ns:
            sequence.expires_ns = at_ns
            self._entries += 1
            heapq.heappush(self._expiring, (at_ns, self._entries, sequence))

    def _is_due(self, entry: tuple[int, int, _Sequence]) -> bool:
        """Return True if a heap entry is still the current timeout of its sequence."""
        sequence = entry[2]
        return sequence in self._backlog and sequence.expires_ns == entry[0]
