"""Mailbox that delivers answers in an event loop.

Invariant: one wake-up per batch, and `LoopMailbox.post` does not raise.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable

from remora.messages import Outcome, Ticket
from remora.scheduling.delivery import run_replies

_log = logging.getLogger("remora.server")


class LoopMailbox:
    """Mailbox of a running event loop. Create it in that loop's thread.

    ``alone`` returns True if no other request can arrive in the current turn; deferred work then runs at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.alone: Callable[[], bool] = lambda: False
        self._loop = loop
        self._thread = threading.get_ident()
        self._inside = False

    @property
    def watcher(self) -> LoopMailbox:
        """See ``Mailbox.watcher``."""
        return self

    def watch(self, fd: int, work: Callable[[int], None]) -> Callable[[], None]:
        """See ``Watcher.watch``."""
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

    def is_current(self) -> bool:
        """See ``Watcher.is_current``."""
        return threading.get_ident() == self._thread

    def post(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        """Deliver at once in the loop's thread, else with one wake-up of the loop."""
        if threading.get_ident() == self._thread:
            run_replies(deliveries)
            return
        try:
            self._loop.call_soon_threadsafe(run_replies, deliveries)
        except RuntimeError:  # the loop and all its connections are closed
            _log.debug("%d answers came after the server stopped", len(deliveries))

    def defer(self, work: Callable[[], None]) -> bool:
        """Run ``work`` in the loop's next turn, after all requests that arrived in this turn.

        Returns False outside the loop's thread.
        """
        if threading.get_ident() != self._thread:
            return False
        if self._inside or not self.alone():
            self._loop.call_soon(work)
            return True
        self._inside = True
        try:
            work()
        finally:
            self._inside = False
        return True
