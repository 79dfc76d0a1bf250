"""Daemon threads: with a stack of a given size, and with a future of a result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_stack_size = threading.Lock()
"""Held while the process-wide size of new stacks is changed."""


def start_daemon(run: Callable[[], object], name: str, *, stack_bytes: int = 0) -> threading.Thread:
    """Start a daemon thread, whose native stack has ``stack_bytes``, or the system's size for 0.

    A large stack takes memory only where it is used. Raises RuntimeError if the system has no more threads.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    if not stack_bytes:
        thread.start()
        return thread
    with _stack_size:  # other threads that start meanwhile have the large stack, too
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def run_in_daemon(work: Callable[[], T], name: str, *, stack_bytes: int = 0) -> Future[T]:
    """Run ``work`` in a dedicated daemon thread of this name, and return its future.

    The thread does not keep the process alive. The future cannot be cancelled. ``stack_bytes`` as in `start_daemon`.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # because the work continues when its waiters are gone

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # any error, because it belongs to the waiter of the future
            future.set_exception(error)

    start_daemon(run, name, stack_bytes=stack_bytes)
    return future
