"""The scheduler, stepped by hand and in a caller's loop: every ticket is answered exactly once."""

from __future__ import annotations

import pytest

from remora.config import BatchPolicy, QueuePolicy
from remora.errors import CancelledError, InternalError, InvalidArgumentError, NotFoundError, UnavailableError
from remora.messages import Outcome, Request, Response, Ticket
from remora.scheduling.delivery import deliver, failure_of
from support.engine.fakes import FakeMailbox, double, ticket_of
from support.engine.scheduler_bench import DYNAMIC, PATIENCE_S, Bench, inline_bench, values


def test_requests_that_wait_run_as_one_batch_and_get_their_own_answers() -> None:
    bench = Bench()
    first, second = bench.submit(1), bench.submit(3)
    assert bench.scheduler.pending == 2
    bench.scheduler.step()
    assert [len(batch) for batch in bench.instances[0].batches] == [2]
    assert values(bench.replies.only(first)) == [0]
    assert values(bench.replies.only(second)) == [0, 2, 4]
    assert bench.scheduler.pending == bench.scheduler.running == 0


def test_the_oldest_queued_request_is_known_until_it_runs() -> None:
    bench = Bench()
    assert bench.scheduler.oldest_ns == 0
    bench.submit(arrival_ns=7)
    bench.submit(arrival_ns=9)
    assert bench.scheduler.oldest_ns == 7
    bench.scheduler.step()
    assert bench.scheduler.oldest_ns == 0


def test_an_idle_step_runs_nothing() -> None:
    bench = Bench()
    assert bench.scheduler.step().tickets == []
    assert bench.instances[0].batches == []
    assert bench.recorder.runs == []


def test_arrival_and_start_are_stamped_with_the_schedulers_clock() -> None:
    bench = Bench()
    ticket = bench.submit()
    early = bench.submit(arrival_ns=7)
    bench.clock.advance(500)
    bench.instances[0].during = lambda: bench.clock.advance(30)
    bench.scheduler.step()
    assert ticket.arrival_ns == 1_000_000_000
    assert early.arrival_ns == 7
    assert ticket.start_ns == early.start_ns == 1_000_000_500
    assert bench.recorder.spans == [(1_000_000_500, 1_000_000_530)]


def test_a_delayed_batch_goes_when_its_time_has_come() -> None:
    bench = Bench(BatchPolicy(max_batch_size=8, dynamic=True, max_delay_ns=1000))
    bench.submit()
    plan = bench.scheduler.step()
    assert not plan.tickets
    bench.clock.advance(plan.wake_ns - bench.clock.now_ns)
    assert len(bench.scheduler.step().tickets) == 1


def test_run_times_are_learned_by_batch_size() -> None:
    bench = Bench()
    bench.submit(2)
    bench.instances[0].during = lambda: bench.clock.advance(1234)
    bench.scheduler.step()
    assert bench.scheduler.costs.predict(2) == 1234


def test_requests_count_as_running_while_the_instance_runs() -> None:
    bench = Bench()
    seen: list[tuple[int, int]] = []
    bench.instances[0].during = lambda: seen.append((bench.scheduler.pending, bench.scheduler.running))
    bench.submit()
    bench.submit()
    bench.scheduler.step()
    assert seen == [(0, 2)]


@pytest.mark.parametrize(
    ("failure", "kind", "text", "from_model"),
    [
        (InvalidArgumentError("no good"), InvalidArgumentError, "no good", False),
        (NotFoundError("gone", from_model=True), NotFoundError, "gone", True),
        (ZeroDivisionError("by zero"), InternalError, "m_0: ZeroDivisionError: by zero", True),
        (MemoryError(), InternalError, "m_0: MemoryError: ", True),
        (SystemExit(3), InternalError, "m_0: SystemExit: 3", True),
    ],
)
def test_a_failing_instance_answers_its_batch_and_goes_on(
    failure: BaseException, kind: type[Exception], text: str, from_model: bool
) -> None:
    bench = Bench()
    tickets = [bench.submit(), bench.submit()]
    bench.instances[0].failure = failure
    bench.scheduler.step()
    for ticket in tickets:
        outcome = bench.replies.only(ticket)
        assert type(outcome) is kind
        assert str(outcome) == text
        assert outcome.from_model is from_model
    assert [outcomes for _, outcomes in bench.recorder.runs] == [[bench.replies.only(ticket) for ticket in tickets]]
    bench.instances[0].failure = None
    last = bench.submit()
    bench.scheduler.step()
    assert values(bench.replies.only(last)) == [0]


