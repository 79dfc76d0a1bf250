"""Models that are loaded when they are first asked for; the law: one load for all who ask at the same time.

A load that failed is not tried again at once: who asks soon after is told of the same failure.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import NamedTuple

from remora.errors import InternalError, RemoraError
from remora.system.clock import Clock

_log = logging.getLogger("remora.models")

FAILURE_HOLDS_NS = 5_000_000_000


class _Flight(NamedTuple):
    done: Future[None]
    begin_ns: int


class OnDemand:
    """Thread-safe.

    Args:
        load: loads a model and returns when it serves; raises RemoraError.
        clock: for how long failures hold.
    """

    def __init__(self, load: Callable[[str], None], clock: Clock) -> None:
        self._load = load
        self._now = clock.monotonic_ns
        self._lock = threading.Lock()
        self._flights: dict[str, _Flight] = {}

    def want(self, key: str) -> Future[None]:
        """The load of a model: one that goes on, one that has just failed, or a new one in a thread of its own."""
        with self._lock:
            flight = self._flights.get(key)
            if flight is not None and (not flight.done.done() or self._holds(flight)):
                return flight.done
            flight = self._flights[key] = _Flight(Future(), self._now())
        threading.Thread(target=self._fly, args=(key, flight.done), name=f"remora load {key}", daemon=True).start()
        return flight.done

    def _holds(self, flight: _Flight) -> bool:
        failed = flight.done.exception() is not None
        return failed and self._now() - flight.begin_ns < FAILURE_HOLDS_NS

    def _fly(self, key: str, done: Future[None]) -> None:
        try:
            self._load(key)
        except RemoraError as error:
            settle(done, error)
        except Exception as error:
            _log.exception("loading '%s' failed", key)
            settle(done, InternalError(f"{type(error).__name__}: {error}"))
        else:
            settle(done)

    def stop(self, error: RemoraError) -> None:
        """Nobody waits any longer: whoever does is told of ``error``."""
        with self._lock:
            flights = list(self._flights.values())
        for flight in flights:
            settle(flight.done, error)


def settle(ready: Future[None], error: RemoraError | None = None) -> None:
    """End the wait for a load, well or with an error, unless it has ended already: a stop does not wait for loads."""
    with suppress(InvalidStateError):
        if error is None:
            ready.set_result(None)
        else:
            ready.set_exception(error)
