"""Requests, streams and sequences as they are recorded for a shadow, and the limits of that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from remora.errors import CancelledError, InternalError
from remora.messages import InferForm, Outcome, OutputSpec, Response, Streamed, Tensor
from remora.models.recordings import (
    MAX_ANSWERS,
    MAX_BYTES,
    MAX_SEQUENCES,
    MAX_STEPS,
    MAX_WAITING,
    Recorder,
    Recording,
    Step,
)


class _Bench:
    """Recorder with what it offered, and requests whose answers are the test's."""

    def __init__(self, share: float = 1.0) -> None:
        self.offered: list[Recording] = []
        self.sent: list[Outcome] = []
        self.seen = 0
        self.moves: list[bool] = []
        self.recorder = Recorder(self.offered.append, lambda: self.seen, share)
        self.recorder.moved = lambda: self.moves.append(self.recorder.is_open)

    def begin(self, form: InferForm = InferForm(()), data: Any = ()) -> Any:  # noqa: B008
        return self.recorder.begin(form, data, self._reply, "m", "2")

    def go_on(self, form: InferForm, data: Any = (), version: str = "2") -> Any:
        return self.recorder.go_on(form, data, self._reply, version)

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
    reply(None, answer)
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
    bench.begin(data=[OnDevice()])(None, Response([Tensor("y", "FP32", OnDevice())]))  # type: ignore[arg-type]
    (recording,) = bench.offered
    assert _values(recording) == [[7.0]]
    assert np.array_equal(recording.steps[0].data[0], [7])  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [InternalError("broken"), CancelledError("gone")])
def test_a_request_that_fails_is_not_copied(error: Any) -> None:
    bench = _Bench()
    bench.begin()(None, error)
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
        reply(None, outcome)
    assert _values(bench.offered[0]) == [[1.0, 2.0]]
    assert len(bench.sent) == 3


def test_a_stream_that_fails_or_is_too_long_is_not_copied() -> None:
    bench = _Bench()
    reply = bench.begin()
    reply(None, Streamed(_answer(), False))
    reply(None, Streamed(InternalError("broken"), True))
    assert bench.recorder.dropped == 0
    reply = bench.begin()
    for _ in range(MAX_ANSWERS + 5):
        reply(None, Streamed(_answer(), False))
    reply(None, Streamed(None, True))
    assert bench.recorder.dropped == 1
    assert bench.offered == []
    assert len(bench.sent) == 2 + MAX_ANSWERS + 6  # each is sent


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_full_recorder_closes_and_opens_again_at_half() -> None:
    bench = _Bench(share=0.5)
    bench.seen = 100
    for _ in range(MAX_WAITING):
        bench.begin()(None, _answer())
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
    bench.begin()(None, Response([Tensor("y", "UINT8", large)]))  # its answer has no room
    assert bench.recorder.dropped == 3
    assert bench.offered == []


def test_a_recording_that_is_alone_may_be_of_any_size() -> None:
    bench = _Bench()
    bench.begin(data=[np.zeros(MAX_BYTES + 1, np.uint8)])(None, _answer())
    assert len(bench.offered) == 1
    assert bench.moves == [False]


# -- sequences --------------------------------------------------------------------------------------------------------


def test_a_sequence_is_offered_whole_with_its_id() -> None:
    bench = _Bench()
    replies = [bench.begin(_of(7, start=True)), bench.go_on(_of(7)), bench.go_on(_of(7, end=True))]
    for value, reply in reversed([*enumerate(replies)]):
        assert bench.offered == []
        reply(None, _answer(value))
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
        replies[-1](None, InternalError("broken") if number == failing else _answer())
        if number < 2:
            replies.append(bench.go_on(_of(7, end=number == 1)))
    assert bench.offered == []
    assert len(bench.sent) == 3


def test_a_sequence_whose_id_begins_anew_is_recorded_anew() -> None:
    bench = _Bench()
    bench.begin(_of(7, start=True))(None, _answer(1))
    bench.begin(_of(7, start=True))(None, _answer(2))
    bench.go_on(_of(7, end=True))(None, _answer(3))
    (recording,) = bench.offered
    assert _values(recording) == [[2.0], [3.0]]


def test_a_sequence_that_another_version_continues_is_dropped() -> None:
    bench = _Bench()
    bench.begin(_of(7, start=True))(None, _answer())
    assert not isinstance(bench.go_on(_of(7), version="3"), Step)
    assert not isinstance(bench.go_on(_of(7, end=True)), Step)
    assert bench.recorder.dropped == 1


def test_long_and_open_sequences_are_limited() -> None:
    bench = _Bench()
    for number in range(1, MAX_SEQUENCES + 3):
        bench.begin(_of(number, start=True))(None, _answer())
    assert bench.recorder.dropped == 2
    assert not isinstance(bench.go_on(_of(2)), Step)
    for _ in range(MAX_STEPS - 1):
        bench.go_on(_of(3))(None, _answer())
    assert not isinstance(bench.go_on(_of(3)), Step)
    assert bench.recorder.dropped == 3


def test_a_full_recorder_stays_open_for_the_rest_of_a_sequence() -> None:
    bench = _Bench()
    bench.begin(_of(7, start=True))(None, _answer())
    for _ in range(MAX_WAITING):
        bench.begin()
    assert bench.recorder.is_open
    bench.go_on(_of(7, end=True))(None, _answer())
    assert len(bench.offered) == 1
    assert bench.moves == [False]
