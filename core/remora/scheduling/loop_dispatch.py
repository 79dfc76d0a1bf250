"""Dispatch in the event loop of the caller.

A batch that is predicted to be short runs in the loop, at the end of the iteration in which its requests arrived. A
batch for a remote instance is only begun there, possibly ahead of the end of the running one. Everything else is passed
to the threads. Invariants:

1. An armed pool is polled: by the loop, or by a thread if the caller is not in the loop.
2. Only full batches are dispatched ahead. If the instance ends before such a batch starts, its tickets return to the
   front of the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from remora.backends import Instance, capabilities_of
from remora.messages import Mailbox, Watcher
from remora.scheduling.batching import BatchQueue, Plan
from remora.scheduling.costs import CostModel
from remora.scheduling.pool import BatchRunner, DispatchPolicy, Pool
from remora.scheduling.running import Ran
from remora.scheduling.slots import Slot
from remora.scheduling.thread_dispatch import NoThreadError, ThreadDispatch


class LoopDispatch:
    """Dispatch of batches in event loops.

    Args:
        pool: queue and instances.
        batches: runs and begins plans.
        threads: run what a loop must not.
        costs: predicts durations.
        policy: of the scheduler.
    """

    def __init__(
        self, pool: Pool, batches: BatchRunner, threads: ThreadDispatch, costs: CostModel, policy: DispatchPolicy
    ) -> None:
        self._pool = pool
        self._batches = batches
        self._threads = threads
        self._costs = costs
        self._policy = policy
        self._quick = self._remote = False
        self._ahead: BatchQueue | None = None
        self._mailbox: Mailbox | None = None
        self._work: Callable[[], None] = _do_nothing

    def update_capabilities(self, instances: Sequence[Instance]) -> None:
        """Derive from the instances what a loop may run. The lock is held if requests can arrive."""
        promptly = not self._policy.may_wait
        self._quick = promptly and all(instance.quick for instance in instances)
        capabilities = [capabilities_of(instance) for instance in instances]
        self._remote = promptly and not self._policy.decoupled and all(each.remote for each in capabilities)
        queue = self._pool.queue
        ahead = self._remote and all(each.ahead for each in capabilities)
        self._ahead = queue if ahead and isinstance(queue, BatchQueue) else None

    def arm(self, mailbox: Mailbox | None) -> bool:
        """Have the queue polled if an instance is idle. The lock is held and the pool is not armed.

        Returns True if the caller's loop does it; the caller must then call `defer` without the lock.
        """
        pool = self._pool
        if not pool.slots.idle:
            pool.armed = self._ahead is not None and self._behind(mailbox) is not None
        elif mailbox is not None and (
            mailbox.watcher is not None
            if self._remote
            else self._quick and self._costs.predict(pool.queue.rows_ahead) <= self._policy.inline_limit_ns
        ):
            pool.armed = True
        else:
            self._threads.wake()
        return pool.armed

    def _behind(self, mailbox: Mailbox | None) -> Slot | None:
        """Return the slot behind whose batch the caller's loop may begin another. The lock is held."""
        if (
            self._ahead is None
            or mailbox is None
            or mailbox.watcher is None
            or not self._ahead.crowded(len(self._pool.slots))
        ):
            return None
        return self._pool.slots.next_ahead()

    def defer(self, mailbox: Mailbox) -> None:
        """Have the caller's loop, or else a thread, poll the queue. The lock is not held.

        A loop polls at the end of its iteration. A thread is woken if the caller is not in the mailbox's loop.
        """
        if self._mailbox is not mailbox:  # the same callback while one loop calls
            self._mailbox, self._work = mailbox, partial(self._dispatch, mailbox)
        if not mailbox.defer(self._work):
            with self._pool.lock:
                self._pool.armed = False
                self._threads.wake()

    def _dispatch(self, mailbox: Mailbox) -> None:
        """Run or begin one batch in the caller's loop, then arrange for the next one."""
        pool = self._pool
        with pool.lock:
            pool.armed = False
            if (slot := pool.slots.next()) is not None:
                plan = pool.take(slot)
            elif (slot := self._behind(mailbox)) is not None:
                plan = pool.take_ahead(slot)
            else:
                return  # the thread that uses the instance polls again when it is done
            watcher = mailbox.watcher if self._remote and plan.tickets else None
            slot.begun += watcher is not None
        if watcher is not None:
            self._begin(slot, plan, mailbox, watcher)
            self._rearm(mailbox)
        else:
            self._rearm(mailbox, self._batches.run_uncounted(slot, plan))

    def _rearm(self, mailbox: Mailbox, answered: int | None = None) -> None:
        """Count the answered requests of a batch that has run, and poll the queue again later.

        A batch without requests counts too, because a stop waits for the queue that it has emptied.
        """
        pool = self._pool
        try:
            with pool.lock:
                if answered is not None:
                    pool.subtract_running(answered)
                armed = len(pool.queue) > 0 and not pool.armed and self.arm(mailbox)
            if armed:
                self.defer(mailbox)
        except NoThreadError as error:
            self._batches.refuse_queued(error)

    def _begin(self, slot: Slot, plan: Plan, mailbox: Mailbox, watcher: Watcher) -> None:
        """Begin a batch on a remote instance. It may end in any thread."""
        pool = self._pool

        def ended(ran: Ran | None) -> None:
            pool.free(slot, begun=True, unrun=plan if ran is None else None)
            if watcher.is_current() and len(pool.queue):
                self._dispatch(mailbox)  # at once, because the instance would idle while the answers are written
            else:
                self._rearm(mailbox)
            if ran is not None:
                self._batches.finish(plan, ran)

        if not self._batches.begin(slot, plan, watcher, ended):
            try:
                with pool.lock:
                    slot.begun -= 1
                    slot.barred = slot.begun > 0
                    if slot.barred:
                        pool.put_back(plan)
                    else:
                        slot.handed = plan._replace(dropped=[])
                        self._threads.wake_slot(slot)
            except NoThreadError as error:
                slot.handed = None
                self._batches.refuse(slot, plan, error)


def _do_nothing() -> None:
    """Do nothing, before the first call of a loop."""