def test_an_instance_that_loses_an_answer_fails_its_batch_instead_of_mixing_answers_up() -> None:
    bench = Bench()
    tickets = [bench.submit(), bench.submit()]
    bench.instances[0].execute = lambda execution: [double(execution.requests[0])]  # type: ignore[method-assign]
    bench.scheduler.step()
    for ticket in tickets:
        assert str(bench.replies.only(ticket)) == "instance 'm_0' returned 1 responses for 2 requests"


def test_one_request_of_a_batch_may_fail_alone_and_the_recorder_gets_its_outcome() -> None:
    bench = Bench()

    def answer(request: Request) -> Outcome:
        return NotFoundError("not this one", from_model=True) if request.form.id == "bad" else double(request)

    bench.instances[0].answer = answer
    good, bad = bench.submit(), bench.submit(id="bad")
    bench.scheduler.step()
    assert values(bench.replies.only(good)) == [0]
    assert str(bench.replies.only(bad)) == "not this one"
    ((_, outcomes),) = bench.recorder.runs
    assert [isinstance(outcome, Response) for outcome in outcomes] == [True, False]


def test_a_cancelled_ticket_never_runs_and_does_not_strand_its_neighbours() -> None:
    bench = Bench()
    gone, stays = bench.submit(), bench.submit()
    gone.cancel()
    bench.scheduler.step()
    assert isinstance(bench.replies.only(gone), CancelledError)
    assert values(bench.replies.only(stays)) == [0]
    assert bench.instances[0].batches == [[stays.request]]
    assert [ticket for ticket, _ in bench.recorder.drops] == [gone]


@pytest.mark.parametrize(
    "policy",
    [
        BatchPolicy(),
        DYNAMIC,
        BatchPolicy(max_batch_size=8, dynamic=True, queue=QueuePolicy(default_timeout_ns=10**12, allow_override=True)),
    ],
    ids=["single", "dynamic", "timeouts"],
)
@pytest.mark.parametrize("ordered", [False, True])
def test_requests_that_are_cancelled_behind_a_busy_instance_do_not_pile_up(policy: BatchPolicy, ordered: bool) -> None:
    bench = Bench(policy, ordered=ordered)
    stays = [bench.submit() for _ in range(10)]
    gone: list[Ticket] = []
    for _ in range(5_000):
        gone.append(bench.submit())
        gone[-1].cancel()
        assert bench.scheduler.pending <= 10 + 64 + 1
    assert ordered or len(bench.replies.order) >= 4_900
    while bench.scheduler.pending:
        bench.scheduler.step()
    assert all(isinstance(bench.replies.only(ticket), CancelledError) for ticket in gone)
    assert all(isinstance(bench.replies.only(ticket), Response) for ticket in stays)


def test_a_queue_full_of_cancelled_requests_takes_others_again() -> None:
    bench = Bench(BatchPolicy(max_batch_size=8, dynamic=True, queue=QueuePolicy(max_size=100)))
    for _ in range(100):
        bench.submit().cancel()
    for _ in range(65):
        try:
            bench.submit()
        except UnavailableError:
            continue
        return
    raise AssertionError("the queue stays full")


def test_a_queue_of_cancelled_tickets_is_answered_without_a_run() -> None:
    bench = Bench()
    gone = bench.submit()
    gone.cancel()
    bench.scheduler.step()
    assert isinstance(bench.replies.only(gone), CancelledError)
    assert bench.instances[0].batches == []
    assert bench.recorder.runs == []


