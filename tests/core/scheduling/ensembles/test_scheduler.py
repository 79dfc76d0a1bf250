"""Requests through an ensemble: what steps are asked, what is shared, how requests end [E02-E08, X07]."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeClock, FakeMailbox, Replies, UntouchableMemory, config_of
from remora.errors import (
    CancelledError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    RemoraError,
    UnavailableError,
)
from remora.messages import (
    Array,
    Data,
    InferForm,
    InputSpec,
    Mailbox,
    Outcome,
    OutputSpec,
    Response,
    Streamed,
    Tensor,
    Ticket,
)
from remora.scheduling.ensembles import request as ensemble_requests
from remora.scheduling.ensembles.request import fit_batch
from remora.scheduling.ensembles.scheduler import EnsembleScheduler
from remora.signature import Signature, UnreadableError
from remora.tensors.device import DeviceArray

PATIENCE_S = 30.0
ONE = 'input { name: "I" data_type: TYPE_INT32 dims: -1 } output { name: "O" data_type: TYPE_INT32 dims: -1 }'
TWO = 'input { name: "J" data_type: TYPE_INT32 dims: -1 } ' + ONE
ROW = "data_type: TYPE_INT32 dims: -1"


def steps_text(*steps: tuple[str, str, str]) -> str:
    """Steps as (model, "I=a J=b", "O=c")."""

    def maps(kind: str, pairs: str) -> str:
        parts = [pair.split("=") for pair in pairs.split()]
        return " ".join(f'{kind} {{ key: "{key}" value: "{value}" }}' for key, value in parts)

    return "".join(
        f'step {{ model_name: "{model}" model_version: -1 {maps("input_map", inputs)} {maps("output_map", outputs)} }}'
        for model, inputs, outputs in steps
    )


CHAIN = steps_text(("first", "I=IN", "O=middle"), ("second", "I=middle", "O=OUT"))
FORK = steps_text(("first", "I=IN", "O=x"), ("second", "I=IN", "O=y"), ("third", "I=x J=y", "O=OUT"))


@dataclass(eq=False)
class FakeStep:
    """A composing model; requests wait in ``tickets`` until the test answers them, or for ever."""

    name: str
    text: str = ONE
    decoupled: bool = False
    tickets: list[Ticket] = field(default_factory=list)
    refusal: RemoraError | None = None
    lent: int = 0
    taken: int = 0
    devices: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        self.signature = Signature(config_of(self.text), self.name)

    def submit(
        self,
        form: InferForm,
        data: Sequence[Data],
        reply: Callable[[Ticket, Outcome], None],
        *,
        mailbox: Mailbox | None = None,
        context: object = None,
        held: frozenset[object] = frozenset(),
        stays: bool = False,
    ) -> Ticket:
        if self.refusal is not None:
            raise self.refusal
        request = self.signature.request(form, data)
        request.held = held
        request.stays = stays
        ticket = Ticket(request, reply, mailbox, context)
        self.tickets.append(ticket)
        return ticket

    def labels_of(self, output: str) -> Sequence[str]:
        return ()

    def unreadable(self, error: UnreadableError) -> RemoraError:
        return error

    def give_back(self) -> None:
        self.taken += 1

    def answer(self, *outputs: Array, spent_ns: tuple[int, int, int] = (1, 20, 300)) -> None:
        """Answer the oldest request that waits, in the test's thread."""
        ticket = self.tickets.pop(0)
        ticket.spent_ns = spent_ns
        self.deliver(ticket, Response([Tensor("O", "INT32", array) for array in outputs]))

    def fail(self, error: RemoraError) -> None:
        self.deliver(self.tickets.pop(0), error)

    @staticmethod
    def deliver(*pairs: Ticket | Outcome) -> None:
        """Alternating tickets and outcomes, as one delivery."""
        mailbox = pairs[0].mailbox  # type: ignore[union-attr]
        assert mailbox is not None
        mailbox.post(list(zip(pairs[::2], pairs[1::2], strict=True)))  # type: ignore[arg-type]


@dataclass
class FakeModels:
    """Lends its steps."""

    steps: Mapping[str, FakeStep]
    missing: RemoraError | None = None

    def borrow(self, name: str, version: int = -1) -> FakeStep:
        if self.missing is not None:
            raise self.missing
        self.steps[name].lent += 1
        return self.steps[name]


@dataclass
class FakeEnsembleRecorder:
    """Remembers the requests that ended."""

    ended: list[tuple[tuple[int, int, int], RemoraError | None]] = field(default_factory=list)

    def ensemble_ended(
        self, ticket: Ticket, spent_ns: tuple[int, int, int], error: RemoraError | None, first_ns: int, now_ns: int
    ) -> None:
        self.ended.append((spent_ns, error))


