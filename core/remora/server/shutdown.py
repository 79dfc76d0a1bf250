"""Signals, exit timeout and exit of the process.

Threads independent of the event loop receive the signals and enforce the exit timeout, because a model's code may run
in the loop's thread and never return.

Invariant: the process ends within its exit timeout even if a load, a model or the event loop hangs.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection
from typing import NoReturn, TypeVar

_log = logging.getLogger("remora.server")

MARGIN_S = 1.0
"""How long after the exit timeout a process that is still running is ended by force."""
_HELD_S = 2.0
"""Additional time until a process is ended whose interpreter lock is held by native code."""

T = TypeVar("T")


def exit_now(code: int) -> NoReturn:
    """End the process and its worker processes at once."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def force_exit() -> NoReturn:
    """Log that the exit timeout has expired and end the process [V03]."""
    _log.error("Exit timeout expired. Exiting immediately.")
    exit_now(1)


def force_exit_after(seconds: float) -> None:
    """End the process after ``seconds``, unless it has ended by then. Returns at once."""
    seconds = max(seconds, MARGIN_S)
    timer = threading.Timer(seconds, force_exit)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + _HELD_S, exit=True)  # its thread runs without the GIL


def on_signals(numbers: Collection[int], stop: Callable[[], None]) -> None:
    """Call ``stop`` in a dedicated thread at the first of these signals.

    The second signal ends the process. Call this in the main thread while its event loop runs. The loop
    must not have signal handlers.
    """
    receiving, sending = socket.socketpair()
    sending.setblocking(False)

    def wait() -> None:
        count = 0
        with receiving, sending:  # keeps both sockets open until the process ends
            while True:
                if receiving.recv(1)[0] not in numbers:
                    continue
                count += 1
                if count > 1:
                    _log.error("a second signal came: ending at once")
                    os._exit(1)
                stop()

    for number in numbers:
        signal.signal(number, lambda _number, _frame: None)  # the wake-up socket receives the signal's number
    signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=wait, name="remora signals", daemon=True).start()


def in_own_thread(work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """Run ``work`` in a new daemon thread, which other work cannot occupy and the process does not join."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work(*arguments)
        except BaseException as found:  # any error, because the loop awaits the result
            error = found
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is closed
            _log.debug("the end of %s came after the loop's", work)

    threading.Thread(target=run, name="remora end", daemon=True).start()
    return future
