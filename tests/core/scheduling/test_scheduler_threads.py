"""A scheduler whose threads and callers race."""

from __future__ import annotations

import threading

import pytest

from remora.errors import CancelledError, InternalError, UnavailableError
from remora.messages import Outcome, Request, Response, Ticket
from remora.scheduling.batching import BatchQueue
from remora.scheduling.scheduler import Scheduler
from remora.signature import Signature
from support.engine.fakes import DOUBLER, FakeInstance, FakeMailbox, config_of, ticket_of
from support.engine.scheduler_bench import DYNAMIC, PATIENCE_S, Bench, inline_bench
from support.process.eventually import eventually
from support.process.no_threads import refuse_threads


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
    mailbox.turn()  # the loop or the thread runs what arrived meanwhile
    assert inside.wait(PATIENCE_S), "what arrived meanwhile was forgotten"
    assert bench.scheduler.stop(PATIENCE_S)


@pytest.fixture(params=[False, True], ids=["threads", "threads-and-loops"])
def quick(request: pytest.FixtureRequest) -> bool:
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


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_request_for_which_no_thread_can_start_is_refused_and_the_next_is_served(
    monkeypatch: pytest.MonkeyPatch, *, together: bool, ordered: bool
) -> None:
    bench = Bench(threads=True, ordered=ordered)
    refused = [ticket_of(1, reply=bench.replies) for _ in range(2 if together else 1)]
    with monkeypatch.context() as without_threads:
        refuse_threads(without_threads)
        with pytest.raises(UnavailableError, match="can't start new thread"):
            bench.scheduler.submit_all(refused) if together else bench.scheduler.submit(refused[0])
    answered = bench.submit()
    assert bench.scheduler.stop(PATIENCE_S)
    assert list(bench.replies.outcomes) == [answered]


def test_a_stop_that_needs_a_thread_which_cannot_start_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, mailbox = inline_bench(threads=True)
    waiting = bench.submit(mailbox=mailbox)
    with monkeypatch.context() as without_threads:
        refuse_threads(without_threads)
        assert not bench.scheduler.stop(PATIENCE_S)
    bench.scheduler.fail_pending(UnavailableError("unloaded"))
    assert isinstance(bench.replies.only(waiting), UnavailableError)


def test_requests_behind_a_batch_of_a_loop_are_refused_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, mailbox = inline_bench(threads=True)
    behind: list[Ticket] = []

    def arrive() -> None:
        bench.scheduler.costs.learn(1, 1_000_000_000)  # too long for the loop
        behind.append(bench.submit(mailbox=mailbox))

    bench.instances[0].during = arrive
    first = bench.submit(mailbox=mailbox)
    with monkeypatch.context() as without_threads:
        refuse_threads(without_threads)
        mailbox.turn()
    assert isinstance(bench.replies.only(first), Response)
    assert isinstance(bench.replies.only(behind[0]), UnavailableError)
    assert bench.scheduler.pending == 0


def test_a_request_that_relies_on_a_caller_who_gets_no_thread_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, elsewhere = inline_bench(threads=True)
    others: list[Ticket] = []

    def defer(_: object) -> bool:
        others.append(bench.submit())
        return False

    monkeypatch.setattr(elsewhere, "defer", defer)
    with monkeypatch.context() as without_threads:
        refuse_threads(without_threads)
        with pytest.raises(UnavailableError, match="can't start new thread"):
            bench.submit(mailbox=elsewhere)
    assert isinstance(bench.replies.only(others[0]), UnavailableError)
    assert list(bench.replies.outcomes) == others


def test_requests_of_an_instance_that_is_replaced_are_refused_if_no_thread_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, begun, goes_on = Bench(threads=True), threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        assert goes_on.wait(PATIENCE_S)

    bench.instances[0].during = run
    first = bench.submit()
    assert begun.wait(PATIENCE_S)
    behind = bench.submit()
    replacing = threading.Thread(target=lambda: bench.scheduler.set_instances([FakeInstance("m_new")]))
    pool = bench.scheduler._pool
    with monkeypatch.context() as without_threads:
        refuse_threads(without_threads, "remora")
        replacing.start()
        eventually(lambda: pool.removals == 1)
        goes_on.set()
        replacing.join(PATIENCE_S)
        eventually(lambda: behind in bench.replies.outcomes)
    assert isinstance(bench.replies.only(first), Response)
    assert isinstance(bench.replies.only(behind), UnavailableError)
    served = bench.submit()
    assert bench.scheduler.stop(PATIENCE_S)
    assert isinstance(bench.replies.only(served), Response)
