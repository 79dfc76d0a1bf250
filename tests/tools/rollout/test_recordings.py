"""Requests, streams and sequences as they are recorded for a shadow, and the limits of that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from remora.errors import CancelledError, InternalError
from remora.messages import InferForm, Outcome, OutputSpec, Request, Response, Streamed, Tensor, Ticket
from remora_tools.rollout.recordings import (
    EVICT_NS,
    EXPIRE_NS,
    MAX_ANSWERS,
    MAX_BYTES,
    MAX_SEQUENCES,
    MAX_STEPS,
    MAX_WAITING,
    Recorder,
    Recording,
    Step,
)


def _ticket() -> Ticket:
    return Ticket(Request(InferForm(()), {}, (), 1, None), lambda *_: None)


TICKET = _ticket()


class _Bench:
    """Recorder with what it offered, and requests whose answers are the test's."""

    def __init__(self, share: float = 1.0) -> None:
        self.offered: list[Recording] = []
        self.sent: list[Outcome] = []
        self.seen = 0
        self.moves: list[bool] = []
        self.now_ns = 0
        self.recorder = Recorder(self.offered.append, lambda: self.seen, share, self._note_move)

    def _note_move(self) -> None:
        self.moves.append(self.recorder.is_open)

    def begin(self, form: InferForm = InferForm(()), data: Any = ()) -> Any:  # noqa: B008
        return self.recorder.begin(form, data, self._reply, "m", "2", self.now_ns)

    def go_on(self, form: InferForm, data: Any = (), version: str = "2") -> Any:
        return self.recorder.continue_sequence(form, data, self._reply, version, self.now_ns)

    def _reply(self, _: Any, outcome: Outcome) -> None:
        self.sent.append(outcome)


def _answer(value: float = 1) -> Response:
    return Response([Tensor("y", "FP32", np.array([value], np.float32))])


def _of(sequence: int, *, start: bool = False, end: bool = False) -> InferForm:
    return InferForm((), sequence_id=sequence, sequence_start=start, sequence_end=end)


def _values(recording: Recording) -> list[list[float]]:
    return [[float(answer[0].data[0]) for answer in step.expected] for step in recording.steps]


# -- requests ---------------------------------------------------------------------------------------------------------


def test_a_request_is_offered_after_its_answer_is_sent() -> None:
    bench = _Bench()
    buffer, array = bytearray(b"abc"), np.array([1, 2])
    form = InferForm((), (OutputSpec("y"),), id="r", timeout_us=5)
    reply = bench.begin(form, [memoryview(buffer), array, [b"x"], None, b"y"])
    buffer[:] = b"xyz"
    array[:] = 9
    assert bench.offered == []
    answer = _answer()
    reply(TICKET, answer)
    answer.outputs[0].data[:] = 7  # the memory is used again
    (recording,) = bench.offered
    assert bench.sent == [answer]
    assert (recording.model, recording.version, _values(recording)) == ("m", "2", [[1.0]])
    (step,) = recording.steps
    assert (step.form.id, step.form.outputs, step.form.timeout_us) == ("r", (OutputSpec("y"),), 0)
    assert step.data[0] == b"abc"
    assert np.array_equal(step.data[1], [1, 2])  # type: ignore[arg-type]
    assert step.data[2:] == [[b"x"], None, b"y"]


def test_tensors_of_a_device_are_copied_to_the_host() -> None:
    class OnDevice:
        nbytes = 4

        def host(self) -> np.ndarray[Any, Any]:
            return np.array([7], np.float32)

    bench = _Bench()
    bench.begin(data=[OnDevice()])(TICKET, Response([Tensor("y", "FP32", OnDevice())]))  # type: ignore[arg-type]
    (recording,) = bench.offered
    assert _values(recording) == [[7.0]]
    assert np.array_equal(recording.steps[0].data[0], [7])  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [InternalError("broken"), CancelledError("gone")])
def test_a_request_that_fails_is_not_copied(error: Any) -> None:
    bench = _Bench()
    bench.begin()(TICKET, error)
    assert (bench.offered, bench.sent, bench.recorder.dropped) == ([], [error], 0)


def test_a_request_that_is_refused_leaves_its_room() -> None:
    bench = _Bench()
    for _ in range(2 * MAX_WAITING):
        step = bench.begin()
        assert isinstance(step, Step)
        step.abandon()
    assert bench.recorder.dropped == 0


def test_a_stream_is_offered_with_all_of_its_answers() -> None:
    bench = _Bench()
    reply = bench.begin()
    for outcome in (Streamed(_answer(1), False), Streamed(_answer(2), False), Streamed(None, True)):
        assert bench.offered == []
        reply(TICKET, outcome)
    assert _values(bench.offered[0]) == [[1.0, 2.0]]
    assert len(bench.sent) == 3


