"""Sequences from request to answer: controls, padding, both strategies, rescheduling, cancellation and the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from remora.backends import Execution
from remora.calls import LiveSequence
from remora.config import sequence_policy
from remora.errors import CancelledError, InvalidArgumentError, UnavailableError
from remora.messages import InferForm, Outcome, Response, Tensor, Ticket
from remora.proto.model_config_pb2 import ModelConfig
from remora.scheduling.batching import DELAY, FULL, IDLE
from remora.scheduling.sequences.scheduler import SequenceOptions, SequenceScheduler
from remora.signature import Signature
from support.engine.fakes import FakeClock, FakeInstance, FakeMailbox, FakeRecorder, Replies, config_of, ticket_of
from support.process.no_threads import refuse_threads

MODEL = """
backend: "fake" max_batch_size: 3
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
sequence_batching { max_sequence_idle_microseconds: 100 %s
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ -1, 2 ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: %s } }
}
"""


PATIENCE_S = 30


class Bench:
    """A scheduler turned by hand over fake instances."""

    def __init__(
        self,
        strategy: str = "direct { }",
        data_type: str = "TYPE_UINT64",
        *,
        instances: int = 1,
        quick: bool = False,
        threads: bool = False,
    ) -> None:
        config: ModelConfig = config_of(MODEL % (strategy, data_type))
        policy = sequence_policy(config)
        assert policy is not None
        self.clock = FakeClock()
        self.recorder = FakeRecorder()
        self.replies = Replies()
        self.instances = [FakeInstance(f"fake_{index}", quick=quick) for index in range(instances)]
        self.scheduler = SequenceScheduler(
            policy, self.instances, Signature(config, "m"), self.recorder, self.clock, SequenceOptions(threads=threads)
        )

    def ask(
        self,
        sequence_id: int | str,
        *,
        start: bool = False,
        end: bool = False,
        mailbox: FakeMailbox | None = None,
        reply: Callable[[Ticket, Outcome], None] | None = None,
    ) -> Ticket:
        ticket = ticket_of(reply=reply or self.replies, mailbox=mailbox)
        ticket.request.form = InferForm((), sequence_id=sequence_id, sequence_start=start, sequence_end=end)
        self.scheduler.submit(ticket)
        return ticket

    def batch(self, index: int = 0, instance: int = 0) -> list[tuple[int, bool, float, int]]:
        """START, READY, END and ID of each request of a batch that ran."""
        return [
            tuple(request.inputs[name].item() for name in ("START", "READY", "END", "ID"))
            for request in self.instances[instance].batches[index]
        ]


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 2 }"])
def test_controls_say_where_in_its_sequence_a_request_stands(strategy: str) -> None:
    bench = Bench(strategy)
    tickets = [bench.ask(7, start=True), bench.ask(7), bench.ask(7, end=True)]
    for _ in tickets:
        bench.scheduler.step()
    assert [bench.batch(index) for index in range(3)] == [[(1, True, -1, 7)], [(0, True, -1, 7)], [(0, True, 2, 7)]]
    assert all(isinstance(bench.replies.only(ticket), Response) for ticket in tickets)
    assert bench.scheduler.open_sequences == 0


@pytest.mark.parametrize(
    ("data_type", "given", "seen"),
    [
        ("TYPE_UINT64", 2**64 - 1, np.uint64(2**64 - 1)),
        ("TYPE_INT64", 2**64 - 1, np.int64(-1)),
        ("TYPE_UINT32", 2**32 + 5, np.uint32(5)),
        ("TYPE_INT32", 9, np.int32(9)),
        ("TYPE_STRING", "é", "é".encode()),
        ("TYPE_STRING", "\udcff", b"\xff"),
    ],
)
def test_the_id_arrives_in_the_type_that_the_control_has(data_type: str, given: int | str, seen: object) -> None:
    bench = Bench(data_type=data_type)
    bench.ask(given, start=True)
    bench.scheduler.step()
    array = bench.instances[0].batches[0][0].inputs["ID"]
    assert array.shape == (1, 1)
    assert array[0, 0] == seen
    assert type(array[0, 0]) is type(seen)


@pytest.mark.parametrize(
    ("data_type", "given", "is_a", "expected"),
    [("TYPE_UINT64", "abc", "BYTES", "UINT64"), ("TYPE_STRING", 5, "UINT64", "BYTES")],
)
def test_an_id_of_the_wrong_kind_is_refused_with_tritons_text(
    data_type: str, given: int | str, is_a: str, expected: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Bench(data_type=data_type).ask(given, start=True)
    assert str(caught.value) == (
        f"[request id: <id_unknown>] sequence batching control 'ID' data-type is '{is_a}', but model 'm' expects "
        f"'{expected}'"
    )


def test_empty_slots_below_the_highest_ready_one_are_filled_with_null_requests() -> None:
    bench = Bench()
    bench.ask(1, start=True)
    bench.ask(2, start=True)
    bench.scheduler.step()
    second = bench.ask(2)
    plan = bench.scheduler.step()
    assert bench.batch(1) == [(0, False, -1, 0), (0, True, -1, 2)]
    assert not bench.instances[0].batches[1][0].inputs["IN"].any()
    assert plan.rows == 2
    assert [ticket for ticket, _ in bench.replies.outcomes.items()][-1] is second
    told, outcomes = bench.recorder.runs[1]
    assert (told.tickets, len(outcomes)) == ([second], 1)


def test_a_full_batch_and_an_idle_instance_are_named_as_reasons() -> None:
    bench = Bench()
    for number in (1, 2, 3):
        bench.ask(number, start=True)
    assert bench.scheduler.step().reason == FULL
    bench.ask(1)
    assert bench.scheduler.step().reason == IDLE


def test_a_batch_below_the_minimum_utilization_waits_for_the_delay() -> None:
    bench = Bench("direct { max_queue_delay_microseconds: 5 minimum_slot_utilization: 0.6 }")
    bench.ask(1, start=True)
    plan = bench.scheduler.step()
    assert (plan.tickets, plan.wake_ns) == ([], bench.clock.now_ns + 5000)
    bench.clock.advance(5000)
    assert bench.scheduler.step().reason == DELAY
    bench.ask(1)
    bench.ask(2, start=True)
    assert len(bench.scheduler.step().tickets) == 2


def test_two_sequences_of_the_oldest_strategy_share_a_batch_without_padding() -> None:
    bench = Bench("oldest { max_candidate_sequences: 2 }")
    for number in (1, 2, 3):
        bench.ask(number, start=True, end=True)
    assert len(bench.scheduler.step().tickets) == 2
    assert [row[3] for row in bench.batch(0)] == [1, 2]
    bench.scheduler.step()
    assert [row[3] for row in bench.batch(1)] == [3]


def test_a_sequence_stays_with_its_instance() -> None:
    bench = Bench(instances=2)
    bench.ask(1, start=True)
    bench.ask(2, start=True)
    bench.ask(2)
    for index in (0, 1, 0, 1):
        bench.scheduler.step(index)
    assert [row[3] for batch in range(2) for row in bench.batch(batch, 1)] == [2, 2]


def test_a_failed_request_does_not_end_its_sequence() -> None:
    bench = Bench()
    bench.instances[0].failure = ValueError("no")
    first = bench.ask(1, start=True)
    bench.scheduler.step()
    bench.instances[0].failure = None
    second = bench.ask(1)
    bench.scheduler.step()
    assert "ValueError: no" in str(bench.replies.only(first))
    assert isinstance(bench.replies.only(second), Response)


def test_a_cancelled_request_takes_those_behind_it_along() -> None:
    bench = Bench()
    first, second = bench.ask(1, start=True), bench.ask(1)
    first.cancel()
    bench.scheduler.step()
    assert isinstance(bench.replies.only(first), CancelledError)
    assert isinstance(bench.replies.only(second), CancelledError)
    assert bench.instances[0].batches == []
    assert bench.scheduler.pending == 0


def test_idle_time_is_measured_by_the_clock_it_was_given() -> None:
    bench = Bench()
    bench.ask(1, start=True)
    bench.scheduler.step()
    bench.clock.advance(100_000)
    bench.scheduler.sweep()
    assert bench.scheduler.open_sequences == 0


class Countdown(FakeInstance):
    """Asks for a given number of further turns."""

    turns = 2

    def execute(self, execution: Execution) -> list[Any]:
        super().execute(execution)
        self.turns -= 1
        if self.turns >= 0:
            execution.rescheduled = frozenset({0})
            return [None]
        return [Response([Tensor("OUT", "INT32", np.zeros((1, 1), np.int32))])]


def test_an_iterative_request_is_answered_once_after_all_its_turns() -> None:
    bench = Bench("iterative_sequence: true")
    policy = sequence_policy(config_of(MODEL % ("iterative_sequence: true", "TYPE_UINT64")))
    assert policy is not None
    instance = Countdown()
    bench.instances = [instance]
    signature = Signature(config_of(MODEL % ("iterative_sequence: true", "TYPE_UINT64")), "m")
    bench.scheduler = SequenceScheduler(
        policy, [instance], signature, bench.recorder, bench.clock, SequenceOptions(threads=False)
    )
    ticket = bench.ask(0)
    for _ in range(3):
        assert ticket not in bench.replies.outcomes
        bench.scheduler.step()
    assert isinstance(bench.replies.only(ticket), Response)
    assert len(instance.batches) == 3
    assert bench.scheduler.open_sequences == 0


def test_a_quick_model_runs_in_the_callers_loop_once_its_batches_are_known() -> None:
    bench = Bench(quick=True)
    mailbox = FakeMailbox()
    bench.ask(1, start=True, mailbox=mailbox)
    assert mailbox.turn() == 0, "the time of a batch is not known yet"
    bench.instances[0].during = lambda: bench.clock.advance(1000)
    bench.scheduler.step()
    assert bench.scheduler.costs.curve() == {1: 1000}
    tickets = [bench.ask(1, mailbox=mailbox), bench.ask(1, end=True, mailbox=mailbox)]
    while mailbox.turn():
        pass
    assert bench.replies.order[1:] == tickets
    assert len(mailbox.posts) == 3


def test_a_stopped_scheduler_takes_nothing_new_and_finishes_with_threads_too() -> None:
    bench = Bench()
    policy = sequence_policy(config_of(MODEL % ("direct { }", "TYPE_UINT64")))
    assert policy is not None
    signature = Signature(config_of(MODEL % ("direct { }", "TYPE_UINT64")), "m")
    bench.scheduler = SequenceScheduler(policy, bench.instances, signature, bench.recorder, bench.clock)
    tickets = [bench.ask(number % 5 + 1, start=True, end=True) for number in range(40)]
    assert bench.scheduler.stop(PATIENCE_S)
    assert all(isinstance(bench.replies.only(ticket), Response) for ticket in tickets)
    with pytest.raises(UnavailableError, match="stopping"):
        bench.ask(1, start=True)


def test_a_stop_returns_false_while_the_timeout_thread_still_delivers_an_answer() -> None:
    bench = Bench(threads=True)
    executing, finish, delivering, proceed = (threading.Event() for _ in range(4))
    bench.instances[0].during = lambda: (executing.set(), finish.wait(PATIENCE_S), None)[-1]
    answered = threading.Event()

    def note_first(ticket: Ticket, outcome: Outcome) -> None:
        bench.replies(ticket, outcome)
        answered.set()

    def block(ticket: Ticket, outcome: Outcome) -> None:
        delivering.set()
        proceed.wait(PATIENCE_S)
        bench.replies(ticket, outcome)

    bench.ask(1, start=True, reply=note_first)
    assert executing.wait(PATIENCE_S)
    cancelled = bench.ask(1, end=True, reply=block)
    cancelled.cancel()
    assert delivering.wait(PATIENCE_S)
    finish.set()
    assert answered.wait(PATIENCE_S)
    assert bench.scheduler.stop(0.05) is False
    proceed.set()
    assert bench.scheduler.stop(PATIENCE_S) is True
    assert isinstance(bench.replies.only(cancelled), CancelledError)


def test_the_report_tells_of_the_living_the_ended_and_the_refused() -> None:
    bench = Bench("oldest { max_candidate_sequences: 1 }", instances=2)
    for number in (1, 2, 3):
        bench.ask(number, start=True)
    bench.ask(3)
    bench.scheduler.step()
    bench.clock.advance(40_000)
    report = bench.scheduler.report()
    assert (report.strategy, report.slots, report.active, report.backlog) == ("oldest", 2, 2, 1)
    assert report.idle_limit_ns == 100_000
    assert report.live == (
        LiveSequence(1, "active", "fake_0", 0, running=False, waiting=0, idle_ns=40_000),
        LiveSequence(2, "active", "fake_1", 0, running=True, waiting=0, idle_ns=0),
        LiveSequence(3, "backlog", "", -1, running=False, waiting=2, idle_ns=0),
    )
    bench.clock.advance(70_000)
    with pytest.raises(InvalidArgumentError, match="START"):
        bench.ask(1)
    report = bench.scheduler.report()
    assert [row.id for row in report.live] == [2, 3]
    assert [(row.id, row.instance, row.slot, row.why) for row in report.ended] == [(1, "fake_0", 0, "idle")]
    assert report.refused[0].id == 1
    assert report.refused[0].error.endswith("must specify the START flag on the first request of the sequence")
    assert "idle for longer than max_sequence_idle_microseconds (100)" in report.refused[0].explanation


def test_a_refused_request_does_not_keep_a_slot_from_those_that_wait_for_it() -> None:
    bench = Bench("oldest { max_candidate_sequences: 1 }")
    bench.ask(1, start=True)
    bench.scheduler.step()
    waiting = bench.ask(2, start=True)
    bench.clock.advance(100_000)
    with pytest.raises(InvalidArgumentError, match="START"):
        bench.ask(1)  # its time was over, which frees its slot
    bench.scheduler.step()
    assert isinstance(bench.replies.only(waiting), Response)


def test_start_in_the_middle_of_a_sequence_is_warned_of_with_tritons_text(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.ask(1, start=True)
    assert not caplog.records
    bench.ask(1, start=True, end=True)
    assert caplog.messages == [
        "sequence 1 for model 'm' has a conflict. The previous sequence did not end before this sequence start. "
        "Previous sequence will be terminated early."
    ]
    bench.ask(1, start=True)
    assert len(caplog.records) == 1


def held(strategy: str, hold: int, backlog_hold: int = 0) -> Bench:
    bench = Bench(strategy)
    config = config_of(MODEL % (strategy, "TYPE_UINT64"))
    policy = sequence_policy(config)
    assert policy is not None
    bench.scheduler = SequenceScheduler(
        policy,
        bench.instances,
        Signature(config, "m"),
        bench.recorder,
        bench.clock,
        SequenceOptions(hold=hold, backlog_hold=backlog_hold, threads=False),
    )
    return bench


def test_a_direct_batcher_that_is_held_back_counts_all_requests_with_a_slot() -> None:
    bench = held("direct { }", 4)
    for number in (1, 2):
        bench.ask(number, start=True)
    bench.ask(1)
    plan = bench.scheduler.step()
    assert (plan.tickets, plan.wake_ns > bench.clock.now_ns) == ([], True)
    bench.ask(3, start=True)
    assert len(bench.scheduler.step().tickets) == 3
    assert len(bench.scheduler.step().tickets) == 1  # and it never holds back again


def test_it_waits_for_a_backlog_too_when_both_are_requested() -> None:
    bench = held("direct { }", 3, 2)
    for number in (1, 2, 3, 4):
        bench.ask(number, start=True)
        assert bench.scheduler.step().tickets == []
    bench.ask(4)
    assert len(bench.scheduler.step().tickets) == 3


def test_a_sequence_begun_with_the_id_of_one_that_got_its_end_counts_as_the_backlog() -> None:
    bench = held("direct { }", 9, 2)
    for number in (1, 2, 3):
        for at in range(3):
            bench.ask(number, start=at == 0, end=at == 2)
    assert bench.scheduler.step().tickets == []
    bench.ask(1, start=True)
    assert bench.scheduler.step().tickets == []
    bench.ask(1, end=True)
    assert len(bench.scheduler.step().tickets) == 3


def test_a_backlog_alone_holds_nothing_back_as_in_triton() -> None:
    bench = held("direct { }", 0, 9)
    bench.ask(1, start=True)
    assert len(bench.scheduler.step().tickets) == 1


def test_an_oldest_batcher_that_is_held_back_counts_those_that_may_run() -> None:
    bench = held("oldest { max_candidate_sequences: 3 }", 2, 9)
    bench.ask(1, start=True)
    bench.ask(1)
    assert bench.scheduler.step().tickets == []
    bench.ask(2, start=True)
    assert len(bench.scheduler.step().tickets) == 2


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 3 }"])
def test_a_stop_holds_nothing_back(strategy: str) -> None:
    bench = Bench(strategy)
    config = config_of(MODEL % (strategy, "TYPE_UINT64"))
    policy = sequence_policy(config)
    assert policy is not None
    bench.scheduler = SequenceScheduler(
        policy,
        bench.instances,
        Signature(config, "m"),
        bench.recorder,
        bench.clock,
        SequenceOptions(hold=50, backlog_hold=50),
    )
    ticket = bench.ask(1, start=True)
    stopping = threading.Thread(target=bench.scheduler.stop, args=(10,))
    stopping.start()
    stopping.join(PATIENCE_S)
    assert isinstance(bench.replies.only(ticket), Response)


def test_a_request_while_no_thread_can_start_is_refused_and_the_next_sequence_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(threads=True)
    with monkeypatch.context() as without_threads:
        refuse_threads(without_threads)
        refused = bench.ask(1, start=True, end=True)
    answered = bench.ask(2, start=True, end=True)
    assert bench.scheduler.stop(PATIENCE_S)
    assert isinstance(bench.replies.only(refused), UnavailableError)
    assert isinstance(bench.replies.only(answered), Response)
