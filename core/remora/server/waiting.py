"""Requests over HTTP that wait for a model on its way; the law: few enough, not too long, each answered once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future

from remora.errors import RemoraError, UnavailableError
from remora.model_table import LoadingError
from remora.protocols.http_answer import INTERNAL, encode_error, failure
from remora.server.exchange import Exchange

_log = logging.getLogger("remora.http")


class WaitingRoom:
    """Holds requests until what they need is loaded. All of it happens in the event loop's thread.

    Args:
        seats: how many may wait at the same time.
        patience_s: how long each may wait.
    """

    def __init__(self, seats: int, patience_s: float) -> None:
        self._seats = seats
        self._patience_s = patience_s
        self._taken = 0

    def take(self, loading: LoadingError, exchange: Exchange, timeout_ns: int, go_on: Callable[[int], object]) -> None:
        """Call ``go_on`` with the nanoseconds that it took, once what is loading is there.

        The exchange is answered with 503 when there is no seat, when the load fails, or when it takes longer than
        ``timeout_ns`` (0 for none) or the room's patience.
        """
        if self._taken >= self._seats:
            error = UnavailableError(f"{loading.message}, and {self._taken} wait for it")
            exchange.respond(encode_error(error, plain=True))
            return
        self._taken += 1
        loop = asyncio.get_running_loop()
        begin = loop.time()
        limit_s = min(self._patience_s, timeout_ns / 1e9) if timeout_ns else self._patience_s
        left = False

        def leave() -> bool:
            nonlocal left
            was_there, left = not left, True
            self._taken -= was_there
            timer.cancel()
            return was_there

        def give_up() -> None:
            if leave():
                error = UnavailableError(f"{loading.message}: the request waited for {limit_s:g} s")
                exchange.respond(encode_error(error, plain=True))

        def arrived(ready: Future[None]) -> None:
            if not leave():
                return
            fault = ready.exception()
            if fault is not None:
                known = fault if isinstance(fault, RemoraError) else UnavailableError(loading.message)
                exchange.respond(encode_error(known, plain=True))
                return
            try:
                go_on(int((loop.time() - begin) * 1e9))
            except Exception:  # nobody else is there to answer
                _log.exception("a request that had waited failed")
                exchange.respond(failure(500, INTERNAL, plain=True))

        timer = loop.call_later(limit_s, give_up)
        loading.ready.add_done_callback(lambda ready: _tell(loop, arrived, ready))


def _tell(loop: asyncio.AbstractEventLoop, arrived: Callable[[Future[None]], None], ready: Future[None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(arrived, ready)
