"""Copies of requests to a shadow, whose answers are compared and never sent.

Invariant: the primary's answer is sent first, and copies beyond a bound are dropped before their tensors are copied:
the queue and the number of unanswered copies are limited.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from remora.errors import RemoraError
from remora.messages import Data, InferForm, Outcome, Response, Tensor
from remora.tracing.differences import Difference
from remora.traffic.comparing import Outputs
from remora.traffic.judgement import Rate

if TYPE_CHECKING:
    from remora.models.shadow_targets import Compare, Target

_log = logging.getLogger("remora.releases")

MAX_WAITING = 64
MAX_UNANSWERED = 16
SAMPLES = 20
_MOST_REASON = 300
_IDLE_S = 5.0


class Copy(NamedTuple):
    """A request for the shadow, with the primary's version and outputs."""

    form: InferForm
    data: list[Data]
    expected: list[Tensor]
    model: str
    version: str


class Shadowing:
    """Runner of copies and counts of their comparisons. Thread-safe.

    Args:
        target: gets the copies.
        compare: returns how the shadow's outputs differ from the primary's, "" if they agree.
        log: keeps differences.
        name: of the shadow in the log.
    """

    def __init__(
        self,
        target: Target,
        compare: Compare,
        log: Callable[[Difference], None] | None = None,
        name: str = "",
    ) -> None:
        self._target = target
        self._compare = compare
        self._log = log
        self._name = name
        self._waiting: deque[Copy] = deque()
        self._answers: deque[tuple[Copy, Outcome]] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._threads = self._idle = 0
        self._unanswered = 0
        self.compared = self.differing = self.failed = self.dropped = 0
        self.samples: deque[str] = deque(maxlen=SAMPLES)
        """The latest differences, each with the request's id."""

    def has_room(self) -> bool:
        """Return True if a copy would be queued now; False counts it as dropped."""
        with self._lock:
            if len(self._waiting) < MAX_WAITING and self._unanswered < MAX_UNANSWERED:
                return True
            self.dropped += 1
            return False

    def offer(self, copy: Copy) -> None:
        """Queue a copy, or drop it. Never blocks for long."""
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                self.dropped += 1
                return
            self._waiting.append(copy)
            self._wake()

    def _wake(self) -> None:
        """Wake a thread or start one. The lock is held."""
        self._changed.notify()
        if self._idle < len(self._waiting) + len(self._answers) and self._threads < self._target.threads:
            self._threads += 1
            threading.Thread(target=self._serve, name="remora shadow", daemon=True).start()

    def _serve(self) -> None:
        try:
            self._run()
        finally:
            self._target.end_thread()

    def _run(self) -> None:
        """Send copies and compare answers until none has arrived for a while."""
        while True:
            with self._lock:
                self._idle += 1
                found = self._changed.wait_for(lambda: self._answers or self._waiting, _IDLE_S)
                self._idle -= 1
                if not found:
                    self._threads -= 1
                    return
                if self._answers:
                    copy, outcome = self._answers.popleft()
                    sends = False
                else:
                    copy = self._waiting.popleft()
                    sends = self._unanswered < MAX_UNANSWERED  # otherwise the shadow is slow or hangs
                    self._unanswered += sends
                    self.dropped += not sends
                    if not sends:
                        continue
            if sends:
                self._send(copy)
            else:
                self._judge(copy, outcome)

    def _send(self, copy: Copy) -> None:
        def answered(outcome: Outcome) -> None:
            if isinstance(outcome, Response):
                outcome = Response(copied_outputs(outcome))  # because the reply may free the memory
            with self._lock:
                self._answers.append((copy, outcome))
                self._wake()

        try:
            self._target.send(copy.form, copy.data, answered)
        except Exception as error:  # a shadow's failure is a result, whatever it is
            answered(error if isinstance(error, RemoraError) else RemoraError(f"{type(error).__name__}: {error}"))

    def _judge(self, copy: Copy, outcome: Outcome) -> None:
        reason, failed, found = "", False, []
        try:
            if isinstance(outcome, Response):
                found = outcome.outputs
                reason = self._compare(_by_name(copy.expected), _by_name(found))
            else:
                reason, failed = f"the shadow failed: {outcome}", True
        except Exception as error:  # such as that of the operator's function
            reason, failed = f"the answers cannot be compared: {type(error).__name__}: {error}", True
        reason = reason[:_MOST_REASON]
        with self._lock:
            self._unanswered -= 1
            self.compared += 1
            self.failed += failed
            if reason:
                self.differing += 1
                self.samples.append(f"{copy.form.id[:128]}: {reason}" if copy.form.id else reason)
        if reason and self._log is not None:
            try:
                row = Difference(
                    copy.model, copy.version, self._name, copy.form, copy.data, copy.expected, found, reason
                )
                self._log(row)
            except Exception:  # the copies go on
                self._log = None
                _log.exception("differences of the shadow of model '%s' are not logged any more", copy.model)

    @property
    def rate(self) -> Rate:
        """Answers that differ, and all that were compared."""
        with self._lock:
            return Rate(self.differing, self.compared)

    def document(self) -> dict[str, object]:
        """Return the counts and the latest differences as JSON values."""
        with self._lock:
            return {
                "compared": self.compared,
                "differing": self.differing,
                "failed": self.failed,
                "dropped": self.dropped,
                "samples": list(self.samples),
            }


def _by_name(outputs: Sequence[Tensor]) -> Outputs:
    return {tensor.name: tensor.data for tensor in outputs}


def copied(data: Sequence[Data]) -> list[Data]:
    """Return a copy of a request's inputs, whose buffers may be reused after its answer."""
    return [_copied(each) for each in data]


def _copied(data: Data) -> Data:
    if data is None or isinstance(data, bytes):
        return data
    if isinstance(data, list):
        return [bytes(each) for each in data]
    return np.array(data) if isinstance(data, np.ndarray) else bytes(data)


def copied_outputs(response: Response) -> list[Tensor]:
    """Return copies of the outputs of an answer."""
    return [Tensor(name, datatype, np.array(_on_host(data))) for name, datatype, data in response.outputs]


def _on_host(data: Any) -> Any:
    """Return an array in the host's memory."""
    # Only DeviceArray, which is not imported here, has `host`.
    return data.host() if hasattr(data, "host") else data
