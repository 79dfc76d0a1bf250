"""Stop of a scheduler: waiting requests, running requests and the time limit."""

from __future__ import annotations

import threading

import pytest

from remora.config import BatchPolicy
from remora.errors import UnavailableError
from support.engine.fakes import ticket_of
from support.engine.scheduler_bench import PATIENCE_S, Bench, inline_bench, values


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
    bench.scheduler._threads.enabled = False
    tickets = [bench.submit() for _ in range(20)]
    bench.scheduler._threads.enabled = True
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
