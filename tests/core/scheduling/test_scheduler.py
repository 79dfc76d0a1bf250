"""The scheduler: turned by hand, in a caller's loop, and raced by threads. Every ticket is answered exactly once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fakes import DOUBLER, FakeClock, FakeInstance, FakeMailbox, FakeRecorder, Replies, config_of, double, ticket_of
from remora.config import BatchPolicy, QueuePolicy
from remora.errors import CancelledError, InternalError, InvalidArgumentError, NotFoundError, UnavailableError
from remora.messages import Outcome, Request, Response, Ticket
from remora.scheduling.batching import BatchQueue
from remora.scheduling.delivery import deliver, failure_of
from remora.scheduling.scheduler import Scheduler
from remora.signature import Signature

DYNAMIC = BatchPolicy(max_batch_size=8, dynamic=True)
PATIENCE_S = 30.0
"""How long a threaded test waits before it counts as a deadlock."""


class Bench:
    """A scheduler with everything around it faked."""

    def __init__(
        self,
        policy: BatchPolicy = DYNAMIC,
        *,
        instances: int = 1,
        quick: bool = False,
        threads: bool = False,
        may_wait: bool = False,
        ordered: bool = False,
    ) -> None:
        self.clock = FakeClock()
        self.instances = [FakeInstance(f"m_{index}", quick=quick) for index in range(instances)]
        self.recorder = FakeRecorder()
        self.replies = Replies()
        self.scheduler = Scheduler(
            BatchQueue(policy),
            self.instances,
            Signature(config_of(DOUBLER), "m"),
            self.recorder,
            self.clock,
            threads=threads,
            may_wait=may_wait,
            ordered=ordered,
        )

    def submit(self, rows: int = 1, **settings: object) -> Ticket:
        ticket = ticket_of(rows, reply=self.replies, **settings)  # type: ignore[arg-type]
        self.scheduler.submit(ticket)
        return ticket


def values(outcome: Outcome) -> list[int]:
    assert isinstance(outcome, Response)
    found: list[int] = outcome.outputs[0].data.reshape(-1).tolist()
    return found


# -- turned by hand -------------------------------------------------------------------------------------------------


def test_requests_that_wait_run_as_one_batch_and_get_their_own_answers() -> None:
    bench = Bench()
    first, second = bench.submit(1), bench.submit(3)
    assert bench.scheduler.pending == 2
    bench.scheduler.step()
    assert [len(batch) for batch in bench.instances[0].batches] == [2]
    assert values(bench.replies.only(first)) == [0]
    assert values(bench.replies.only(second)) == [0, 2, 4]
    assert bench.scheduler.pending == bench.scheduler.running == 0


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


# -- in the caller's loop -------------------------------------------------------------------------------------------


def inline_bench(**settings: bool) -> tuple[Bench, FakeMailbox]:
    """A bench whose model has shown that it is quick."""
    bench = Bench(**{"quick": True, **settings})  # type: ignore[arg-type]
    bench.scheduler.costs.learn(1, 1000)
    return bench, FakeMailbox()


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


def test_a_request_that_arrives_while_a_batch_is_answered_gets_a_turn_of_its_own() -> None:
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


# -- the end --------------------------------------------------------------------------------------------------------


def test_a_stopped_scheduler_refuses_with_tritons_text() -> None:
    bench = Bench()
    assert bench.scheduler.stop(0)
    with pytest.raises(
        UnavailableError,
        match=r"^Server is stopping, scheduler for model has stopped accepting new inference requests$",
    ):
        bench.submit()


def test_what_waits_is_run_by_stop() -> None:
    bench = Bench(threads=True)
    bench.scheduler._threads = False
    tickets = [bench.submit() for _ in range(20)]
    bench.scheduler._threads = True
    assert bench.scheduler.stop(PATIENCE_S)
    for ticket in tickets:
        assert values(bench.replies.only(ticket)) == [0]


def test_stop_does_not_wait_for_a_loop_that_waits_for_stop() -> None:
    bench, mailbox = inline_bench(threads=True)
    ticket = bench.submit(mailbox=mailbox)
    assert mailbox.deferred
    assert bench.scheduler.stop(PATIENCE_S)
    assert values(bench.replies.only(ticket)) == [0]
    mailbox.turn()
    bench.replies.only(ticket)


def test_stop_sends_at_once_what_waits_for_its_delay() -> None:
    bench = Bench(BatchPolicy(max_batch_size=8, dynamic=True, max_delay_ns=10**12), threads=True)
    ticket = bench.submit()
    assert bench.scheduler.stop(PATIENCE_S)
    assert values(bench.replies.only(ticket)) == [0]


def test_the_time_of_a_stop_is_one_budget_over_all_threads() -> None:
    bench = Bench(instances=2, threads=True)
    running, may_end = threading.Semaphore(0), threading.Event()

    def during() -> None:
        running.release()
        assert may_end.wait(PATIENCE_S)

    for instance in bench.instances:
        instance.during = during
        bench.submit(8)
        assert running.acquire(timeout=PATIENCE_S)
    bench.scheduler._now = iter([0, *[10**9] * 9]).__next__
    assert not bench.scheduler.stop(1)  # its time is over when it comes to the first thread: it does not wait at all
    bench.scheduler._now = bench.clock.monotonic_ns
    may_end.set()
    assert bench.scheduler.stop(PATIENCE_S)


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
    bench.scheduler.abandon(UnavailableError("too late"))
    third = bench.submit()
    bench.scheduler.step()
    assert bench.replies.order == [first, second, third]


def test_answers_of_many_instances_leave_in_the_order_of_their_requests() -> None:
    bench = Bench(BatchPolicy(max_batch_size=2, dynamic=True), instances=4, threads=True, ordered=True)
    tickets = [bench.submit() for _ in range(300)]
    assert bench.scheduler.stop(PATIENCE_S)
    assert bench.replies.order == tickets


def test_a_stop_that_times_out_returns_false_and_running_requests_are_still_answered() -> None:
    bench = Bench(threads=True)
    running, may_end = threading.Event(), threading.Event()
    answered = threading.Event()

    def during() -> None:
        running.set()
        assert may_end.wait(PATIENCE_S)

    bench.instances[0].during = during
    ticket = ticket_of(reply=lambda *_: answered.set())
    bench.scheduler.submit(ticket)
    assert running.wait(PATIENCE_S)
    assert not bench.scheduler.stop(0.01)
    may_end.set()
    assert answered.wait(PATIENCE_S)
    assert bench.scheduler.stop(PATIENCE_S)


def test_stop_waits_for_a_batch_that_runs_in_a_loop() -> None:
    bench, mailbox = inline_bench()
    ended: list[bool] = []
    bench.instances[0].during = lambda: ended.append(bench.scheduler.stop(0))
    bench.submit(mailbox=mailbox)
    mailbox.turn()
    assert ended == [False]
    assert bench.scheduler.stop(0)


# -- threads --------------------------------------------------------------------------------------------------------


class Counter:
    """Counts answers by ticket; `all_in` is set when as many as expected are there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.answers: dict[int, int] = {}
        self.outcomes: list[Outcome] = []

    def __call__(self, ticket: Ticket, outcome: Outcome) -> None:
        with self.lock:
            self.answers[id(ticket)] = self.answers.get(id(ticket), 0) + 1
            self.outcomes.append(outcome)


