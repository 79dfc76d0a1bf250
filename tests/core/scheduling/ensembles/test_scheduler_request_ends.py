"""How requests to an ensemble end: failures, missing tensors, cancellation, stop."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import numpy as np
import pytest

from remora.errors import (
    CancelledError,
    InvalidArgumentError,
    NotFoundError,
    RemoraError,
    UnavailableError,
)
from remora.messages import (
    InferForm,
    InputSpec,
    Response,
    Streamed,
    Tensor,
    Ticket,
)
from support.engine.ensemble_bench import FORK, ONE, PATIENCE_S, ROW, Bench, FakeStep, numbers, steps_text

# -- ends -----------------------------------------------------------------------------------------------------------


def test_the_first_failure_ends_the_request_with_its_code_and_the_ensembles_name() -> None:
    bench = Bench(FORK)
    ticket = bench.ask()
    other = bench["second"].tickets[0]
    bench["first"].fail(NotFoundError("model says 3", answered=True))
    error = bench.error_of(ticket)
    assert (error.code, str(error)) == ("NOT_FOUND", "in ensemble 'e', model says 3")
    assert error.from_model
    assert not error.answered, "the ensemble itself failed"
    assert other.request.cancelled, "what still runs for it is stopped"
    FakeStep.deliver(other, Response([Tensor("O", "INT32", numbers(1))]))
    assert len(bench.replies.outcomes[ticket]) == 1
    assert not bench["third"].tickets


@pytest.mark.parametrize("refusal", [UnavailableError("Exceeds maximum queue size"), InvalidArgumentError("no")])
def test_a_step_that_refuses_its_request_ends_the_request(refusal: RemoraError) -> None:
    bench = Bench()
    bench["second"].refusal = refusal
    ticket = bench.ask()
    bench["first"].answer(numbers(1))
    error = bench.error_of(ticket)
    assert (error.code, str(error)) == (refusal.code, f"in ensemble 'e', {refusal}")


def test_an_output_that_is_not_there_is_missed_by_the_step_that_needs_it() -> None:
    bench = Bench()
    ticket = bench.ask()
    bench["first"].answer()
    assert "expected 1 inputs but got 0 inputs for model 'second'" in str(bench.error_of(ticket))


def test_an_output_that_is_not_there_is_left_out_of_the_answer() -> None:
    bench = Bench()
    ticket = bench.ask()
    bench["first"].answer(numbers(1))
    bench["second"].answer()
    outcome = bench.replies.only(ticket)
    assert isinstance(outcome, Response)
    assert outcome.outputs == []


def test_an_output_that_no_step_produced_is_named_in_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "remora.models")
    outputs = "".join(f'output {{ name: "{name}" {ROW} }}' for name in ("OUT", "middle"))
    bench = Bench(outputs=outputs)
    ticket = bench.ask()
    bench["first"].answer(numbers(1))
    bench["second"].answer()
    outcome = bench.replies.only(ticket)
    assert isinstance(outcome, Response)
    assert [tensor.name for tensor in outcome.outputs] == ["middle"]
    assert [record.message for record in caplog.records] == ["Composing models did not output tensor OUT"]


def test_an_optional_input_of_the_second_step_may_be_left_out() -> None:
    text = ONE + ' input { name: "J" data_type: TYPE_INT32 dims: -1 optional: true }'
    bench = Bench(
        steps_text(("first", "I=IN", "O=middle"), ("second", "I=middle J=MORE", "O=OUT")),
        models=[FakeStep("second", text)],
        inputs=f'input {{ name: "IN" {ROW} }} input {{ name: "MORE" {ROW} optional: true }}',
    )
    ticket = bench.ask()
    bench["first"].answer(numbers(1))
    assert list(bench["second"].tickets[0].request.inputs) == ["I"]
    bench["second"].answer(numbers(2))
    assert isinstance(bench.replies.only(ticket), Response)


# -- what an answer says besides its outputs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "answered"),
    [(0, 0), (5, 5), ("seven", "seven"), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)],
)
def test_an_answer_names_its_requests_sequence(number: int | str, answered: int | str) -> None:
    bench = Bench()
    specs = (InputSpec("IN", "INT32", (4,)),)
    ticket = bench.ask(InferForm(specs, sequence_id=number, sequence_start=True))
    bench["first"].answer(numbers(1))
    bench["second"].answer(numbers(2))
    outcome = bench.replies.only(ticket)
    assert isinstance(outcome, Response)
    assert outcome.parameters == {"sequence_id": answered, "sequence_start": True, "sequence_end": False}


def test_each_answer_of_a_stream_with_outputs_names_the_sequence() -> None:
    bench = Bench(steps_text(("first", "I=IN", "O=OUT")), models=[FakeStep("first", decoupled=True)])
    ticket = bench.ask(InferForm((InputSpec("IN", "INT32", (4,)),), sequence_id=3, sequence_end=True))
    step = bench["first"].tickets[0]
    one = Response([Tensor("O", "INT32", numbers(1))])
    FakeStep.deliver(step, Streamed(one, False))
    FakeStep.deliver(step, Streamed(Response([]), False))
    FakeStep.deliver(step, Streamed(None, True))
    found = [each.outcome for each in bench.replies.outcomes[ticket] if isinstance(each, Streamed)]
    assert [each and each.parameters for each in found if isinstance(each, Response | None)] == [
        {"sequence_id": 3, "sequence_start": False, "sequence_end": True},
        {},
        None,
    ]


@pytest.mark.parametrize(
    ("batches", "step_batches", "given", "dims", "reshape", "expected"),
    [
        (4, 4, (2, 4, 1, 2), "8", "4,1,2", (2, 8)),
        (0, 0, (4, 1, 2), "8", "4,1,2", (8,)),
        (4, 0, (4, 1, 2), "8", "4,1,2", (1, 8)),
        (0, 4, (1, 4, 1, 2), "8", "4,1,2", (8,)),
        (0, 4, (1, 4, 1, 2), "8", "1,4,1,2", (8,)),
        (4, 4, (2, 3, 2), "-1,1,2", "-1,2", (2, 3, 1, 2)),
        (4, 4, (3,), "1", "", (3, 1)),
    ],
)
def test_an_output_is_answered_in_the_shape_that_the_ensemble_declares(
    batches: int, step_batches: int, given: tuple[int, ...], dims: str, reshape: str, expected: tuple[int, ...]
) -> None:
    shape = f"data_type: TYPE_INT32 dims: [{dims}] reshape {{ shape: [{reshape}] }}"
    bench = Bench(
        steps_text(("first", "I=IN", "O=OUT")),
        models=[FakeStep("first", f"max_batch_size: {step_batches} " + ONE)],
        inputs=f'max_batch_size: {batches} input {{ name: "IN" {ROW} }}',
        outputs=f'output {{ name: "OUT" {shape} }}',
    )
    ticket = bench.ask(IN=np.zeros((1, 4) if batches else (4,), np.int32))
    bench["first"].answer(np.zeros(given, np.int32))
    outcome = bench.replies.only(ticket)
    assert isinstance(outcome, Response), outcome
    assert outcome.outputs[0].data.shape == expected


def test_a_missing_input_ends_in_tritons_words() -> None:
    bench = Bench(
        steps_text(("third", "I=IN J=MORE", "O=OUT")),
        inputs=f'input {{ name: "IN" {ROW} }} input {{ name: "MORE" {ROW} optional: true }}',
    )
    ticket = bench.ask(MORE=numbers(1))
    error = bench.error_of(ticket)
    assert str(error) == (
        "in ensemble 'e', [request id: <id_unknown>] unexpected deadlock, at least one output is not set while no more "
        "ensemble steps can be made"
    )
    assert error.code == "INVALID_ARG"


def test_a_missing_model_ends_the_request() -> None:
    bench = Bench()
    bench.lender.missing = NotFoundError("no such model")
    assert str(bench.error_of(bench.ask())) == "in ensemble 'e', no such model"


def test_a_model_that_has_become_decoupled_ends_the_request() -> None:
    bench = Bench()
    bench["second"].decoupled = True
    assert "another transaction policy" in str(bench.error_of(bench.ask()))


def test_a_cancelled_request_ends_at_once_and_stops_its_steps() -> None:
    bench = Bench(FORK)
    ticket = bench.ask()
    open_steps = [bench[name].tickets[0] for name in ("first", "second")]
    ticket.cancel()
    assert isinstance(bench.replies.only(ticket), CancelledError)
    assert all(step.request.cancelled for step in open_steps)
    bench["first"].answer(numbers(1))
    assert len(bench.replies.outcomes[ticket]) == 1


def test_a_request_cancelled_before_submission_ends_at_once() -> None:
    bench = Bench()
    request = bench.signature.request(InferForm((InputSpec("IN", "INT32", (1,)),)), [numbers(1)])
    ticket = Ticket(request, bench.replies)
    ticket.cancel()
    bench.scheduler.submit(ticket)
    assert isinstance(bench.replies.only(ticket), CancelledError)
    assert not bench["first"].tickets


@pytest.mark.parametrize("end", ["answer", "fail", "cancel"])
def test_every_model_is_given_back_once_and_the_request_counted_once(end: str) -> None:
    bench = Bench(FORK)
    ticket = bench.ask()
    assert bench.scheduler.running == 1
    if end == "cancel":
        ticket.cancel()
    elif end == "fail":
        bench["first"].fail(NotFoundError("no"))
    else:
        for name in ("first", "second", "third"):
            bench[name].answer(numbers(1))
    ticket.cancel()
    assert [(model.lent, model.taken) for model in bench.models.values()] == [(1, 1)] * 3
    assert len(bench.recorder.ended) == 1
    assert bench.scheduler.running == 0
    assert len(bench.replies.outcomes[ticket]) == 1


@pytest.mark.parametrize("end", ["answer", "cancel", "cancelled before"])
def test_an_ended_request_is_freed_without_the_garbage_collector(end: str) -> None:
    bench = Bench()
    given = numbers(1)
    alive = weakref.ref(given)
    request = bench.signature.request(InferForm((InputSpec("IN", "INT32", (1,)),)), [given])
    ticket = Ticket(request, lambda _ticket, _outcome: None)
    gc.disable()
    try:
        if end == "cancelled before":
            ticket.cancel()
        bench.scheduler.submit(ticket)
        if end == "cancel":
            ticket.cancel()
            bench["first"].tickets.clear()
        elif end == "answer":
            bench["first"].answer(numbers(2))
            bench["second"].answer(numbers(3))
        del given, request, ticket
        assert alive() is None
    finally:
        gc.enable()


def test_the_numbers_are_the_sums_of_the_steps() -> None:
    bench = Bench()
    ticket = bench.ask()
    bench["first"].answer(numbers(1), spent_ns=(1, 10, 100))
    bench["second"].answer(numbers(1), spent_ns=(2, 20, 200))
    assert bench.recorder.ended == [((3, 30, 300), None)]
    assert ticket.spent_ns == (3, 30, 300)


def test_a_stopping_scheduler_refuses_requests_and_finishes_those_in_flight() -> None:
    bench = Bench()
    ticket = bench.ask()
    assert not bench.scheduler.stop(0.0)
    with pytest.raises(UnavailableError, match="Server is stopping"):
        bench.ask()
    stopped = threading.Thread(target=bench.scheduler.stop)
    stopped.start()
    bench["first"].answer(numbers(1))
    bench["second"].answer(numbers(1))
    stopped.join(PATIENCE_S)
    assert not stopped.is_alive()
    assert isinstance(bench.replies.only(ticket), Response)


def test_an_abandoned_request_is_answered() -> None:
    bench = Bench()
    ticket = bench.ask()
    bench.scheduler.fail_pending(UnavailableError("the time is over"))
    assert str(bench.error_of(ticket)) == "in ensemble 'e', the time is over"
    assert bench.scheduler.stop(0.0)
