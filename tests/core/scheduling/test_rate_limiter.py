"""The limiter raced by threads, and a scheduler whose instances take turns [I08]."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from remora.config import BatchPolicy, RatePolicy
from remora.errors import ConfigError, UnavailableError
from remora.messages import Outcome, Ticket
from remora.scheduling.batching import RESOURCES, SINGLE, BatchQueue
from remora.scheduling.pool import DispatchPolicy
from remora.scheduling.rate_limiter import RateLimiter, Turn
from remora.scheduling.scheduler import Scheduler
from remora.signature import Signature
from support.engine.fakes import DOUBLER, FakeClock, FakeInstance, FakeRecorder, Replies, config_of, dynamic, ticket_of

PATIENCE_S = 30.0
ONE = RatePolicy(((("R", 0), 1),))
TWO = RatePolicy(((("R", 0), 2),))


@dataclass
class Journal:
    """What happened, in order; a turn that always comes at once, or after ``waits``."""

    waits: bool = False
    rows: list[str] = field(default_factory=list)

    def acquire(self) -> bool:
        self.rows.append("acquire")
        return self.waits

    def release(self, *, ran: bool) -> None:
        self.rows.append("ran" if ran else "idle")


class Answers:
    """Waits for a number of answers."""

    def __init__(self, count: int) -> None:
        self.replies = Replies()
        self._left = threading.Semaphore(0)
        self._count = count

    def __call__(self, ticket: Ticket, outcome: Outcome) -> None:
        self.replies(ticket, outcome)
        self._left.release()

    def wait(self) -> None:
        assert all(self._left.acquire(timeout=PATIENCE_S) for _ in range(self._count))


def scheduler_of(
    instances: list[FakeInstance], turns: list[Turn], policy: BatchPolicy | None = None
) -> tuple[Scheduler, FakeRecorder]:
    recorder = FakeRecorder()
    signature = Signature(config_of(DOUBLER), "m")
    queue = BatchQueue(policy or BatchPolicy(max_batch_size=8))
    return Scheduler(
        queue, instances, signature, recorder, FakeClock(), DispatchPolicy(may_wait=True), turns=turns
    ), recorder


@pytest.mark.parametrize(("waits", "reason"), [(False, SINGLE), (True, RESOURCES)])
def test_an_instance_takes_its_turn_runs_and_gives_it_back(waits: bool, reason: str) -> None:
    journal, instance, answers = Journal(waits), FakeInstance(quick=True), Answers(1)
    instance.during = lambda: journal.rows.append("run")
    scheduler, recorder = scheduler_of([instance], [journal])  # type: ignore[list-item]
    scheduler.submit(ticket_of(reply=answers))
    answers.wait()
    assert scheduler.stop(PATIENCE_S)
    assert journal.rows == ["acquire", "run", "ran"]
    assert [plan.reason for plan, _ in recorder.runs] == [reason]


def test_the_turn_is_given_back_when_the_model_fails() -> None:
    journal, instance, answers = Journal(), FakeInstance(), Answers(2)
    instance.failure = ValueError("no")
    scheduler, _ = scheduler_of([instance], [journal])  # type: ignore[list-item]
    for _ in range(2):
        scheduler.submit(ticket_of(reply=answers))
    answers.wait()
    assert scheduler.stop(PATIENCE_S)
    assert journal.rows == ["acquire", "ran"] * 2


def test_a_batch_that_waits_for_company_holds_nothing_meanwhile() -> None:
    journal, instance, answers = Journal(), FakeInstance(), Answers(1)
    scheduler, _ = scheduler_of([instance], [journal], dynamic(delay_ms=60_000))  # type: ignore[list-item]
    scheduler.submit(ticket_of(reply=answers))
    assert scheduler.stop(PATIENCE_S)  # which ends the waiting
    answers.wait()
    assert journal.rows[-2:] == ["acquire", "ran"]
    assert set(journal.rows[:-2]) <= {"acquire", "idle"}
    assert journal.rows[1::2].count("ran") == 1


def test_the_batch_is_formed_when_the_turn_comes() -> None:
    limiter = RateLimiter({})
    other, mine = limiter.join([ONE, ONE])
    instance, answers = FakeInstance(), Answers(4)
    scheduler, recorder = scheduler_of([instance], [mine], dynamic())
    other.acquire()
    for _ in range(4):
        scheduler.submit(ticket_of(reply=answers))
    assert instance.batches == []
    other.release(ran=True)
    answers.wait()
    assert scheduler.stop(PATIENCE_S)
    assert [plan.rows for plan, _ in recorder.runs] == [4]


def test_instances_of_two_models_never_hold_more_than_there_is() -> None:
    limiter = RateLimiter({("R", None): 2})
    gate, now, most = threading.Lock(), [0], [0]

    def during(units: int) -> None:
        with gate:
            now[0] += units
            most[0] = max(most[0], now[0])
        with gate:
            now[0] -= units

    answers = Answers(400)
    schedulers = []
    for policy, units in ((ONE, 1), (TWO, 2)):
        instances = [FakeInstance(f"i{index}") for index in range(2)]
        for instance in instances:
            instance.during = lambda units=units: during(units)  # type: ignore[misc]
        schedulers.append(scheduler_of(instances, limiter.join([policy] * 2))[0])
    for _ in range(200):
        for scheduler in schedulers:
            scheduler.submit(ticket_of(reply=answers))
    answers.wait()
    assert all(scheduler.stop(PATIENCE_S) for scheduler in schedulers)
    assert 1 <= most[0] <= 2
    assert all(len(outcomes) == 1 for outcomes in answers.replies.outcomes.values())


def test_a_stop_whose_time_is_over_answers_what_waits_for_a_turn() -> None:
    limiter = RateLimiter({})
    other, mine = limiter.join([ONE, ONE])
    other.acquire()
    answers = Answers(1)
    scheduler, _ = scheduler_of([FakeInstance()], [mine])
    ticket = ticket_of(reply=answers)
    scheduler.submit(ticket)
    assert not scheduler.stop(0.0)
    scheduler.fail_pending(UnavailableError("gone"))
    answers.wait()
    mine.leave()
    mine.leave()
    assert scheduler.stop(PATIENCE_S), "its thread still waits"
    assert isinstance(answers.replies.only(ticket), UnavailableError)
    assert not mine.acquire(), "who has left waits for nothing"


def test_what_does_not_fit_is_refused_when_it_joins() -> None:
    limiter = RateLimiter({("R", 0): 1})
    limiter.join([ONE])
    with pytest.raises(ConfigError, match="is limited to 1"):
        limiter.join([TWO])


def test_waiting_requests_of_other_instances_are_served_meanwhile() -> None:
    limiter = RateLimiter({})
    blocked, free = limiter.join([ONE, RatePolicy()])
    (other,) = limiter.join([ONE])
    other.acquire()
    instances = [FakeInstance("blocked"), FakeInstance("free")]
    answers = Answers(20)
    scheduler, _ = scheduler_of(instances, [blocked, free])
    for _ in range(20):
        scheduler.submit(ticket_of(reply=answers))
    answers.wait()
    assert len(instances[1].batches) == 20
    other.release(ran=True)
    assert scheduler.stop(PATIENCE_S)