class Bench:
    """An ensemble of fakes with one input IN and one output OUT unless told otherwise."""

    def __init__(
        self,
        steps: str = CHAIN,
        *,
        models: Collection[FakeStep] = (),
        inputs: str = f'input {{ name: "IN" {ROW} }}',
        outputs: str = f'output {{ name: "OUT" {ROW} }}',
        more: str = "",
        scheduling: str = "",
    ) -> None:
        names = ("first", "second", "third")
        self.models = {name: FakeStep(name, TWO if name == "third" else ONE) for name in names}
        self.models.update((model.name, model) for model in models)
        config = config_of(
            f'name: "e" platform: "ensemble" {inputs} {outputs} {more} ensemble_scheduling {{ {steps} {scheduling} }}'
        )
        self.signature = Signature(config, "e")
        self.clock = FakeClock()
        self.recorder = FakeEnsembleRecorder()
        self.lender = FakeModels(self.models)
        decoupled = {model.name for model in self.models.values() if model.decoupled}
        self.scheduler = EnsembleScheduler(config, decoupled, self.lender, self.signature, self.recorder, self.clock)
        self.replies = Replies()

    def __getitem__(self, name: str) -> FakeStep:
        return self.models[name]

    def ask(
        self,
        form: InferForm | None = None,
        *,
        mailbox: Mailbox | None = None,
        **inputs: Array,
    ) -> Ticket:
        inputs = inputs or {"IN": np.arange(4, dtype=np.int32)}
        specs = tuple(InputSpec(name, "INT32", array.shape) for name, array in inputs.items())
        form = form or InferForm(specs)
        request = self.signature.request(form, list(inputs.values()))
        ticket = Ticket(request, self.replies, mailbox)
        self.scheduler.submit(ticket)
        return ticket

    def error_of(self, ticket: Ticket) -> RemoraError:
        outcome = self.replies.only(ticket)
        assert isinstance(outcome, RemoraError)
        return outcome

    def streamed(self, ticket: Ticket) -> list[tuple[object, bool]]:
        """What came of a stream: the values, or the error's text, and whether it was the final one."""
        found: list[tuple[object, bool]] = []
        for each in self.replies.outcomes.get(ticket, []):
            assert isinstance(each, Streamed)
            value: object = each.outcome
            if isinstance(each.outcome, Response):
                value = each.outcome.outputs[0].data.tolist()
            elif each.outcome is not None:
                value = str(each.outcome)
            found.append((value, each.final))
        return found


def numbers(*values: int) -> Array:
    return np.array(values, np.int32)


# -- the way through ------------------------------------------------------------------------------------------------


def test_a_chain_passes_the_very_arrays_on_and_answers_with_the_last() -> None:
    bench = Bench()
    given, middle, last = numbers(1), numbers(2), numbers(3)
    ticket = bench.ask(IN=given)
    assert np.shares_memory(bench["first"].tickets[0].request.inputs["I"], given)
    bench["first"].answer(middle)
    passed = bench["second"].tickets[0].request.inputs["I"]
    assert np.shares_memory(passed, middle)
    assert passed.flags.writeable
    bench["second"].answer(last)
    outcome = bench.replies.only(ticket)
    assert isinstance(outcome, Response)
    assert [(tensor.name, tensor.datatype) for tensor in outcome.outputs] == [("OUT", "INT32")]
    assert outcome.outputs[0].data is last


def test_independent_steps_run_side_by_side() -> None:
    bench = Bench(FORK)
    ticket = bench.ask()
    assert [len(bench[name].tickets) for name in ("first", "second", "third")] == [1, 1, 0]
    bench["second"].answer(numbers(2))
    assert ticket not in bench.replies.outcomes
    bench["first"].answer(numbers(1))
    assert {name: array.tolist() for name, array in bench["third"].tickets[0].request.inputs.items()} == {
        "I": [1],
        "J": [2],
    }


def test_a_tensor_that_two_steps_read_is_passed_on_read_only() -> None:
    bench = Bench(FORK)
    given = numbers(1)
    bench.ask(IN=given)
    for name in ("first", "second"):
        array = bench[name].tickets[0].request.inputs["I"]
        assert np.shares_memory(array, given)
        assert not array.flags.writeable
    assert given.flags.writeable, "the giver's own array stays as it was"


