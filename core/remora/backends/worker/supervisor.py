"""Supervisor that starts a worker process, logs its output and restarts it after its end.

A worker that has answered an execution is restarted immediately after its end, which a request may have caused. One
that ends before it has answered anything is restarted with growing delay, because it may never serve. The first start
belongs to the load: if it fails, so does the load. One thread owns the process, and callers get an error immediately
while there is no worker.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from remora.backends.worker import channel as channels
from remora.backends.worker.callbacks import WorkerCallbacks
from remora.backends.worker.channel import MemoryChannel, NoRoomError, PeerLostError
from remora.backends.worker.connection import POLL_S, WorkerConnection
from remora.backends.worker.logs import Lines
from remora.backends.worker.pipes import PipeChannel
from remora.backends.worker.process import WorkerProcess
from remora.backends.worker.ring import RingError
from remora.backends.worker.settings import WorkerSettings
from remora.backends.worker.suspects import restarting
from remora.backends.worker.wire import Draft, Item, MessageKind, WireError
from remora.errors import RemoraError

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
START_WAIT_S = 30.0
"""How long a load waits for its process to start, which is slow if many start at once."""
RESTART_WAIT_S = 5.0
"""How long an execution waits for a worker that is being restarted."""
_IDLE_S = 1.0
_CHUNK = 1 << 16

Steps = Sequence[tuple[MessageKind, Sequence[Draft]]]


class Backoff:
    """Restart delays as a function of what earlier processes have answered. Pure."""

    def __init__(self) -> None:
        self._failures = 0

    def delay_s(self, *, answered: bool) -> float:
        """Return the seconds to wait after the end of a worker.

        The result is 0 for one that has ``answered`` an execution, and for the first that has not.
        """
        self._failures = 1 if answered else self._failures + 1
        return 0.0 if self._failures == 1 else min(FIRST_DELAY_S * 2 ** (self._failures - 2), LONGEST_DELAY_S)


class _State(NamedTuple):
    """State of the worker.

    ``connection`` is set only while the worker serves, ``retry_at`` only while a restart is pending.
    """

    trouble: str
    connection: WorkerConnection | None = None
    starting: bool = False
    retry_at: float = 0.0


class Supervisor:
    """One worker and its successors.

    Args:
        name: the instance's name, or the model's name until the instance starts.
        callbacks: handles the worker's callbacks.
        settings: the operator's settings.
        python: the interpreter of the worker.
    """

    def __init__(self, name: str, callbacks: WorkerCallbacks, settings: WorkerSettings, python: Path) -> None:
        self.name = name
        self._python = python
        self._callbacks = callbacks
        self._settings = settings
        self._changed = threading.Condition()
        self._state = _State("it is being started", starting=True)
        self._closing = threading.Event()
        self._steps: Steps | None = None  # sent to a new process before it serves
        self._current: WorkerConnection | None = None
        self._answered = False  # by the process that has ended
        self._lines = {1: Lines(), 2: Lines()}
        self._thread = threading.Thread(target=self._run, name=f"remora worker {name}", daemon=True)
        self._thread.start()

    @property
    def in_memory(self) -> bool:
        """True if messages travel through shared memory."""
        return self._settings.transport != "pipe" and hasattr(os, "memfd_create") and hasattr(os, "eventfd")

    # -- for callers ------------------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str:
        """Reason why the worker cannot run now, empty if it can."""
        return "" if self._state.connection is not None else self._state.trouble

    @property
    def serving(self) -> WorkerConnection | None:
        """Connection of the serving worker, or None."""
        return self._state.connection

    @property
    def pid(self) -> int:
        """Process id, 0 if there is no process."""
        connection = self._state.connection
        return connection.process.pid if connection is not None else 0

    def wait_for_connection(self) -> WorkerConnection:
        """Return the connection, waiting a moment for a worker that is starting.

        Raises UnavailableError if there is none.
        """
        state = self._state
        if state.connection is not None:
            return state.connection
        patience_s = START_WAIT_S if self._steps is None else RESTART_WAIT_S
        with self._changed:
            self._changed.wait_for(lambda: not self._state.starting, patience_s)
            state = self._state
        if state.connection is not None:
            return state.connection
        remaining_s = max(state.retry_at - time.monotonic(), 0.0)
        again = "it is being started again" if state.starting else f"the server starts it again in {remaining_s:.1f} s"
        raise restarting(f"Stub process '{self.name}' is not healthy: {state.trouble}; {again}", remaining_s)

    def request(self, kind: MessageKind, items: Sequence[Draft] = ()) -> Sequence[Item]:
        """Send a request to the worker and return its answer.

        Raises RemoraError: the worker's own, or an InternalError if it died.
        """
        return self.wait_for_connection().request(kind, items).result()

    def serve(self, name: str, steps: Steps) -> None:
        """Restart the worker after failures from now on, sending ``steps`` to a new process first."""
        self.name = name
        self._steps = steps
        connection = self._state.connection
        if connection is not None:
            connection.instance = name
            connection.restarts = True

    def close(self) -> None:
        """Let the model finalize, then end the process and wait for its end."""
        state = self._state
        self._closing.set()
        if state.connection is not None:
            with suppress(RemoraError, TimeoutError):
                state.connection.request(MessageKind.CLOSE).result(self._settings.finalize_timeout_s)
                state.connection.ended.wait(_EXIT_WAIT_S)
        current = self._current
        if current is not None:
            current.process.kill()
        self._thread.join()

    # -- the supervisor's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = Backoff()
        while True:
            self._answered = False
            reason = self._run_process()
            if self._closing.is_set() or self._steps is None:
                self._set(_State(reason))
                return
            delay = backoff.delay_s(answered=self._answered)
            self._callbacks.logger.error(
                "instance '%s' is not healthy: %s; starting it again%s", self.name, reason,
                f" in {delay:g} s" if delay else "",
            )  # fmt: skip
            self._set(_State(reason, starting=not delay, retry_at=time.monotonic() + delay))
            if delay:
                self._closing.wait(delay)
                self._set(_State(reason, starting=True))
            if self._closing.is_set():
                return

    def _set(self, state: _State) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def _run_process(self) -> str:
        """Start a process, supervise it until it ends and return the reason of its end."""
        try:
            connection, lifeline = self._start()
        except OSError as error:
            return f"its process cannot be started: {error}"
        self._current = connection
        try:
            if self._closing.is_set():
                connection.process.kill()
            self._prepare(connection)
            reason = self._watch(connection)
        finally:
            connection.process.kill()
            lifeline.close()
        while not connection.process.ended():
            self._closing.wait(0.01)
        self._drain(connection, (connection.process.stdout, connection.process.stderr), ended=True)
        reason = reason or connection.process.reason()
        self._set(_State(connection.reason or reason, starting=True))
        self._current = None
        self._answered = connection.answered
        connection.end(reason)
        self._callbacks.forget(connection)
        return connection.reason

    def _start(self) -> tuple[WorkerConnection, socket.socket]:
        settings = self._settings
        lifeline, theirs = socket.socketpair()
        fds = [theirs.fileno()]
        options: dict[str, object] = {"lifeline": theirs.fileno(), "memory_limit": settings.memory_limit}
        ends: channels.Ends | None = None
        if self.in_memory:
            ends, worker_ends = channels.create(settings.transfer_bytes)
            options["ends"] = list(worker_ends)
            options["poll_ns"] = settings.poll_ns
            fds += sorted(set(worker_ends))
        try:
            process = WorkerProcess(options, fds, self.name, self._python)
        except BaseException:
            lifeline.close()
            for fd in set(ends or ()):
                os.close(fd)
            raise
        finally:
            theirs.close()
        gone = process.exit_fd if process.exit_fd >= 0 else lifeline.fileno()
        channel = (
            PipeChannel(lifeline) if ends is None else MemoryChannel(ends, gone, serves=True, poll_ns=settings.poll_ns)
        )
        return WorkerConnection(channel, process, self.name, self._callbacks.run), lifeline

    def _prepare(self, connection: WorkerConnection) -> None:
        """Send the steps to a new process.

        The first process gets them from the loader.
        """
        if self._steps is None:
            self._set(_State("", connection))
            return
        connection.restarts = True
        for kind, items in self._steps:
            future = connection.request(kind, items)
        future.add_done_callback(lambda done: self._prepared(connection, done.exception()))

    def _prepared(self, connection: WorkerConnection, error: BaseException | None) -> None:
        if error is None:
            self._callbacks.logger.info("instance '%s' serves again", self.name)
            self._set(_State("", connection))
        elif not connection.ended.is_set():
            connection.reason = f"it could not be started again: {error}"
            connection.process.kill()

    def _watch(self, connection: WorkerConnection) -> str:
        """Handle events until the process ends.

        Returns a reason, "" if the exit status explains the end.
        """
        process, channel = connection.process, connection.channel
        poller = select.poll()
        watched = (process.exit_fd, channel.back_fd, process.stdout, process.stderr)
        for fd in watched:
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        while True:
            connection.polled_slowly = True  # before the check, so that a new execution either sees the flag or is seen
            idle = connection.polled_slowly = connection.flush() and not connection.streaming
            events = {fd for fd, _ in poller.poll((_IDLE_S if idle else POLL_S) * 1000)}
            for fd in self._drain(connection, events & {process.stdout, process.stderr}):
                poller.unregister(fd)
            try:
                if channel.back_fd in events or process.exit_fd in events:
                    channel.background(connection.handle)
                connection.read_for_loop(time.monotonic())  # before the timeouts, because it may have answered
                connection.check_executions()
                channel.tidy()
            except (WireError, RingError) as error:
                connection.fail_protocol(error)
            except (PeerLostError, NoRoomError):
                process.kill()
                with suppress(KeyError):
                    poller.unregister(channel.back_fd)
            if (process.exit_fd < 0 or process.exit_fd in events) and process.ended():
                with suppress(PeerLostError, WireError, RingError):
                    channel.background(connection.handle, last=True)  # so that no answered batch counts as failed

                return ""

    def _drain(self, connection: WorkerConnection, fds: Sequence[int] | set[int], *, ended: bool = False) -> list[int]:
        """Log the printed output and return the pipes that are at their end."""
        closed: list[int] = []
        for fd in fds:
            number, level = (1, logging.INFO) if fd == connection.process.stdout else (2, logging.WARNING)
            while True:
                try:
                    data = os.read(fd, _CHUNK)
                except BlockingIOError:
                    break
                if not data:
                    closed.append(fd)
                    break
                self._callbacks.log_lines(level, self._lines[number].feed(data), connection.current)
                if len(data) < _CHUNK or not ended:
                    break
            if ended:
                self._callbacks.log_lines(level, self._lines[number].end(), connection.current)
        return closed


_EXIT_WAIT_S = 2.0
