"""Requests and their answers, recorded for a shadow.

A recording is one request, or a sequence from its start to its end. Each request has one answer, or those of a stream.

Invariant: recordings that are not run yet are limited in number and bytes, and a request beyond a limit is not copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from remora.messages import Data, InferForm, Outcome, OutputSpec, Reply, Response, Tensor, Ticket, split_outcome

MAX_WAITING = 64
MAX_BYTES = 64 << 20
MAX_ANSWERS = 256
"""Answers of one stream; a request with more is not copied."""
MAX_STEPS = 256
"""Requests of one sequence; a longer one is not copied."""
MAX_SEQUENCES = 16
"""Sequences that are recorded at a time."""
EVICT_NS = 1_000_000_000
"""Time without a request after which a sequence makes room for another request."""
EXPIRE_NS = 60_000_000_000
"""Time without a request after which a sequence is not recorded any more."""


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
        """Record an answer and send it, also if it cannot be recorded."""
        final, content = split_outcome(outcome)
        try:
            if ticket.request.cancelled:  # because a cancelled stream ends early without an error
                self.abandon()
            elif isinstance(content, Response):
                if self._recorder.reserve_answer(self._recording, self, content):
                    self.expected.append(copied_outputs(content))  # before the reply, because it may free the memory
            elif content is not None:  # failures are not compared
                self.abandon()
        except Exception:  # such as no memory for the copy
            with suppress(Exception):
                self._recorder.discard(self._recording, dropped=True)
        self._reply(ticket, outcome)
        if final:
            self._recorder.end_request(self._recording)

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
        "complete", "count", "discarded", "model", "offered_ns", "sequence_id", "size", "steps", "unanswered",
        "used_ns", "version",
    )  # fmt: skip

    def __init__(self, model: str, version: str, sequence_id: int | str = 0) -> None:
        self.model = model
        self.version = version
        self.sequence_id = sequence_id
        self.steps: list[Step] = []
        self.offered_ns = self.used_ns = 0
        self.size = self.count = self.unanswered = 0
        self.complete = self.discarded = False


class Room:
    """Number and bytes of recordings that are not run yet, and of those without room.

    Not thread-safe. Between half of a limit and the limit it stays open or closed, so that it does not change for each
    request.

    Args:
        share: of the requests that is recorded, from 0 to 1.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._count = self._bytes = 0
        self._dropped = self._refused = self._closed_at = 0
        self.is_open = True

    @property
    def has_place(self) -> bool:
        """True if one more recording may begin."""
        return self._count < MAX_WAITING

    def fits(self, size: int) -> bool:
        """Return True if there is room for more bytes."""
        return self._bytes + size <= MAX_BYTES

    def add(self, count: int, size: int) -> None:
        """Take room, or give it back with negative numbers."""
        self._count += count
        self._bytes += size

    def refuse(self) -> None:
        """Count a request that found no room."""
        if self.is_open:
            self._dropped += 1
        else:
            self._refused += 1

    def drop(self) -> None:
        """Count a recording that was given up for want of room."""
        self._dropped += 1

    def should_open(self) -> bool:
        """Return True if there is enough room to be open."""
        limit = 1.0 if self.is_open else 0.5
        return self._count < limit * MAX_WAITING and self._bytes < limit * MAX_BYTES

    def switch(self, answered_count: int) -> None:
        """Open or close when the primary has answered so many requests."""
        if self.is_open:
            self._closed_at, self._refused = answered_count + 1, 0  # the request that closes it is not answered yet
        else:
            self._dropped = self.dropped(answered_count)
        self.is_open = not self.is_open

    def dropped(self, answered_count: int) -> int:
        """Return the recordings without room.

        While it is closed they are estimated as the share of the requests.
        """
        if self.is_open:
            return self._dropped
        return self._dropped + max(round((answered_count - self._closed_at) * self._share), self._refused)


