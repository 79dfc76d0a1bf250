"""Queue and instances of one scheduler, their lock, and the execution of plans on them.

Both ways of dispatch share a `Pool`: an event loop (`loop_dispatch`) and the threads of the instances
(`thread_dispatch`). Methods that need the lock state it; `BatchRunner` takes it itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import cast

from remora.errors import RemoraError
from remora.messages import Ticket, Watcher
from remora.scheduling.batching import BatchQueue, Plan, Queue
from remora.scheduling.running import Answers, Ran, Recorder, Runner, StreamRunner
from remora.scheduling.slots import Slot, Slots

INLINE_LIMIT_NS = 250_000
"""Batches predicted to be shorter run in the caller's event loop, because a thread hop costs about 60 us."""


@dataclass(frozen=True, slots=True)
class DispatchPolicy:
    """How a scheduler runs its batches.

    Attributes:
        threads: False in tests, which call `Scheduler.step` instead.
        inline_limit_ns: an event loop runs batches that are predicted to be shorter.
        may_wait: True if the queue may delay a batch; an event loop then runs none.
        decoupled: True if the model streams its responses.
        ordered: deliver answers in the order of their requests [D06]; not for decoupled models.
    """

    threads: bool = True
    inline_limit_ns: int = INLINE_LIMIT_NS
    may_wait: bool = False
    decoupled: bool = False
    ordered: bool = False


class Pool:
    """Queue and instances of one scheduler.

    Attributes:
        queue: decides on batches.
        slots: the instances.
        now: the scheduler's clock, nanoseconds.
        lock: guards everything here.
        changed: condition on ``lock``; notified when an instance's thread or a stop may continue.
        armed: True while an event loop is about to poll the queue.
        stopping: True once no new requests are accepted.
        running: requests in an execution, or whose answers are being delivered.
        removals: number of callers that wait for removed instances.
    """

    def __init__(self, queue: Queue, slots: Slots, now: Callable[[], int]) -> None:
        self.queue = queue
        self.slots = slots
        self.now = now
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.armed = False
        self.stopping = False
        self.running = 0
        self.removals = 0

    def take(self, slot: Slot) -> Plan:
        """Poll the queue, and mark the slot busy if there is a batch. The lock is held."""
        plan = self.queue.poll(self.now())
        if plan.tickets:
            self.slots.occupy(slot)
            self.running += len(plan.tickets)
        return plan

    def take_ahead(self, slot: Slot) -> Plan:
        """Return a plan to queue behind the running batch. The lock is held.

        If there is none, the slot is barred until that batch ends.
        """
        plan = cast("BatchQueue", self.queue).ahead(self.now(), len(self.slots))
        self.running += len(plan.tickets)
        slot.barred = not plan.tickets
        return plan

    def put_back(self, plan: Plan) -> None:
        """Return a batch that was queued ahead and did not run. The lock is held."""
        self.running -= len(plan.tickets)
        cast("BatchQueue", self.queue).put_back(plan.tickets)

    def free(self, slot: Slot, *, begun: bool = False, unrun: Plan | None = None) -> None:
        """Record the end of a batch, before its answers are delivered.

        ``begun``: an event loop had begun it. ``unrun``: nothing of this plan has run.
        """
        with self.lock:
            self.slots.free(slot, begun=begun)
            if unrun is not None:
                self.put_back(unrun)
            if self.stopping or slot.retired:
                self.changed.notify_all()

    def count_answered(self, count: int = 1) -> None:
        """Count requests as done, after their delivery, because a stop waits for answers."""
        with self.lock:
            self.subtract_running(count)

    def subtract_running(self, count: int) -> None:
        """Count requests as done. The lock is held."""
        self.running -= count
        if self.stopping or self.removals:
            self.changed.notify_all()


class BatchRunner:
    """Execution of plans on the pool's instances, and delivery of the answers.

    No lock is held by the caller of any method.

    Args:
        pool: gets the instances back.
        runner: for models that are not decoupled.
        streaming: for decoupled models, else None.
        recorder: records the dropped requests.
        deliver: delivers answers.
    """

    def __init__(
        self,
        pool: Pool,
        runner: Runner,
        streaming: StreamRunner | None,
        recorder: Recorder,
        deliver: Callable[[Answers], None],
    ) -> None:
        self._pool = pool
        self._runner = runner
        self._run = (streaming or runner).run
        self._recorder = recorder
        self._deliver = deliver

    def run(self, slot: Slot, plan: Plan) -> None:
        """Run a plan in the caller's thread and deliver its answers."""
        self._pool.count_answered(self.run_uncounted(slot, plan))

    def run_uncounted(self, slot: Slot, plan: Plan) -> int:
        """Run a plan like `run`, and return how many requests the caller must count as answered."""
        deliveries = self.drop(plan.dropped) if plan.dropped else []
        left_open = 0
        if plan.tickets:
            try:
                answers, left_open = self._run(slot, plan)
                deliveries += answers
            finally:
                self._pool.free(slot)
        self._deliver(deliveries)
        return len(plan.tickets) - left_open

    def begin(self, slot: Slot, plan: Plan, watcher: Watcher, ended: Callable[[Ran | None], None]) -> bool:
        """Begin a plan on a remote instance. See `Runner.begin`."""
        if plan.dropped:
            self._deliver(self.drop(plan.dropped))
        return self._runner.begin(slot, plan, watcher, ended)

    def finish(self, plan: Plan, ran: Ran) -> None:
        """Deliver the answers of a plan that was begun."""
        self._deliver(ran.answers)
        self._pool.count_answered(len(plan.tickets) - ran.left_open)

    def refuse(self, slot: Slot, plan: Plan, error: RemoraError) -> None:
        """Answer the requests of a plan, for which the slot is busy, with ``error``."""
        self._pool.free(slot)
        self._deliver(self.drop([(ticket, error) for ticket in plan.tickets]))
        self._pool.count_answered(len(plan.tickets))

    def refuse_queued(self, error: RemoraError, own: Collection[Ticket] = ()) -> set[Ticket]:
        """Answer all queued requests with ``error``, because no thread can start to run them.

        Returns those of ``own`` that were queued, which are not answered: an event loop may have taken the others.
        """
        with self._pool.lock:
            tickets = self._pool.queue.drain()
            self._pool.changed.notify_all()
        refused = set(tickets).intersection(own)
        self._deliver(self.drop([(ticket, error) for ticket in tickets if ticket not in refused]))
        return refused

    def drop(self, dropped: Sequence[tuple[Ticket, RemoraError]]) -> Answers:
        """Record requests that do not run, and return their answers."""
        for ticket, error in dropped:
            self._recorder.dropped(ticket, error, self._pool.now())
        return [*dropped]
