"""The end of the process, which nothing that hangs can hold up: neither a load, nor a model, nor the event loop.

Signals are received and the exit timeout is counted in threads that share nothing with the event loop, because code of
a model may run in the loop's thread and never return.
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
"""How long after the exit timeout a process ends by force that should have ended in order."""
_HELD_S = 2.0
"""How long after the exit timeout a process ends whose interpreter is held by native code."""

T = TypeVar("T")


def exit_now(code: int) -> NoReturn:
    """End the process at once. Worker processes end with it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def force_exit() -> NoReturn:
    """End the process, whose exit timeout is over [V03]."""
    _log.error("Exit timeout expired. Exiting immediately.")
    exit_now(1)


def force_exit_after(seconds: float) -> None:
    """Give up after ``seconds`` unless the process has ended by then. Waits for nothing."""
    seconds = max(seconds, MARGIN_S)
    timer = threading.Timer(seconds, force_exit)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + _HELD_S, exit=True)  # by a thread that needs no interpreter


def on_signals(numbers: Collection[int], stop: Callable[[], None]) -> None:
    """Call ``stop`` at the first of these signals, in a thread of its own; a second one ends the process at once.

    To be called in the main thread, while its event loop runs; the loop may have no signal handlers besides.
    """
    receiving, sending = socket.socketpair()
    sending.setblocking(False)

    def wait() -> None:
        came = 0
        with receiving, sending:  # for as long as the process lives
            while True:
                if receiving.recv(1)[0] not in numbers:
                    continue
                came += 1
                if came > 1:
                    _log.error("a second signal came: ending at once")
                    os._exit(1)
                stop()

    for number in numbers:
        signal.signal(number, lambda _number, _frame: None)  # what is received is written to the socket
    signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=wait, name="remora signals", daemon=True).start()


def in_own_thread(work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """Do something in a thread that no other work can keep busy, and that the process does not wait for."""
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
        except BaseException as found:  # for the loop, which waits for it
            error = found
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is closed: it waits no longer
            _log.debug("the end of %s came after the loop's", work)

    threading.Thread(target=run, name="remora end", daemon=True).start()
    return future
