"""Runner of recorded requests on a shadow, whose answers are compared and never sent.

Invariant: the primary's answer is sent first, and copies run when `remora.traffic.pacing` allows it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from remora.messages import Tensor
from remora.models.recordings import Recorder, Recording, Step
from remora.system.clock import Clock
from remora.tracing.differences import Difference
from remora.traffic.comparing import Outputs
from remora.traffic.judgement import Rate
from remora.traffic.pacing import rest_ns, wait_ns
from remora.traffic.releases import Release

if TYPE_CHECKING:
    from remora.models.served_model import ServedModel
    from remora.models.shadow_targets import Compare, Target

_log = logging.getLogger("remora.releases")

SAMPLES = 20
_MOST_REASON = 300
_IDLE_S = 5.0


class Primary(NamedTuple):
    """What a runner of copies knows about the model that is copied.

    Attributes:
        is_busy: returns True if requests wait or run.
        seen: returns how many requests were answered.
        share: of the requests that is copied, from 0 to 1.
        processors: that copies may use on average.
    """

    is_busy: Callable[[], bool]
    seen: Callable[[], int]
    share: float
    processors: float


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
        self.recorder = Recorder(self._offer, primary.seen, primary.share)
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
            if self._closed:
                return
            self._waiting.append(recording)
            if self._idle:
                self._offered.notify()
            elif self._threads < min(self._target.threads, len(self._waiting)):
                self._threads += 1
                threading.Thread(target=self._serve, name="remora shadow", daemon=True).start()

    def _serve(self) -> None:
        try:
            while (recording := self._next()) is not None:
                self._perform(recording)
        finally:
            self._target.end_thread()

    def _next(self) -> Recording | None:
        """Wait for the next recording that may run; None after a while without any."""
        while True:
            with self._lock:
                self._idle += 1
                found = self._offered.wait_for(lambda: self._waiting or self._closed, _IDLE_S)
                self._idle -= 1
                if not found or self._closed:
                    self._threads -= 1
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
                    self._rested.wait(wait / 1e9)
                    continue
                recording = self._waiting.popleft()
            self.recorder.free(recording)
            return recording

    def _perform(self, recording: Recording) -> None:
        """Send the requests of a recording one after the other, and compare the answers."""
        begin_ns, cost_ns = self._clock.thread_ns(), 0
        row: Difference | None = None
        failed = False
        for number, step in enumerate(recording.steps, start=1):
            found: Sequence[Sequence[Tensor]] = ()
            try:
                answered = self._target.answer(step.form, step.data)
                cost_ns += answered.cost_ns
                found = answered.answers
            except Exception as error:  # a shadow's failure is a result, whatever it is
                reason, at, failed = f"the shadow failed: {str(error) or type(error).__name__}", 0, True
            else:
                if row is not None:  # the others are sent, so that the sequence ends
                    continue
                try:
                    reason, at = compared_answers(self._compare, step.expected, found)
                except Exception as error:  # such as that of the operator's function
                    reason, at, failed = f"the answers cannot be compared: {type(error).__name__}: {error}", 0, True
            if reason and row is None:
                row = self._difference(recording, step, found, reason, at, number)
            if failed:
                break
        self._count(row, failed=failed)
        cost_ns += self._clock.thread_ns() - begin_ns
        with self._lock:
            self._ran_ns = self._clock.monotonic_ns()
            self._rested_ns = max(self._rested_ns, self._ran_ns) + rest_ns(cost_ns, self._primary.processors)

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
        """Drop the copies that wait."""
        with self._lock:
            dropped = [*self._waiting]
            self._waiting.clear()
            self._closed = True
            self._rested.notify_all()
            self._offered.notify_all()
        for recording in dropped:
            self.recorder.free(recording)

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


def shadow_document(
    release: Release, shadowing: Shadowing | None, primary: ServedModel | None
) -> dict[str, Any] | None:
    """Return the shadow of a release as JSON values, None without one.

    Without ``shadowing`` the server's options do not define its name.
    """
    if release.shadow is None:
        return None
    shadow = release.shadow
    shown = shadow._asdict() | {"weight": shadow.weight / 100, "title": shadow.title}
    if shadowing is None:
        return shown | {"warning": "it gets no copies: the server's options do not define its name"}
    warning = _warning(release, shadowing, primary)
    return shown | shadowing.document() | ({"warning": warning} if warning else {})


def _warning(release: Release, shadowing: Shadowing, primary: ServedModel | None) -> str:
    """Return which requests of a model the shadow does not get, "" if it gets all kinds."""
    if primary is None or release.shadow is None:
        return ""
    if refusal := shadowing.refusal(primary):
        return refusal
    arms = {arm.version for arm in release.arms}
    if primary.config.HasField("sequence_batching") and release.shadow.is_version and release.shadow.version in arms:
        return "it gets no sequences, because clients begin sequences at the same version"
    if primary.generation is not None:
        return "it gets no requests of OpenAI's routes"
    return ""
