"""Scheduler of one model version with sequence batching.

Each instance has a separate scheduler. `SequenceTable`, which is pure, decides which sequence has which slot and whose
request runs next. This module owns the table's lock and the thread that handles timeouts. Invariants:

1. A request is passed to its instance when the previous request of its sequence has run, and not earlier.
2. No request is passed on, and no answer delivered, while the lock is held.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from remora.backends import Execution, Instance
from remora.calls import LiveSequence, SequenceReport
from remora.config import SequencePolicy
from remora.errors import InvalidArgumentError, RemoraError
from remora.messages import Array, InferForm, Outcome, Streamed, Ticket
from remora.scheduling.batching import BatchQueue, Plan, Queue
from remora.scheduling.costs import CostModel
from remora.scheduling.delivery import deliver, stopping
from remora.scheduling.pool import DispatchPolicy
from remora.scheduling.running import Recorder
from remora.scheduling.scheduler import Scheduler
from remora.scheduling.sequences.controls import NULL, Controls
from remora.scheduling.sequences.direct import DirectQueue
from remora.scheduling.sequences.history import SequenceHistory
from remora.scheduling.sequences.states import StatefulInstance, States
from remora.scheduling.sequences.table import Orders, SequenceInfo, SequenceTable
from remora.signature import Signature
from remora.system.clock import Clock

if TYPE_CHECKING:
    from remora.scheduling.rate_limiter import Turn

_log = logging.getLogger("remora.models")

SHOWN_LIMIT = 1000
"""Maximum number of live sequences listed in a report. It counts all of them."""


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """Settings of a sequence scheduler other than the model's policy.

    Attributes:
        initial_states: states at the start of a sequence, by the names of the model's inputs.
        decoupled: True if the model streams its responses.
        hold: dispatch nothing before that many requests have a slot; with the oldest strategy, before that many of one
            instance are ready [D16].
        backlog_hold: with ``hold`` and the direct strategy, dispatch nothing before that many wait for a slot [S15].
        threads: False in tests, which call `SequenceScheduler.step` and `sweep` instead.
    """

    initial_states: Mapping[str, Array] = field(default_factory=dict)
    decoupled: bool = False
    hold: int = 0
    backlog_hold: int = 0
    threads: bool = True


_USUAL = SequenceOptions()


class SequenceScheduler:
    """Requests and instances of one model version with sequence batching [S01-S14].

    Args:
        policy: of the model.
        instances: at least one.
        signature: converts outputs to their wire shape.
        recorder: records every execution and failure, except the requests that fill empty slots.
        clock: read here and in the instances' schedulers.
        options: settings other than the policy.
        turns: as for `Scheduler`.
    """

    def __init__(
        self,
        policy: SequencePolicy,
        instances: Sequence[Instance],
        signature: Signature,
        recorder: Recorder,
        clock: Clock,
        options: SequenceOptions = _USUAL,
        *,
        turns: Sequence[Turn] = (),
    ) -> None:
        self._policy = policy
        hold = options.hold
        self._table = SequenceTable(
            policy, len(instances), signature.name, hold=0 if policy.oldest else hold, backlog_hold=options.backlog_hold
        )
        self._controls = Controls(policy.controls, signature.max_batch_size > 0, signature.name)
        self._signature = signature
        self._names = [instance.name for instance in instances]
        self._history = SequenceHistory(self._names, policy.idle_ns)
        self._states: States | None = None
        if policy.states:
            outputs = [tensor.name for tensor in signature.outputs]
            self._states = States(policy.states, options.initial_states, outputs, batches=signature.max_batch_size > 0)
            instances = [StatefulInstance(instance, self._states) for instance in instances]
        self._recorder = recorder
        self._now = clock.monotonic_ns
        self._threads = options.threads
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._sweep_due = False
        self._sleeps_until_ns = 0
        self.costs = CostModel()
        dispatch = DispatchPolicy(
            threads=options.threads,
            may_wait=policy.max_delay_ns > 0 or hold > 0 or bool(turns),
            decoupled=options.decoupled,
            ordered=policy.batching.preserve_ordering and not options.decoupled and not policy.iterative,
        )
        adapter = _RecorderAdapter(self, recorder)
        self._lanes = [
            Scheduler(
                self._queue(hold),
                [instance],
                signature,
                adapter,
                clock,
                dispatch,
                turns=turns[index : index + 1],
                costs=self.costs,
            )
            for index, instance in enumerate(instances)
        ]

    def _queue(self, hold: int) -> Queue:
        if self._policy.oldest:
            return BatchQueue(self._policy.batching, hold=hold)
        table = self._table
        return DirectQueue(self._policy, table.slot_of, self._controls, lambda: table.held)

    # -- taking requests --------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Queue a request of a sequence. Its reply delivers the answer. Any thread may call.

        Raises InvalidArgumentError if it breaks a rule of sequences [S01-S03, S10], or UnavailableError if the
        scheduler is stopping [D17]. The ticket is then not answered.
        """
        request = ticket.request
        now_ns = self._now()
        ticket.arrival_ns = ticket.arrival_ns or now_ns
        refusal: InvalidArgumentError | None = None
        with self._changed:
            if self._stopping:
                raise stopping()
            if self._policy.iterative and not request.form.sequence_id:
                request.form = replace(request.form, sequence_id=self._table.unused_id())
            try:
                orders = self._admit(ticket, now_ns)
            except InvalidArgumentError as error:
                refusal, orders = error, self._record_ended(self._table.reap(now_ns), now_ns)
                self._record_refusal(request.form, error, now_ns)
            self._watch_time()
        if refusal is None:
            request.when_cancelled(self._request_sweep)
        self._apply(orders)
        if self._table.held:
            with self._changed:
                self._table.update_hold()
        if refusal is not None:
            raise refusal

    def _admit(self, ticket: Ticket, now_ns: int) -> Orders:
        """Admit a request to its sequence. Raises InvalidArgumentError. The lock is held."""
        form = ticket.request.form
        self._controls.check(ticket.request)
        conflict = (
            form.sequence_start and not self._policy.iterative and self._table.can_continue(form.sequence_id, now_ns)
        )
        orders = self._record_ended(self._table.admit(ticket, now_ns), now_ns)
        if conflict:
            _log.warning(
                "sequence %s for model '%s' has a conflict. The previous sequence did not end before this sequence "
                "start. Previous sequence will be terminated early.",
                form.sequence_id,
                self._signature.name,
            )
        return orders

    def _record_refusal(self, form: InferForm, error: InvalidArgumentError, now_ns: int) -> None:
        """Record the reason of a refusal for the report. The lock is held."""
        explanation = self._history.refuse(form, error, self._table.is_live(form.sequence_id), now_ns)
        _log.debug("model '%s' refused a request: %s; %s", self._signature.name, error, explanation)

    def _record_ended(self, orders: Orders, now_ns: int) -> Orders:
        """Record the sequences that the orders end, and return the orders. The lock is held."""
        self._history.note(orders.ended, now_ns)
        return orders

    def _request_sweep(self) -> None:
        """Wake the thread after a cancellation, which may end a sequence."""
        if self._threads:
            with self._changed:
                self._sweep_due = True
                self._changed.notify_all()

    def _apply(self, orders: Orders) -> None:
        """Carry out the table's orders. The lock is not held."""
        answers: list[tuple[Ticket, Outcome]] = []
        for ticket, error in orders.dropped:
            self._recorder.dropped(ticket, error, self._now())
            answers.append((ticket, error))
        deliver(answers)
        for ticket, place, start, end, states in orders.steps:
            self._controls.add(ticket.request, start=start, end=end)
            if self._states is not None:
                self._states.give(ticket.request, states)
            try:
                self._lanes[place.instance].submit(ticket)
            except RemoraError as error:  # no thread can start; `stop` drains the table before its lanes refuse any
                self._recorder.dropped(ticket, error, self._now())
                deliver([(ticket, error)])
                self.release([ticket])

    def release(self, tickets: Sequence[Ticket], rescheduled: frozenset[Ticket] = frozenset()) -> None:
        """Record that requests have run or were dropped, so that their successors may run.

        No lock is held.
        """
        now_ns = self._now()
        released: list[Orders] = []
        with self._changed:
            released = [
                self._record_ended(self._table.released(ticket, now_ns, rescheduled=ticket in rescheduled), now_ns)
                for ticket in tickets
            ]
            self._watch_time()
            if self._stopping and not self._table.busy:
                self._changed.notify_all()
        for orders in released:
            self._apply(orders)

    # -- time -------------------------------------------------------------------------------------------------------

    def _watch_time(self) -> None:
        """Schedule the thread's next wake-up for timeouts. The lock is held."""
        wake_ns = self._table.wake_ns
        if not self._threads or self._stopping:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._keep_time, name="remora sequences", daemon=True)
            with suppress(RuntimeError):  # the process can have no more threads; the next request tries again
                thread.start()
                self._thread = thread
        elif wake_ns and not 0 < self._sleeps_until_ns <= wake_ns:
            self._changed.notify_all()

    def _keep_time(self) -> None:
        while True:
            with self._changed:
                if self._stopping:
                    return
                wake_ns, now_ns = self._table.wake_ns, self._now()
                if not self._sweep_due and (not wake_ns or wake_ns > now_ns):
                    self._sleeps_until_ns = wake_ns
                    self._changed.wait((wake_ns - now_ns) / 1e9 if wake_ns else None)
                    continue
                self._sweep_due = False
                orders = self._record_ended(self._table.sweep(now_ns), now_ns)
            self._apply(orders)

    def sweep(self) -> None:
        """Handle timeouts and cancellations, as the thread does."""
        now_ns = self._now()
        with self._changed:
            orders = self._record_ended(self._table.sweep(now_ns), now_ns)
        self._apply(orders)

    def step(self, index: int = 0) -> Plan:
        """Let one instance poll once and run the plan, for tests without threads."""
        return self._lanes[index].step()

    # -- queries ----------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        return self._table.waiting + sum(lane.pending for lane in self._lanes)

    @property
    def oldest_ns(self) -> int:
        with self._changed:
            waiting_ns = self._table.oldest_ns
        return min((ns for ns in (waiting_ns, *(lane.oldest_ns for lane in self._lanes)) if ns), default=0)

    @property
    def running(self) -> int:
        return sum(lane.running for lane in self._lanes)

    @property
    def open_sequences(self) -> int:
        return self._table.count

    def keeps_sequence(self, sequence_id: int | str) -> bool:
        return self._table.is_live(sequence_id)

    def report(self) -> SequenceReport:
        """Return the sequences as shown to operators."""
        with self._changed:
            now_ns = self._now()
            rows = self._table.sequences(SHOWN_LIMIT)
            backlog = self._table.backlog
            ended, refused = self._history.ended(now_ns), self._history.refused(now_ns)
            live = self._table.count
        return SequenceReport(
            "oldest" if self._policy.oldest else "direct",
            self._policy.slots * len(self._lanes),
            live - backlog,
            backlog,
            self._policy.idle_ns,
            tuple(self._shown(row, now_ns) for row in rows),
            tuple(ended),
            tuple(refused),
        )

    def _shown(self, row: SequenceInfo, now_ns: int) -> LiveSequence:
        state, instance, slot = "backlog", "", -1
        if row.place is not None:
            state, instance, slot = "active", self._names[row.place.instance], row.place.slot
        idle_ns = now_ns - row.quiet_ns if row.quiet_ns else 0
        return LiveSequence(row.id, state, instance, slot, row.running, row.pending, idle_ns)

    # -- shutdown ---------------------------------------------------------------------------------------------------

    def stop(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests, run the queued ones and end the threads.

        Returns False on timeout. None waits without limit.
        """
        begin_ns = self._now()

        def left_s() -> float | None:
            return None if timeout_s is None else max(timeout_s - (self._now() - begin_ns) / 1e9, 0.0)

        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            orders = self._record_ended(self._table.close(begin_ns), begin_ns)
        self._apply(orders)
        for lane in self._lanes:
            lane.stop_waiting()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._table.busy, left_s()):
                return False
        if not all(lane.stop(left_s()) for lane in self._lanes):
            return False
        if self._thread is None:
            return True
        self._thread.join(left_s())
        return not self._thread.is_alive()

    def fail_pending(self, error: RemoraError) -> None:
        """Answer all queued requests with ``error``, after a stop timed out."""
        with self._changed:
            tickets = self._table.drain()
        deliver([(ticket, error) for ticket in tickets])
        for lane in self._lanes:
            lane.fail_pending(error)


class _RecorderAdapter:
    """Recorder of the instances' schedulers that releases requests and filters out null tickets."""

    def __init__(self, scheduler: SequenceScheduler, recorder: Recorder) -> None:
        self._scheduler = scheduler
        self._recorder = recorder

    def executed(
        self, plan: Plan, execution: Execution, outcomes: Sequence[Outcome | None], start_ns: int, end_ns: int
    ) -> None:
        rescheduled = frozenset(plan.tickets[index] for index in execution.rescheduled)
        real = [at for at, ticket in enumerate(plan.tickets) if ticket.context is not NULL]
        if len(real) < len(plan.tickets):
            plan = plan._replace(tickets=[plan.tickets[at] for at in real])
            outcomes = [outcomes[at] for at in real]
        self._recorder.executed(plan, execution, outcomes, start_ns, end_ns)
        self._scheduler.release(plan.tickets, rescheduled)

    def streamed(self, ticket: Ticket, index: int, streamed: Streamed, begin_ns: int, now_ns: int) -> None:
        if ticket.context is not NULL:
            self._recorder.streamed(ticket, index, streamed, begin_ns, now_ns)

    def dropped(self, ticket: Ticket, error: RemoraError, now_ns: int) -> None:
        self._recorder.dropped(ticket, error, now_ns)
        self._scheduler.release([ticket])