class Recorder:
    """Table of the sequences that are recorded for one shadow. Thread-safe.

    Args:
        offer: gets each finished recording; `free` follows.
        answered_count: returns how many requests the primary has answered.
        share: of the requests, from 0 to 1.
        on_open_changed: called after ``is_open`` has changed, without a lock.
    """

    def __init__(
        self,
        offer: Callable[[Recording], None],
        answered_count: Callable[[], int],
        share: float,
        on_open_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._offer = offer
        self._answered_count = answered_count
        self._on_open_changed = on_open_changed
        self._lock = threading.Lock()
        self._sequences: dict[int | str, Recording] = {}
        self._room = Room(share)
        self._closed = False

    @property
    def is_open(self) -> bool:
        """False while requests need not come here, because none would be recorded."""
        return self._room.is_open

    @property
    def has_sequences(self) -> bool:
        """True while a sequence is recorded, of which no request may be missed."""
        return bool(self._sequences)

    @property
    def dropped(self) -> int:
        """Recordings that had no room, estimated while no request comes here."""
        with self._lock:
            return self._room.dropped(0 if self._room.is_open else self._answered_count())

    def begin(
        self, form: InferForm, data: Sequence[Data], reply: Reply, model: str, version: str, now_ns: int = 0
    ) -> Reply:
        """Return the reply that records a request or the start of a sequence.

        It is ``reply`` if there is no room. Never raises.
        """
        recording = Recording(model, version, form.sequence_id if not form.sequence_end else 0)
        with self._lock:
            if older := self._sequences.get(form.sequence_id):
                self._discard(older)  # its id begins anew
            self._expire(now_ns)
            if admitted := self._has_place(recording, now_ns):
                self._room.add(1, 0)
                self._add(recording, form, now_ns)
                if recording.sequence_id:
                    self._sequences[recording.sequence_id] = recording
            else:
                self._room.refuse()
            changed = self._update_open()
        if changed:
            self._on_open_changed()
        return self._record(recording, form, data, reply, now_ns) if admitted else reply

    def continue_sequence(
        self, form: InferForm, data: Sequence[Data], reply: Reply, version: str, now_ns: int = 0
    ) -> Reply:
        """Return the reply that records the next request of a sequence.

        It is ``reply`` if the sequence is not recorded. Never raises.
        """
        with self._lock:
            recording = self._sequences.get(form.sequence_id)
            if recording is None:
                return reply
            if admitted := recording.count < MAX_STEPS and recording.version == version:
                self._add(recording, form, now_ns)
            else:
                self._discard(recording, dropped=True)
            changed = self._update_open()
        if changed:
            self._on_open_changed()
        return self._record(recording, form, data, reply, now_ns) if admitted else reply

    def forget(self, sequence_id: int | str) -> None:
        """Do not copy the sequence of this id, because a request of it is not recorded."""
        recording = self._sequences.get(sequence_id)
        if recording is not None:
            self.discard(recording)

    def reserve_answer(self, recording: Recording, step: Step, answer: Response) -> bool:
        """Take room for an answer, or give the recording up and return False."""
        size = sum(bytes_of(each.data) for each in answer.outputs)
        with self._lock:
            if recording.discarded:
                return False
            if len(step.expected) < MAX_ANSWERS and self._room.fits(size):
                self._take(recording, size)
                return True
        self.discard(recording, dropped=True)
        return False

    def end_request(self, recording: Recording) -> None:
        """Offer a recording after its last answer."""
        with self._lock:
            recording.unanswered -= 1
            if recording.discarded or recording.unanswered or not recording.complete:
                return
        self._offer(recording)

    def discard(self, recording: Recording, *, dropped: bool = False) -> None:
        """Forget a recording that does not run."""
        with self._lock:
            self._discard(recording, dropped=dropped)
            changed = self._update_open()
        if changed:
            self._on_open_changed()

    def free(self, recording: Recording) -> None:
        """Give back the room of a recording that runs now."""
        with self._lock:
            self._give_back(recording)
            changed = self._update_open()
        if changed:
            self._on_open_changed()

    def close(self) -> None:
        """Record nothing from now on."""
        with self._lock:
            self._closed = True
            for recording in [*self._sequences.values()]:
                self._discard(recording)
            changed = self._update_open()
        if changed:
            self._on_open_changed()

    # -- with the lock ------------------------------------------------------------------------------------------------

    def _has_place(self, recording: Recording, now_ns: int) -> bool:
        """Return True if a recording may begin. Sequences that were idle for long enough make room."""
        if self._closed or not self._room.is_open:
            return False
        if recording.sequence_id and len(self._sequences) >= MAX_SEQUENCES and not self._evict(now_ns):
            return False
        return self._room.has_place or self._evict(now_ns)

    def _reserve(self, recording: Recording, size: int, now_ns: int) -> bool:
        """Take room for the inputs of a request. Sequences that were idle for long enough make room."""
        while not recording.discarded:
            if self._room.fits(size):
                self._take(recording, size)
                return True
            if size > MAX_BYTES or not self._evict(now_ns):
                break
        return False

    def _evict(self, now_ns: int) -> bool:
        """Give up the sequence that has been idle for longest.

        Return False if none was idle for long enough.
        """
        idle = [each for each in self._sequences.values() if not each.unanswered and now_ns - each.used_ns >= EVICT_NS]
        if idle:
            self._discard(min(idle, key=lambda each: each.used_ns), dropped=True)
        return bool(idle)

    def _expire(self, now_ns: int) -> None:
        for each in [*self._sequences.values()]:
            if not each.unanswered and now_ns - each.used_ns >= EXPIRE_NS:
                self._discard(each, dropped=True)

    def _add(self, recording: Recording, form: InferForm, now_ns: int) -> None:
        recording.count += 1
        recording.unanswered += 1
        recording.used_ns = now_ns
        recording.complete = not form.sequence_id or form.sequence_end
        if recording.complete and recording.sequence_id:
            self._sequences.pop(recording.sequence_id, None)

    def _take(self, recording: Recording, size: int) -> None:
        recording.size += size
        self._room.add(0, size)

    def _discard(self, recording: Recording, *, dropped: bool = False) -> None:
        if not self._give_back(recording):
            return
        if dropped:
            self._room.drop()
        for step in recording.steps:  # because a request in flight keeps its step
            step.data, step.expected = [], []
        recording.steps = []

    def _give_back(self, recording: Recording) -> bool:
        """Give back the room of a recording, once."""
        if recording.discarded:
            return False
        recording.discarded = True
        self._room.add(-1, -recording.size)
        if self._sequences.get(recording.sequence_id) is recording:
            del self._sequences[recording.sequence_id]
        return True

    def _update_open(self) -> bool:
        """Open or close the recorder, and return True if that changes something."""
        is_open = not self._closed and (bool(self._sequences) or self._room.should_open())
        if is_open == self._room.is_open:
            return False
        self._room.switch(self._answered_count())
        return True

    # -- without it ---------------------------------------------------------------------------------------------------

    def _record(self, recording: Recording, form: InferForm, data: Sequence[Data], reply: Reply, now_ns: int) -> Reply:
        """Copy the inputs of a request. Returns ``reply`` if there is no room for them."""
        with suppress(Exception):  # such as no memory for the copy
            size = sum(map(bytes_of, data))
            with self._lock:
                reserved = self._reserve(recording, size, now_ns)
            if reserved:
                step = Step(self, recording, _plain(form), [_copied(each) for each in data], reply)
                recording.steps.append(step)
                return step
        self.discard(recording, dropped=True)
        return reply


@lru_cache(maxsize=64)
def _plain(form: InferForm) -> InferForm:
    """Return the form of a copy, the same object for the same form, which is checked once."""
    return replace(form, timeout_us=0, outputs=tuple(OutputSpec(each.name) for each in form.outputs))


def bytes_of(data: Any) -> int:
    """Return the size of a tensor's values."""
    if data is None:
        return 0
    if isinstance(data, np.ndarray) and data.dtype == object:
        data = data.reshape(-1).tolist()
    if isinstance(data, list):
        return sum(map(len, data))
    size: int = data.nbytes if hasattr(data, "nbytes") else len(data)
    return size


def _copied(data: Data) -> Data:
    """Return a copy of an input, whose buffer may be reused after the answer."""
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
