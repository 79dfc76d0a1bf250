"""Requests through an ensemble: requests to the steps, shared tensors and batches [E02-E08, X07]."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import (
    InternalError,
)
from remora.messages import (
    InferForm,
    InputSpec,
    Outcome,
    OutputSpec,
    Response,
    Tensor,
    Ticket,
)
from remora.scheduling.ensembles.request import fit_batch
from remora.tensors.device import DeviceArray
from support.engine.ensemble_bench import CHAIN, FORK, ONE, ROW, Bench, FakeStep, numbers, steps_text
from support.engine.fakes import FakeMailbox, UntouchableMemory

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
    ticket.request.blocking_instances = frozenset({instance})
    bench.scheduler.submit(ticket)
    assert bench["first"].tickets[0].request.blocking_instances == {instance}


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


# -- tensors that stay on a device ----------------------------------------------------------------------------------


def on_gpu(readable: int = 0) -> DeviceArray:
    return DeviceArray("INT32", (2,), UntouchableMemory(readable=readable), 4096, None)


GPU = frozenset({(2, 0)})


def test_between_models_that_take_it_there_a_tensor_never_leaves_its_device() -> None:
    bench = Bench(models=[FakeStep("first", devices=GPU), FakeStep("second", devices=GPU)])
    ticket = bench.ask()
    assert bench["first"].tickets[0].request.keep_on_device
    made = on_gpu()
    bench["first"].answer(made.as_array())
    passed: object = bench["second"].tickets[0].request.inputs["I"]
    assert isinstance(passed, DeviceArray)
    assert (passed.address, passed.shared) == (made.address, False)
    assert not bench["second"].tickets[0].request.keep_on_device, "no later step takes a tensor there"
    bench["second"].answer(numbers(3))
    assert isinstance(bench.replies.only(ticket), Response)
    assert made.memory.copied == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("other", [frozenset(), frozenset({(2, 1)})])
def test_a_model_on_another_device_gets_one_copy(other: frozenset[tuple[int, int]]) -> None:
    bench = Bench(models=[FakeStep("first", devices=GPU), FakeStep("second", devices=other)])
    bench.ask()
    assert not bench["first"].tickets[0].request.keep_on_device
    made = on_gpu(readable=1)
    bench["first"].answer(made.as_array())
    assert bench["second"].tickets[0].request.inputs["I"].shape == (2,)
    assert isinstance(bench["second"].tickets[0].request.inputs["I"], np.ndarray)


def test_readers_on_host_and_device_cost_one_copy_and_the_device_reader_may_not_write() -> None:
    steps = steps_text(("first", "I=IN", "O=x"), ("second", "I=x", "O=OUT"), ("third", "I=x J=x", "O=OUT2"))
    outputs = f'output {{ name: "OUT" {ROW} }} output {{ name: "x" {ROW} }} output {{ name: "OUT2" {ROW} }}'
    bench = Bench(steps, models=[FakeStep("first", devices=GPU), FakeStep("second", devices=GPU)], outputs=outputs)
    ticket = bench.ask()
    assert bench["first"].tickets[0].request.keep_on_device
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
