"""Requests over HTTP that wait for a model on its way; the law: few enough, not too long, each answered once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future

from remora.errors import CancelledError, RemoraError, UnavailableError
from remora.models.table import LoadingError
from remora.protocols.rest.answer import INTERNAL, encode_error, failure
from remora.server.http.exchange import Cancellable, Exchange

_log = logging.getLogger("remora.http")


GoOn = Callable[[int], Cancellable | None]
"""Handles a request that has waited for so many nanoseconds; what it has become can be cancelled."""


class LoadWaiters:
    """Holds requests until what they need is loaded. All of it happens in the event loop's thread.

    Args:
        seats: how many may wait at the same time.
        patience_s: how long each may wait.
    """

    def __init__(self, seats: int, patience_s: float) -> None:
        self._seats = seats
        self._patience_s = patience_s
        self._waiting: dict[Future[None], dict[_Waiting, None]] = {}  # by load, who came first in front

    @property
    def taken(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))

    def take(self, loading: LoadingError, exchange: Exchange, timeout_ns: int, go_on: GoOn) -> Cancellable | None:
        """Call ``go_on`` with the nanoseconds that it took, once what is loading is there; it may raise LoadingError
        to wait for more.

        The exchange is answered with 503 when there is no seat, when the load fails, or when it takes longer than
        ``timeout_ns`` (0 for none) or the room's patience. What this returns can be cancelled, before and after.
        """
        if self.taken >= self._seats:
            error = UnavailableError(f"{loading.message}, and {self.taken} wait for it")
            exchange.respond(encode_error(error, plain=True))
            return None
        limit_s = min(self._patience_s, timeout_ns / 1e9) if timeout_ns else self._patience_s
        return _Waiting(self, loading, exchange, limit_s, go_on)

    def sit(self, waiting: _Waiting, ready: Future[None]) -> None:
        """Wake it when this load has ended."""
        others = self._waiting.get(ready)
        if others is not None:
            others[waiting] = None
            return
        self._waiting[ready] = {waiting: None}
        loop = asyncio.get_running_loop()
        # Once for a load: a future keeps what it is to call, and would keep the body of each who has left.
        ready.add_done_callback(lambda ready: _tell(loop, self._arrived, ready))

    def leave(self, waiting: _Waiting, ready: Future[None]) -> bool:
        """Give the seat back; False when it was given back before."""
        others = self._waiting.get(ready, {})
        if waiting not in others:
            return False
        del others[waiting]
        return True

    def _arrived(self, ready: Future[None]) -> None:
        for waiting in self._waiting.pop(ready):
            waiting.arrived(ready.exception())


class _Waiting:
    """A request in the room; once it has gone on, it stands for what the request has become."""

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
        room.sit(self, loading.ready)

    def cancel(self) -> None:
        if self._leave():
            self._refuse(CancelledError(f"{self._loading.message}: the client left before"))
        elif self._became is not None:
            self._became.cancel()

    def _leave(self) -> bool:
        left = self._room.leave(self, self._loading.ready)
        if left:
            self._timer.cancel()
        return left

    def _give_up(self) -> None:
        if self._leave():
            self._refuse(UnavailableError(f"{self._loading.message}: the request waited for {self._limit_s:g} s"))

    def arrived(self, fault: BaseException | None) -> None:
        """The load has ended, and the seat is free."""
        if fault is not None:
            self._timer.cancel()
            self._refuse(fault if isinstance(fault, RemoraError) else UnavailableError(self._loading.message))
            return
        try:
            self._became = self._go_on(int((self._loop.time() - self._begin) * 1e9))
        except LoadingError as again:  # its time goes on
            self._loading = again
            self._room.sit(self, again.ready)
            return
        except Exception:  # nobody else is there to answer
            _log.exception("a request that had waited failed")
            self._exchange.respond(failure(500, INTERNAL, plain=True))
        self._timer.cancel()

    def _refuse(self, error: RemoraError) -> None:
        self._exchange.respond(encode_error(error, plain=True))


def _tell(loop: asyncio.AbstractEventLoop, arrived: Callable[[Future[None]], None], ready: Future[None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(arrived, ready)
