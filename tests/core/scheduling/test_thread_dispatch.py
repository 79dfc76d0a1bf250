"""Threads of instances: which one is started or woken for a queue that is not empty."""

from __future__ import annotations

import threading
import weakref

import pytest

from remora.scheduling.batching import BatchQueue, Plan
from remora.scheduling.pool import Pool
from remora.scheduling.slots import Slot, Slots
from remora.scheduling.thread_dispatch import ThreadDispatch
from support.engine.fakes import FakeClock, FakeInstance, dynamic, ticket_of
from support.engine.scheduler_bench import PATIENCE_S
from support.process.eventually import eventually


class Batches:
    """Runs nothing: frees the slot and notes the plan."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.plans: list[tuple[Slot, Plan]] = []
        self.ran = threading.Semaphore(0)

    def run(self, slot: Slot, plan: Plan) -> None:
        self.plans.append((slot, plan))
        self.pool.free(slot)
        self.pool.count_answered(len(plan.tickets))
        self.ran.release()


class AlwaysGranted:
    """Turn at resources that no other instance needs."""

    def acquire(self) -> bool:
        return False

    def release(self, *, ran: bool) -> None: ...


class Bench:
    def __init__(self, instances: int = 2, *, enabled: bool = True, in_turn: bool = False) -> None:
        self.clock = FakeClock()
        self.pool = Pool(
            BatchQueue(dynamic(2)), Slots([FakeInstance(f"m_{at}") for at in range(instances)]), self.clock.monotonic_ns
        )
        self.batches = Batches(self.pool)
        turns = {slot: AlwaysGranted() for slot in self.pool.slots} if in_turn else {}
        self.threads = ThreadDispatch(self.pool, self.batches, turns, enabled=enabled)  # type: ignore[arg-type]

    def push(self, count: int = 1) -> None:
        for _ in range(count):
            self.pool.queue.push(ticket_of(arrival_ns=self.clock.now_ns))

    def stop(self) -> None:
        with self.pool.lock:
            self.pool.stopping = True
            self.pool.changed.notify_all()
        for slot in self.pool.slots:
            if slot.thread is not None:
                slot.thread.join(PATIENCE_S)
                assert not slot.thread.is_alive()


def test_a_thread_is_started_for_the_first_instance_that_may_run() -> None:
    bench = Bench()
    first, second = bench.pool.slots
    with bench.pool.lock:
        bench.pool.slots.occupy(first)
        bench.push()
        bench.threads.wake()
    assert bench.batches.ran.acquire(timeout=PATIENCE_S)
    assert first.thread is None
    assert [slot for slot, _ in bench.batches.plans] == [second]
    bench.stop()


def test_no_thread_is_started_where_tests_step_by_hand() -> None:
    bench = Bench(enabled=False)
    with bench.pool.lock:
        bench.push()
        bench.threads.wake()
        for slot in bench.pool.slots:
            bench.threads.wake_slot(slot)
    assert [slot.thread for slot in bench.pool.slots] == [None, None]


def test_a_thread_that_takes_a_batch_wakes_another_for_the_rest() -> None:
    bench = Bench()
    with bench.pool.lock:
        bench.push(4)
        bench.threads.wake()
    for _ in range(2):
        assert bench.batches.ran.acquire(timeout=PATIENCE_S)
    assert sorted(len(plan.tickets) for _, plan in bench.batches.plans) == [2, 2]
    assert len(bench.pool.queue) == 0
    bench.stop()


def test_a_plan_handed_to_a_slot_runs_in_its_thread() -> None:
    bench = Bench(1)
    (slot,) = bench.pool.slots
    plan = Plan([ticket_of()], 1)
    with bench.pool.lock:
        bench.pool.slots.occupy(slot)
        bench.pool.running += 1
        slot.handed = plan
        bench.threads.wake_slot(slot)
    assert bench.batches.ran.acquire(timeout=PATIENCE_S)
    assert bench.batches.plans == [(slot, plan)]
    bench.stop()


def test_a_thread_leaves_an_armed_queue_to_the_loop() -> None:
    bench = Bench(1)
    resting, wait = threading.Event(), bench.pool.changed.wait

    def note_and_wait(timeout: float | None = None) -> bool:
        resting.set()
        return wait(timeout)

    bench.pool.changed.wait = note_and_wait  # type: ignore[method-assign]
    with bench.pool.lock:
        bench.push()
        bench.pool.armed = True
        bench.threads.wake()
    assert resting.wait(PATIENCE_S)
    assert bench.batches.plans == []
    with bench.pool.lock:
        bench.pool.armed = False
        bench.threads.wake()
    assert bench.batches.ran.acquire(timeout=PATIENCE_S)
    bench.stop()


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_thread_without_work_keeps_nothing_of_its_last_batch_alive(in_turn: bool) -> None:
    bench = Bench(1, in_turn=in_turn)
    with bench.pool.lock:
        ticket = ticket_of(arrival_ns=bench.clock.now_ns)
        tensor = weakref.ref(ticket.request.inputs["IN"])
        bench.pool.queue.push(ticket)
        bench.threads.wake()
    assert bench.batches.ran.acquire(timeout=PATIENCE_S)
    bench.batches.plans.clear()
    del ticket
    eventually(lambda: tensor() is None)
    bench.stop()