def test_a_stream_that_is_cancelled_is_not_copied() -> None:
    bench, ticket = _Bench(), _ticket()
    reply = bench.begin()
    reply(ticket, Streamed(_answer(), False))
    ticket.cancel()
    reply(ticket, Streamed(None, True))
    assert (bench.offered, bench.recorder.dropped, len(bench.sent)) == ([], 0, 2)


class _Unreadable:
    nbytes = 4

    def __init__(self, error: Exception) -> None:
        self.error = error

    def host(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [MemoryError(), InternalError("the device is lost")])
def test_a_copy_that_fails_costs_no_answer_and_no_room(error: Exception) -> None:
    bench, damaged = _Bench(), _Unreadable(error)
    answer = Response([Tensor("y", "FP32", damaged)])  # type: ignore[arg-type]
    for number in range(1, MAX_WAITING + 2):
        bench.begin()(TICKET, answer)
        assert len(bench.sent) == number
    bench.begin(_of(7, start=True))(TICKET, _answer())
    for reply in (bench.begin(data=[damaged]), bench.go_on(_of(7), data=[damaged])):
        assert not isinstance(reply, Step)
    assert bench.offered == []
    assert bench.recorder.dropped == MAX_WAITING + 3
    assert not bench.recorder.has_sequences


def test_a_stream_that_fails_or_is_too_long_is_not_copied() -> None:
    bench = _Bench()
    reply = bench.begin()
    reply(TICKET, Streamed(_answer(), False))
    reply(TICKET, Streamed(InternalError("broken"), True))
    assert bench.recorder.dropped == 0
    reply = bench.begin()
    for _ in range(MAX_ANSWERS + 5):
        reply(TICKET, Streamed(_answer(), False))
    reply(TICKET, Streamed(None, True))
    assert bench.recorder.dropped == 1
    assert bench.offered == []
    assert len(bench.sent) == 2 + MAX_ANSWERS + 6  # each is sent


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_full_recorder_closes_and_opens_again_at_half() -> None:
    bench = _Bench(share=0.5)
    bench.seen = 100
    for _ in range(MAX_WAITING):
        bench.begin()(TICKET, _answer())
    assert bench.moves == [False]
    assert not isinstance(bench.begin(), Step)
    bench.seen = 301  # the request that closed it, and others that are not even looked at
    assert bench.recorder.dropped == 100
    for number, recording in enumerate(bench.offered, start=1):
        assert bench.recorder.is_open == (number > MAX_WAITING // 2 + 1)
        bench.recorder.free(recording)
    assert bench.moves == [False, True]
    bench.seen = 900
    assert bench.recorder.dropped == 100


def test_requests_that_are_looked_at_while_it_is_closed_count_as_dropped() -> None:
    bench = _Bench()
    for _ in range(MAX_WAITING + 7):
        bench.begin()
    assert bench.recorder.dropped == 7


def test_the_bytes_of_waiting_recordings_are_limited() -> None:
    bench = _Bench()
    large = np.zeros(MAX_BYTES // 2 + 1, np.uint8)
    assert isinstance(bench.begin(data=[large]), Step)
    assert not isinstance(bench.begin(data=[large]), Step)
    assert not isinstance(bench.begin(data=[[b"x" * (MAX_BYTES // 2)]]), Step)
    bench.begin()(TICKET, Response([Tensor("y", "UINT8", large)]))  # its answer has no room
    assert bench.recorder.dropped == 3
    assert bench.offered == []


def test_a_recording_that_is_alone_is_limited_too() -> None:
    bench = _Bench()
    assert not isinstance(bench.begin(data=[np.zeros(MAX_BYTES + 1, np.uint8)]), Step)
    reply = bench.begin()
    half = Response([Tensor("y", "UINT8", np.zeros(MAX_BYTES // 2, np.uint8))])
    for _ in range(3):
        reply(TICKET, Streamed(half, False))
    reply(TICKET, Streamed(None, True))
    assert (bench.offered, bench.recorder.dropped, len(bench.sent)) == ([], 2, 4)
    assert (reply.data, reply.expected) == ([], [])  # although the request is in flight


def test_a_closed_recorder_records_nothing() -> None:
    bench = _Bench()
    bench.begin(_of(7, start=True))(TICKET, _answer())
    bench.recorder.close()
    assert bench.moves == [False]
    assert not isinstance(bench.begin(), Step)
    assert not isinstance(bench.go_on(_of(7, end=True)), Step)
    assert bench.moves == [False]


# -- sequences --------------------------------------------------------------------------------------------------------


def test_a_sequence_is_offered_whole_with_its_id() -> None:
    bench = _Bench()
    replies = [bench.begin(_of(7, start=True)), bench.go_on(_of(7)), bench.go_on(_of(7, end=True))]
    for value, reply in reversed([*enumerate(replies)]):
        assert bench.offered == []
        reply(TICKET, _answer(value))
    (recording,) = bench.offered
    assert _values(recording) == [[0.0], [1.0], [2.0]]
    assert [(step.form.sequence_id, step.form.sequence_start, step.form.sequence_end) for step in recording.steps] == [
        (7, True, False),
        (7, False, False),
        (7, False, True),
    ]
    assert not isinstance(bench.go_on(_of(7)), Step)


def test_a_sequence_is_not_joined_after_its_start() -> None:
    bench = _Bench()
    assert not isinstance(bench.go_on(_of(7)), Step)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_sequence_with_a_failure_is_not_copied(failing: int) -> None:
    bench = _Bench()
    replies = [bench.begin(_of(7, start=True))]
    for number in range(3):
        replies[-1](TICKET, InternalError("broken") if number == failing else _answer())
        if number < 2:
            replies.append(bench.go_on(_of(7, end=number == 1)))
    assert bench.offered == []
    assert len(bench.sent) == 3


def test_a_sequence_whose_id_begins_anew_is_recorded_anew() -> None:
    bench = _Bench()
    bench.begin(_of(7, start=True))(TICKET, _answer(1))
    bench.begin(_of(7, start=True))(TICKET, _answer(2))
    bench.go_on(_of(7, end=True))(TICKET, _answer(3))
    (recording,) = bench.offered
    assert _values(recording) == [[2.0], [3.0]]


def test_a_sequence_that_another_version_continues_is_dropped() -> None:
    bench = _Bench()
    bench.begin(_of(7, start=True))(TICKET, _answer())
    assert not isinstance(bench.go_on(_of(7), version="3"), Step)
    assert not isinstance(bench.go_on(_of(7, end=True)), Step)
    assert bench.recorder.dropped == 1


def test_long_and_open_sequences_are_limited() -> None:
    bench = _Bench()
    for number in range(1, MAX_SEQUENCES + 3):
        assert isinstance(bench.begin(_of(number, start=True)), Step) == (number <= MAX_SEQUENCES)
    assert bench.recorder.dropped == 2
    for _ in range(MAX_STEPS - 1):
        bench.go_on(_of(3))(TICKET, _answer())
    assert not isinstance(bench.go_on(_of(3)), Step)
    assert bench.recorder.dropped == 3


@pytest.mark.parametrize("lack", ["sequences", "bytes", "count"])
def test_a_sequence_that_is_idle_makes_room_for_another_request(lack: str) -> None:
    bench, done = _Bench(), Response([])
    data = [np.zeros(MAX_BYTES // 4, np.uint8)] if lack == "bytes" else []
    for number in range(1, {"sequences": MAX_SEQUENCES, "bytes": 4, "count": 2}[lack] + 1):
        bench.begin(_of(number, start=True), data)(TICKET, done)
    while lack == "count" and isinstance(bench.begin(), Step):
        pass
    dropped = bench.recorder.dropped
    assert not isinstance(bench.begin(_of(99, start=True), data), Step)
    bench.now_ns = EVICT_NS // 2
    bench.go_on(_of(1))(TICKET, done)
    bench.now_ns = EVICT_NS
    assert isinstance(bench.begin(_of(99, start=True), data), Step)
    assert bench.recorder.dropped == dropped + 2
    assert not isinstance(bench.go_on(_of(2, end=True)), Step)
    assert isinstance(bench.go_on(_of(1, end=True)), Step)  # it was not idle


def test_a_sequence_without_an_end_expires() -> None:
    bench = _Bench()
    bench.begin(_of(7, start=True))(TICKET, _answer())
    unanswered = bench.begin(_of(8, start=True))
    bench.now_ns = EXPIRE_NS - 1
    bench.begin()
    assert bench.recorder.dropped == 0
    bench.now_ns = EXPIRE_NS
    bench.begin()
    assert bench.recorder.dropped == 1
    unanswered(TICKET, _answer())
    assert isinstance(bench.go_on(_of(8, end=True)), Step)
    assert not isinstance(bench.go_on(_of(7, end=True)), Step)


def test_a_sequence_with_a_request_that_is_not_recorded_is_forgotten() -> None:
    bench = _Bench()
    bench.begin(_of(7, start=True))(TICKET, _answer())
    bench.recorder.forget(8)
    assert bench.recorder.has_sequences
    bench.recorder.forget(7)
    assert not isinstance(bench.go_on(_of(7, end=True)), Step)
    assert (bench.offered, bench.recorder.dropped) == ([], 0)


def test_a_full_recorder_stays_open_for_the_rest_of_a_sequence() -> None:
    bench = _Bench()
    bench.begin(_of(7, start=True))(TICKET, _answer())
    for _ in range(MAX_WAITING):
        bench.begin()
    assert bench.recorder.is_open
    bench.go_on(_of(7, end=True))(TICKET, _answer())
    assert len(bench.offered) == 1
    assert bench.moves == [False]
