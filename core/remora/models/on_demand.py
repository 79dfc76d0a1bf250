"""Loads that requests start in ondemand mode, one per model at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from remora.errors import InternalError, RemoraError, UnavailableError
from remora.models.readiness import resolve_future
from remora.system.clock import Clock

_log = logging.getLogger("remora.models")

FAILURE_HOLDS_NS = 5_000_000_000


class _Load(NamedTuple):
    done: Future[None]
    begin_ns: int


class OnDemand:
    """Loads that requests start, one per model at a time. Thread-safe.

    Args:
        load: loads a model and returns when it serves; raises RemoraError.
        clock: measures how long a failure is remembered.
    """

    def __init__(self, load: Callable[[str], None], clock: Clock) -> None:
        self._load = load
        self._now = clock.monotonic_ns
        self._lock = threading.Lock()
        self._loads: dict[str, _Load] = {}
        self._end: RemoraError | None = None

    def request_load(self, key: str) -> Future[None]:
        """Return the running or just failed load of a model, or start one in a separate thread.

        After `stop` no load starts, and the result has its error.
        """
        with self._lock:
            load = self._loads.get(key)
            if load is not None and (not load.done.done() or self._has_just_failed(load)):
                return load.done
            load = self._loads[key] = _Load(Future(), self._now())
            if self._end is not None:
                resolve_future(load.done, self._end)
                return load.done
        thread = threading.Thread(target=self._run, args=(key, load.done), name=f"remora load {key}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process can have no more threads
            resolve_future(load.done, UnavailableError(f"model '{key}' cannot be loaded: {error}"))
        return load.done

    def _has_just_failed(self, load: _Load) -> bool:
        failed = load.done.exception() is not None
        return failed and self._now() - load.begin_ns < FAILURE_HOLDS_NS

    def _run(self, key: str, done: Future[None]) -> None:
        try:
            self._load(key)
        except RemoraError as error:
            resolve_future(done, error)
        except Exception as error:
            _log.exception("loading '%s' failed", key)
            resolve_future(done, InternalError(f"{type(error).__name__}: {error}"))
        else:
            resolve_future(done)

    def stop(self, error: RemoraError) -> None:
        """Fail the loads in progress and later ones with ``error``, for the requests that wait."""
        with self._lock:
            self._end = error
            loads = list(self._loads.values())
        for load in loads:
            resolve_future(load.done, error)
