"""Copies of requests to a shadow version, whose answers are compared and never sent.

Invariant: the primary's answer is sent first, and copies beyond a bound are dropped: the queue and the number of
unanswered copies are limited.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from queue import Empty, Full, Queue
from typing import Any, NamedTuple

import numpy as np

from remora.errors import RemoraError
from remora.messages import Data, InferForm, Outcome, Response, Ticket
from remora.models.served_model import ServedModel
from remora.traffic.comparing import Comparison, difference
from remora.traffic.judgement import Rate

_log = logging.getLogger("remora.releases")

MAX_WAITING = 64
MAX_UNANSWERED = 16
SAMPLES = 20
_IDLE_S = 5.0


class Copy(NamedTuple):
    """A request for the shadow version, and the primary's outputs."""

    model: ServedModel
    form: InferForm
    data: list[Data]
    expected: dict[str, Any]


class Shadowing:
    """Runner of copies and counts of their comparisons. Thread-safe.

    Args:
        how: how the answers are compared.
    """

    def __init__(self, how: Comparison) -> None:
        self._how = how
        self._queue: Queue[Copy] = Queue(MAX_WAITING)
        self._lock = threading.Lock()
        self._runs = False
        self._unanswered = 0
        self.compared = self.differing = self.failed = self.dropped = 0
        self.samples: deque[str] = deque(maxlen=SAMPLES)
        """The latest differences, each with the request's id."""

    def offer(self, copy: Copy) -> None:
        """Queue a copy, or drop it. Never blocks."""
        try:
            self._queue.put_nowait(copy)
        except Full:
            with self._lock:
                self.dropped += 1
            return
        with self._lock:
            starts, self._runs = not self._runs, True
        if starts:
            threading.Thread(target=self._run, name="remora shadow", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                copy = self._queue.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if self._queue.empty():
                        self._runs = False
                        return
                continue
            self._send(copy)

    def _send(self, copy: Copy) -> None:
        with self._lock:
            if self._unanswered >= MAX_UNANSWERED:  # the shadow is slow or hangs
                self.dropped += 1
                return
            self._unanswered += 1

        def answered(_: Ticket, outcome: Outcome) -> None:
            self._compare(copy, outcome)

        try:
            copy.model.submit(copy.form, copy.data, answered)
        except Exception as error:  # a shadow's failure is a result, whatever it is
            self._compare(copy, error if isinstance(error, RemoraError) else RemoraError(f"{type(error).__name__}"))

    def _compare(self, copy: Copy, outcome: Outcome) -> None:
        reason, failed = "", False
        try:
            if isinstance(outcome, Response):
                found = {tensor.name: np.asarray(tensor.data) for tensor in outcome.outputs}
                reason = difference(copy.expected, found, self._how)
            else:
                reason, failed = f"the shadow failed: {str(outcome)[:200]}", True
        except Exception as error:
            reason, failed = f"the answers cannot be compared: {type(error).__name__}", True
        with self._lock:
            self._unanswered -= 1
            self.compared += 1
            self.failed += failed
            if reason:
                self.differing += 1
                self.samples.append(f"{copy.form.id[:128]}: {reason}" if copy.form.id else reason)

    @property
    def rate(self) -> Rate:
        """Answers that differ, and all that were compared."""
        with self._lock:
            return Rate(self.differing, self.compared)

    def document(self) -> dict[str, Any]:
        """Return the counts and the latest differences as JSON values."""
        with self._lock:
            return {
                "compared": self.compared,
                "differing": self.differing,
                "failed": self.failed,
                "dropped": self.dropped,
                "samples": list(self.samples),
            }


def copied(data: Sequence[Data]) -> list[Data]:
    """Return a copy of a request's inputs, whose buffers may be reused after its answer."""
    return [_copied(each) for each in data]


def _copied(data: Data) -> Data:
    if data is None or isinstance(data, bytes):
        return data
    if isinstance(data, list):
        return [bytes(each) for each in data]
    return np.array(data) if isinstance(data, np.ndarray) else bytes(data)


def copied_outputs(response: Response) -> dict[str, Any]:
    """Return copies of the primary's outputs."""
    return {tensor.name: np.array(tensor.data) for tensor in response.outputs}
