"""Requests and their answers, recorded for a shadow.

A recording is one request, or a sequence from its start to its end. Each request has one answer, or those of a stream.

Invariant: recordings that are not run yet are limited in number and bytes, and a request beyond a limit is not copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from remora.messages import Data, InferForm, Outcome, OutputSpec, Response, Streamed, Tensor, Ticket

MAX_WAITING = 64
MAX_BYTES = 64 << 20
MAX_ANSWERS = 256
"""Answers of one stream; a request with more is not copied."""
MAX_STEPS = 256
"""Requests of one sequence; a longer one is not copied."""
MAX_SEQUENCES = 16
"""Sequences that are recorded at a time; the oldest makes room for the next."""
Reply = Callable[[Ticket, Outcome], None]


class Step:
    """Request of a recording, and the reply that records its answers.

    Attributes:
        form: the request, without its timeout.
        data: a copy of its inputs.
        expected: the outputs of each answer.
    """

    __slots__ = ("_recorder", "_recording", "_reply", "data", "expected", "form")

    def __init__(
        self, recorder: Recorder, recording: Recording, form: InferForm, data: list[Data], reply: Reply
    ) -> None:
        self._recorder = recorder
        self._recording = recording
        self._reply = reply
        self.form = form
        self.data = data
        self.expected: list[list[Tensor]] = []

    def __call__(self, ticket: Ticket, outcome: Outcome) -> None:
        """Record an answer and send it."""
        final, found = (outcome.final, outcome.outcome) if isinstance(outcome, Streamed) else (True, outcome)
        if isinstance(found, Response):
            if self._recorder.takes(self._recording, self, found):
                self.expected.append(copied_outputs(found))  # before the reply, because it may free the memory
        elif found is not None:  # failures are not compared
            self.abandon()
        self._reply(ticket, outcome)
        if final:
            self._recorder.answered(self._recording)

    def abandon(self) -> None:
        """Do not copy the request, or its whole sequence."""
        self._recorder.discard(self._recording)


class Recording:
    """Copy of a request, or of all requests of a sequence, with the answers of the primary.

    Attributes:
        model, version: the primary.
        steps: the requests in their order.
        offered_ns: when the last answer was recorded.
    """

    __slots__ = (
        "complete", "discarded", "model", "offered_ns", "sequence_id", "size", "steps", "unanswered", "version",
    )  # fmt: skip

    def __init__(self, model: str, version: str, sequence_id: int | str = 0) -> None:
        self.model = model
        self.version = version
        self.sequence_id = sequence_id
        self.steps: list[Step] = []
        self.offered_ns = 0
        self.size = self.unanswered = 0
        self.complete = self.discarded = False


class Recorder:
    """Recordings for one shadow. Thread-safe.

    Args:
        offer: gets each finished recording; `free` follows.
        seen: returns how many requests the primary has answered.
        share: of the requests, from 0 to 1.
    """

    def __init__(self, offer: Callable[[Recording], None], seen: Callable[[], int], share: float) -> None:
        self._offer = offer
        self._seen = seen
        self._share = share
        self._lock = threading.Lock()
        self._sequences: dict[int | str, Recording] = {}
        self._count = self._bytes = 0
        self._dropped = self._refused = self._closed_at = 0
        self.is_open = True
        """False while requests need not come here, because none would be recorded."""
        self.moved: Callable[[], None] = _nothing
        """Called after ``is_open`` has changed, without a lock."""

    @property
    def dropped(self) -> int:
        """Recordings that had no room, about as many as the share of the requests while none had."""
        with self._lock:
            return self._dropped + (0 if self.is_open else self._missed())

    def begin(self, form: InferForm, data: Sequence[Data], reply: Reply, model: str, version: str) -> Reply:
        """Return the reply that records a request or the start of a sequence.

        It is ``reply`` if there is no room.
        """
        recording = Recording(model, version, form.sequence_id if not form.sequence_end else 0)
        size = _size(data)
        with self._lock:
            older = self._sequences.get(form.sequence_id) if form.sequence_id else None
            if older is not None:
                self._end(older)  # its id begins anew
            if recording.sequence_id and len(self._sequences) >= MAX_SEQUENCES:
                self._end(next(iter(self._sequences.values())), dropped=True)
            admitted = self._count < MAX_WAITING and (self._bytes + size <= MAX_BYTES or not self._count)
            if admitted:
                self._count += 1
                self._add(recording, form, size)
                if recording.sequence_id:
                    self._sequences[recording.sequence_id] = recording
            elif self.is_open:
                self._dropped += 1
            else:
                self._refused += 1
            moved = self._move()
        if moved:
            self.moved()
        return self._step(recording, form, data, reply) if admitted else reply

    def go_on(self, form: InferForm, data: Sequence[Data], reply: Reply, version: str) -> Reply:
        """Return the reply that records the next request of a sequence.

        It is ``reply`` if the sequence is not recorded.
        """
        size = _size(data)
        with self._lock:
            recording = self._sequences.get(form.sequence_id)
            if recording is None:
                return reply
            fits = len(recording.steps) < MAX_STEPS and self._bytes + size <= MAX_BYTES
            if fits and recording.version == version:
                self._add(recording, form, size)
            else:
                self._end(recording, dropped=True)
            moved = self._move()
        if moved:
            self.moved()
        return self._step(recording, form, data, reply) if not recording.discarded else reply

    def takes(self, recording: Recording, step: Step, answer: Response) -> bool:
        """Take room for an answer, or give the recording up and return False."""
        size = sum(_bytes_of(each.data) for each in answer.outputs)
        with self._lock:
            if recording.discarded:
                return False
            if len(step.expected) < MAX_ANSWERS and (self._bytes + size <= MAX_BYTES or self._count == 1):
                recording.size += size
                self._bytes += size
                return True
        self.discard(recording, dropped=True)
        return False

    def answered(self, recording: Recording) -> None:
        """Offer a recording after its last answer."""
        with self._lock:
            recording.unanswered -= 1
            if recording.discarded or recording.unanswered or not recording.complete:
                return
        self._offer(recording)

    def discard(self, recording: Recording, *, dropped: bool = False) -> None:
        """Forget a recording that is not offered yet."""
        with self._lock:
            self._end(recording, dropped=dropped)
            moved = self._move()
        if moved:
            self.moved()

    def free(self, recording: Recording) -> None:
        """Give back the room of a recording that runs now."""
        self.discard(recording)

    # -- with the lock ------------------------------------------------------------------------------------------------

    def _add(self, recording: Recording, form: InferForm, size: int) -> None:
        recording.size += size
        recording.unanswered += 1
        recording.complete = not form.sequence_id or form.sequence_end
        self._bytes += size
        if recording.complete and recording.sequence_id:
            self._sequences.pop(recording.sequence_id, None)

    def _end(self, recording: Recording, *, dropped: bool = False) -> None:
        if recording.discarded:
            return
        recording.discarded = True
        self._count -= 1
        self._bytes -= recording.size
        self._dropped += dropped
        if self._sequences.get(recording.sequence_id) is recording:
            del self._sequences[recording.sequence_id]

    def _move(self) -> bool:
        """Open or close the recorder, and return True if that changes something."""
        # Between the limits it stays as it is, so that it does not change for each request.
        limit = 1.0 if self.is_open else 0.5
        is_open = bool(self._sequences) or (self._count < limit * MAX_WAITING and self._bytes < limit * MAX_BYTES)
        if is_open == self.is_open:
            return False
        if is_open:
            self._dropped += self._missed()
        else:
            self._closed_at, self._refused = self._seen() + 1, 0  # the request that closes it is not answered yet
        self.is_open = is_open
        return True

    def _missed(self) -> int:
        """Return how many requests would have been recorded since the recorder closed."""
        return max(round((self._seen() - self._closed_at) * self._share), self._refused)

    # -- without it ---------------------------------------------------------------------------------------------------

    def _step(self, recording: Recording, form: InferForm, data: Sequence[Data], reply: Reply) -> Step:
        step = Step(self, recording, _plain(form), _copied_inputs(data), reply)
        recording.steps.append(step)
        return step


def _nothing() -> None:
    """Do nothing when a recorder opens or closes."""


@lru_cache(maxsize=64)
def _plain(form: InferForm) -> InferForm:
    """Return the form of a copy, the same object for the same form, which is checked once."""
    return replace(form, timeout_us=0, outputs=tuple(OutputSpec(each.name) for each in form.outputs))


def _size(data: Sequence[Data]) -> int:
    return sum(_bytes_of(each) for each in data)


def _bytes_of(data: Any) -> int:
    if data is None:
        return 0
    if isinstance(data, np.ndarray) and data.dtype == object:
        data = data.reshape(-1).tolist()
    if isinstance(data, list):
        return sum(map(len, data))
    size: int = data.nbytes if hasattr(data, "nbytes") else len(data)
    return size


def _copied_inputs(data: Sequence[Data]) -> list[Data]:
    """Return a copy of a request's inputs, whose buffers may be reused after its answer."""
    return [_copied(each) for each in data]


def _copied(data: Data) -> Data:
    if data is None or isinstance(data, bytes):
        return data
    if isinstance(data, list):
        return [bytes(each) for each in data]
    there: Any = _on_host(data)
    return np.array(there) if isinstance(there, np.ndarray) else bytes(there)


def copied_outputs(response: Response) -> list[Tensor]:
    """Return copies of the outputs of an answer."""
    return [Tensor(name, datatype, np.array(_on_host(data))) for name, datatype, data in response.outputs]


def _on_host(data: Any) -> Any:
    """Return an array in the host's memory."""
    # Only DeviceArray, which is not imported here, has `host`.
    return data.host() if hasattr(data, "host") else data