def test_a_step_gets_all_properties_of_the_ensembles_request() -> None:
    bench = Bench()
    form = InferForm((InputSpec("IN", "INT32", (1,)),), (), "me", {"a": 1}, 3, 500, 77, True, True)
    bench.ask(form, IN=numbers(1))
    asked = bench["first"].tickets[0].request.form
    assert (asked.inputs, asked.outputs) == ((InputSpec("I", "INT32", (1,)),), (OutputSpec("O"),))
    assert (asked.id, asked.parameters, asked.priority, asked.timeout_us) == ("me", {"a": 1}, 3, 500)
    assert (asked.sequence_id, asked.sequence_start, asked.sequence_end) == (77, True, True)


def test_the_same_words_give_the_same_form_so_that_a_step_is_checked_once() -> None:
    bench = Bench()
    for _ in range(2):
        bench.ask()
    one, two = bench["first"].tickets
    assert one.request.form is two.request.form


def test_instances_blocked_by_the_ensemble_are_blocked_by_its_steps() -> None:
    bench = Bench()
    instance = object()
    ticket = Ticket(bench.signature.request(InferForm((InputSpec("IN", "INT32", (1,)),)), [numbers(1)]), bench.replies)
    ticket.request.held = frozenset({instance})
    bench.scheduler.submit(ticket)
    assert bench["first"].tickets[0].request.held == {instance}


def test_answers_of_one_delivery_are_delivered_together() -> None:
    bench = Bench(steps_text(("first", "I=IN", "O=OUT")))
    mailbox = FakeMailbox()
    tickets = [bench.ask(mailbox=mailbox) for _ in range(3)]
    answers = [Response([Tensor("O", "INT32", numbers(number))]) for number in range(3)]
    pairs: list[Ticket | Outcome] = []
    for step, answer in zip(bench["first"].tickets, answers, strict=True):
        pairs += [step, answer]
    FakeStep.deliver(*pairs)
    assert [[ticket for ticket, _ in post] for post in mailbox.posts] == [tickets]


def test_a_quick_step_may_run_in_the_loop_that_the_request_came_from() -> None:
    bench = Bench()
    mailbox = FakeMailbox()
    bench.ask(mailbox=mailbox)
    inner = bench["first"].tickets[0].mailbox
    assert inner is not None
    assert inner.defer(lambda: None)
    assert len(mailbox.deferred) == 1
    mailbox.here = False
    assert not inner.defer(lambda: None), "another thread may not"
    bench.ask()
    outside = bench["first"].tickets[1].mailbox
    assert outside is not None
    assert not outside.defer(lambda: None), "no loop, nothing to defer to"


# -- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dims", "batches", "expected"),
    [
        ((4,), (4,), True, (1, 4)),
        ((4,), (-1,), True, (1, 4)),
        ((2, 4), (4,), True, (2, 4)),
        ((1, 4), (4,), False, (4,)),
        ((1, 4), (-1, 4), False, (1, 4)),
        ((2, 4), (4,), False, (2, 4)),
        ((), (), True, (1,)),
    ],
)
def test_a_batch_of_one_row_is_added_and_removed_between_models(
    shape: tuple[int, ...], dims: tuple[int, ...], batches: bool, expected: tuple[int, ...]
) -> None:
    assert fit_batch(shape, dims, batches=batches) == expected


def test_an_ensemble_without_batches_exchanges_single_rows_with_a_model_that_batches() -> None:
    bench = Bench(
        steps_text(("first", "I=IN", "O=OUT")),
        models=[FakeStep("first", "max_batch_size: 8 " + ONE)],
    )
    ticket = bench.ask(IN=numbers(1, 2))
    assert bench["first"].tickets[0].request.inputs["I"].shape == (1, 2)
    bench["first"].answer(numbers(3, 4).reshape(1, 2))
    outcome = bench.replies.only(ticket)
    assert isinstance(outcome, Response)
    assert outcome.outputs[0].data.tolist() == [3, 4]


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


def test_each_answer_of_a_stream_names_the_sequence_and_one_without_outputs_does_not() -> None:
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
    bench.scheduler.abandon(UnavailableError("the time is over"))
    assert str(bench.error_of(ticket)) == "in ensemble 'e', the time is over"
    assert bench.scheduler.stop(0.0)


# -- streams --------------------------------------------------------------------------------------------------------


def sent(ticket: Ticket, value: int | None, *, final: bool = False) -> None:
    outcome = None if value is None else Response([Tensor("O", "INT32", numbers(value))])
    FakeStep.deliver(ticket, Streamed(outcome, final))


