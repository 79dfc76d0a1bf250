"""Takes requests, forms batches, gives them to the model's instances and delivers the answers.

What moves is here: the lock, the instance threads, the decision to run a batch in the caller's event loop,
or to begin one there whose instance runs elsewhere. What runs together is decided in `batching`, which is pure. Each
idle instance pulls its own batch, and who ends one looks at the queue again. Laws:

1. Each ticket is answered exactly once, whatever its batch does.
2. A failing batch answers its tickets and the instance goes on.
3. Answers of one batch reach a mailbox in one delivery.
4. No answer is delivered while the lock is held.
5. An instance in trouble is given work only when all are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from remora.backends import Instance, RemoteInstance
from remora.errors import RemoraError
from remora.messages import Mailbox, Ticket, Watcher
from remora.scheduling.batching import RESOURCES, Plan, Queue
from remora.scheduling.costs import CostModel
from remora.scheduling.delivery import OrderedDelivery, deliver, stopping
from remora.scheduling.recorder import Recorder
from remora.scheduling.running import Answers, Runner, StreamRunner
from remora.signature import Signature
from remora.system.clock import Clock

if TYPE_CHECKING:
    from remora.scheduling.rate_limiter import Turn


INLINE_LIMIT_NS = 250_000
"""A batch predicted to be shorter runs in the event loop that brought it: a thread hop costs about 60 us."""


class _Slot:
    """An instance and who uses it. ``handed`` is a plan that its thread is to run: the slot is busy with it."""

    __slots__ = ("busy", "handed", "instance", "retired", "thread")

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.busy = False
        self.handed: Plan | None = None
        self.retired = False
        self.thread: threading.Thread | None = None

    @property
    def trouble(self) -> str:
        return str(getattr(self.instance, "trouble", ""))


class Scheduler:
    """The requests and instances of one model version.

    Args:
        queue: the decider; this scheduler's lock guards it.
        instances: at least one.
        signature: gives outputs their wire shape.
        recorder: is told of every execution and failure.
        clock: read here and nowhere below.
        threads: False in tests, which turn the crank with `step`.
        ordered: answers leave in the order of their requests (spec D06); not for decoupled models.
        costs: learns how long batches take; one of its own unless others read it too.
        turns: one for each instance, when they share resources with others (spec I08); none without a rate limiter.
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
        self._slots = [_Slot(instance) for instance in instances]
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
        self._idle_threads = 0
        self._inline_armed = False
        self._inline_work: tuple[Mailbox | None, Callable[[], None]] = (None, lambda: None)
        self._stopping = False
        self._running = 0
        self._ordered = OrderedDelivery() if ordered else None
        self._deliver = deliver if self._ordered is None else self._ordered.deliver
        self.costs = CostModel() if costs is None else costs
        accounts = (signature, recorder, self._now, self.costs)
        self._runner = Runner(*accounts)
        self._streaming = (
            StreamRunner(*accounts, opened=self._streams_opened, ended=self._stream_ended) if decoupled else None
        )

    def _judge(self, instances: Sequence[Instance]) -> None:
        """What these instances let a loop do, and whether any may be in trouble while another is not."""
        promptly = not self._may_wait
        self._quick = promptly and all(instance.quick for instance in instances)
        self._remote = promptly and not self._decoupled and all(getattr(each, "remote", False) for each in instances)
        self._may_fail = len(instances) > 1 and any(hasattr(instance, "trouble") for instance in instances)

    # -- taking requests --------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket; its answer comes through its reply. Any thread may call.

        Raises UnavailableError when the queue is full (spec D12) or the scheduler is stopping (spec D17); the ticket
        is then not answered.
        """
        ticket.arrival_ns = ticket.arrival_ns or self._now()
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

    def _arm(self, mailbox: Mailbox | None) -> bool:
        """See to it that somebody looks at the queue, if an instance is idle; True when that is the caller's loop,
        which the caller then has to tell. The lock is held."""
        if self._inline_armed or not any(not slot.busy for slot in self._slots):
            return False
        if mailbox is None or not self._suits(mailbox):
            self._wake_thread()
            return False
        self._inline_armed = True
        return True

    def _suits(self, mailbox: Mailbox) -> bool:
        """Whether the loop may see to the next batch: it will be quick, or is only begun there. The lock is held."""
        if self._remote:
            return mailbox.watcher is not None
        return self._quick and self.costs.predict(self._queue.rows_ahead) <= self._inline_limit_ns

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
        if not self._threads:
            return
        if self._idle_threads:
            self._work.notify()
            return
        for slot in self._slots:
            if slot.thread is None:
                self._start_thread(slot)
                return

    def _start_thread(self, slot: _Slot) -> None:
        slot.thread = threading.Thread(
            target=self._serve_in_turn if self._turns else self._serve,
            args=(slot,),
            name=f"remora {slot.instance.name}",
            daemon=True,
        )
        slot.thread.start()

    def _rouse(self, slot: _Slot) -> None:
        """Have the thread of this very slot look. The lock is held."""
        if slot.thread is not None:
            self._work.notify_all()
        elif self._threads:
            self._start_thread(slot)

    def _pass_on(self) -> None:
        """Have an instance that may run look at the queue, instead of the caller's, which may not; then wait."""
        for slot in self._slots:
            if self._may_run(slot):
                self._rouse(slot)
                break
        self._rest()

    @property
    def pending(self) -> int:
        """Requests that wait (spec P04)."""
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
            slot = next((slot for slot in self._slots if self._may_run(slot)), None)
            if slot is None:
                return  # whoever holds the instance looks at the queue again when it is done
            plan = self._take(slot)
        if self._remote and plan.tickets and mailbox.watcher is not None:
            self._begin(slot, plan, mailbox, mailbox.watcher)
        else:
            self._run(slot, plan)
        self._look_again(mailbox)

    def _look_again(self, mailbox: Mailbox) -> None:
        with self._lock:
            if not len(self._queue) or not self._arm(mailbox):
                return
        self._defer(mailbox)

    def _may_run(self, slot: _Slot) -> bool:
        """Whether this instance may take the next batch (law 5). The lock is held."""
        return not slot.busy and not (self._may_fail and slot.trouble and not all(each.trouble for each in self._slots))

    def _serve(self, slot: _Slot) -> None:
        """The life of an instance's thread."""
        while True:
            with self._lock:
                plan = self._await_plan(slot)
                if plan is None:
                    return
            self._run(slot, plan)

    def _await_plan(self, slot: _Slot) -> Plan | None:
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
                if not self._may_run(slot):
                    self._pass_on()
                    continue
                plan = self._take(slot)
                if plan.tickets or plan.dropped:
                    if len(self._queue) and not plan.wake_ns:
                        self._wake_thread()
                    return plan
                wake_ns = plan.wake_ns
            if self._stopping and not len(self._queue) and not slot.busy:  # a busy one may yet be handed its batch
                return None
            self._rest(wake_ns)

    def _rest(self, wake_ns: int = 0) -> None:
        """Sleep, with the lock held, until something arrives or it is ``wake_ns``; 0 for never."""
        timeout = max(wake_ns - self._now(), 0) / 1e9 if wake_ns else None
        self._idle_threads += 1
        self._work.wait(timeout)
        self._idle_threads -= 1

    def _serve_in_turn(self, slot: _Slot) -> None:
        """The life of the thread of an instance that shares resources: it forms its batch when they are its own."""
        turn = self._turns[slot]
        while self._await_request():
            waited = turn.take()
            with self._lock:
                plan = self._take(slot)
                if plan.tickets and len(self._queue):
                    self._wake_thread()
                elif not plan.tickets:
                    turn.give_back(ran=False)
                    if len(self._queue) and not plan.dropped:
                        self._rest(plan.wake_ns)
            try:
                self._run(slot, plan._replace(reason=RESOURCES) if waited else plan)
            finally:
                if plan.tickets:
                    turn.give_back(ran=True)

    def _await_request(self) -> bool:
        """Wait until there is something in the queue; False when it is time to end."""
        with self._lock:
            while not len(self._queue):
                if self._stopping:
                    return False
                self._rest()
            return True

    def step(self, index: int = 0) -> Plan:
        """Let one instance look at the queue once and run what it finds: the crank that tests turn."""
        slot = self._slots[index]
        with self._lock:
            plan = self._take(slot)
        self._run(slot, plan)
        if self._streaming is not None:
            self._streaming.catch_up()
        return plan

    def _take(self, slot: _Slot) -> Plan:
        """A plan from the queue, the slot made busy if there is something to run. The lock is held."""
        plan = self._queue.poll(self._now())
        if plan.tickets:
            slot.busy = True
            self._running += len(plan.tickets)
        return plan

    def _run(self, slot: _Slot, plan: Plan) -> None:
        deliveries = self._drop(plan)
        if plan.tickets:
            try:
                deliveries += (self._streaming or self._runner).run(slot.instance, plan)
            finally:
                self._free(slot)
        self._deliver(deliveries)
        self._answered(plan)

    def _begin(self, slot: _Slot, plan: Plan, mailbox: Mailbox, watcher: Watcher) -> None:
        """Begin a batch that runs elsewhere. Its end may come in any thread."""
        self._deliver(self._drop(plan))

        def ended(answers: Answers) -> None:
            self._free(slot)
            if watcher.is_current() and len(self._queue):
                self._run_inline(mailbox)  # at once: the instance is not to idle while the answers are written
            else:
                self._look_again(mailbox)
            self._deliver(answers)
            self._answered(plan)

        if not self._runner.begin(cast("RemoteInstance", slot.instance), plan, watcher, ended):
            with self._lock:
                slot.handed = plan._replace(dropped=[])
                self._rouse(slot)

    def _drop(self, plan: Plan) -> Answers:
        for ticket, error in plan.dropped:
            self._recorder.dropped(ticket, error, self._now())
        return [*plan.dropped]

    def _free(self, slot: _Slot) -> None:
        with self._lock:
            slot.busy = False
            if self._stopping or slot.retired:
                self._work.notify_all()

    def _answered(self, plan: Plan) -> None:
        """Only now is a plan done with: a stop waits for answers, not for instances alone."""
        with self._lock:
            self._running -= len(plan.tickets)
            if self._stopping:
                self._work.notify_all()

    def _streams_opened(self, count: int) -> None:
        with self._lock:
            self._running += count  # until each of them has ended
            if self._threads and self._streaming is not None:
                self._streaming.start(self._slots[0].instance.name)

    def _stream_ended(self) -> None:
        with self._lock:
            self._running -= 1
            if self._stopping:
                self._work.notify_all()

    def set_instances(self, instances: Sequence[Instance]) -> None:
        """Run on these from now on; returns when those left out have finished what they run. Any thread may call.

        Not for decoupled models, whose instances answer after they ran, nor for instances that share resources.
        """
        with self._lock:
            known = {id(slot.instance): slot for slot in self._slots}
            self._slots = [known.get(id(instance)) or _Slot(instance) for instance in instances]
            self._judge(instances)
            left_out = [slot for slot in known.values() if slot not in self._slots]
            for slot in left_out:
                slot.retired = True
            self._work.notify_all()
            if len(self._queue) and not self._inline_armed:
                self._wake_thread()
            self._work.wait_for(lambda: not any(slot.busy for slot in left_out))

    # -- the end ----------------------------------------------------------------------------------------------------

    def hasten(self) -> None:
        """From now on nothing waits for company, while more may still come: for a stop of whoever hands it in."""
        with self._lock:
            self._queue.hasten()
            self._work.notify_all()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Take nothing new, run what waits at once, end the threads. False when that took too long (None: wait)."""
        end_ns = None if timeout_s is None else self._now() + int(timeout_s * 1e9)
        with self._lock:
            self._stopping = True
            self._queue.hasten()
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
            done = self._work.wait_for(lambda: self._running == 0, self._left_s(end_ns))
        if done and self._streaming is not None:
            self._streaming.close()
        return done

    def _left_s(self, end_ns: int | None) -> float | None:
        return None if end_ns is None else max(end_ns - self._now(), 0) / 1e9

    def abandon(self, error: RemoraError) -> None:
        """Answer everything that still waits with ``error``: for a stop whose time is over."""
        with self._lock:
            tickets = self._queue.drain()
            self._work.notify_all()
        self._deliver([(ticket, error) for ticket in tickets])
