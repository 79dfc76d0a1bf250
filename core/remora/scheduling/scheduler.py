"""Scheduler of one model version: queue, instance threads and answers.

The lock, the instance threads and the dispatch are here: a batch runs in an instance's thread, or in the caller's event
loop, or is begun there on a remote instance, possibly ahead of time. `batching` decides, without side effects, which
requests run together. Each idle instance pulls its own batch, and the thread that ends a batch polls the queue again.
Invariants:

1. Each ticket is answered exactly once, whatever its batch does.
2. A failing batch answers its tickets and the instance continues.
3. Answers of one batch reach a mailbox in one delivery.
4. No answer is delivered while the lock is held.
5. An unhealthy instance gets work only if all instances are unhealthy.
6. Only full batches are dispatched ahead. If the instance ends before such a batch starts, its tickets return to the
   front of the queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from remora.backends import Instance, capabilities_of
from remora.errors import RemoraError
from remora.messages import Mailbox, Ticket, Watcher
from remora.scheduling.batching import RESOURCES, BatchQueue, Plan, Queue
from remora.scheduling.costs import CostModel
from remora.scheduling.delivery import OrderedDelivery, deliver, stopping
from remora.scheduling.running import Answers, OpenRequests, Ran, Recorder, Runner, StreamRunner
from remora.scheduling.slots import Slot, Slots
from remora.signature import Signature
from remora.system.clock import Clock

if TYPE_CHECKING:
    from remora.scheduling.rate_limiter import Turn


_SWEEP_AFTER = 64
"""Minimum number of submissions between two sweeps of cancelled requests."""
INLINE_LIMIT_NS = 250_000
"""Batches predicted to be shorter run in the caller's event loop, because a thread hop costs about 60 us."""


