"""Batching for the direct strategy: which slots of one instance run together [S07].

This module has no threads, locks or clock, like `batching`.

Invariant: a sequence's request is always at the batch position of its slot.
"""

from __future__ import annotations

from collections.abc import Callable

from remora.config import SequencePolicy
from remora.errors import RemoraError
from remora.messages import Ticket
from remora.scheduling.batching import DELAY, FULL, IDLE, SHAPE, Plan, cancelled_in_queue
from remora.scheduling.sequences.controls import Controls

HELD_LOOK_NS = 10_000_000
"""Poll interval of a queue that is held back; only tests hold it back."""


class DirectQueue:
    """Ready requests of one instance's sequences, at most one for each slot. Not thread-safe.

    Args:
        policy: of the model.
        slot_of: returns the slot of a ticket's sequence.
        controls: creates the tickets that fill empty slots below the highest ready one.
        held: returns True while nothing may run yet [D16, S15].
    """

    def __init__(
        self,
        policy: SequencePolicy,
        slot_of: Callable[[Ticket], int],
        controls: Controls,
        held: Callable[[], bool] = lambda: False,
    ) -> None:
        self._policy = policy
        self._slot_of = slot_of
        self._controls = controls
        self._held = held
        self._ready: dict[int, Ticket] = {}
        self._delay_ns = policy.max_delay_ns

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def oldest_ns(self) -> int:
        """The arrival of the ticket that has waited longest, or 0."""
        return min((ticket.arrival_ns for ticket in self._ready.values()), default=0)

    @property
    def rows_ahead(self) -> int:
        """The maximum number of rows of the next batch."""
        return max(self._ready, default=-1) + 1

    def push(self, ticket: Ticket) -> None:
        """Queue the ready request of a sequence. Never full, because each slot has one place."""
        self._ready[self._slot_of(ticket)] = ticket

    def poll(self, now_ns: int) -> Plan:
        """Return the batch to run now on the idle instance and remove its tickets from the queue."""
        dropped = self.drop_cancelled()
        if not self._ready:
            return Plan([], dropped=dropped)
        if self._held():
            return Plan([], dropped=dropped, wake_ns=now_ns + HELD_LOOK_NS)
        oldest = min(self._ready.values(), key=lambda ticket: ticket.arrival_ns)
        key = oldest.request.shape_key
        chosen = {slot: ticket for slot, ticket in self._ready.items() if ticket.request.shape_key == key}
        reason = FULL if len(chosen) == self._policy.slots else IDLE
        if len(chosen) < len(self._ready):
            reason = SHAPE
        elif len(chosen) < self._policy.minimum_utilization * self._policy.slots:
            wake_ns = oldest.arrival_ns + self._delay_ns
            if now_ns < wake_ns:
                return Plan([], dropped=dropped, wake_ns=wake_ns)
            reason = DELAY
        for slot in chosen:
            del self._ready[slot]
        tickets = [
            chosen[slot] if slot in chosen else self._controls.null(oldest.request) for slot in range(max(chosen) + 1)
        ]
        return Plan(tickets, len(tickets), reason, dropped)

    def drop_cancelled(self) -> list[tuple[Ticket, RemoraError]]:
        cancelled = [slot for slot, ticket in self._ready.items() if ticket.request.cancelled]
        tickets = [self._ready.pop(slot) for slot in cancelled]
        return [(ticket, cancelled_in_queue(ticket)) for ticket in tickets]

    has_timeouts = False

    def next_refusal_ns(self) -> int:
        """Return 0, because no queue timeout applies to the ready request of a sequence."""
        return 0

    def drop_expired(self, now_ns: int) -> list[tuple[Ticket, RemoraError]]:
        """Return nothing, see `next_refusal_ns`."""
        return []

    def stop_waiting(self) -> None:
        """Dispatch without queue delays from now on, for a shutdown."""
        self._delay_ns = 0
        self._held = lambda: False

    def drain(self) -> list[Ticket]:
        tickets = list(self._ready.values())
        self._ready.clear()
        return tickets
