"""An event loop as the place where answers are delivered; the law: one wake-up for a batch, and nothing raised."""

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
    """The mailbox of one running event loop. Made in that loop's thread.

    ``alone`` may tell that nothing else can arrive in the current turn; deferred work then need not wait for its end.
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
            except RuntimeError:  # the loop is closed, and watches nothing
                os.close(own)

        return end_soon

    def is_current(self) -> bool:
        """See ``Watcher.is_current``."""
        return threading.get_ident() == self._thread

    def post(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        """Deliver now when the caller is the loop's thread, else in one wake-up of the loop."""
        if threading.get_ident() == self._thread:
            run_replies(deliveries)
            return
        try:
            self._loop.call_soon_threadsafe(run_replies, deliveries)
        except RuntimeError:  # the loop is closed: nobody is left to answer
            _log.debug("%d answers came after the server stopped", len(deliveries))

    def defer(self, work: Callable[[], None]) -> bool:
        """Run ``work`` in the loop's next turn, when what arrived together with this has been taken in."""
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
