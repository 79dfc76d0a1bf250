"""Readiness that models decide themselves, such as Python models with ``is_ready`` [Y01]."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from remora.system.threads import run_in_daemon

_log = logging.getLogger("remora.models")

LIMIT_S = 5.0
"""Longest wait for the answer of a model, after which it counts as not ready, as in Triton."""


class SharedAnswer:
    """Answer of an instance, of which at most one is awaited at a time.

    A model that hangs therefore collects no questions. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: Future[bool] | None = None

    def get(self, ask: Callable[[], bool], name: str) -> Future[bool]:
        """Return the future of the question in flight, or begin one in a daemon thread of this name."""
        with self._lock:
            if self._pending is None or self._pending.done():
                try:
                    self._pending = run_in_daemon(ask, name)
                except RuntimeError as error:  # the system has no more threads
                    self._pending = Future()
                    self._pending.set_exception(error)
            return self._pending


def are_ready(model: str, asks: Sequence[Callable[[], Future[bool]]], limit_s: float = LIMIT_S) -> bool:
    """Return False if an instance is not ready, fails, or does not answer in time.

    Waits for ``limit_s`` at most. The log has the reason for an error and for a late answer.
    """
    answers = [ask() for ask in asks]
    done, late = wait(answers, limit_s)
    if late:
        _log.warning("model '%s' is not ready: its is_ready has not returned for %g s", model, limit_s)
    errors = [error for answer in done if (error := answer.exception()) is not None]
    for error in errors:
        _log.warning("model '%s' is not ready: %s", model, error)
    return not late and not errors and all(answer.result() for answer in answers)
