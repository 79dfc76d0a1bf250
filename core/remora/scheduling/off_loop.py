"""Lets requests from event loops wait elsewhere, where the scheduler behind may have to wait for a cache.

In front of such a scheduler alone: others pay nothing for it. Laws: an event loop never waits; a request that is
refused after it was taken is answered with the refusal; a stop waits for what is on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from remora.errors import RemoraError
from remora.messages import Ticket
from remora.scheduling.delivery import deliver, failure_of, stopping
from remora.scheduling.response_cache import InnerScheduler
from remora.system.clock import Clock


class RefusalRecorder(Protocol):
    """Counts requests that were refused. Called without locks, from any thread; must not raise."""

    def refused(self, error: RemoraError) -> None:
        """A request that had been taken was refused, and is answered so."""


class OffLoopScheduler:
    """Hands the requests of event loops to threads that may wait.

    Args:
        inner: whose `submit` may wait.
        run: does work in such a thread.
        recorder: the model's.
        clock: stamps arrivals.
    """

    def __init__(
        self,
        inner: InnerScheduler,
        run: Callable[[Callable[[], None]], None],
        recorder: RefusalRecorder,
        clock: Clock,
    ) -> None:
        self.inner = inner
        self.costs = inner.costs
        self._run = run
        self._recorder = recorder
        self._now = clock.monotonic_ns
        self._changed = threading.Condition()
        self._under_way = 0
        self._stopping = False

    def submit(self, ticket: Ticket) -> None:
        """Take a ticket: at once where its caller may wait, else by a thread. Any thread may call.

        Raises what the inner scheduler raises, or UnavailableError when it stops; the ticket is then not answered.
        """
        if ticket.mailbox is None:
            self.inner.submit(ticket)
            return
        ticket.arrival_ns = ticket.arrival_ns or self._now()
        with self._changed:
            if self._stopping:
                raise stopping()
            self._under_way += 1
        self._run(lambda: self._hand_on(ticket))

    def _hand_on(self, ticket: Ticket) -> None:
        try:
            self.inner.submit(ticket)
        except Exception as error:
            failure = failure_of(error, "the response cache")
            self._recorder.refused(failure)
            deliver([(ticket, failure)])
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    @property
    def pending(self) -> int:
        """Requests that wait (spec P04), those that wait for the cache included."""
        return self._under_way + self.inner.pending

    @property
    def running(self) -> int:
        """Requests inside an execution now."""
        return self.inner.running

    def stop(self, timeout_s: float | None = None) -> bool:
        """Take nothing new, finish what waits; False when that did not end in time (None: wait)."""
        begin_ns = self._now()
        with self._changed:
            self._stopping = True
            if not self._changed.wait_for(lambda: not self._under_way, timeout_s):
                return False
        return self.inner.stop(None if timeout_s is None else max(timeout_s - (self._now() - begin_ns) / 1e9, 0.0))

    def abandon(self, error: RemoraError) -> None:
        """Answer everything that still waits with ``error``."""
        self.inner.abandon(error)
