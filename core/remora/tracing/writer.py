"""Hands finished traces on in a thread of its own; the law: whoever finishes a request never waits for that, and memory
is bounded. What there is no room for is dropped, counted, and said in the log once.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from remora.tracing.records import Trace
from remora.tracing.sampling import Sampling

_log = logging.getLogger("remora.traces")

_LAST_S = 0.5
"""How long a sink that was told to hurry may take."""


class Finished(NamedTuple):
    """A trace and whose settings it was made under; ``size`` is what it counts for in the queue.

    Without a trace: those settings are gone, and no more of their traces come.
    """

    sampling: Sampling
    trace: Trace | None
    size: int = 1


class Sink(Protocol):
    """Where traces go. Called by the writer's thread alone."""

    def write(self, finished: Sequence[Finished]) -> None:
        """Write them. May take its time, and raise."""

    def close(self) -> None:
        """Nothing more comes. May be called by another thread, to hurry up a `write` under way."""


class TraceWriter:
    """The queue and its thread, which starts with the first trace.

    Args:
        sink: where traces go.
        room: what may wait, in sizes.
        batch: how much makes the sink's turn come at once.
        delay_s: how long less than that waits.
    """

    def __init__(self, sink: Sink, *, room: int, batch: int = 1, delay_s: float = 0.0) -> None:
        self.dropped = 0
        """Traces for which there was no room, or that the sink could not write."""
        self._sink = sink
        self._room = room
        self._batch = min(batch, room)
        self._delay_s = delay_s
        self._queue: deque[Finished] = deque()
        self._queued = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._writing = 0
        self._hurry = False
        self._closing = False
        self._failing = False
        self._thread: threading.Thread | None = None

    def put(self, finished: Finished) -> None:
        """Take a trace, if there is room. Any thread may call; it does not wait."""
        with self._lock:
            if self._closing:
                return
            if self._queued + finished.size > self._room:
                full = not self.dropped
                self.dropped += 1
            else:
                full = False
                self._queue.append(finished)
                self._queued += finished.size
                if self._thread is None:
                    thread = threading.Thread(target=self._serve, name="remora traces", daemon=True)
                    thread.start()
                    self._thread = thread
                if len(self._queue) == 1 or self._queued >= self._batch:
                    self._changed.notify_all()
        if full:
            _log.warning("traces come faster than they can be written: some are dropped from now on")

    def flush(self, timeout_s: float) -> bool:
        """Write what waits now; False when that took longer."""
        with self._lock:
            self._hurry = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._queue and not self._writing, timeout_s)
            self._hurry = False
            return done

    def close(self, timeout_s: float) -> None:
        """Write what waits, for as long as that, and end. What is left is dropped. May be called again."""
        done = self.flush(timeout_s)
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self.dropped += len(self._queue)
            self._queue.clear()
            self._changed.notify_all()
            thread = self._thread
        try:
            self._sink.close()
        except Exception as error:  # as in `write`: the end of a server goes on
            _log.warning("the last traces cannot be written: %s", error)
        if thread is not None:
            thread.join(timeout_s if done else _LAST_S)
        with self._lock:
            self.dropped += self._writing  # not written in time
        if self.dropped:
            _log.warning("%d traces were dropped in all", self.dropped)

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._writing = 0
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._closing)
                self._changed.wait_for(
                    lambda: self._queued >= self._batch or self._hurry or self._closing, self._delay_s
                )
                if self._closing:
                    return
                batch = list(self._queue)
                self._queue.clear()
                self._queued = 0
                self._writing = len(batch)
            try:
                self._sink.write(batch)
            except Exception as error:  # a full disk, a collector that is down: the requests do not care
                self._failed(len(batch), error)
            else:
                self._recovered()

    def _failed(self, count: int, error: Exception) -> None:
        with self._lock:
            self.dropped += count
            first, self._failing = not self._failing, True
        if first:
            _log.warning("traces cannot be written and are dropped until they can: %s", error)

    def _recovered(self) -> None:
        if self._failing:
            self._failing = False
            _log.info("traces are written again; %d were dropped so far", self.dropped)
