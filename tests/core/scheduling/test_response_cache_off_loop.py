"""Requests of event loops wait for a cache elsewhere; all others, and refusals, are as without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from remora.errors import QueueFullError, RemoraError, UnavailableError
from remora.messages import Ticket
from remora.scheduling.costs import CostModel
from remora.scheduling.response_cache import OffLoopScheduler
from support.engine.fakes import FakeClock, FakeMailbox, Replies, ticket_of


@dataclass
class Inner:
    """Takes tickets, or refuses them with ``failure``."""

    costs: CostModel = field(default_factory=CostModel)
    taken: list[Ticket] = field(default_factory=list)
    failure: Exception | None = None
    pending: int = 0
    running: int = 0
    stopped: list[float | None] = field(default_factory=list)
    abandoned: list[RemoraError] = field(default_factory=list)

    def submit(self, ticket: Ticket) -> None:
        if self.failure is not None:
            raise self.failure
        self.taken.append(ticket)

    def stop(self, timeout_s: float | None = None) -> bool:
        self.stopped.append(timeout_s)
        return True

    def fail_pending(self, error: RemoraError) -> None:
        self.abandoned.append(error)


class Bench:
    """A scheduler whose threads are turned by hand."""

    def __init__(self) -> None:
        self.inner = Inner()
        self.work: list[Callable[[], None]] = []
        self.refusals: list[RemoraError] = []
        self.clock = FakeClock()
        self.scheduler = OffLoopScheduler(self.inner, self.work.append, self, self.clock)
        self.replies = Replies()

    def refused(self, error: RemoraError) -> None:
        self.refusals.append(error)

    def submit(self, *, loop: bool = True) -> Ticket:
        ticket = ticket_of(reply=self.replies, mailbox=FakeMailbox() if loop else None)
        self.scheduler.submit(ticket)
        return ticket


def test_a_loop_hands_its_request_over_and_goes_on() -> None:
    bench = Bench()
    ticket = bench.submit()
    assert bench.inner.taken == []
    assert bench.scheduler.pending == 1
    bench.clock.advance(5)
    bench.work.pop()()
    assert bench.inner.taken == [ticket]
    assert ticket.arrival_ns == 1_000_000_000, "waiting for the cache counts"
    assert bench.scheduler.pending == 0


def test_a_caller_that_may_block_blocks_itself() -> None:
    bench = Bench()
    ticket = bench.submit(loop=False)
    assert bench.inner.taken == [ticket]
    assert bench.work == []
    bench.inner.failure = QueueFullError("full")
    with pytest.raises(QueueFullError):
        bench.submit(loop=False)
    assert bench.refusals == []


@pytest.mark.parametrize("failure", [QueueFullError("full"), ValueError("ours")])
def test_a_refusal_after_the_request_was_taken_is_its_answer(failure: Exception) -> None:
    bench = Bench()
    bench.inner.failure = failure
    ticket = bench.submit()
    bench.work.pop()()
    outcome = bench.replies.only(ticket)
    assert isinstance(outcome, RemoraError)
    assert str(failure) in str(outcome)
    assert bench.refusals == [outcome]
    assert bench.scheduler.pending == 0


def test_a_stop_waits_for_what_is_on_its_way_and_takes_nothing_new() -> None:
    bench = Bench()
    ticket = bench.submit()
    assert not bench.scheduler.stop(0.0)
    assert bench.inner.stopped == []
    with pytest.raises(UnavailableError, match="Server is stopping"):
        bench.submit()
    stopped: list[bool] = []
    thread = threading.Thread(target=lambda: stopped.append(bench.scheduler.stop(30.0)))
    thread.start()
    bench.work.pop()()
    thread.join(30.0)
    assert stopped == [True]
    assert bench.inner.taken == [ticket]
    assert bench.inner.stopped == [30.0]
    assert bench.scheduler.stop()
    bench.scheduler.fail_pending(UnavailableError("gone"))
    assert len(bench.inner.abandoned) == 1
