"""Implicit state: what each request of a sequence is given, what is kept of its answer, and what a client sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.backends import Execution
from remora.config import sequence_policy
from remora.errors import InternalError, RemoraError
from remora.messages import InferForm, OutputSpec, Request, Response, Streamed, Tensor, Ticket
from remora.scheduling.sequences.scheduler import SequenceOptions, SequenceScheduler
from remora.signature import Signature
from support.engine.fakes import FakeClock, FakeInstance, FakeRecorder, Replies, config_of, ticket_of

MODEL = """
backend: "fake" max_batch_size: 3
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 } %(shown)s
sequence_batching { max_sequence_idle_microseconds: 1000000 %(strategy)s
  state { input_name: "SUM" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: 1 }
  state { input_name: "LOG" output_name: "LOG_OUT" data_type: TYPE_INT32 dims: -1 }
}
"""
STRATEGIES = ["direct { }", "oldest { max_candidate_sequences: 4 }"]


def remember(request: Request) -> Response:
    """OUT and SUM_OUT are the sum so far; LOG_OUT has all inputs so far behind the one that it began with."""
    sum_so_far = request.inputs["SUM"] + request.inputs["IN"]
    log = np.concatenate([request.inputs["LOG"], request.inputs["IN"]], axis=1)
    outputs = {"OUT": sum_so_far, "SUM_OUT": sum_so_far, "LOG_OUT": log}
    return Response([Tensor(name, "INT32", outputs[name]) for name in request.requested])


class Bench:
    """A scheduler turned by hand over instances that leave their state to it."""

    def __init__(
        self, strategy: str = STRATEGIES[0], *, shown: str = "", instances: int = 1, decoupled: bool = False
    ) -> None:
        config = config_of(MODEL % {"strategy": strategy, "shown": shown})
        policy = sequence_policy(config)
        assert policy is not None
        self.clock = FakeClock()
        self.replies = Replies()
        self.signature = Signature(config, "m")
        self.instances = [FakeInstance(f"fake_{index}") for index in range(instances)]
        for instance in self.instances:
            instance.answer = remember
        initial = {"SUM": np.array([[100]], np.int32), "LOG": np.zeros((1, 1), np.int32)}
        self.scheduler = SequenceScheduler(
            policy,
            self.instances,
            self.signature,
            FakeRecorder(),
            self.clock,
            SequenceOptions(initial, decoupled, threads=False),
        )

    def ask(
        self, number: int, value: int, *, start: bool = False, end: bool = False, outputs: tuple[str, ...] = ()
    ) -> Ticket:
        ticket = ticket_of(reply=self.replies)
        request = ticket.request
        request.form = InferForm(
            (), tuple(map(OutputSpec, outputs)), sequence_id=number, sequence_start=start, sequence_end=end
        )
        request.requested = outputs or tuple(tensor.name for tensor in self.signature.outputs)
        request.inputs["IN"] = np.array([[value]], np.int32)
        self.scheduler.submit(ticket)
        return ticket

    def turn(self) -> None:
        while any(self.scheduler.step(index).tickets for index in range(len(self.instances))):
            pass

    def told(self, ticket: Ticket) -> dict[str, list[int]]:
        """What a ticket's answer shows."""
        outcome = self.replies.only(ticket)
        assert isinstance(outcome, Response), outcome
        return {tensor.name: tensor.data[0].tolist() for tensor in outcome.outputs}

    def seen(self, index: int, instance: int = 0) -> list[dict[str, list[int]]]:
        """What the requests of a batch brought along."""
        return [
            {name: array[0].tolist() for name, array in request.inputs.items()}
            for request in self.instances[instance].batches[index]
        ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_request_gets_the_state_as_the_one_before_it_left_it(strategy: str) -> None:
    bench = Bench(strategy)
    tickets = [bench.ask(7, 1, start=True), bench.ask(7, 2), bench.ask(7, 3, end=True)]
    bench.turn()
    assert [bench.told(ticket) for ticket in tickets] == [{"OUT": [101]}, {"OUT": [103]}, {"OUT": [106]}]
    assert [bench.seen(index)[0]["LOG"] for index in range(3)] == [[0], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sequences_in_one_batch_have_their_own_states(strategy: str) -> None:
    bench = Bench(strategy)
    first, second = bench.ask(1, 1, start=True), bench.ask(2, 10, start=True)
    bench.turn()
    third, fourth = bench.ask(1, 2), bench.ask(2, 20)
    bench.turn()
    assert [bench.told(ticket)["OUT"] for ticket in (first, second, third, fourth)] == [[101], [110], [103], [130]]
    assert [len(batch) for batch in bench.instances[0].batches] == [2, 2]


def test_start_begins_anew_also_in_the_middle_of_a_sequence() -> None:
    bench = Bench()
    bench.ask(7, 1, start=True)
    again = bench.ask(7, 5, start=True)
    bench.turn()
    assert bench.told(again)["OUT"] == [105]
    assert bench.seen(1)[0]["LOG"] == [0]


def test_a_sequence_that_was_silent_for_too_long_has_lost_its_state() -> None:
    bench = Bench()
    bench.ask(7, 1, start=True)
    bench.turn()
    bench.clock.advance(10**10)
    bench.scheduler.sweep()
    late = bench.ask(7, 2, start=True)
    bench.turn()
    assert bench.told(late)["OUT"] == [102]


def test_a_state_is_shown_if_it_is_declared_and_requested() -> None:
    bench = Bench(shown='output { name: "SUM_OUT" data_type: TYPE_INT32 dims: 1 }')
    all_of_it = bench.ask(7, 1, start=True)
    one = bench.ask(7, 2, outputs=("OUT",))
    other = bench.ask(7, 3, outputs=("SUM_OUT",))
    bench.turn()
    assert bench.told(all_of_it) == {"OUT": [101], "SUM_OUT": [101]}
    assert bench.told(one) == {"OUT": [103]}
    assert bench.told(other) == {"SUM_OUT": [106]}


def test_a_failed_request_leaves_the_state_as_it_was() -> None:
    bench = Bench()
    bench.ask(7, 1, start=True)
    bench.turn()
    bench.instances[0].failure = ValueError("no")
    failed = bench.ask(7, 50)
    bench.turn()
    bench.instances[0].failure = None
    after = bench.ask(7, 2)
    bench.turn()
    assert isinstance(bench.replies.only(failed), RemoraError)
    assert bench.told(after)["OUT"] == [103]


def test_an_answer_without_a_states_output_leaves_that_state_as_it_was() -> None:
    bench = Bench()

    def without_sum(request: Request) -> Response:
        answer = remember(request)
        answer.outputs = [tensor for tensor in answer.outputs if tensor.name != "SUM_OUT"]
        return answer

    bench.instances[0].answer = without_sum
    tickets = [bench.ask(7, 1, start=True), bench.ask(7, 2)]
    bench.turn()
    assert [bench.told(ticket)["OUT"] for ticket in tickets] == [[101], [102]]
    assert bench.seen(1)[0]["LOG"] == [0, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((1, 2), np.int32),
        np.zeros((2, 1), np.int32),
        np.zeros((1,), np.int32),
        np.zeros((), np.int32),
        np.zeros((1, 1), np.int64),
    ],
)
def test_an_output_that_does_not_fit_fails_its_request_and_no_state_changes(wrong: Any) -> None:
    bench = Bench()
    bench.ask(7, 1, start=True)
    bench.turn()

    def misfit(request: Request) -> Response:
        return Response([*remember(request).outputs[2:], Tensor("SUM_OUT", "INT32", wrong)])

    bench.instances[0].answer = misfit
    failed = bench.ask(7, 50)
    bench.turn()
    bench.instances[0].answer = remember
    after = bench.ask(7, 2)
    bench.turn()
    error = bench.replies.only(failed)
    assert isinstance(error, InternalError)
    assert "data_type INT32 and dims [1] behind a batch dimension of 1" in str(error)
    assert bench.told(after)["OUT"] == [103]
    assert bench.seen(2)[0]["LOG"] == [0, 1]


def test_padding_has_states_of_zeros_and_changes_no_other_state() -> None:
    bench = Bench()
    bench.ask(1, 1, start=True)
    bench.ask(2, 10, start=True)
    bench.turn()
    second = bench.ask(2, 20)
    bench.turn()
    first = bench.ask(1, 2)
    bench.turn()
    assert bench.seen(1)[0] == {"IN": [0], "SUM": [0], "LOG": [0, 0]}
    assert (bench.told(second)["OUT"], bench.told(first)["OUT"]) == ([130], [103])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_states_of_unequal_shapes_do_not_share_a_batch(strategy: str) -> None:
    bench = Bench(strategy)
    bench.ask(1, 1, start=True)
    bench.turn()
    bench.ask(1, 2)
    bench.ask(2, 10, start=True)
    bench.turn()
    shapes = [[request.inputs["LOG"].shape for request in batch] for batch in bench.instances[0].batches]
    assert all(len(set(row)) == 1 for row in shapes)
    assert sorted(shape[0] for shape in shapes) == [(1, 1), (1, 1), (1, 2)]


def test_what_was_given_is_never_written_again() -> None:
    bench = Bench()

    def give_back(request: Request) -> Response:
        kept = request.inputs["SUM"]
        return Response([Tensor("OUT", "INT32", kept), Tensor("SUM_OUT", "INT32", kept + request.inputs["IN"])])

    bench.instances[0].answer = give_back
    tickets = [bench.ask(7, value, start=value == 1) for value in (1, 2, 3)]
    bench.turn()
    assert [bench.told(ticket)["OUT"] for ticket in tickets] == [[100], [101], [103]]
    assert not bench.instances[0].batches[2][0].inputs["SUM"].flags.writeable


def test_a_state_is_kept_apart_from_the_array_that_the_model_goes_on_writing_to() -> None:
    bench = Bench()
    scratch = np.zeros((1, 1), np.int32)

    def overwrite(request: Request) -> Response:
        scratch[:] = request.inputs["SUM"] + request.inputs["IN"]
        return Response([Tensor("OUT", "INT32", scratch.copy()), Tensor("SUM_OUT", "INT32", scratch)])

    bench.instances[0].answer = overwrite
    bench.ask(1, 1, start=True)
    bench.turn()
    bench.ask(2, 10, start=True)
    bench.turn()
    third = bench.ask(1, 2)
    bench.turn()
    assert bench.told(third)["OUT"] == [103]


class Talker(FakeInstance):
    """Answers through the stream, twice: the state grows with each answer."""

    def execute(self, execution: Execution) -> list[Any]:
        self.batches.append(list(execution.requests))
        for index, request in enumerate(execution.requests):
            answer = remember(request)
            execution.send(index, Streamed(answer, final=False))
            execution.send_soon(index, Streamed(None, final=True))
        return [None] * len(execution.requests)


def test_streamed_answers_renew_the_state_and_do_not_show_it() -> None:
    bench = Bench(decoupled=True)
    talker = Talker()
    config = config_of(MODEL % {"strategy": STRATEGIES[0], "shown": ""})
    policy = sequence_policy(config)
    assert policy is not None
    initial = {"SUM": np.array([[100]], np.int32), "LOG": np.zeros((1, 1), np.int32)}
    bench.scheduler = SequenceScheduler(
        policy,
        [talker],
        bench.signature,
        FakeRecorder(),
        bench.clock,
        SequenceOptions(initial, decoupled=True, threads=False),
    )
    tickets = [bench.ask(7, 1, start=True), bench.ask(7, 2)]
    bench.turn()
    for ticket, expected in zip(tickets, ([101], [103]), strict=True):
        first, last = bench.replies.outcomes[ticket]
        assert isinstance(first, Streamed)
        assert isinstance(first.outcome, Response)
        assert [(tensor.name, tensor.data[0].tolist()) for tensor in first.outcome.outputs] == [("OUT", expected)]
        assert last == Streamed(None, final=True)


_MOOD = 10**6


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(
    requests=st.lists(st.tuples(st.integers(1, 6), st.integers(-9, 9), st.booleans(), st.booleans()), max_size=40),
    choices=st.randoms(use_true_random=False),
)
def test_any_mixture_of_sequences_is_answered_as_a_simple_loop_would(
    strategy: str, requests: list[tuple[int, int, bool, bool]], choices: Any
) -> None:
    def moody(request: Request) -> Any:
        return InternalError("a mood") if request.inputs["IN"].max() == _MOOD else remember(request)

    bench = Bench(strategy, instances=2)
    for instance in bench.instances:
        instance.answer = moody
    sums: dict[int, int] = {}
    expected: list[tuple[Ticket, int | None]] = []
    for number, value, fails, end in requests:
        start = number not in sums
        before = sums.get(number, 100)
        ticket = bench.ask(number, _MOOD if fails else value, start=start, end=end)
        sums[number] = before if fails else before + value
        expected.append((ticket, None if fails else before + value))
        if end:
            del sums[number]
        if choices.random() < 0.5:
            bench.scheduler.step(choices.randrange(2))
    bench.turn()
    for ticket, sum_so_far in expected:
        if sum_so_far is None:
            assert isinstance(bench.replies.only(ticket), InternalError)
        else:
            assert bench.told(ticket)["OUT"] == [sum_so_far]