class Scheduler:
    """Requests and instances of one model version.

    Args:
        queue: decides on batches; this scheduler's lock guards it.
        instances: at least one.
        signature: converts outputs to their wire shape.
        recorder: records every execution and failure.
        clock: read here and nowhere below.
        threads: False in tests, which call `step` instead.
        ordered: deliver answers in the order of their requests [D06]; not for decoupled models.
        costs: learns the durations of batches; by default not shared.
        turns: one for each instance that shares resources with others [I08]; empty without a rate limiter.
    """

    def __init__(
        self,
        queue: Queue,
        instances: Sequence[Instance],
        signature: Signature,
        recorder: Recorder,
        clock: Clock,
        *,
        threads: bool = True,
        inline_limit_ns: int = INLINE_LIMIT_NS,
        may_wait: bool = False,
        decoupled: bool = False,
        ordered: bool = False,
        turns: Sequence[Turn] = (),
        costs: CostModel | None = None,
    ) -> None:
        self._queue = queue
        self._slots = Slots(instances)
        self._recorder = recorder
        self._now = clock.monotonic_ns
        self._threads = threads
        self._turns = dict(zip(self._slots, turns, strict=True)) if turns else {}
        self._may_wait = may_wait or bool(turns)
        self._decoupled = decoupled
        self._update_capabilities(instances)
        self._inline_limit_ns = inline_limit_ns
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._inline_armed = False
        self._inline_work: tuple[Mailbox | None, Callable[[], None]] = (None, lambda: None)
        self._stopping = False
        self._retiring = 0
        self._running = 0
        self._sweep_in = _SWEEP_AFTER
        self._ordered = OrderedDelivery() if ordered else None
        self._deliver = deliver if self._ordered is None else self._ordered.deliver
        self.costs = CostModel() if costs is None else costs
        accounts = (signature, recorder, self._now, self.costs)
        self._open_requests = OpenRequests(self._left_open, self._answered)
        self._runner = Runner(*accounts, self._open_requests, self._deliver)
        self._streaming = StreamRunner(*accounts, self._open_requests) if decoupled else None

    def _update_capabilities(self, instances: Sequence[Instance]) -> None:
        """Derive from the instances what an event loop may run."""
        promptly = not self._may_wait
        self._quick = promptly and all(instance.quick for instance in instances)
        capabilities = [capabilities_of(instance) for instance in instances]
        self._remote = promptly and not self._decoupled and all(each.remote for each in capabilities)
        ahead = self._remote and all(each.ahead for each in capabilities)
        self._ahead = self._queue if ahead and isinstance(self._queue, BatchQueue) else None

    # -- taking requests --------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket. Its reply delivers the answer. Any thread may call.

        Raises UnavailableError if the queue is full [D12] or the scheduler is stopping [D17]; the ticket is then not
        answered.
        """
        ticket.arrival_ns = ticket.arrival_ns or self._now()
        self._sweep_in -= 1  # without the lock, because a lost count is harmless
        if self._sweep_in <= 0:
            self._drop_cancelled()
        with self._lock:
            if self._stopping:
                raise stopping()
            self._queue.push(ticket)
            if self._ordered is not None:
                self._ordered.expect(ticket)
            mailbox = ticket.mailbox
            if not self._arm(mailbox):
                return
        self._defer(cast("Mailbox", mailbox))

    def _drop_cancelled(self) -> None:
        """Answer the cancelled requests in the queue.

        Clients could otherwise add any number of them behind a busy instance. Their number is bounded by that of the
        other requests or _SWEEP_AFTER, and the cost by one check per submission.
        """
        with self._lock:
            dropped = self._queue.drop_cancelled()
            self._sweep_in = max(_SWEEP_AFTER, len(self._queue))
        if dropped:
            self._deliver(self._drop(Plan([], dropped=dropped)))

    def _arm(self, mailbox: Mailbox | None) -> bool:
        """Have the queue polled if an instance is idle. The lock is held.

        Returns True if the caller's loop does it; the caller must then call `_defer`.
        """
        if self._inline_armed:
            return False
        if not self._slots.any_idle():
            self._inline_armed = self._behind(mailbox) is not None
        elif mailbox is not None and self._suits(mailbox):
            self._inline_armed = True
        else:
            self._wake_thread()
        return self._inline_armed

    def _suits(self, mailbox: Mailbox) -> bool:
        """Return True if the loop may dispatch the next batch. The lock is held.

        The batch is predicted to be short, or its instance is remote.
        """
        if self._remote:
            return mailbox.watcher is not None
        return self._quick and self.costs.predict(self._queue.rows_ahead) <= self._inline_limit_ns

    def _behind(self, mailbox: Mailbox | None) -> Slot | None:
        """Return the slot behind whose batch the caller's loop may begin another. The lock is held."""
        if (
            self._ahead is None
            or mailbox is None
            or mailbox.watcher is None
            or not self._ahead.crowded(len(self._slots))
        ):
            return None
        return self._slots.next_ahead()

    def _defer(self, mailbox: Mailbox) -> None:
        """Have the caller's loop, or else a thread, poll the queue.

        A loop polls at the end of its iteration. A thread is woken if the caller is not in the mailbox's loop.
        """
        if not mailbox.defer(self._work_for(mailbox)):
            with self._lock:
                self._inline_armed = False
                self._wake_thread()

    def _work_for(self, mailbox: Mailbox) -> Callable[[], None]:
        """Return the callback for this mailbox's loop, the same object while one loop calls."""
        if self._inline_work[0] is not mailbox:
            self._inline_work = (mailbox, lambda: self._run_inline(mailbox))
        return self._inline_work[1]

    def _wake_thread(self) -> None:
        """Wake the thread of an instance that may run. The lock is held.

        The thread of a slot whose batch was begun by a loop may sleep too: waking only that one would be useless,
        because it has to wait until its instance is free.
        """
        if not self._threads:
            return
        fresh: Slot | None = None
        ready = unready = False
        for slot in self._slots:
            if slot.resting:
                if self._slots.may_run(slot):
                    ready = True
                else:
                    unready = True
            elif slot.thread is None and fresh is None and self._slots.may_run(slot):
                fresh = slot
        if ready and not unready:
            self._work.notify()
        elif ready:
            self._work.notify_all()  # because the condition is shared and the order of wake-ups is undefined
        elif fresh is not None:
            self._start_thread(fresh)

    def _start_thread(self, slot: Slot) -> None:
        thread = slot.thread = threading.Thread(
            target=self._serve_in_turn if self._turns else self._serve,
            args=(slot,),
            name=f"remora {slot.instance.name}",
            daemon=True,
        )
        thread.start()

    def _wake_slot(self, slot: Slot) -> None:
        """Wake the thread of this slot. The lock is held."""
        if slot.thread is not None:
            self._work.notify_all()
        elif self._threads:
            self._start_thread(slot)

    def _pass_on(self, caller: Slot) -> None:
        """Wake an instance that may run, and wait, because the caller's instance may not run."""
        if (slot := self._slots.next()) is not None:
            self._wake_slot(slot)
        self._rest(caller)

    @property
    def pending(self) -> int:
        """Queued requests [P04]."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests in an execution, or whose answers are being delivered."""
        return self._running

    # -- running batches --------------------------------------------------------------------------------------------

    def _run_inline(self, mailbox: Mailbox) -> None:
        """Run or begin one batch in the caller's loop, then arrange for the next one."""
        with self._lock:
            self._inline_armed = False
            if (slot := self._slots.next()) is not None:
                plan = self._take(slot)
            elif (slot := self._behind(mailbox)) is not None:
                plan = self._take_ahead(slot)
            else:
                return  # the thread that uses the instance polls again when it is done
            watcher = mailbox.watcher if self._remote and plan.tickets else None
            slot.begun += watcher is not None
        if watcher is not None:
            self._begin(slot, plan, mailbox, watcher)
        else:
            self._run(slot, plan)
        self._poll_later(mailbox)

    def _poll_later(self, mailbox: Mailbox) -> None:
        with self._lock:
            armed = len(self._queue) > 0 and self._arm(mailbox)
        if armed:
            self._defer(mailbox)

    def _serve(self, slot: Slot) -> None:
        """Main loop of an instance's thread."""
        while True:
            with self._lock:
                plan = self._await_plan(slot)
                if plan is None:
                    return
            self._run(slot, plan)

    def _await_plan(self, slot: Slot) -> Plan | None:
        """Wait, with the lock held, for a batch or dropped tickets.

        Returns None at shutdown.
        """
        while True:
            wake_ns = 0
            if slot.handed is not None:
                plan, slot.handed = slot.handed, None
                return plan
            if slot.retired and not slot.busy:
                if len(self._queue):
                    self._wake_thread()  # because the wake-up was meant for a slot that stays
                return None
            if not slot.busy and len(self._queue) and not self._inline_armed:
                if not self._slots.may_run(slot):
                    self._pass_on(slot)
                    continue
                plan = self._take(slot)
                if plan.tickets or plan.dropped:
                    if len(self._queue) and not plan.wake_ns:
                        self._wake_thread()
                    return plan
                wake_ns = plan.wake_ns
            if self._stopping and not len(self._queue) and not slot.busy:  # a busy slot may still be handed its batch
                return None
            self._rest(slot, wake_ns)

    def _rest(self, slot: Slot, wake_ns: int = 0) -> None:
        """Sleep in the thread of ``slot``, with the lock held, until notified or ``wake_ns``.

        ``wake_ns`` 0 means no time limit.
        """
        timeout = max(wake_ns - self._now(), 0) / 1e9 if wake_ns else None
        slot.resting = True
        self._work.wait(timeout)
        slot.resting = False

    def _serve_in_turn(self, slot: Slot) -> None:
        """Main loop of the thread of an instance that shares resources.

        It forms its batch when the resources are granted.
        """
        turn = self._turns[slot]
        while self._await_request(slot):
            waited = turn.take()
            with self._lock:
                plan = self._take(slot)
                if plan.tickets and len(self._queue):
                    self._wake_thread()
                elif not plan.tickets:
                    turn.give_back(ran=False)
                    if len(self._queue) and not plan.dropped:
                        self._rest(slot, plan.wake_ns)
            try:
                self._run(slot, plan._replace(reason=RESOURCES) if waited else plan)
            finally:
                if plan.tickets:
                    turn.give_back(ran=True)

    def _await_request(self, slot: Slot) -> bool:
        """Wait until the queue is not empty. Return False at shutdown."""
        with self._lock:
            while not len(self._queue):
                if self._stopping:
                    return False
                self._rest(slot)
            return True

    def step(self, index: int = 0) -> Plan:
        """Let one instance poll the queue once and run the plan, for tests without threads."""
        slot = [*self._slots][index]
        with self._lock:
            plan = self._take(slot)
        self._run(slot, plan)
        self._open_requests.catch_up()
        return plan

    def _take(self, slot: Slot) -> Plan:
        """Poll the queue, and mark the slot busy if there is a batch. The lock is held."""
        plan = self._queue.poll(self._now())
        if plan.tickets:
            slot.busy = True
            self._running += len(plan.tickets)
        return plan

    def _take_ahead(self, slot: Slot) -> Plan:
        """Return a plan to queue behind the running batch.

        If there is none, the slot is barred until that batch ends.
        """
        plan = cast("BatchQueue", self._queue).ahead(self._now(), len(self._slots))
        self._running += len(plan.tickets)
        slot.barred = not plan.tickets
        return plan

    def _run(self, slot: Slot, plan: Plan) -> None:
        deliveries = self._drop(plan)
        left_open = 0
        if plan.tickets:
            try:
                answers, left_open = (self._streaming or self._runner).run(slot.instance, plan)
                deliveries += answers
            finally:
                self._free(slot)
        self._deliver(deliveries)
        self._answered(len(plan.tickets) - left_open)

    def _begin(self, slot: Slot, plan: Plan, mailbox: Mailbox, watcher: Watcher) -> None:
        """Begin a batch on a remote instance. It may end in any thread."""
        self._deliver(self._drop(plan))

        def ended(ran: Ran | None) -> None:
            self._free(slot, begun=True, unrun=plan if ran is None else None)
            if watcher.is_current() and len(self._queue):
                self._run_inline(mailbox)  # at once, because the instance would idle while the answers are written
            else:
                self._poll_later(mailbox)
            if ran is not None:
                self._deliver(ran.answers)
                self._answered(len(plan.tickets) - ran.left_open)

        if not self._runner.begin(slot, plan, watcher, ended):
            with self._lock:
                slot.begun -= 1
                slot.barred = slot.begun > 0
                if slot.barred:
                    self._put_back(plan)
                else:
                    slot.handed = plan._replace(dropped=[])
                    self._wake_slot(slot)

    def _put_back(self, plan: Plan) -> None:
        """Return a batch that was queued ahead and did not run. The lock is held."""
        self._running -= len(plan.tickets)
        cast("BatchQueue", self._queue).put_back(plan.tickets)

    def _drop(self, plan: Plan) -> Answers:
        for ticket, error in plan.dropped:
            self._recorder.dropped(ticket, error, self._now())
        return [*plan.dropped]

    def _free(self, slot: Slot, *, begun: bool = False, unrun: Plan | None = None) -> None:
        with self._lock:
            slot.free(begun=begun)
            if unrun is not None:
                self._put_back(unrun)
            if self._stopping or slot.retired:
                self._work.notify_all()

    def _answered(self, count: int = 1) -> None:
        """Count requests as done, after their delivery, because a stop waits for answers."""
        with self._lock:
            self._running -= count
            if self._stopping or self._retiring:
                self._work.notify_all()

    def _left_open(self) -> None:
        """Start the thread for late answers.

        Open requests count as running until answered.
        """
        if self._threads:
            with self._lock:
                self._open_requests.start(next(iter(self._slots)).instance.name)

    def set_instances(self, instances: Sequence[Instance]) -> None:
        """Replace the instances, and wait until the removed ones have answered their requests.

        Any thread may call. Not for decoupled models, nor for instances that share resources.
        """
        with self._lock:
            retired = self._slots.set(instances)
            self._update_capabilities(instances)
            self._work.notify_all()
            if len(self._queue) and not self._inline_armed:
                self._wake_thread()
            self._retiring += 1
            removed = [slot.instance for slot in retired]
            self._work.wait_for(
                lambda: not any(slot.busy for slot in retired) and not self._open_requests.any_open(removed)
            )
            self._retiring -= 1

    # -- shutdown ---------------------------------------------------------------------------------------------------

    def stop_waiting(self) -> None:
        """Dispatch without queue delays from now on, while more requests may still arrive.

        A wrapping scheduler calls this when it stops.
        """
        with self._lock:
            self._queue.stop_waiting()
            self._work.notify_all()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests, run queued ones at once and end the threads.

        Returns False on timeout; None waits without limit.
        """
        end_ns = None if timeout_s is None else self._now() + int(timeout_s * 1e9)
        with self._lock:
            self._stopping = True
            self._queue.stop_waiting()
            self._inline_armed = False
            self._work.notify_all()
            if len(self._queue) and not any(slot.thread for slot in self._slots):
                self._wake_thread()
        for slot in self._slots:
            if slot.thread is not None:
                slot.thread.join(self._left_s(end_ns))
                if slot.thread.is_alive():
                    return False
        with self._lock:
            done = self._work.wait_for(lambda: not self._running and not len(self._queue), self._left_s(end_ns))
        if done:
            self._open_requests.close()
        return done

    def _left_s(self, end_ns: int | None) -> float | None:
        return None if end_ns is None else max(end_ns - self._now(), 0) / 1e9

    def abandon(self, error: RemoraError) -> None:
        """Answer queued and open requests with ``error``, after a stop timed out."""
        with self._lock:
            tickets = self._queue.drain()
            self._work.notify_all()
        self._deliver([(ticket, error) for ticket in tickets])
        self._open_requests.end_all(error)
