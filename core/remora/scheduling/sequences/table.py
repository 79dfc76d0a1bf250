"""Which sequences have a slot, which wait for one, and whose request may go next [S01-S06, S11, S12, S14].

This file knows no threads, no locks and no clock: time comes in as an argument, and what is to be done goes out as
data. Laws:

1. A sequence keeps its slot from the moment it gets one until it has ended, was silent for too long or was cancelled.
2. Of each sequence at most one request is under way, and they go in the order of their arrival.
3. Sequences get slots in the order in which they began.
4. Once its END has arrived a sequence takes nothing more: START with its id begins another one beside it, as in Triton.
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
    """A slot: which instance, and which place in its batch."""

    slot: int
    instance: int


class SequenceStep(NamedTuple):
    """A request that may go now. ``start`` and ``end`` say where in its sequence it stands.

    ``states`` is where the sequence's states are kept [S13]: empty at its start, the caller's to fill, and gone
    with the sequence.
    """

    ticket: Ticket
    place: Place
    start: bool
    end: bool
    states: dict[str, Array]


class Ended(NamedTuple):
    """A sequence that has ended, where, and why: one of this module's constants. ``place`` is None without a slot."""

    id: int | str
    place: Place | None
    why: str


class Orders(NamedTuple):
    """What follows from an event: requests that go, those that never run, with the answer of each, and what ended."""

    steps: list[SequenceStep]
    dropped: list[tuple[Ticket, RemoraError]]
    ended: list[Ended]


