"""Thread that refuses requests at the time of their queue timeout [D10].

Polling an idle instance refuses them as well, but all instances may be busy for as long as a batch takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from remora.errors import RemoraError
from remora.messages import Ticket
from remora.scheduling.pool import Pool

IDLE_S = 1.0
"""How long the thread outlives the last queued request with a timeout."""

Refuse = Callable[[Sequence[tuple[Ticket, RemoraError]]], None]


class QueueTimeouts:
    """Queue timeouts of one scheduler.

    Args:
        pool: queue and instances.
        refuse: answers the refused requests; called without the lock.
        enabled: False in tests, which call `Scheduler.step` instead.
    """

    def __init__(self, pool: Pool, refuse: Refuse, *, enabled: bool = True) -> None:
        self._pool = pool
        self._refuse = refuse
        self._enabled = enabled
        self._changed = threading.Condition(pool.lock)
        self._thread: threading.Thread | None = None
        self._wakes_ns = 0  # when the thread wakes by itself; 0 while it sleeps without a request

    def expect(self) -> None:
        """Refuse the queued requests in time, after one was added. The lock is held."""
        next_ns = self._pool.queue.next_refusal_ns() if self._enabled else 0
        if not next_ns or 0 < self._wakes_ns <= next_ns:
            return
        if self._thread is not None:
            self._changed.notify()
            return
        thread = threading.Thread(target=self._serve, name="remora queue timeouts", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process has no room for it: the next poll of an instance refuses them
            return
        self._thread = thread

    def _serve(self) -> None:
        pool = self._pool
        while True:
            with pool.lock:
                dropped = self._await_refusals()
                pool.running += len(dropped)  # a stop waits for their answers
            if not dropped:
                return
            self._refuse(dropped)
            pool.count_answered(len(dropped))
            del dropped

    def _await_refusals(self) -> Sequence[tuple[Ticket, RemoraError]]:
        """Return the requests to refuse now, or nothing at the end of the thread. The lock is held."""
        pool = self._pool
        while True:
            next_ns = pool.queue.next_refusal_ns()
            if next_ns:
                now_ns = pool.now()
                if dropped := pool.queue.drop_expired(now_ns) if next_ns <= now_ns else ():
                    self._wakes_ns = now_ns
                    return dropped
                self._wakes_ns = next_ns
                self._changed.wait(max(next_ns - now_ns, 0) / 1e9)
            else:
                self._wakes_ns = 0
                self._changed.wait(IDLE_S)
                if not pool.queue.next_refusal_ns():
                    self._thread = None
                    return ()
