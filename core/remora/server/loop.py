"""Mailbox that delivers answers in an event loop.

Invariant: one wake-up per batch, and `LoopMailbox.post` does not raise.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable

from remora.messages import Mailbox, Outcome, Ticket
from remora.scheduling.delivery import run_replies
from remora.statistics import LATENCY_BOUNDS_NS, Histogram

_log = logging.getLogger("remora.server")

_SAMPLE_S = 0.5


class LoopMailbox:
    """Mailbox of a running event loop. Create it in that loop's thread.

    ``alone`` returns True if no other request can arrive in the current turn; deferred work then runs at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.alone: Callable[[], bool] = lambda: False
        self._loop = loop
        self._thread = threading.get_ident()
        self._inside = False
        self._due: list[Callable[[], None]] | None = None  # deferred by the work of `collect` that runs now

    @property
    def watcher(self) -> LoopMailbox:
        return self

    def watch(self, fd: int, work: Callable[[int], None]) -> Callable[[], None]:
        own = os.dup(fd)
        self._loop.add_reader(own, work, own)

        def end() -> None:
            self._loop.remove_reader(own)
            os.close(own)

        def end_soon() -> None:
            try:
                self._loop.call_soon_threadsafe(end)
            except RuntimeError:  # the loop is closed
                os.close(own)

        return end_soon

    def call_next(self, work: Callable[[], None]) -> None:
        self._loop.call_soon(work)

    def collect(self, work: Callable[[], None]) -> bool:
        if threading.get_ident() != self._thread or (not self._inside and self.alone()):
            return False
        self._loop.call_soon(self._submit, work)
        return True

    def _submit(self, work: Callable[[], None]) -> None:
        due: list[Callable[[], None]] = []
        self._due = due
        try:
            work()
        finally:
            self._due = None
            for deferred in due:
                deferred()

    def is_current(self) -> bool:
        # The next loop may run in the same thread, or in one with the same identifier.
        return threading.get_ident() == self._thread and self._loop.is_running()

    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def post(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        """Deliver at once in the loop's thread, else with one wake-up of the loop."""
        if threading.get_ident() == self._thread and self._loop.is_running():
            run_replies(deliveries)
            return
        try:
            self._loop.call_soon_threadsafe(run_replies, deliveries)
        except RuntimeError:  # the loop and all its connections are closed
            _log.debug("%d answers came after their event loop was closed", len(deliveries))

    def defer(self, work: Callable[[], None]) -> bool:
        """Run ``work`` in the loop's next turn, after all requests that arrived in this turn.

        Returns False outside the loop's thread, and if the loop does not run.
        """
        if threading.get_ident() != self._thread or not self._loop.is_running():
            return False
        if self._due is not None:
            self._due.append(work)
            return True
        if self._inside or not self.alone():
            self._loop.call_soon(work)
            return True
        self._inside = True
        try:
            work()
        finally:
            self._inside = False
        return True


class PerTurn:
    """Bytes that are computed once in a turn of the loop, however often they are read.

    Args:
        compute: returns the bytes.
        mailbox: of the loop; None to compute them at each read, as outside of the loop's thread.
    """

    def __init__(self, compute: Callable[[], bytes], mailbox: Mailbox | None) -> None:
        self._compute = compute
        self._watcher = mailbox.watcher if mailbox is not None else None
        self._value: bytes | None = None

    def get(self) -> bytes:
        watcher = self._watcher
        if watcher is None or not watcher.is_current():
            return self._compute()
        if self._value is None:
            self._value = self._compute()
            watcher.call_next(self._forget)
        return self._value

    def _forget(self) -> None:
        self._value = None


class Lateness:
    """How late the loop runs its timers, which is how long a request may wait for other work of the loop.

    Create it in the loop's thread; it samples until `stop`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._counts = [0] * (len(LATENCY_BOUNDS_NS) + 1)
        self._sum_ns = 0
        self._sample(loop.time())

    def _sample(self, due: float) -> None:
        late_ns = max(int((self._loop.time() - due) * 1e9), 0)
        self._counts[bisect_left(LATENCY_BOUNDS_NS, late_ns)] += 1
        self._sum_ns += late_ns
        due = self._loop.time() + _SAMPLE_S
        self._timer = self._loop.call_at(due, self._sample, due)

    def stop(self) -> None:
        """Take no more samples."""
        self._timer.cancel()

    def histogram(self) -> Histogram:
        """Return the samples so far."""
        return Histogram(tuple(self._counts), self._sum_ns)
