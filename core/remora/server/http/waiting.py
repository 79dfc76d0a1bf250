"""HTTP requests that wait for a model being loaded, bounded in number and time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from remora.errors import CancelledError, RemoraError, UnavailableError
from remora.messages import Buffer
from remora.models.table import LoadingError
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import INTERNAL, encode_error, failure
from remora.server.http.exchange import Cancellable, Exchange

_log = logging.getLogger("remora.http")

Wait = Callable[[Callable[[Head, Buffer, Exchange], Cancellable | None], Head, Buffer, Exchange], Cancellable | None]
"""Runs work, and runs it again once the model that it needs is loaded; see `RestService.when_loaded`."""
GoOn = Callable[[int], Cancellable | None]
"""Handles a request after a wait in nanoseconds; returns its cancellable continuation."""


class LoadWaiters:
    """Requests that wait until their model is loaded. Use it in the event loop's thread.

    Args:
        max_waiting: number of requests that may wait at the same time.
        timeout_s: how long each may wait.
    """

    def __init__(self, max_waiting: int, timeout_s: float) -> None:
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._waiting: dict[Future[None], dict[_Waiting, None]] = {}  # by load, in order of arrival

    @property
    def taken(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    def take(self, loading: LoadingError, exchange: Exchange, timeout_ns: int, go_on: GoOn) -> Cancellable | None:
        """Call ``go_on`` with the wait in nanoseconds once the load has ended.

        It may raise LoadingError to wait again. The exchange is answered with 503 if too many requests wait, if the
        load fails, or if it takes longer than ``timeout_ns`` (0 for none) or ``timeout_s``. The result can be cancelled
        during the wait and after it.
        """
        if self.taken >= self._max_waiting:
            error = UnavailableError(f"{loading.message}, and {self.taken} wait for it")
            exchange.respond(encode_error(error, plain=True))
            return None
        limit_s = min(self._timeout_s, timeout_ns / 1e9) if timeout_ns else self._timeout_s
        return _Waiting(self, loading, exchange, limit_s, go_on)

    def add(self, waiting: _Waiting, ready: Future[None]) -> None:
        """Resume a request when the load has ended."""
        others = self._waiting.get(ready)
        if others is not None:
            others[waiting] = None
            return
        self._waiting[ready] = {waiting: None}
        loop = asyncio.get_running_loop()
        # One callback per load, because a Future never drops callbacks and would keep the bodies of cancelled requests.
        ready.add_done_callback(lambda ready: _tell(loop, self._arrived, ready))

    def remove(self, waiting: _Waiting, ready: Future[None]) -> bool:
        """Remove a request; return False if it was removed before."""
        others = self._waiting.get(ready, {})
        if waiting not in others:
            return False
        del others[waiting]
        return True

    def _arrived(self, ready: Future[None]) -> None:
        for waiting in self._waiting.pop(ready):
            waiting.arrived(ready.exception())


class _Waiting:
    """One waiting request; after the wait, the handle of its continuation."""

    def __init__(
        self, room: LoadWaiters, loading: LoadingError, exchange: Exchange, limit_s: float, go_on: GoOn
    ) -> None:
        self._room = room
        self._loading = loading
        self._exchange = exchange
        self._limit_s = limit_s
        self._go_on = go_on
        self._became: Cancellable | None = None
        loop = self._loop = asyncio.get_running_loop()
        self._begin = loop.time()
        self._timer = loop.call_later(limit_s, self._give_up)
        room.add(self, loading.ready)

    def cancel(self) -> None:
        if self._remove():
            self._refuse(CancelledError(f"{self._loading.message}: the client left before"))
        elif self._became is not None:
            self._became.cancel()

    def _remove(self) -> bool:
        removed = self._room.remove(self, self._loading.ready)
        if removed:
            self._timer.cancel()
        return removed

    def _give_up(self) -> None:
        if self._remove():
            self._refuse(UnavailableError(f"{self._loading.message}: the request waited for {self._limit_s:g} s"))

    def arrived(self, fault: BaseException | None) -> None:
        """Continue or refuse the request after the load has ended.

        The load is no longer in the table.
        """
        if fault is not None:
            self._timer.cancel()
            self._refuse(fault if isinstance(fault, RemoraError) else UnavailableError(self._loading.message))
            return
        try:
            self._became = self._go_on(int((self._loop.time() - self._begin) * 1e9))
        except LoadingError as again:  # its time limit is unchanged
            self._loading = again
            self._room.add(self, again.ready)
            return
        except Exception:  # no caller is left to answer
            _log.exception("a request that had waited failed")
            self._exchange.respond(failure(500, INTERNAL, plain=True))
        self._timer.cancel()

    def _refuse(self, error: RemoraError) -> None:
        self._exchange.respond(encode_error(error, plain=True))


def _tell(loop: asyncio.AbstractEventLoop, arrived: Callable[[Future[None]], None], ready: Future[None]) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(arrived, ready)
