"""Dispatch in event loops: who polls the queue after a submission."""

from __future__ import annotations

import threading

import pytest

from remora.config import BatchPolicy
from remora.errors import CancelledError
from support.engine.fakes import FakeMailbox
from support.engine.scheduler_bench import PATIENCE_S, Bench, inline_bench


def test_the_loop_polls_once_for_all_requests_of_an_iteration() -> None:
    bench, mailbox = inline_bench()
    for _ in range(3):
        bench.submit(mailbox=mailbox)
    assert len(mailbox.deferred) == 1
    mailbox.turn()
    assert [len(batch) for batch in bench.instances[0].batches] == [3]


def test_the_callback_is_the_same_object_while_one_loop_calls() -> None:
    bench, mailbox = inline_bench()
    works = []
    for _ in range(2):
        bench.submit(mailbox=mailbox)
        works += mailbox.deferred
        mailbox.turn()
    other = FakeMailbox()
    bench.submit(mailbox=other)
    works += other.deferred
    assert works[0] is works[1]
    assert works[1] is not works[2]
    other.turn()
    assert len(bench.replies.order) == 3


@pytest.mark.parametrize(
    ("quick", "cost_ns", "in_loop"), [(True, 250_000, True), (True, 250_001, False), (False, 1, False)]
)
def test_a_loop_runs_batches_that_are_short_and_run_no_user_code(quick: bool, cost_ns: int, in_loop: bool) -> None:
    bench, mailbox = Bench(quick=quick), FakeMailbox()
    bench.scheduler.costs.learn(1, cost_ns)
    bench.submit(mailbox=mailbox)
    assert bool(mailbox.deferred) is in_loop


def test_a_loop_runs_nothing_of_a_queue_that_may_wait() -> None:
    bench = Bench(BatchPolicy(max_batch_size=8, dynamic=True, max_delay_ns=1000), quick=True, may_wait=True)
    bench.scheduler.costs.learn(1, 1)
    mailbox = FakeMailbox()
    bench.submit(mailbox=mailbox)
    assert not mailbox.deferred


def test_a_caller_outside_the_loop_disarms_the_queue_for_the_next_caller() -> None:
    bench, elsewhere = inline_bench()
    elsewhere.here = False
    bench.submit(mailbox=elsewhere)
    here = FakeMailbox()
    bench.submit(mailbox=here)
    assert len(here.deferred) == 1
    here.turn()
    assert len(bench.replies.order) == 2


def test_what_is_left_after_a_batch_is_polled_again_in_the_loop() -> None:
    bench, mailbox = Bench(BatchPolicy(max_batch_size=2, dynamic=True), quick=True), FakeMailbox()
    bench.scheduler.costs.learn(1, 1000)
    for _ in range(5):
        bench.submit(mailbox=mailbox)
    while mailbox.turn():
        pass
    assert [len(batch) for batch in bench.instances[0].batches] == [2, 2, 1]
    assert bench.scheduler.running == bench.scheduler.pending == 0


def test_a_stop_ends_when_the_loop_drops_the_last_request() -> None:
    bench, mailbox = inline_bench()
    ticket = bench.submit(mailbox=mailbox)
    ticket.cancel()
    changed = bench.scheduler._pool.changed
    waiting, stopped, wait = threading.Event(), threading.Event(), changed.wait

    def note_and_wait(timeout: float | None = None) -> bool:
        waiting.set()
        return wait(timeout)

    def stop() -> None:
        bench.scheduler.stop()
        stopped.set()

    changed.wait = note_and_wait  # type: ignore[method-assign]
    threading.Thread(target=stop, daemon=True).start()
    assert waiting.wait(PATIENCE_S)
    mailbox.turn()
    assert stopped.wait(PATIENCE_S)
    assert isinstance(bench.replies.only(ticket), CancelledError)