def test_a_reply_that_raises_does_not_strand_its_neighbours() -> None:
    bench = Bench()

    def fail(_ticket: Ticket, _outcome: Outcome) -> None:
        raise OSError("the client is gone")

    bench.scheduler.submit(ticket_of(reply=fail))
    stays = bench.submit()
    bench.scheduler.step()
    assert values(bench.replies.only(stays)) == [0]


def test_a_full_queue_refuses_without_answering() -> None:
    bench = Bench(BatchPolicy(max_batch_size=8, dynamic=True, queue=QueuePolicy(max_size=1)))
    first = bench.submit()
    refused = ticket_of(reply=bench.replies)
    with pytest.raises(UnavailableError, match="Exceeds maximum queue size"):
        bench.scheduler.submit(refused)
    bench.scheduler.step()
    assert bench.replies.order == [first]


def test_of_requests_queued_together_a_full_queue_refuses_those_beyond_its_size() -> None:
    bench = Bench(BatchPolicy(max_batch_size=8, dynamic=True, queue=QueuePolicy(max_size=2)))
    tickets = [ticket_of(reply=bench.replies) for _ in range(4)]
    refused = bench.scheduler.submit_all(tickets)
    assert [index for index, _ in refused] == [2, 3]
    assert all("Exceeds maximum queue size" in str(error) for _, error in refused)
    bench.scheduler.step()
    assert bench.replies.order == tickets[:2]


def test_requests_queued_together_run_as_one_batch_at_the_end_of_the_turn() -> None:
    bench, mailbox = inline_bench(ordered=True)
    tickets = [ticket_of(reply=bench.replies, mailbox=mailbox) for _ in range(3)]
    assert bench.scheduler.submit_all(tickets) == []
    assert {ticket.arrival_ns for ticket in tickets} == {bench.clock.now_ns}
    assert (mailbox.turn(), mailbox.turn()) == (1, 0)
    assert [len(batch) for batch in bench.instances[0].batches] == [3]
    assert bench.replies.order == tickets


def test_requests_queued_together_are_refused_together_by_a_scheduler_that_stops() -> None:
    bench = Bench()
    assert bench.scheduler.stop(0)
    tickets = [ticket_of(reply=bench.replies) for _ in range(2)]
    with pytest.raises(UnavailableError, match="stopping"):
        bench.scheduler.submit_all(tickets)
    assert bench.replies.order == []


def test_answers_of_one_batch_reach_each_mailbox_in_one_delivery() -> None:
    bench = Bench()
    one, two = FakeMailbox(), FakeMailbox()
    tickets = [bench.submit(mailbox=mailbox) for mailbox in (one, two, one, None)]
    bench.scheduler.step()
    assert [[ticket for ticket, _ in post] for post in one.posts] == [[tickets[0], tickets[2]]]
    assert [[ticket for ticket, _ in post] for post in two.posts] == [[tickets[1]]]
    assert len(bench.replies.order) == 4


def test_delivering_nothing_posts_nothing() -> None:
    deliver([])


def test_a_remora_error_keeps_its_identity() -> None:
    error = NotFoundError("x")
    assert failure_of(error, "m") is error


def test_what_arrives_in_one_turn_of_the_loop_runs_as_one_batch_at_its_end() -> None:
    bench, mailbox = inline_bench()
    for _ in range(3):
        bench.submit(mailbox=mailbox)
    assert bench.instances[0].batches == []
    assert mailbox.turn() == 1
    assert [len(batch) for batch in bench.instances[0].batches] == [3]
    assert len(bench.replies.order) == 3
    assert mailbox.turn() == 0


def test_more_than_one_batch_in_a_turn_takes_one_turn_each() -> None:
    bench, mailbox = inline_bench()
    for _ in range(10):
        bench.submit(mailbox=mailbox)
    assert mailbox.turn() == 1
    assert len(bench.replies.order) == 8
    assert mailbox.turn() == 1
    assert len(bench.replies.order) == 10
    assert mailbox.turn() == 0