def streaming(**more: str) -> Bench:
    return Bench(models=[FakeStep("first", decoupled=True)], **more)


def test_each_response_of_a_decoupled_step_becomes_an_answer() -> None:
    bench = streaming()
    ticket = bench.ask()
    source = bench["first"].tickets[0]
    for value in (1, 2):
        sent(source, value)
        bench["second"].answer(numbers(10 * value))
    sent(source, None, final=True)
    assert bench.streamed(ticket) == [([10], False), ([20], False), (None, True)]
    assert bench.recorder.ended[0][1] is None


def test_the_last_answer_is_the_final_one_when_it_is_known_to_be_the_last() -> None:
    bench = streaming()
    ticket = bench.ask()
    sent(bench["first"].tickets[0], 1, final=True)
    bench["second"].answer(numbers(10))
    assert bench.streamed(ticket) == [([10], True)]


def test_answers_leave_in_the_order_of_the_responses() -> None:
    bench = streaming()
    ticket = bench.ask()
    for value in (1, 2):
        sent(bench["first"].tickets[0], value, final=value == 2)
    bench["second"].tickets.reverse()
    bench["second"].answer(numbers(20))
    assert bench.streamed(ticket) == []
    bench["second"].answer(numbers(10))
    assert bench.streamed(ticket) == [([10], False), ([20], True)]


def test_a_failure_in_a_stream_is_its_end() -> None:
    bench = streaming()
    ticket = bench.ask()
    source = bench["first"].tickets[0]
    sent(source, 1)
    bench["second"].answer(numbers(10))
    FakeStep.deliver(source, Streamed(NotFoundError("failed midway"), False))
    sent(source, 2)
    assert bench.streamed(ticket) == [([10], False), ("in ensemble 'e', failed midway", True)]
    assert source.request.cancelled


