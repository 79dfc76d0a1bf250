"""Background delivery of traces, captured requests and other records.

Threads that queue an item never wait for its delivery, and memory is bounded: items that do not fit are dropped,
counted and logged once.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from remora.tracing.records import Trace
from remora.tracing.sampling import Sampling

_log = logging.getLogger("remora.traces")

_LAST_S = 0.5
"""Seconds that the sink may take to finish after `Sink.close`."""


class Finished(NamedTuple):
    """A trace and the sampling it belongs to. ``size`` is its weight in the queue.

    Without a trace: the settings were replaced, and no more traces of this sampling are started.
    """

    sampling: Sampling
    trace: Trace | None
    size: int = 1


class Queued(Protocol):
    """What a writer delivers."""

    @property
    def size(self) -> int:
        """Weight in the queue."""


T = TypeVar("T", bound=Queued)
T_contra = TypeVar("T_contra", bound=Queued, contravariant=True)


class DroppedError(Exception):
    """Error of a sink that dropped ``count`` items and keeps the others.

    They may be those of earlier calls.
    """

    def __init__(self, count: int, reason: object) -> None:
        super().__init__(str(reason))
        self.count = count


class Sink(Protocol[T_contra]):
    """Destination of traces. The writer's thread alone calls `write`."""

    def write(self, finished: Sequence[T_contra], /) -> None:
        """Write traces. May block and raise.

        All are then dropped, unless the error is a `DroppedError`.
        """

    def close(self) -> None:
        """Close the sink. Another thread may call this to cut a running `write` short."""


class _Limits(NamedTuple):
    """Capacity of a queue, amount that is written at once, and wait of a smaller amount."""

    room: int
    batch: int
    delay_s: float


class _SizedQueue(Generic[T]):
    """Items that wait, and the sum of their sizes."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self.size = 0

    def add(self, item: T) -> None:
        self.items.append(item)
        self.size += item.size

    def take_all(self) -> list[T]:
        items = list(self.items)
        self.items.clear()
        self.size = 0
        return items


class TraceWriter(Generic[T]):
    """The queue and its thread, which starts with the first trace.

    Args:
        sink: destination of traces.
        room: capacity of the queue, in sizes.
        batch: amount that is written at once without waiting.
        delay_s: how long a smaller amount waits.
        what: name of the items in the log.
    """

    def __init__(self, sink: Sink[T], *, room: int, batch: int = 1, delay_s: float = 0.0, what: str = "traces") -> None:
        self._what = what
        self.log = _log
        """Log of what goes wrong."""
        self.dropped = 0
        """Traces that did not fit or that the sink could not write."""
        self._sink = sink
        self._limits = _Limits(room, min(batch, room), delay_s)
        self._queue = _SizedQueue[T]()
        self._changed = threading.Condition(threading.Lock())
        self._writing = 0
        self._hurry = False
        self._closing = False
        self._failing = False
        self._thread: threading.Thread | None = None

    def finish(self, sampling: Sampling, trace: Trace | None, size: int) -> None:
        """Queue a trace, or the end of a sampling; see `Finished`."""
        self.put(Finished(sampling, trace, size))  # type: ignore[arg-type]  # called by writers of traces

    def put(self, finished: T) -> None:
        """Queue a trace if there is room. Any thread may call, and the call never blocks."""
        with self._changed:
            if self._closing:
                return
            if self._queue.size + finished.size > self._limits.room:
                why = "arrive faster than they can be written"
            elif self._thread is None and not self._start():
                why = "cannot be written, because no thread can start"
            else:
                self._queue.add(finished)
                if len(self._queue.items) == 1 or self._queue.size >= self._limits.batch:
                    self._changed.notify_all()
                return
            self.dropped += 1
            first = self.dropped == 1
        if first:
            _log.warning("%s %s: dropping some from now on", self._what, why)

    def _start(self) -> bool:
        """Start the thread with the lock held; return False if there can be no more threads."""
        thread = threading.Thread(target=self._serve, name=f"remora {self._what}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def flush(self, timeout_s: float) -> bool:
        """Write all queued traces and return False on timeout."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._queue.items and not self._writing, timeout_s)
            self._hurry = False
            return done

    def close(self, timeout_s: float) -> None:
        """Write queued traces within the timeout, drop the rest and stop. Idempotent."""
        done = self.flush(timeout_s)
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self.dropped += len(self._queue.take_all())
            self._changed.notify_all()
            thread = self._thread
        try:
            self._sink.close()
        except Exception as error:  # as in `_serve`: a failed sink must not stop the shutdown
            with self._changed:
                self.dropped += _dropped_by(error, 0)
            _log.warning("the last %s cannot be written: %s", self._what, error)
        if thread is not None:
            thread.join(timeout_s if done else _LAST_S)
        with self._changed:
            self.dropped += self._writing  # not written in time
        if self.dropped:
            _log.warning("%d %s were dropped in all", self.dropped, self._what)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._writing = 0
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue.items or self._closing)
                self._changed.wait_for(
                    lambda: self._queue.size >= self._limits.batch or self._hurry or self._closing,
                    self._limits.delay_s,
                )
                if self._closing:
                    return
                batch = self._queue.take_all()
                self._writing = len(batch)
            try:
                self._sink.write(batch)
            except Exception as error:  # such as a full disk or an unreachable collector
                self._failed(_dropped_by(error, len(batch)), error)
            else:
                self._recovered()

    def _failed(self, count: int, error: Exception) -> None:
        with self._changed:
            self.dropped += count
            first, self._failing = not self._failing, True
        if first:
            _log.warning("%s cannot be written and are dropped until they can: %s", self._what, error)

    def _recovered(self) -> None:
        if self._failing:
            self._failing = False
            _log.info("%s are written again; %d were dropped so far", self._what, self.dropped)


def _dropped_by(error: Exception, otherwise: int) -> int:
    return error.count if isinstance(error, DroppedError) else otherwise
