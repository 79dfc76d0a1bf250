"""Answers from the cache before the scheduler is asked, and into it afterwards [K03, K05].

A scheduler in front of another one, so that models without a cache pay nothing for it. Laws: a hit takes part in no
queue and no batch; only a model's success is kept; an answer that cannot be kept still goes to its caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from remora.cache import ResponseCache, request_key
from remora.errors import RemoraError
from remora.messages import Outcome, Response, Ticket
from remora.scheduling.costs import CostModel
from remora.scheduling.delivery import deliver, failure_of, stopping
from remora.system.clock import Clock


class InnerScheduler(Protocol):
    """What the requests that miss go to."""

    costs: CostModel

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket. Raises UnavailableError; the ticket is then not answered."""

    @property
    def pending(self) -> int:
        """Requests that wait."""

    @property
    def running(self) -> int:
        """Requests inside an execution."""

    def stop(self, timeout_s: float | None = None) -> bool:
        """Take nothing new, finish what waits; False when that did not end in time."""

    def abandon(self, error: RemoraError) -> None:
        """Answer everything that still waits with ``error``."""


class CacheRecorder(Protocol):
    """Counts hits and misses. Called without locks, from any thread; must not raise."""

    def cache_hit(self, ticket: Ticket, lookup_ns: int, begin_ns: int, now_ns: int) -> None:
        """A request was answered from the cache: asked at ``begin_ns``, answered at ``now_ns``."""

    def cache_miss(self, spent_ns: int, now_ns: int) -> None:
        """A request had to run; ``spent_ns`` is what the look-up and the keeping of its answer took together."""


class CachedScheduler:
    """The requests of one model version that has the response cache on.

    Args:
        inner: the model's own scheduler.
        cache: shared by all models of the engine.
        scope: the model's, from the cache.
        recorder: the model's.
        clock: the engine's.
        composed: whether other models make the answers, as an ensemble's; theirs change with those models [E09].
    """

    def __init__(
        self,
        inner: InnerScheduler,
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
        """Answer from the cache, maybe before this returns, or hand the ticket on. Any thread may call.

        Raises what the inner scheduler raises; the ticket is then not answered.
        """
        begin_ns = self._now()
        ticket.arrival_ns = ticket.arrival_ns or begin_ns
        if self._stopping or ticket.request.cancelled:  # its scheduler knows what to answer
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
            ticket.reply = self._keeping(key, ticket.reply, now_ns - begin_ns)
            self.inner.submit(ticket)
            return
        ticket.start_ns = begin_ns
        self._recorder.cache_hit(ticket, now_ns - begin_ns, begin_ns, now_ns)
        deliver([(ticket, response)])

    def _keeping(
        self, key: bytes, reply: Callable[[Ticket, Outcome], None], lookup_ns: int
    ) -> Callable[[Ticket, Outcome], None]:
        """The reply that keeps the answer first: afterwards it belongs to whoever asked."""

        def keep_and_reply(ticket: Ticket, outcome: Outcome) -> None:
            begin_ns = self._now()
            if isinstance(outcome, Response):
                self._cache.insert(key, outcome)
            now_ns = self._now()
            self._recorder.cache_miss(lookup_ns + now_ns - begin_ns, now_ns)
            reply(ticket, outcome)

        return keep_and_reply

    @property
    def pending(self) -> int:
        """Requests that wait [P04]."""
        return self.inner.pending

    @property
    def running(self) -> int:
        """Requests inside an execution now."""
        return self.inner.running

    def stop(self, timeout_s: float | None = None) -> bool:
        """Take nothing new, hits included, and finish what waits; False when that did not end in time (None: wait)."""
        self._stopping = True
        return self.inner.stop(timeout_s)

    def abandon(self, error: RemoraError) -> None:
        """Answer everything that still waits with ``error``."""
        self.inner.abandon(error)


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
        """Requests that wait [P04], those that wait for the cache included."""
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