def test_a_request_that_arrives_while_a_batch_is_answered_gets_its_own_turn() -> None:
    bench, mailbox = inline_bench()
    late: list[Ticket] = []

    def reply_and_ask_again(ticket: Ticket, outcome: Outcome) -> None:
        bench.replies(ticket, outcome)
        if not late:
            late.append(bench.submit(mailbox=mailbox))

    bench.scheduler.submit(ticket_of(reply=reply_and_ask_again, mailbox=mailbox))
    mailbox.turn()
    assert mailbox.turn() == 1
    assert values(bench.replies.only(late[0])) == [0]


@pytest.mark.parametrize(
    ("settings", "known_ns", "here"),
    [
        ({"quick": False}, 1000, True),
        ({"may_wait": True}, 1000, True),
        ({}, 0, True),
        ({}, 10_000_000, True),
        ({}, 1000, False),
    ],
    ids=["not-quick", "may-wait", "cost-unknown", "too-long", "another-thread"],
)
def test_the_loop_runs_nothing_that_is_slow_or_unknown_or_not_its_own(
    settings: dict[str, bool], known_ns: int, here: bool
) -> None:
    bench = Bench(**{"quick": True, **settings})  # type: ignore[arg-type]
    if known_ns:
        bench.scheduler.costs.learn(1, known_ns)
    mailbox = FakeMailbox(here=here)
    bench.submit(mailbox=mailbox)
    assert mailbox.turn() == 0
    assert bench.instances[0].batches == []
    assert len(bench.scheduler.step().tickets) == 1


def test_a_busy_instance_is_not_shared_with_the_loop() -> None:
    bench, mailbox = inline_bench()

    def arrive_during_the_run() -> None:
        bench.instances[0].during = lambda: None
        bench.submit(mailbox=mailbox)

    bench.instances[0].during = arrive_during_the_run
    bench.submit()
    bench.scheduler.step()
    assert mailbox.deferred == []
    assert bench.scheduler.pending == 1


def test_a_turn_that_finds_its_request_cancelled_answers_it() -> None:
    bench, mailbox = inline_bench()
    bench.submit(mailbox=mailbox).cancel()
    mailbox.turn()
    assert [type(outcome) for (outcome,) in bench.replies.outcomes.values()] == [CancelledError]


def test_an_inline_callback_with_an_empty_queue_does_nothing() -> None:
    bench, mailbox = inline_bench()
    ticket = bench.submit(mailbox=mailbox)
    bench.scheduler.step()
    mailbox.turn()
    bench.replies.only(ticket)


def test_answers_in_order_wait_for_those_of_requests_before_them() -> None:
    bench = Bench(BatchPolicy(max_batch_size=1, dynamic=True), instances=2, ordered=True)
    first, second, third = (bench.submit() for _ in range(3))

    def overtake() -> None:
        bench.scheduler.step(1)
        assert bench.replies.order == []

    bench.instances[0].during = overtake
    second.cancel()
    bench.scheduler.step(0)
    assert bench.replies.order == [first, second, third]
    assert isinstance(bench.replies.only(second), CancelledError)


def test_an_answer_that_is_held_back_is_not_lost_when_the_one_before_it_is_abandoned() -> None:
    bench = Bench(BatchPolicy(max_batch_size=1, dynamic=True, queue=QueuePolicy(max_size=2)), ordered=True)
    first, second = bench.submit(), bench.submit()
    with pytest.raises(UnavailableError):
        bench.submit()
    bench.scheduler.fail_pending(UnavailableError("too late"))
    third = bench.submit()
    bench.scheduler.step()
    assert bench.replies.order == [first, second, third]


def test_answers_of_many_instances_leave_in_the_order_of_their_requests() -> None:
    bench = Bench(BatchPolicy(max_batch_size=2, dynamic=True), instances=4, threads=True, ordered=True)
    tickets = [bench.submit() for _ in range(300)]
    assert bench.scheduler.stop(PATIENCE_S)
    assert bench.replies.order == tickets
