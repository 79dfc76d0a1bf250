"""Response cache in front of a scheduler, and a wrapper for caches that block [K03, K05].

Both wrap another scheduler, so that models without a cache pay nothing for it. Invariants:

1. A hit enters no queue and no batch.
2. Only a model's successful response is inserted.
3. A response that cannot be inserted is still delivered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from remora.cache import ResponseCache, request_key
from remora.errors import RemoraError
from remora.messages import Outcome, Response, Ticket
from remora.scheduling.delivery import deliver, failure_of, stopping
from remora.scheduling.scheduler import RequestScheduler
from remora.system.clock import Clock


class CacheRecorder(Protocol):
    """Counter of hits and misses.

    Called without locks, from any thread; must not raise.
    """

    def cache_hit(self, ticket: Ticket, lookup_ns: int, begin_ns: int, now_ns: int) -> None:
        """Count a request answered from the cache.

        The look-up began at ``begin_ns``; the answer was ready at ``now_ns``.
        """

    def cache_miss(self, spent_ns: int, now_ns: int) -> None:
        """Count a request that had to run.

        ``spent_ns`` is the sum of look-up and insertion.
        """


class CachedScheduler:
    """Scheduler of one model version with the response cache enabled.

    Args:
        inner: the model's own scheduler.
        cache: shared by all models of the engine.
        scope: the model's key scope, from the cache.
        recorder: the model's.
        clock: the engine's.
        composed: True if other models compute the responses, as in an ensemble; they become stale when those models
            change [E09].
    """

    def __init__(
        self,
        inner: RequestScheduler,
        cache: ResponseCache,
        scope: bytes,
        recorder: CacheRecorder,
        clock: Clock,
        *,
        composed: bool = False,
    ) -> None:
        self.inner = inner
        self.costs = inner.costs
        self._cache = cache
        self._scope = scope
        self._recorder = recorder
        self._now = clock.monotonic_ns
        self._composed = composed
        self._stopping = False

    def submit(self, ticket: Ticket) -> None:
        """Answer from the cache, possibly before this returns, or pass the ticket on.

        Any thread may call. Raises what the inner scheduler raises; the ticket is then not answered.
        """
        begin_ns = self._now()
        ticket.arrival_ns = ticket.arrival_ns or begin_ns
        if self._stopping or ticket.request.cancelled:  # the inner scheduler answers these
            self.inner.submit(ticket)
            return
        scope = b"%b %d" % (self._scope, self._cache.epoch) if self._composed else self._scope
        key = request_key(scope, ticket.request)
        if key is None:
            self.inner.submit(ticket)
            return
        response = self._cache.lookup(key)
        now_ns = self._now()
        if response is None:
            ticket.reply = self._insert_before(key, ticket.reply, now_ns - begin_ns)
            self.inner.submit(ticket)
            return
        ticket.start_ns = begin_ns
        self._recorder.cache_hit(ticket, now_ns - begin_ns, begin_ns, now_ns)
        deliver([(ticket, response)])

    def _insert_before(
        self, key: bytes, reply: Callable[[Ticket, Outcome], None], lookup_ns: int
    ) -> Callable[[Ticket, Outcome], None]:
        """Return a reply that inserts the response first, because the client owns it afterwards."""

        def insert_and_reply(ticket: Ticket, outcome: Outcome) -> None:
            begin_ns = self._now()
            if isinstance(outcome, Response):
                self._cache.insert(key, outcome)
            now_ns = self._now()
            self._recorder.cache_miss(lookup_ns + now_ns - begin_ns, now_ns)
            reply(ticket, outcome)

        return insert_and_reply

    @property
    def pending(self) -> int:
        return self.inner.pending

    @property
    def oldest_ns(self) -> int:
        return self.inner.oldest_ns

    @property
    def running(self) -> int:
        return self.inner.running

    def stop(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests, hits included, and finish the queued ones.

        Returns False on timeout; None waits without limit.
        """
        self._stopping = True
        return self.inner.stop(timeout_s)

    def fail_pending(self, error: RemoraError) -> None:
        self.inner.fail_pending(error)


class RefusalRecorder(Protocol):
    """Counter of refused requests.

    Called without locks, from any thread; must not raise.
    """

    def refused(self, error: RemoraError) -> None:
        """Count a request that was accepted first and then refused."""


class OffLoopScheduler:
    """Scheduler wrapper that moves requests from event loops to threads that may block.

    Args:
        inner: the scheduler whose `submit` may block.
        run: runs work in such a thread.
        recorder: the model's.
        clock: for arrival times.
    """

    def __init__(
        self,
        inner: RequestScheduler,
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
        self._in_flight = 0
        self._stopping = False

    def submit(self, ticket: Ticket) -> None:
        """Submit a ticket at once if its caller may block, else in a thread.

        Any thread may call. Raises what the inner scheduler raises, or UnavailableError during a stop; the ticket is
        then not answered.
        """
        if ticket.mailbox is None:
            self.inner.submit(ticket)
            return
        ticket.arrival_ns = ticket.arrival_ns or self._now()
        with self._changed:
            if self._stopping:
                raise stopping()
            self._in_flight += 1
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
                self._in_flight -= 1
                self._changed.notify_all()

    @property
    def pending(self) -> int:
        """Queued requests [P04], including those that wait for the cache."""
        return self._in_flight + self.inner.pending

    @property
    def oldest_ns(self) -> int:
        """Arrival of the queued request that has waited longest, or 0.

        Requests that wait for the cache are left out.
        """
        return self.inner.oldest_ns

    @property
    def running(self) -> int:
        return self.inner.running

    def stop(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and finish the queued ones.

        Returns False on timeout; None waits without limit.
        """
        begin_ns = self._now()
        with self._changed:
            self._stopping = True
            if not self._changed.wait_for(lambda: not self._in_flight, timeout_s):
                return False
        return self.inner.stop(None if timeout_s is None else max(timeout_s - (self._now() - begin_ns) / 1e9, 0.0))

    def fail_pending(self, error: RemoraError) -> None:
        self.inner.fail_pending(error)
