"""Keeps one worker process alive: starts it, drains what it prints, notices its end and starts it again; the law: one
thread owns the process, and whoever needs it is told at once when it is not there.

A worker that has served is started again at once, and later and later the more often it fails. The first start is the
load's: when it fails, so does the load.
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
from remora.backends.worker.connection import LOOK_S, WorkerConnection
from remora.backends.worker.logs import Lines
from remora.backends.worker.pipes import PipeChannel
from remora.backends.worker.process import WorkerProcess
from remora.backends.worker.ring import RingError
from remora.backends.worker.settings import WorkerSettings
from remora.backends.worker.wire import Draft, Item, MessageKind, WireError
from remora.errors import InternalError, RemoraError

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
STEADY_S = 60.0
"""A worker that has lived so long has not failed again, but anew."""
START_WAIT_S = 30.0
"""How long a load waits for its process to be there: a machine that starts many at once takes its time."""
RESTART_WAIT_S = 5.0
"""How long an execution waits for a worker that is just being started again."""
_IDLE_S = 1.0
_CHUNK = 1 << 16

Steps = Sequence[tuple[MessageKind, Sequence[Draft]]]


class Backoff:
    """How long to wait before the next start. Pure: told how long each life was."""

    def __init__(self) -> None:
        self._failures = 0

    def delay_s(self, lived_s: float) -> float:
        """Seconds to wait now that a worker has ended after ``lived_s``; 0 for the first failure in a long time."""
        self._failures = 1 if lived_s >= STEADY_S else self._failures + 1
        return 0.0 if self._failures == 1 else min(FIRST_DELAY_S * 2 ** (self._failures - 2), LONGEST_DELAY_S)


class _State(NamedTuple):
    """Where the worker stands. ``link`` only while it serves; ``since`` and ``delay_s`` only while it waits."""

    trouble: str
    link: WorkerConnection | None = None
    starting: bool = False
    retry_at: float = 0.0


class Supervisor:
    """One worker and its successors.

    Args:
        name: the instance's name, or the model's while it is only being opened.
        errands: does what the worker asks for.
        settings: the operator's.
        python: the interpreter that the worker runs on.
    """

    def __init__(self, name: str, errands: WorkerCallbacks, settings: WorkerSettings, python: Path) -> None:
        self.name = name
        self._python = python
        self._errands = errands
        self._settings = settings
        self._changed = threading.Condition()
        self._state = _State("it is being started", starting=True)
        self._closing = threading.Event()
        self.in_memory = settings.transport != "pipe" and hasattr(os, "memfd_create") and hasattr(os, "eventfd")
        """Whether messages travel through shared memory."""
        self._steps: Steps | None = None  # what a new process is told before it serves
        self._living: WorkerConnection | None = None
        self._lines = {1: Lines(), 2: Lines()}
        self._thread = threading.Thread(target=self._live, name=f"remora worker {name}", daemon=True)
        self._log = errands.logger
        self._thread.start()

    # -- for those who need the worker ------------------------------------------------------------------------------

    @property
    def trouble(self) -> str:
        """Why the worker does not serve now; empty when it does."""
        return "" if self._state.link is not None else self._state.trouble

    @property
    def serving(self) -> WorkerConnection | None:
        """The connection, when the worker serves now."""
        return self._state.link

    @property
    def pid(self) -> int:
        """The process's number, 0 when there is none."""
        link = self._state.link
        return link.process.pid if link is not None else 0

    def link(self) -> WorkerConnection:
        """The connection. Waits a moment for a worker that is being started. Raises InternalError without one."""
        state = self._state
        if state.link is not None:
            return state.link
        patience_s = START_WAIT_S if self._steps is None else RESTART_WAIT_S
        with self._changed:
            self._changed.wait_for(lambda: not self._state.starting, patience_s)
            state = self._state
        if state.link is not None:
            return state.link
        left = max(state.retry_at - time.monotonic(), 0.0)
        again = "it is being started again" if state.starting else f"the server starts it again in {left:.1f} s"
        raise InternalError(f"Stub process '{self.name}' is not healthy: {state.trouble}; {again}", from_model=True)

    def ask(self, kind: MessageKind, items: Sequence[Draft] = ()) -> Sequence[Item]:
        """Ask the worker and wait for its answer. Raises RemoraError: the worker's own, or that it died."""
        return self.link().ask(kind, items).result()

    def serve(self, name: str, steps: Steps) -> None:
        """From now on the worker is to live: a new one is told ``steps`` first."""
        self.name = name
        self._steps = steps
        link = self._state.link
        if link is not None:
            link.instance = name
            link.restarts = True

    def close(self) -> None:
        """Let the model finalize, then end the process; returns when it is gone."""
        state = self._state
        self._closing.set()
        if state.link is not None:
            with suppress(RemoraError, TimeoutError):
                state.link.ask(MessageKind.CLOSE).result(self._settings.finalize_timeout_s)
                state.link.ended.wait(_GOODBYE_S)
        living = self._living
        if living is not None:
            living.process.kill()
        self._thread.join()

    # -- the keeper's thread ----------------------------------------------------------------------------------------

    def _live(self) -> None:
        backoff = Backoff()
        while True:
            begin = time.monotonic()
            reason = self._one_life()
            if self._closing.is_set() or self._steps is None:
                self._set(_State(reason))
                return
            delay = backoff.delay_s(time.monotonic() - begin)
            self._log.error(
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

    def _one_life(self) -> str:
        """Start a process and keep it until it ends; returns why it ended."""
        try:
            link, lifeline = self._start()
        except OSError as error:
            return f"its process cannot be started: {error}"
        self._living = link
        try:
            if self._closing.is_set():
                link.process.kill()
            self._prepare(link)
            reason = self._watch(link)
        finally:
            link.process.kill()
            lifeline.close()
        while not link.process.ended():
            self._closing.wait(0.01)
        self._drain(link, (link.process.stdout, link.process.stderr), ended=True)
        reason = reason or link.process.reason()
        self._set(_State(link.reason or reason, starting=True))
        self._living = None
        link.end(reason)
        self._errands.forget(link)
        return link.reason

    def _start(self) -> tuple[WorkerConnection, socket.socket]:
        settings = self._settings
        lifeline, theirs = socket.socketpair()
        fds = [theirs.fileno()]
        options: dict[str, object] = {"lifeline": theirs.fileno(), "memory_limit": settings.memory_limit}
        ends: channels.Ends | None = None
        if self.in_memory:
            ends, worker_ends = channels.create(settings.transfer_bytes)
            options["ends"] = list(worker_ends)
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
        channel = MemoryChannel(ends, gone, serves=True) if ends is not None else PipeChannel(lifeline)
        return WorkerConnection(channel, process, self.name, self._errands.run), lifeline

    def _prepare(self, link: WorkerConnection) -> None:
        """Tell a new process what it has to know; the first one is told by who loads the model."""
        if self._steps is None:
            self._set(_State("", link))
            return
        link.restarts = True
        for kind, items in self._steps:
            future = link.ask(kind, items)
        future.add_done_callback(lambda done: self._prepared(link, done.exception()))

    def _prepared(self, link: WorkerConnection, error: BaseException | None) -> None:
        if error is None:
            self._log.info("instance '%s' serves again", self.name)
            self._set(_State("", link))
        elif not link.ended.is_set():
            link.reason = f"it could not be started again: {error}"
            link.process.kill()

    def _watch(self, link: WorkerConnection) -> str:
        """Do what comes up until the process ends; returns a reason when there is one besides how it ended."""
        process, channel = link.process, link.channel
        poller = select.poll()
        watched = (process.exit_fd, channel.back_fd, process.stdout, process.stderr)
        for fd in watched:
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        while True:
            link.dozing = True  # before looking: who begins something now sees it, or is seen
            idle = link.dozing = link.flush() and not link.streaming
            events = {fd for fd, _ in poller.poll((_IDLE_S if idle else LOOK_S) * 1000)}
            for fd in self._drain(link, events & {process.stdout, process.stderr}):
                poller.unregister(fd)
            try:
                if channel.back_fd in events or process.exit_fd in events:
                    channel.background(link.handle)
                link.look()
                channel.tidy()
            except (WireError, RingError) as error:
                link.confused(error)
            except (PeerLostError, NoRoomError):
                process.kill()
                with suppress(KeyError):
                    poller.unregister(channel.back_fd)
            if (process.exit_fd < 0 or process.exit_fd in events) and process.ended():
                with suppress(PeerLostError, WireError, RingError):
                    channel.background(link.handle)  # its last words
                return ""

    def _drain(self, link: WorkerConnection, fds: Sequence[int] | set[int], *, ended: bool = False) -> list[int]:
        """Read what was printed and log it; returns the pipes that have come to their end."""
        closed: list[int] = []
        for fd in fds:
            number, level = (1, logging.INFO) if fd == link.process.stdout else (2, logging.WARNING)
            while True:
                try:
                    data = os.read(fd, _CHUNK)
                except BlockingIOError:
                    break
                if not data:
                    closed.append(fd)
                    break
                self._errands.log_lines(level, self._lines[number].feed(data), link.current)
                if len(data) < _CHUNK or not ended:
                    break
            if ended:
                self._errands.log_lines(level, self._lines[number].end(), link.current)
        return closed


_GOODBYE_S = 2.0