class SequenceInfo(NamedTuple):
    """A live sequence, for those who look at it.

    ``place`` is None while it waits for a slot; ``quiet_ns`` since when it has nothing to do, 0 while it has.
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
        self.doomed = False  # it ends with the request that is under way
        self.fresh = True  # the next request that goes is the first of an iterative one
        self.expires_ns = 0  # when it gives up to wait for a slot; 0 for never


class SequenceTable:
    """The sequences of one model version. Not thread-safe.

    Args:
        policy: of the model.
        instances: how many it has.
        model: its name, for error texts.
        hold: nothing should run before that many requests have a slot, and ``backlog_hold`` wait for one [S15].
    """

    def __init__(
        self, policy: SequencePolicy, instances: int, model: str, *, hold: int = 0, backlog_hold: int = 0
    ) -> None:
        self._policy = policy
        self._model = model
        # The lowest slot of all instances first: batches have no more padding than they must.
        self._free = [Place(slot, instance) for slot in range(policy.slots) for instance in range(instances)]
        self._live: dict[_Sequence, None] = {}
        self._open: dict[int | str, _Sequence] = {}  # those that take more requests
        self._ids: Counter[int | str] = Counter()  # how many live sequences have an id
        self._backlog: OrderedDict[_Sequence, None] = OrderedDict()
        self._quiet: OrderedDict[_Sequence, int] = OrderedDict()  # since when, the longest first
        self._expiring: list[tuple[int, int, _Sequence]] = []
        self._under_way: dict[Ticket, _Sequence] = {}
        self._entries = 0  # makes the heap's rows comparable
        self._count = 0
        self._waiting = 0
        self._closing = False
        self._hold = (hold, backlog_hold)
        self.held = hold > 0

    # -- what happens -----------------------------------------------------------------------------------------------

    def admit(self, ticket: Ticket, now_ns: int) -> Orders:
        """A request has arrived. Raises InvalidArgumentError when it breaks a rule [S01-S03]."""
        self._check(ticket)
        form = ticket.request.form
        if not form.sequence_start and not self._policy.iterative and not self.goes_on(form.sequence_id, now_ns):
            raise InvalidArgumentError(  # before anything has changed: nobody would hear of what follows from that
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

    def released(self, ticket: Ticket, now_ns: int, *, again: bool = False) -> Orders:
        """A request has run, or was dropped where it waited to; ``again`` when it asks for one more turn (S14)."""
        orders = Orders([], [], [])
        sequence = self._under_way.pop(ticket, None)
        if sequence is None:
            return orders  # it was forgotten in the meantime
        sequence.running = None
        if ticket.request.cancelled or sequence.doomed:
            if again:
                orders.dropped.append((ticket, cancelled_in_queue(ticket)))
            self._cancel(sequence, orders)
        elif again:
            sequence.waiting.appendleft(ticket)
            self._waiting += 1
            sequence.fresh = False
        elif self._policy.iterative or ticket.request.form.sequence_end:
            self._leave(sequence, DONE, orders)
        self._advance(sequence, now_ns, orders)
        return orders

    def reap(self, now_ns: int) -> Orders:
        """Time has passed. Costs no more than what ends."""
        orders = Orders([], [], [])
        self._reap(now_ns, orders)
        return orders

    def sweep(self, now_ns: int) -> Orders:
        """Time has passed, or requests were cancelled."""
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
        """Nothing new will come: sequences that have nothing to do give up their slots from here on."""
        self._closing = True
        self.held = False
        return self.sweep(now_ns)

    def lift(self) -> None:
        """End the hold when as much waits as it asks for; it never begins again."""
        if self.held:
            behind = sum(len(sequence.waiting) for sequence in self._backlog)
            before = self._waiting - behind + len(self._under_way)
            self.held = before < self._hold[0] or behind < self._hold[1]

    # -- what is known ----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot or for those before them."""
        return self._waiting

    @property
    def busy(self) -> bool:
        """Whether any request waits or is under way."""
        return bool(self._waiting or self._under_way)

    @property
    def wake_ns(self) -> int:
        """When to `sweep` if nothing happens before; 0 for never."""
        while self._expiring and not self._is_due(self._expiring[0]):
            heapq.heappop(self._expiring)
        times = [since + self._policy.idle_ns for since in islice(self._quiet.values(), 1)]
        times += [entry[0] for entry in self._expiring[:1]]
        return min(times, default=0)

    def slot_of(self, ticket: Ticket) -> int:
        """The place in its instance's batch of a request that is under way."""
        place = self._under_way[ticket].place
        return place.slot if place is not None else 0

    def unused_id(self) -> int:
        """A number that is no live sequence's id, for a request that came without one [S14]."""
        self._count += 1
        while self._count in self._ids:
            self._count += 1
        return self._count

    def goes_on(self, sequence_id: int | str, now_ns: int) -> bool:
        """Whether a request without START may follow in the sequence of this id."""
        sequence = self._open.get(sequence_id)
        if sequence is None:
            return False
        if sequence in self._backlog:
            return not 0 < sequence.expires_ns <= now_ns
        return now_ns - self._quiet.get(sequence, now_ns) < self._policy.idle_ns

    def lives(self, sequence_id: int | str) -> bool:
        """Whether there is a sequence of this id, also one that takes no more requests."""
        return sequence_id in self._ids

    @property
    def count(self) -> int:
        """Live sequences."""
        return len(self._live)

    @property
    def backlog(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._backlog)

    def sequences(self, most: int | None = None) -> list[SequenceInfo]:
        """Live sequences, in the order in which they began: all of them, or the first ``most``."""
        return [
            SequenceInfo(row.id, row.place, len(row.waiting), row.running is not None, self._quiet.get(row, 0))
            for row in islice(self._live, most)
        ]

    def drain(self) -> list[Ticket]:
        """Everything that waits, taken out: for a stop that cannot wait."""
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
        """Let a sequence do what it may do now, and others what that makes possible."""
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
        self._under_way[ticket] = sequence
        form = ticket.request.form
        start = sequence.fresh if self._policy.iterative else form.sequence_start
        if start:
            sequence.states = {}
        orders.steps.append(SequenceStep(ticket, sequence.place, start, form.sequence_end, sequence.states))

    def _leave(self, sequence: _Sequence, why: str, orders: Orders) -> None:
        """Give up the slot; iterative requests of the same id wait for one like all others."""
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
        """Take a sequence out that has ended and has nothing left."""
        self._close(sequence)
        del self._live[sequence]
        self._ids[sequence.id] -= 1
        if not self._ids[sequence.id]:
            del self._ids[sequence.id]

    def _close(self, sequence: _Sequence) -> None:
        """Let no further request into a sequence."""
        if self._open.get(sequence.id) is sequence:
            del self._open[sequence.id]

    def _cancel(self, sequence: _Sequence, orders: Orders) -> None:
        """One cancelled request takes all that wait with it [S12]. What runs already ends by itself."""
        orders.dropped.extend((ticket, cancelled_in_queue(ticket)) for ticket in self._emptied(sequence))
        if sequence.running is None:
            self._leave(sequence, CANCELLED, orders)
        else:
            sequence.doomed = True
            self._close(sequence)

    def _reap(self, now_ns: int, orders: Orders) -> None:
        """End the sequences that were silent for too long, silently, and those whose wait is over [S05, S06]."""
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
        """Whether an entry of the heap still says when its sequence gives up."""
        sequence = entry[2]
        return sequence in self._backlog and sequence.expires_ns == entry[0]
