"""Threads of a scheduler's instances, one each, started on first use.

Each idle instance's thread pulls its own batch, and the thread that ends a batch polls the queue again. All methods
without a note in their docstring need the pool's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from remora.errors import UnavailableError
from remora.scheduling.batching import RESOURCES, Plan
from remora.scheduling.pool import BatchRunner, Pool
from remora.scheduling.slots import Slot

if TYPE_CHECKING:
    from remora.scheduling.rate_limiter import Turn

_NO_PLAN = Plan([])


class NoThreadError(UnavailableError):
    """Raised when the process can have no more threads."""


class ThreadDispatch:
    """Dispatch of batches to the threads of their instances.

    Args:
        pool: queue and instances.
        batches: runs plans.
        turns: of each instance that shares resources with others [I08].
        enabled: False in tests that call `Scheduler.step` instead.
    """

    def __init__(self, pool: Pool, batches: BatchRunner, turns: Mapping[Slot, Turn], *, enabled: bool = True) -> None:
        self._pool = pool
        self._batches = batches
        self._turns = turns
        self.enabled = enabled

    def wake(self) -> None:
        """Wake the thread of an instance that may run.

        Raises NoThreadError if no instance has a thread and none can start.

        The thread of a slot whose batch was begun by a loop may sleep too: waking only that one would be useless,
        because it has to wait until its instance is free.
        """
        if not self.enabled:
            return
        slots = self._pool.slots
        fresh: Slot | None = None
        ready = unready = False
        for slot in slots:
            if slot.resting:
                if slots.may_run(slot):
                    ready = True
                else:
                    unready = True
            elif slot.thread is None and fresh is None and slots.may_run(slot):
                fresh = slot
        if ready and not unready:
            self._pool.changed.notify()
        elif ready:
            self._pool.changed.notify_all()  # because the condition is shared and the order of wake-ups is undefined
        elif fresh is not None:
            try:
                self._start(fresh)
            except NoThreadError:
                if not any(slot.thread for slot in slots):  # else theirs poll the queue when they are done
                    raise

    def wake_slot(self, slot: Slot) -> None:
        """Wake the thread of this slot. Raises NoThreadError."""
        if slot.thread is not None:
            self._pool.changed.notify_all()
        elif self.enabled:
            self._start(slot)

    def _start(self, slot: Slot) -> None:
        thread = slot.thread = threading.Thread(
            target=self._serve_in_turn if self._turns else self._serve,
            args=(slot,),
            name=f"remora {slot.instance.name}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:
            slot.thread = None
            raise NoThreadError(f"the request cannot run: {error}") from error

    # -- the threads ------------------------------------------------------------------------------------------------

    def _serve(self, slot: Slot) -> None:
        """Run the main loop of an instance's thread. It takes the lock."""
        while True:
            try:
                with self._pool.lock:
                    plan = self._await_plan(slot)
            except NoThreadError as error:
                self._batches.refuse_queued(error)
                return
            if plan is None:
                return
            self._batches.run(slot, plan)
            del plan  # because waiting for the next batch must not keep the requests of this one alive

    def _await_plan(self, slot: Slot) -> Plan | None:
        """Wait for a batch or dropped tickets.

        Returns None at shutdown or if the slot is retired. Raises NoThreadError if the slot is retired and no other can
        run the queued requests.
        """
        pool = self._pool
        while True:
            if slot.handed is not None:
                plan, slot.handed = slot.handed, None
                return plan
            if slot.retired and not slot.busy:
                if len(pool.queue):
                    self.wake()  # because the wake-up was meant for a slot that remains
                return None
            plan = self._poll(slot)
            if plan.tickets or plan.dropped:
                return plan
            if pool.stopping and not len(pool.queue) and not slot.busy:  # a busy slot may still be handed its batch
                return None
            self._rest(slot, plan.wake_ns)

    def _poll(self, slot: Slot) -> Plan:
        """Poll the queue for a slot.

        Wakes another one for the rest of the queue, or if this slot may not run.
        """
        pool = self._pool
        if slot.busy or pool.armed or not len(pool.queue):
            return _NO_PLAN
        if not pool.slots.may_run(slot):
            if (other := pool.slots.next()) is not None:
                with suppress(NoThreadError):  # the next request tries again
                    self.wake_slot(other)
            return _NO_PLAN
        plan = pool.take(slot)
        if (plan.tickets or plan.dropped) and len(pool.queue) and not plan.wake_ns:
            self.wake()
        return plan

    def _rest(self, slot: Slot, wake_ns: int = 0) -> None:
        """Sleep in the thread of ``slot`` until notified or ``wake_ns``.

        ``wake_ns`` 0 means no time limit.
        """
        timeout = max(wake_ns - self._pool.now(), 0) / 1e9 if wake_ns else None
        slot.resting = True
        self._pool.changed.wait(timeout)
        slot.resting = False

    def _serve_in_turn(self, slot: Slot) -> None:
        """Run the main loop of the thread of an instance that shares resources. It takes the lock.

        It forms its batch when the resources are granted.
        """
        turn = self._turns[slot]
        pool = self._pool
        while self._await_request(slot):
            waited = turn.acquire()
            with pool.lock:
                plan = pool.take(slot)
                if plan.tickets and len(pool.queue):
                    self.wake()
                elif not plan.tickets:
                    turn.release(ran=False)
                    if len(pool.queue) and not plan.dropped:
                        self._rest(slot, plan.wake_ns)
            try:
                self._batches.run(slot, plan._replace(reason=RESOURCES) if waited else plan)
            finally:
                if plan.tickets:
                    turn.release(ran=True)
            del plan  # as above

    def _await_request(self, slot: Slot) -> bool:
        """Wait until the queue is not empty. Return False at shutdown. It takes the lock."""
        with self._pool.lock:
            while not len(self._pool.queue):
                if self._pool.stopping:
                    return False
                self._rest(slot)
            return True