class Unreliable(FakeInstance):
    """Raises in every seventh batch; notices when two threads use it at once."""

    def __init__(self, name: str, *, quick: bool) -> None:
        super().__init__(name, quick=quick)
        self.inside = threading.Lock()
        self.shared = False
        self.ran: list[Request] = []
        self.during = self._trouble

    def _trouble(self) -> None:
        if not self.inside.acquire(blocking=False):
            self.shared = True
            return
        self.ran.extend(self.batches[-1])
        self.inside.release()
        if len(self.batches) % 7 == 0:
            raise RuntimeError("now and then")


class OwnThreadMailbox:
    """A mailbox that may defer in the thread that made it, and runs deferred work when that thread turns it."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.turnable = FakeMailbox()

    def post(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        for ticket, outcome in deliveries:
            ticket.reply(ticket, outcome)

    def defer(self, work: object) -> bool:
        if threading.get_ident() != self.owner:
            return False
        return self.turnable.defer(work)  # type: ignore[arg-type]


def test_an_instances_thread_leaves_it_alone_while_a_loop_uses_it() -> None:
    bench, mailbox = inline_bench(threads=True)
    answered, inside = threading.Event(), threading.Event()
    shared: list[bool] = []
    bench.scheduler.submit(ticket_of(reply=lambda *_: answered.set()))
    assert answered.wait(PATIENCE_S), "the instance has a thread now"

    def during() -> None:
        bench.instances[0].during = inside.set
        bench.submit()
        shared.append(inside.wait(0.05))

    bench.instances[0].during = during
    bench.submit(mailbox=mailbox)
    mailbox.turn()
    assert shared == [False], "two threads used one instance"
    mailbox.turn()  # the loop or the thread runs what arrived meanwhile, whoever sees it first
    assert inside.wait(PATIENCE_S), "what arrived meanwhile was forgotten"
    assert bench.scheduler.stop(PATIENCE_S)


@pytest.fixture(params=[False, True], ids=["threads", "threads-and-loops"])
def quick(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether submitting threads also run batches themselves, as event loops do."""
    return request.param  # type: ignore[no-any-return]


