"""Pool of queue and instances, and the execution of plans on it."""

from __future__ import annotations

import pytest

from remora.errors import CancelledError
from remora.messages import Response
from remora.scheduling.batching import BatchQueue, Plan
from remora.scheduling.costs import CostModel
from remora.scheduling.delivery import deliver
from remora.scheduling.pool import BatchRunner, Pool
from remora.scheduling.running import OpenRequests, Runner
from remora.scheduling.slots import Slot, Slots
from remora.signature import Signature
from support.engine.fakes import DOUBLER, FakeClock, FakeInstance, FakeRecorder, Replies, config_of, dynamic, ticket_of


class Bench:
    def __init__(self, limit: int = 4) -> None:
        self.instance = FakeInstance()
        self.clock = FakeClock()
        self.recorder = FakeRecorder()
        self.replies = Replies()
        now = self.clock.monotonic_ns
        self.pool = Pool(BatchQueue(dynamic(limit)), Slots([self.instance]), now)
        signature = Signature(config_of(DOUBLER), "m")
        open_requests = OpenRequests(lambda: None, self.pool.count_answered)
        runner = Runner(signature, self.recorder, now, CostModel(), open_requests, deliver)
        self.batches = BatchRunner(self.pool, runner, None, self.recorder, deliver)

    @property
    def slot(self) -> Slot:
        (slot,) = self.pool.slots
        return slot

    def push(self, count: int) -> None:
        for _ in range(count):
            self.pool.queue.push(ticket_of(reply=self.replies, arrival_ns=self.clock.now_ns))


def test_a_plan_that_runs_frees_its_slot_before_its_answers_and_counts_them_after() -> None:
    bench = Bench()
    bench.push(2)
    seen: list[tuple[bool, int]] = []
    plan = bench.pool.take(bench.slot)
    for ticket in plan.tickets:
        ticket.reply = lambda ticket, outcome: seen.append((bench.slot.busy, bench.pool.running))
    assert (bench.slot.busy, bench.pool.running) == (True, 2)
    bench.batches.run(bench.slot, plan)
    assert seen == [(False, 2)] * 2
    assert bench.pool.running == 0


def test_an_empty_poll_leaves_the_slot_idle() -> None:
    bench = Bench()
    assert bench.pool.take(bench.slot) == Plan([])
    assert (bench.slot.busy, bench.pool.running) == (False, 0)


def test_an_uncounted_run_returns_what_the_caller_must_count() -> None:
    bench = Bench()
    bench.push(3)
    plan = bench.pool.take(bench.slot)
    assert bench.batches.run_uncounted(bench.slot, plan) == 3
    assert bench.pool.running == 3
    with bench.pool.lock:
        bench.pool.subtract_running(3)
    assert bench.pool.running == 0


def test_dropped_tickets_are_recorded_and_answered_with_the_batch() -> None:
    bench = Bench()
    bench.push(2)
    first = next(iter(bench.pool.queue.poll(bench.clock.now_ns).tickets))
    error = CancelledError("request was cancelled before it ran")
    bench.batches.run(bench.slot, Plan([], dropped=[(first, error)]))
    assert bench.replies.only(first) is error
    assert [row[:2] for row in bench.recorder.drops] == [(first, error)]


def test_a_batch_queued_ahead_returns_to_the_front_if_it_did_not_run() -> None:
    bench = Bench(limit=2)
    bench.push(5)
    running = bench.pool.take(bench.slot)
    bench.slot.begun = 1
    behind = bench.pool.take_ahead(bench.slot)
    assert (len(running.tickets), len(behind.tickets), bench.pool.running) == (2, 2, 4)
    bench.slot.begun = 2
    bench.pool.free(bench.slot, begun=True, unrun=behind)
    assert (bench.pool.running, len(bench.pool.queue)) == (2, 3)
    assert bench.pool.queue.poll(bench.clock.now_ns).tickets == behind.tickets


def test_a_slot_is_barred_until_its_batch_ends_if_nothing_may_go_ahead() -> None:
    bench = Bench(limit=2)
    bench.push(3)
    bench.pool.take(bench.slot)
    bench.slot.begun = 1
    assert not bench.pool.take_ahead(bench.slot).tickets
    assert bench.slot.barred
    bench.pool.free(bench.slot, begun=True)
    assert (bench.slot.barred, bench.slot.busy) == (False, False)


@pytest.mark.parametrize("stopping", [True, False])
def test_a_stop_is_notified_of_each_answer(stopping: bool) -> None:
    bench = Bench()
    bench.push(1)
    bench.pool.stopping = stopping
    plan = bench.pool.take(bench.slot)
    notified: list[int] = []
    bench.pool.changed.notify_all = lambda: notified.append(bench.pool.running)  # type: ignore[method-assign]
    bench.batches.run(bench.slot, plan)
    assert notified == ([1, 0] if stopping else [])
    assert all(isinstance(bench.replies.only(ticket), Response) for ticket in plan.tickets)
