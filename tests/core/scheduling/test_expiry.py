"""Queue timeouts of a scheduler whose instances are all busy."""

from __future__ import annotations

import threading

import pytest

from remora.config import BatchPolicy, QueuePolicy
from remora.scheduling.batching import BatchQueue, ExpiredError
from remora.scheduling.scheduler import Scheduler
from remora.signature import Signature
from remora.system.clock import SystemClock
from support.engine.fakes import DOUBLER, FakeInstance, FakeRecorder, Replies, config_of, ticket_of
from support.engine.scheduler_bench import PATIENCE_S
from support.process.eventually import eventually
from support.process.no_threads import refuse_threads

REJECTING = BatchPolicy(1, dynamic=True, queue=QueuePolicy(default_timeout_ns=60_000_000_000, allow_override=True))
DELAYING = REJECTING._replace(queue=REJECTING.queue._replace(reject_on_timeout=False))


class Bench:
    """A scheduler whose only instance is busy until the test releases it."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.replies = Replies()
        self.begun, self.released = threading.Event(), threading.Event()
        instance = FakeInstance()
        instance.during = self._hold
        self.scheduler = Scheduler(
            BatchQueue(policy), [instance], Signature(config_of(DOUBLER), "m"), FakeRecorder(), SystemClock()
        )
        self.first = ticket_of(reply=self.replies)
        self.scheduler.submit(self.first)
        assert self.begun.wait(PATIENCE_S)

    def _hold(self) -> None:
        self.begun.set()
        assert self.released.wait(PATIENCE_S)

    def submit(self, timeout_us: int) -> object:
        ticket = ticket_of(reply=self.replies, timeout_us=timeout_us)
        self.scheduler.submit(ticket)
        return ticket

    def end(self) -> None:
        self.released.set()
        assert self.scheduler.stop(PATIENCE_S)


def test_a_queue_timeout_is_answered_at_its_time_while_the_instance_is_busy() -> None:
    bench = Bench(REJECTING)
    try:
        late, early = bench.submit(20_000), bench.submit(1000)
        eventually(lambda: {late, early} <= set(bench.replies.outcomes))
        assert all(isinstance(bench.replies.only(each), ExpiredError) for each in (late, early))  # type: ignore[arg-type]
        assert bench.first not in bench.replies.outcomes
        again = bench.submit(1000)
        eventually(lambda: again in bench.replies.outcomes)
    finally:
        bench.end()
    assert bench.first in bench.replies.outcomes


def test_a_request_that_its_policy_delays_is_not_refused() -> None:
    bench = Bench(DELAYING)
    delayed = bench.submit(1)
    assert bench.scheduler._timeouts is not None
    assert bench.scheduler._timeouts._thread is None
    bench.end()
    assert not isinstance(bench.replies.only(delayed), ExpiredError)  # type: ignore[arg-type]


def test_without_room_for_the_thread_the_next_poll_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch, "remora queue timeouts")
    bench = Bench(REJECTING)
    late = bench.submit(1)
    bench.end()
    assert isinstance(bench.replies.only(late), ExpiredError)  # type: ignore[arg-type]
