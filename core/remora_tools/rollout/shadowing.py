"""Runner of recorded requests on a shadow, whose answers are compared and never sent.

Invariant: the primary's answer is sent first, and copies run when `remora_tools.rollout.pacing` allows it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from remora.messages import Data, InferForm, Tensor
from remora.system.clock import Clock
from remora_tools.rollout.comparing import Outputs
from remora_tools.rollout.differences import Difference
from remora_tools.rollout.judgement import Rate
from remora_tools.rollout.pacing import rest_ns, step_wait_ns, wait_ns
from remora_tools.rollout.recordings import Recorder, Recording, Step

if TYPE_CHECKING:
    from remora.models.served_model import ServedModel

_log = logging.getLogger("remora.releases")

SAMPLES = 20
_MOST_REASON = 300
_IDLE_S = 5.0
_MAX_WAIT_S = 3600.0
Compare = Callable[[Outputs, Outputs], str]


class Answered(NamedTuple):
    """Outputs of each answer to a copy, and the model's processor time on this server.

    ``failure`` is the error of a copy that has run without success.
    """

    answers: Sequence[Sequence[Tensor]]
    cost_ns: int = 0
    failure: Exception | None = None


class Target(Protocol):
    """Destination of copies, called by up to ``threads`` threads at a time."""

    threads: int

    def refusal(self, primary: ServedModel | None) -> str:
        """Return why requests to a model cannot be copied here, "" if they can."""

    def answer(self, form: InferForm, data: list[Data]) -> Answered:
        """Send a copy and wait for its answers. Raises Exception if it cannot be sent."""

    def end_thread(self) -> None:
        """Close what the calling thread uses, because it ends."""

    def close(self) -> None:
        """End the copies in flight as soon as possible. Any thread may call."""


class Primary(NamedTuple):
    """What a runner of copies knows about the model that is copied.

    Attributes:
        is_busy: returns True if requests wait or run.
        answered_count: returns how many requests were answered.
        share: of the requests that is copied, from 0 to 1.
        processors: that copies may use on average.
        reroute: called after requests begin or cease to be recorded.
    """

    is_busy: Callable[[], bool]
    answered_count: Callable[[], int]
    share: float
    processors: float
    reroute: Callable[[], None] = lambda: None


class Shadowing:
    """Runner of copies and counts of their comparisons. Thread-safe.

    Args:
        target: gets the copies.
        compare: returns how the shadow's outputs differ from the primary's, "" if they agree.
        primary: the model that is copied.
        clock: the engine's.
        log: keeps differences.
        name: of the shadow in the log.
    """

    def __init__(
        self,
        target: Target,
        compare: Compare,
        primary: Primary,
        clock: Clock,
        log: Callable[[Difference], None] | None = None,
        name: str = "",
    ) -> None:
        self.recorder = Recorder(self._offer, primary.answered_count, primary.share, primary.reroute)
        self._target = target
        self._compare = compare
        self._primary = primary
        self._clock = clock
        self._log = log
        self._name = name
        self._waiting: deque[Recording] = deque()
        self._lock = threading.Lock()
        self._offered = threading.Condition(self._lock)
        self._rested = threading.Condition(self._lock)  # not notified: an offer wakes no thread that rests
        self._threads = self._idle = 0
        self._closed = False
        self._ran_ns = self._rested_ns = 0
        self.compared = self.differing = self.failed = 0
        self.samples: deque[str] = deque(maxlen=SAMPLES)
        """The latest differences, each with the request's id."""

    def _offer(self, recording: Recording) -> None:
        """Queue a recording. Never blocks for long."""
        recording.offered_ns = self._clock.monotonic_ns()
        with self._lock:
            self._waiting.append(recording)
            if self._idle:
                self._offered.notify()
            else:
                self._add_thread()
            refused = [] if self._threads and not self._closed else [*self._waiting]
            if refused:
                self._waiting.clear()
        for each in refused:
            self.recorder.discard(each, dropped=True)

    def _add_thread(self) -> None:
        """Start a thread if more recordings wait than threads run. The lock is held."""
        if self._closed or self._threads >= min(self._target.threads, len(self._waiting)):
            return
        self._threads += 1
        try:
            threading.Thread(target=self._serve, name="remora shadow", daemon=True).start()
        except (RuntimeError, MemoryError):  # the process can have no more threads
            self._threads -= 1

    def _serve(self) -> None:
        try:
            while (recording := self._next()) is not None:
                self._perform(recording)
        finally:
            with self._lock:
                self._threads -= 1
                self._add_thread()  # because an offer may have counted on this one
            self._target.end_thread()

    def _next(self) -> Recording | None:
        """Wait for the next recording that may run; None after a while without any."""
        while True:
            with self._lock:
                self._idle += 1
                found = self._offered.wait_for(lambda: self._waiting or self._closed, _IDLE_S)
                self._idle -= 1
                if not found or self._closed:
                    return None
            busy = self._primary.is_busy()  # without the lock, because it may take those of schedulers
            with self._lock:
                if not self._waiting:  # another thread was quicker
                    continue
                wait = wait_ns(
                    self._clock.monotonic_ns(),
                    offered_ns=self._waiting[0].offered_ns,
                    ran_ns=self._ran_ns,
                    rested_ns=self._rested_ns,
                    busy=busy,
                )
                if wait:
                    self._rested.wait(min(wait / 1e9, _MAX_WAIT_S))
                    continue
                recording = self._waiting.popleft()
            self.recorder.free(recording)
            return recording

    def _await_step(self) -> None:
        """Wait until the next request of a sequence may be sent."""
        ran_ns = self._clock.monotonic_ns()
        while not self._closed:
            wait = step_wait_ns(self._clock.monotonic_ns(), ran_ns=ran_ns, busy=self._primary.is_busy())
            if not wait:
                return
            with self._lock:
                if not self._closed:
                    self._rested.wait(wait / 1e9)

    def _perform(self, recording: Recording) -> None:
        """Send the requests of a recording one after the other, and compare the answers."""
        begin_ns, cost_ns = self._clock.thread_ns(), 0
        last = recording.steps[-1]
        sequence_id = _private_id(last.form.sequence_id)
        row: Difference | None = None
        failed = is_begun = False
        for number, step in enumerate(recording.steps, start=1):
            if number > 1:
                self._await_step()
            if self._closed:
                break
            answered = self._send(step, sequence_id)
            cost_ns += answered.cost_ns
            is_begun = step is not last
            if row is not None and answered.failure is None:
                continue  # the others are sent, so that the sequence ends
            reason, at, failure = self._compared(step, answered)
            failed |= failure
            if reason and row is None:
                row = self._difference(recording, step, answered.answers, reason, at, number)
            if answered.failure is not None:
                break
        if is_begun:
            cost_ns += self._send(last, sequence_id).cost_ns  # ends the sequence at the shadow
        self._count(row, failed=failed)
        cost_ns += self._clock.thread_ns() - begin_ns
        with self._lock:
            self._ran_ns = self._clock.monotonic_ns()
            self._rested_ns = max(self._rested_ns, self._ran_ns) + rest_ns(cost_ns, self._primary.processors)

    def _send(self, step: Step, sequence_id: int | str) -> Answered:
        """Send a copy and return its answers or the failure, which is a result too."""
        form = replace(step.form, sequence_id=sequence_id) if sequence_id else step.form
        try:
            return self._target.answer(form, step.data)
        except Exception as error:
            return Answered((), failure=error)

    def _compared(self, step: Step, answered: Answered) -> tuple[str, int, bool]:
        """Return how the answers to a copy differ, and the index of the first that does.

        The third value is True for a failure.
        """
        if answered.failure is not None:
            return f"the shadow failed: {str(answered.failure) or type(answered.failure).__name__}", 0, True
        try:
            return *compared_answers(self._compare, step.expected, answered.answers), False
        except (Exception, SystemExit) as error:  # such as that of the operator's function
            return f"the answers cannot be compared: {type(error).__name__}: {error}", 0, True

    def _difference(
        self, recording: Recording, step: Step, found: Sequence[Sequence[Tensor]], reason: str, at: int, number: int
    ) -> Difference:
        """Return what is known about a difference: that of one answer to one request."""
        if len(recording.steps) > 1:
            reason = f"request {number} of the sequence: {reason}"
        expected, other = (rows[at] if at < len(rows) else () for rows in (step.expected, found))
        return Difference(
            recording.model,
            recording.version,
            self._name,
            step.form,
            step.data,
            expected,
            other,
            reason[:_MOST_REASON],
        )

    def _count(self, row: Difference | None, *, failed: bool) -> None:
        with self._lock:
            if self._closed:  # the models may be closing
                return
            self.compared += 1
            self.failed += failed
            if row is None:
                return
            self.differing += 1
            self.samples.append(f"{row.form.id[:128]}: {row.reason}" if row.form.id else row.reason)
        if self._log is not None:
            try:
                self._log(row)
            except Exception:  # the copies go on
                self._log = None
                _log.exception("differences of the shadow of model '%s' are not logged any more", row.model)

    def refusal(self, primary: ServedModel | None) -> str:
        """Return why requests to a model are not copied, "" if they are."""
        return self._target.refusal(primary)

    def close(self) -> None:
        """End the copy that runs and drop those that wait. Nothing is counted from now on."""
        with self._lock:
            dropped = [*self._waiting]
            self._waiting.clear()
            self._closed = True
            self._rested.notify_all()
            self._offered.notify_all()
        self._target.close()
        self.recorder.close()
        for recording in dropped:
            self.recorder.discard(recording)

    @property
    def rate(self) -> Rate:
        """Answers that differ, and all that were compared."""
        with self._lock:
            return Rate(self.differing, self.compared)

    def document(self) -> dict[str, object]:
        """Return the counts and the latest differences as JSON values."""
        dropped = self.recorder.dropped
        with self._lock:
            return {
                "compared": self.compared,
                "differing": self.differing,
                "failed": self.failed,
                "dropped": dropped,
                "samples": list(self.samples),
            }


def compared_answers(
    compare: Compare, expected: Sequence[Sequence[Tensor]], found: Sequence[Sequence[Tensor]]
) -> tuple[str, int]:
    """Return how the answers to one request differ, and the index of the first that does.

    The text is empty if they agree.
    """
    for at, (mine, theirs) in enumerate(zip(expected, found, strict=False)):
        reason = compare(_by_name(mine), _by_name(theirs))
        if reason:
            return (f"answer {at + 1}: {reason}" if len(expected) > 1 else reason), at
    if len(expected) != len(found):
        return f"answers: {len(found)}, expected {len(expected)}", min(len(expected), len(found))
    return "", 0


def _by_name(outputs: Sequence[Tensor]) -> Outputs:
    return {tensor.name: tensor.data for tensor in outputs}


def _private_id(sequence_id: int | str) -> int | str:
    """Return an id for the copy of a sequence, which no sequence of a client has.

    A request without a sequence has none.
    """
    if isinstance(sequence_id, str):
        return f"copy-{os.urandom(16).hex()}" if sequence_id else ""
    # Positive in 64 bits with a sign, because other servers may use them.
    return int.from_bytes(os.urandom(8), "big") >> 2 | 1 << 62 if sequence_id else 0
