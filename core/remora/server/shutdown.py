"""Shutdown: draining of the server's parts, signals, exit timeout, process exit.

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
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from remora.system import logs

if TYPE_CHECKING:
    from remora.engine import Engine

_log = logging.getLogger("remora.server")

MARGIN_S = 1.0
"""How long after the exit timeout a process that is still running is ended by force."""
LAST_RECORDS_S = 1.0
"""Longest time for the last log records to reach a collector."""
_POLL_S = 0.01
_HELD_S = 2.0
"""Additional time until a process is ended whose interpreter lock is held by native code."""
_LOST_TURNS = 2
"""Turns of the loop until an aborted connection is lost: the next one, and behind TLS the one after that."""

T = TypeVar("T")


class Drainable(Protocol):
    """Part of the server with its share of a shutdown. The loop's thread calls it.

    A shutdown takes all parts through one step before the next step begins: `announce` (only if a lame-duck time
    precedes), `stop_accepting`, `drain` and `close`.
    """

    def announce(self) -> None:
        """Make clients move away, and keep serving."""

    def stop_accepting(self) -> None:
        """Refuse new connections and calls; those in flight continue."""

    async def drain(self, end: float) -> bool:
        """Wait until the work in flight is done, at most until the loop time ``end``.

        Returns False if some is left.
        """

    def close(self) -> bool:
        """Release everything without waiting; return False if a client was left without its answer."""


async def shut_down(parts: Sequence[Drainable], end: float) -> bool:
    """Drain the parts in their order and close them in reverse order.

    A part ends before those it uses. Returns False if work in flight was abandoned at the loop time ``end``.
    """
    for part in parts:
        part.stop_accepting()
    done = True
    for part in parts:
        done = await part.drain(end) and done
    for part in reversed(parts):
        done = part.close() and done
    return done


async def until_lost() -> None:
    """Wait until `connection_lost` has ended the calls of closed connections.

    The loop calls it in later turns.
    """
    for _ in range(_LOST_TURNS):
        await asyncio.sleep(0)


class EngineDrain:
    """Engine as the part of the server that drains last."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def announce(self) -> None:
        """Report "not ready"."""
        self._engine.begin_drain()

    def stop_accepting(self) -> None:
        """Do nothing, because requests on open connections still reach the engine."""

    async def drain(self, end: float) -> bool:
        """Finish the requests in flight and close all models.

        A model that hangs while it closes is left behind.
        """
        left_s = max(end - asyncio.get_running_loop().time(), 0.0)
        stopping = in_own_thread(self._engine.stop, left_s)
        await asyncio.wait((stopping,), timeout=left_s + _POLL_S)
        return stopping.done() and stopping.result()

    def close(self) -> bool:
        """Return True, because `drain` has closed the models."""
        return True


async def log_in_flight(engine: Engine, end: float) -> None:
    """Log the requests in flight every second, in Triton's words [V03], until it is cancelled."""
    loop = asyncio.get_running_loop()
    _log.info("Waiting for in-flight requests to complete.")
    while True:
        left_s = max(round(end - loop.time()), 0)
        busy = [(model, model.in_flight) for model in engine.models() if model.in_flight]
        _log.info("Timeout %d: Found %d model versions that have in-flight inferences", left_s, len(busy))
        for model, count in busy:
            _log.info("Model '%s' (version %d) has %d in-flight inferences", model.name, model.version, count)
        await asyncio.sleep(1)


async def until_sequences_end(engine: Engine, end: float) -> None:
    """Wait until no sequence is open, at most until the loop time ``end``."""
    while engine.open_sequences and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(_POLL_S)


def exit_now(code: int) -> NoReturn:
    """End the process and its worker processes at once, after the last log records."""
    logs.OURS.end_export(LAST_RECORDS_S)
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
    """Run ``work`` in a new daemon thread.

    Other work cannot occupy it, and the process does not join it.
    """
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