def test_every_ticket_is_answered_once_whatever_happens(quick: bool) -> None:
    bench = Bench()
    instances = [Unreliable(f"m_{index}", quick=quick) for index in range(3)]
    signature = Signature(config_of(DOUBLER), "m")
    scheduler = Scheduler(BatchQueue(DYNAMIC), instances, signature, bench.recorder, bench.clock)
    scheduler.costs.learn(1, 1)
    counter = Counter()
    accepted: list[list[Ticket]] = [[] for _ in range(4)]
    stopped_at = threading.Event()

    def submit_many(place: int) -> None:
        mailbox = OwnThreadMailbox() if quick else None
        for index in range(3000):
            ticket = ticket_of(1 + index % 3, shape_key=index % 5 == 0, reply=counter, mailbox=mailbox)
            try:
                scheduler.submit(ticket)
            except UnavailableError:
                break
            accepted[place].append(ticket)
            if index % 11 == 0:
                ticket.cancel()
            if mailbox is not None and index % 3 == 0:
                mailbox.turnable.turn()
            if place == 0 and index == 1500:
                stopped_at.set()
        if mailbox is not None:
            while mailbox.turnable.turn():
                pass

    threads = [threading.Thread(target=submit_many, args=(place,), daemon=True) for place in range(4)]
    for thread in threads:
        thread.start()
    assert stopped_at.wait(PATIENCE_S)
    assert scheduler.stop(PATIENCE_S), "the scheduler did not come to its end"
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a submitting thread is stuck"
    scheduler.stop(PATIENCE_S)

    tickets = [ticket for part in accepted for ticket in part]
    assert scheduler.pending == scheduler.running == 0
    assert all(counter.answers.get(id(ticket)) == 1 for ticket in tickets), "lost or doubled answers"
    assert len(counter.outcomes) == len(tickets)
    assert not any(instance.shared for instance in instances), "two threads used one instance"
    assert {type(outcome) for outcome in counter.outcomes} <= {Response, InternalError, CancelledError}
    ran = [id(request) for instance in instances for request in instance.ran]
    assert len(ran) == len(set(ran)), "a request ran twice"
    assert len(ran) + len(bench.recorder.drops) == len(tickets)
