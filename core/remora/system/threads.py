"""Work in a daemon thread, with a future of its result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_daemon(work: Callable[[], T], name: str) -> Future[T]:
    """Run ``work`` in a dedicated daemon thread of this name, and return its future.

    The thread does not keep the process alive. The future cannot be cancelled.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # because the work continues when its waiters are gone

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # any error, because it belongs to the waiter of the future
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