def test_a_stream_without_responses_ends_well() -> None:
    bench = streaming()
    ticket = bench.ask()
    sent(bench["first"].tickets[0], None, final=True)
    assert bench.streamed(ticket) == [(None, True)]
    assert bench.recorder.ended[0][1] is None


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender waits as long as the test does."""
    monkeypatch.setattr(ensemble_requests, "_ROOM_TIMEOUT_S", PATIENCE_S)


@pytest.mark.usefixtures("patient")
def test_a_sender_is_held_up_while_the_next_step_has_its_fill() -> None:
    bench = streaming(scheduling="max_inflight_requests: 1")
    ticket = bench.ask()
    source = bench["first"].tickets[0]
    sender = threading.Thread(target=sent, args=(source, 1))
    sender.start()
    while not bench["second"].tickets:  # it comes before the sender waits
        sender.join(0.001)
    assert sender.is_alive()
    bench["second"].answer(numbers(10))
    sender.join(PATIENCE_S)
    assert not sender.is_alive()
    assert bench.streamed(ticket) == [([10], False)]


@pytest.mark.usefixtures("patient")
def test_a_cancelled_stream_lets_its_sender_go() -> None:
    bench = streaming(scheduling="max_inflight_requests: 1")
    ticket = bench.ask()
    sender = threading.Thread(target=sent, args=(bench["first"].tickets[0], 1))
    sender.start()
    while not bench["second"].tickets:
        sender.join(0.001)
    ticket.cancel()
    sender.join(PATIENCE_S)
    assert not sender.is_alive()


def test_steps_in_a_circle_slow_their_sender_down_and_do_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ensemble_requests, "_ROOM_TIMEOUT_S", 0.0)
    bench = streaming(scheduling="max_inflight_requests: 1")
    bench.ask()
    for value in (1, 2):
        sent(bench["first"].tickets[0], value)
    assert len(bench["second"].tickets) == 2


def test_a_sender_whose_instance_a_later_step_may_need_is_not_held_up() -> None:
    again = steps_text(("first", "I=IN", "O=x"), ("second", "I=x", "O=y"), ("first", "I=y", "O=OUT"))
    bench = streaming(steps=again, scheduling="max_inflight_requests: 1")
    bench.ask()
    for value in (1, 2):
        sent(bench["first"].tickets[0], value)
    assert len(bench["second"].tickets) == 2


# -- tensors that stay on a device ----------------------------------------------------------------------------------


def on_gpu(readable: int = 0) -> DeviceArray:
    return DeviceArray("INT32", (2,), UntouchableMemory(readable=readable), 4096, None)


GPU = frozenset({(2, 0)})


def test_between_models_that_take_it_there_a_tensor_never_leaves_its_device() -> None:
    bench = Bench(models=[FakeStep("first", devices=GPU), FakeStep("second", devices=GPU)])
    ticket = bench.ask()
    assert bench["first"].tickets[0].request.stays
    made = on_gpu()
    bench["first"].answer(made.as_array())
    passed: object = bench["second"].tickets[0].request.inputs["I"]
    assert isinstance(passed, DeviceArray)
    assert (passed.address, passed.shared) == (made.address, False)
    assert not bench["second"].tickets[0].request.stays, "nobody after it takes a tensor there"
    bench["second"].answer(numbers(3))
    assert isinstance(bench.replies.only(ticket), Response)
    assert made.memory.copied == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("other", [frozenset(), frozenset({(2, 1)})])
def test_a_model_on_another_device_gets_one_copy(other: frozenset[tuple[int, int]]) -> None:
    bench = Bench(models=[FakeStep("first", devices=GPU), FakeStep("second", devices=other)])
    bench.ask()
    assert not bench["first"].tickets[0].request.stays
    made = on_gpu(readable=1)
    bench["first"].answer(made.as_array())
    assert bench["second"].tickets[0].request.inputs["I"].shape == (2,)
    assert isinstance(bench["second"].tickets[0].request.inputs["I"], np.ndarray)


def test_readers_on_host_and_device_cost_one_copy_and_the_device_reader_may_not_write() -> None:
    steps = steps_text(("first", "I=IN", "O=x"), ("second", "I=x", "O=OUT"), ("third", "I=x J=x", "O=OUT2"))
    outputs = f'output {{ name: "OUT" {ROW} }} output {{ name: "x" {ROW} }} output {{ name: "OUT2" {ROW} }}'
    bench = Bench(steps, models=[FakeStep("first", devices=GPU), FakeStep("second", devices=GPU)], outputs=outputs)
    ticket = bench.ask()
    assert bench["first"].tickets[0].request.stays
    made = on_gpu(readable=1)
    bench["first"].answer(made.as_array())
    passed: object = bench["second"].tickets[0].request.inputs["I"]
    assert isinstance(passed, DeviceArray)
    assert passed.shared
    third = bench["third"].tickets[0].request.inputs
    assert np.shares_memory(third["I"], third["J"])
    bench["second"].answer(numbers(1, 2)), bench["third"].answer(numbers(3, 4))
    outcome = bench.replies.only(ticket)
    assert isinstance(outcome, Response)
    assert all(type(tensor.data) is np.ndarray for tensor in outcome.outputs)
    assert len(made.memory.copied) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("last", [False, True], ids=["for-a-step", "for-the-client"])
def test_a_tensor_that_cannot_be_fetched_from_its_device_ends_its_request_alone(last: bool) -> None:
    class LostMemory(UntouchableMemory):
        def copy(self, to: int, source: int, size: int) -> None:
            raise InternalError("the device is lost")

    bench = Bench(models=[FakeStep("first", devices=GPU), FakeStep("second")])
    ticket = bench.ask()
    if last:
        bench["first"].answer(numbers(1))
    bench["second" if last else "first"].answer(DeviceArray("INT32", (2,), LostMemory(), 4096, None).as_array())
    outcome = bench.replies.only(ticket)
    assert isinstance(outcome, InternalError)
    assert "the device is lost" in outcome.message
    assert bench.scheduler.pending + bench.scheduler.running == 0


WORDS = st.builds(
    lambda fields, parameters, id: InferForm((), id=id, parameters=parameters, **fields),
    st.sampled_from(
        (
            {},
            {"priority": 1},
            {"timeout_us": 1},
            {"sequence_id": 1},
            {"sequence_id": "1"},
            {"sequence_id": 1, "sequence_start": True},
            {"sequence_id": 1, "sequence_end": True},
        )
    ),
    st.sampled_from(({}, {}, {"a": 1}, {"a": True})),
    st.sampled_from(("", "", "r")),
)
SPECS = st.sampled_from([(InputSpec("I", "INT32", (size,)),) for size in (1, 2)] + [()])


@given(st.lists(st.tuples(WORDS, st.integers(0, 1), SPECS), max_size=12))
def test_a_memoised_form_of_a_step_equals_a_new_one(
    asked: list[tuple[InferForm, int, tuple[InputSpec, ...]]],
) -> None:
    kept = Bench(CHAIN).scheduler
    for form, number, inputs in asked * 2:
        fresh = Bench(CHAIN).scheduler
        found = kept.form(form, kept.plan.steps[number], inputs)
        assert repr(found) == repr(fresh.form(form, fresh.plan.steps[number], inputs))
