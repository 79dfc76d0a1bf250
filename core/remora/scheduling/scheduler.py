"""Takes requests, forms batches, gives them to the model's instances and delivers the answers.

What moves is here: the lock, the instance threads, the decision to run a batch in the caller's event loop,
or to begin one there whose instance runs elsewhere, maybe ahead of its time. What runs together is decided in
`batching`, which is pure. Each idle instance pulls its own batch, and who ends one looks at the queue again. Laws:

1. Each ticket is answered exactly once, whatever its batch does.
2. A failing batch answers its tickets and the instance goes on.
3. Answers of one batch reach a mailbox in one delivery.
4. No answer is delivered while the lock is held.
5. An instance in trouble is given work only when all are.
6. What goes ahead could not have waited for company; if its instance ends before its turn, it goes back to its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from remora.backends import Instance
from remora.errors import RemoraError
from remora.messages import Mailbox, Ticket, Watcher
from remora.scheduling.batching import RESOURCES, BatchQueue, Plan, Queue
from remora.scheduling.costs import CostModel
from remora.scheduling.delivery import OrderedDelivery, deliver, stopping
from remora.scheduling.running import Afterwards, Answers, Ran, Recorder, Runner, StreamRunner
from remora.scheduling.slots import Slot, Slots
from remora.signature import Signature
from remora.system.clock import Clock

if TYPE_CHECKING:
    from remora.scheduling.rate_limiter import Turn


_SWEEP_AFTER = 64
"""How many requests come at least between two looks for cancelled ones in the queue."""
INLINE_LIMIT_NS = 250_000
"""A batch predicted to be shorter runs in the event loop that brought it: a thread hop costs about 60 us."""


class Scheduler:
    """The requests and instances of one model version.

    Args:
        queue: the decider; this scheduler's lock guards it.
        instances: at least one.
        signature: gives outputs their wire shape.
        recorder: is told of every execution and failure.
        clock: read here and nowhere below.
        threads: False in tests, which turn the crank with `step`.
        ordered: answers leave in the order of their requests [D06]; not for decoupled models.
        costs: learns how long batches take; one of its own unless others read it too.
        turns: one for each instance, when they share resources with others [I08]; none without a rate limiter.
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
        self._judge(instances)
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
        self._afterwards = Afterwards(self._left_open, self._answered)
        self._runner = Runner(*accounts, self._afterwards, self._deliver)
        self._streaming = StreamRunner(*accounts, self._afterwards) if decoupled else None

    def _judge(self, instances: Sequence[Instance]) -> None:
        """What these instances let a loop do."""
        promptly = not self._may_wait
        self._quick = promptly and all(instance.quick for instance in instances)
        self._remote = promptly and not self._decoupled and all(getattr(each, "remote", False) for each in instances)
        ahead = self._remote and all(getattr(each, "ahead", False) for each in instances)
        self._ahead = self._queue if ahead and isinstance(self._queue, BatchQueue) else None

    # -- taking requests --------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket; its answer comes through its reply. Any thread may call.

        Raises UnavailableError when the queue is full [D12] or the scheduler is stopping [D17]; the ticket
        is then not answered.
        """
        ticket.arrival_ns = ticket.arrival_ns or self._now()
        self._sweep_in -= 1  # without the lock, because it makes no difference if two threads count as one
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
        """Answer the cancelled requests that wait, because behind a busy instance clients could add any number.

        At most as many of them wait as others do, or _SWEEP_AFTER, and each request pays for a look at one other.
        """
        with self._lock:
            dropped = self._queue.drop_cancelled()
            self._sweep_in = max(_SWEEP_AFTER, len(self._queue))
        if dropped:
            self._deliver(self._drop(Plan([], dropped=dropped)))

    def _arm(self, mailbox: Mailbox | None) -> bool:
        """See to it that somebody looks at the queue, if an instance is idle; True when that is the caller's loop,
        which the caller then has to tell. The lock is held."""
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
        """Whether the loop may see to the next batch: it will be quick, or is only begun there. The lock is held."""
        if self._remote:
            return mailbox.watcher is not None
        return self._quick and self.costs.predict(self._queue.rows_ahead) <= self._inline_limit_ns

    def _behind(self, mailbox: Mailbox | None) -> Slot | None:
        """Behind whose batch this caller's loop may begin another. The lock is held."""
        if (
            self._ahead is None
            or mailbox is None
            or mailbox.watcher is None
            or not self._ahead.crowded(len(self._slots))
        ):
            return None
        return self._slots.next_ahead()

    def _defer(self, mailbox: Mailbox) -> None:
        """Have the caller's loop run what has arrived by the end of its turn; a thread, when this is not that loop."""
        if not mailbox.defer(self._work_for(mailbox)):
            with self._lock:
                self._inline_armed = False
                self._wake_thread()

    def _work_for(self, mailbox: Mailbox) -> Callable[[], None]:
        """What runs at the end of a turn of this mailbox's loop; the same object as long as one loop calls."""
        if self._inline_work[0] is not mailbox:
            self._inline_work = (mailbox, lambda: self._run_inline(mailbox))
        return self._inline_work[1]

    def _wake_thread(self) -> None:
        """Have the thread of an instance that may run look at the queue. The lock is held.

        A slot whose batch was begun by a loop may have a thread that rests: waking that one alone would be in vain,
        because it has to wait until its own instance is free.
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
            self._work.notify_all()  # the condition is shared, and which thread wakes first is not known
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

    def _rouse(self, slot: Slot) -> None:
        """Have the thread of this very slot look. The lock is held."""
        if slot.thread is not None:
            self._work.notify_all()
        elif self._threads:
            self._start_thread(slot)

    def _pass_on(self, caller: Slot) -> None:
        """Have an instance that may run look at the queue, instead of the caller's, which may not; then wait."""
        if (slot := self._slots.next()) is not None:
            self._rouse(slot)
        self._rest(caller)

    @property
    def pending(self) -> int:
        """Requests that wait [P04]."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests inside an execution now, or whose answers are being handed on."""
        return self._running

    # -- running batches --------------------------------------------------------------------------------------------

    def _run_inline(self, mailbox: Mailbox) -> None:
        """Run or begin one batch in the caller's loop, then look again in its next turn or hand over to a thread."""
        with self._lock:
            self._inline_armed = False
            if (slot := self._slots.next()) is not None:
                plan = self._take(slot)
            elif (slot := self._behind(mailbox)) is not None:
                plan = self._take_ahead(slot)
            else:
                return  # whoever holds the instance looks at the queue again when it is done
            watcher = mailbox.watcher if self._remote and plan.tickets else None
            slot.begun += watcher is not None
        if watcher is not None:
            self._begin(slot, plan, mailbox, watcher)
        else:
            self._run(slot, plan)
        self._look_again(mailbox)

    def _look_again(self, mailbox: Mailbox) -> None:
        with self._lock:
            armed = len(self._queue) > 0 and self._arm(mailbox)
        if armed:
            self._defer(mailbox)

    def _serve(self, slot: Slot) -> None:
        """The life of an instance's thread."""
        while True:
            with self._lock:
                plan = self._await_plan(slot)
                if plan is None:
                    return
            self._run(slot, plan)

    def _await_plan(self, slot: Slot) -> Plan | None:
        """Wait, with the lock held, until there is a batch or something dropped; None when it is time to end."""
        while True:
            wake_ns = 0
            if slot.handed is not None:
                plan, slot.handed = slot.handed, None
                return plan
            if slot.retired and not slot.busy:
                if len(self._queue):
                    self._wake_thread()  # what woke this thread was meant for one that goes on
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
            if self._stopping and not len(self._queue) and not slot.busy:  # a busy one may yet be handed its batch
                return None
            self._rest(slot, wake_ns)

    def _rest(self, slot: Slot, wake_ns: int = 0) -> None:
        """Sleep in the thread of ``slot``, with the lock held, until something arrives or it is ``wake_ns``; 0 for
        never."""
        timeout = max(wake_ns - self._now(), 0) / 1e9 if wake_ns else None
        slot.resting = True
        self._work.wait(timeout)
        slot.resting = False

    def _serve_in_turn(self, slot: Slot) -> None:
        """The life of the thread of an instance that shares resources: it forms its batch when they are its own."""
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
        """Wait until there is something in the queue; False when it is time to end."""
        with self._lock:
            while not len(self._queue):
                if self._stopping:
                    return False
                self._rest(slot)
            return True

    def step(self, index: int = 0) -> Plan:
        """Let one instance look at the queue once and run what it finds: the crank that tests turn."""
        slot = [*self._slots][index]
        with self._lock:
            plan = self._take(slot)
        self._run(slot, plan)
        self._afterwards.catch_up()
        return plan

    def _take(self, slot: Slot) -> Plan:
        """A plan from the queue, the slot made busy if there is something to run. The lock is held."""
        plan = self._queue.poll(self._now())
        if plan.tickets:
            slot.busy = True
            self._running += len(plan.tickets)
        return plan

    def _take_ahead(self, slot: Slot) -> Plan:
        """A plan for an instance that still runs another; if there is none, not before that has ended."""
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
        """Begin a batch that runs elsewhere. Its end may come in any thread."""
        self._deliver(self._drop(plan))

        def ended(ran: Ran | None) -> None:
            self._free(slot, begun=True, unrun=plan if ran is None else None)
            if watcher.is_current() and len(self._queue):
                self._run_inline(mailbox)  # at once: the instance is not to idle while the answers are written
            else:
                self._look_again(mailbox)
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
                    self._rouse(slot)

    def _put_back(self, plan: Plan) -> None:
        """What has gone ahead did not run. The lock is held."""
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
        """Only now are requests done with: a stop waits for answers, not for instances alone."""
        with self._lock:
            self._running -= count
            if self._stopping or self._retiring:
                self._work.notify_all()

    def _left_open(self) -> None:
        """Requests will be answered after their execution; they count as running until then."""
        if self._threads:
            with self._lock:
                self._afterwards.start(next(iter(self._slots)).instance.name)

    def set_instances(self, instances: Sequence[Instance]) -> None:
        """Run on these from now on; returns when those left out have finished what they run and have answered what they
        left open. Any thread may call. Not for decoupled models, nor for instances that share resources."""
        with self._lock:
            left_out = self._slots.set(instances)
            self._judge(instances)
            self._work.notify_all()
            if len(self._queue) and not self._inline_armed:
                self._wake_thread()
            self._retiring += 1
            gone = [slot.instance for slot in left_out]
            self._work.wait_for(lambda: not any(slot.busy for slot in left_out) and not self._afterwards.any_open(gone))
            self._retiring -= 1

    # -- the end ----------------------------------------------------------------------------------------------------

    def stop_waiting(self) -> None:
        """From now on nothing waits for company, while more may still come: for a stop of whoever hands it in."""
        with self._lock:
            self._queue.stop_waiting()
            self._work.notify_all()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Take nothing new, run what waits at once, end the threads. False when that took too long (None: wait)."""
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
            self._afterwards.close()
        return done

    def _left_s(self, end_ns: int | None) -> float | None:
        return None if end_ns is None else max(end_ns - self._now(), 0) / 1e9

    def abandon(self, error: RemoraError) -> None:
        """Answer with ``error`` what still waits, and what was left open: for a stop whose time is over."""
        with self._lock:
            tickets = self._queue.drain()
            self._work.notify_all()
        self._deliver([(ticket, error) for ticket in tickets])
        self._afterwards.end_all(error)
