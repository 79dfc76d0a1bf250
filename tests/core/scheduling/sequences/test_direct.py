"""The direct strategy's decider: tables, and what holds for any slots, shapes, times and cancellations [S07]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.config import SequencePolicy
from remora.errors import CancelledError
from remora.messages import Ticket
from remora.scheduling.batching import DELAY, FULL, IDLE, SHAPE, Plan
from remora.scheduling.sequences.controls import NULL, Controls
from remora.scheduling.sequences.direct import HELD_LOOK_NS, DirectQueue
from support.engine.fakes import MS, START, ticket_of


class Bench:
    """A queue whose tickets have the slots that they are given."""

    def __init__(self, slots: int = 4, *, delay_ms: int = 0, utilization: float = 0.0) -> None:
        self.policy = SequencePolicy(slots=slots, max_delay_ns=delay_ms * MS, minimum_utilization=utilization)
        self.slots: dict[Ticket, int] = {}
        self.held = False
        self.queue = DirectQueue(
            self.policy, self.slots.__getitem__, Controls((), batches=True, model="m"), lambda: self.held
        )

    def push(self, slot: int, *, key: str = "a", at_ms: int = 0) -> Ticket:
        ticket = ticket_of(shape_key=key, arrival_ns=START + at_ms * MS)
        self.slots[ticket] = slot
        self.queue.push(ticket)
        return ticket

    def rows(self, plan: Plan) -> list[Ticket | None]:
        """The plan's tickets, None for what only fills a slot."""
        return [None if ticket.context is NULL else ticket for ticket in plan.tickets]


def test_each_request_is_at_the_place_of_its_slot_and_what_is_empty_below_is_filled() -> None:
    bench = Bench()
    third, first = bench.push(2), bench.push(0)
    plan = bench.queue.poll(START)
    assert bench.rows(plan) == [first, None, third]
    assert (plan.rows, plan.reason) == (3, IDLE)
    assert plan.tickets[1].request.inputs["IN"].tolist() == [[0]]
    assert len(bench.queue) == 0


def test_all_slots_ready_are_a_full_batch() -> None:
    bench = Bench(2)
    tickets = [bench.push(slot) for slot in range(2)]
    plan = bench.queue.poll(START)
    assert bench.rows(plan) == tickets
    assert plan.reason == FULL


def test_the_oldest_requests_shape_goes_first_and_the_others_wait_their_turn() -> None:
    bench = Bench()
    late = bench.push(0, key="b", at_ms=2)
    early = bench.push(1, key="a", at_ms=1)
    plan = bench.queue.poll(START)
    assert bench.rows(plan) == [None, early]
    assert plan.reason == SHAPE
    assert bench.rows(bench.queue.poll(START)) == [late]


def test_too_few_wait_for_company_until_the_oldest_has_waited_long_enough() -> None:
    bench = Bench(delay_ms=5, utilization=0.5)
    first = bench.push(0)
    assert bench.queue.poll(START + 5 * MS - 1) == Plan([], wake_ns=START + 5 * MS)
    plan = bench.queue.poll(START + 5 * MS)
    assert bench.rows(plan) == [first]
    assert plan.reason == DELAY


def test_enough_do_not_wait() -> None:
    bench = Bench(delay_ms=5, utilization=0.5)
    tickets = [bench.push(slot) for slot in range(2)]
    plan = bench.queue.poll(START)
    assert bench.rows(plan) == tickets
    assert plan.reason == IDLE


def test_a_queue_that_stops_waiting_dispatches_at_once() -> None:
    bench = Bench(delay_ms=5, utilization=0.5)
    first = bench.push(0)
    bench.queue.stop_waiting()
    assert bench.rows(bench.queue.poll(START)) == [first]


def test_while_it_is_held_nothing_goes_and_it_looks_again_soon() -> None:
    bench = Bench()
    bench.push(0)
    bench.held = True
    assert bench.queue.poll(START) == Plan([], wake_ns=START + HELD_LOOK_NS)
    bench.held = False
    assert bench.queue.poll(START).tickets


@pytest.mark.parametrize("slots", [(), (0,), (2,), (1, 3)])
def test_rows_ahead_are_those_up_to_the_highest_slot(slots: tuple[int, ...]) -> None:
    bench = Bench()
    for slot in slots:
        bench.push(slot)
    assert bench.queue.rows_ahead == max(slots, default=-1) + 1
    assert len(bench.queue) == len(slots)


def test_a_drained_queue_is_empty() -> None:
    bench = Bench()
    tickets = [bench.push(slot) for slot in (3, 1)]
    assert bench.queue.drain() == tickets
    assert bench.queue.poll(START) == Plan([])


# -- properties -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """A request of a slot; it comes ``after_ms`` after the one before it."""

    slot: int
    key: str
    after_ms: int
    cancel: bool
    polled: bool


readies = st.lists(
    st.builds(
        Ready,
        st.integers(0, 4),
        st.sampled_from("aab"),
        st.sampled_from([0, 0, 1, 4]),
        st.sampled_from([False, False, False, True]),
        st.booleans(),
    ),
    max_size=14,
)


@settings(max_examples=300)
@given(st.integers(1, 5), st.sampled_from([0, 3]), st.sampled_from([0.0, 0.5, 1.0]), readies)
def test_every_request_leaves_once_at_its_place_in_batches_that_are_large_and_prompt(
    slots: int, delay_ms: int, utilization: float, plan_of_requests: list[Ready]
) -> None:
    bench = Bench(slots, delay_ms=delay_ms, utilization=utilization)
    waiting: dict[int, Ticket] = {}
    now_ms = 0

    def poll(at_ns: int) -> Plan:
        plan = bench.queue.poll(at_ns)
        dead = [ticket for ticket in waiting.values() if ticket.request.cancelled]
        assert [ticket for ticket, _ in plan.dropped] == dead, "not all that were cancelled, or others, were dropped"
        assert all(isinstance(error, CancelledError) for _, error in plan.dropped)
        for ticket in dead:
            del waiting[bench.slots[ticket]]
        check(bench, waiting, plan, at_ns)
        for ticket in plan.tickets:
            if ticket.context is not NULL:
                del waiting[bench.slots[ticket]]
        assert len(bench.queue) == len(waiting)
        return plan

    for ready in plan_of_requests:
        now_ms += ready.after_ms
        slot = ready.slot % slots
        if slot not in waiting:
            waiting[slot] = bench.push(slot, key=ready.key, at_ms=now_ms)
        if ready.cancel:
            waiting[slot].cancel()
        if ready.polled:
            poll(START + now_ms * MS)
    now_ns = START + now_ms * MS
    while waiting:
        plan = poll(now_ns)
        if plan.wake_ns:
            assert plan.wake_ns > now_ns
            now_ns = plan.wake_ns
    assert poll(now_ns) == Plan([])


def check(bench: Bench, alive: dict[int, Ticket], plan: Plan, at_ns: int) -> None:
    """Safety, maximality and promptness of one plan over the requests that may run."""
    policy = bench.policy
    if not alive:
        assert plan.tickets == []
        assert plan.wake_ns == 0
        return
    oldest = min(ticket.arrival_ns for ticket in alive.values())
    keys = {ticket.request.shape_key for ticket in alive.values() if ticket.arrival_ns == oldest}
    if not plan.tickets:
        assert len({ticket.request.shape_key for ticket in alive.values()}) == 1, "a batch that cannot grow waited"
        assert len(alive) < policy.minimum_utilization * policy.slots, "enough were ready"
        assert plan.wake_ns == oldest + policy.max_delay_ns
        assert plan.wake_ns > at_ns, "the delay is over"
        return
    rows = bench.rows(plan)
    went = {slot: ticket for slot, ticket in enumerate(rows) if ticket is not None}
    assert all(alive[slot] is ticket for slot, ticket in went.items()), "not at its place"
    assert rows[-1] is not None, "padded beyond the last"
    (key,) = {ticket.request.shape_key for ticket in went.values()}
    assert key in keys, "not the shape of the oldest"
    assert went.keys() == {slot for slot, ticket in alive.items() if ticket.request.shape_key == key}, "too few went"
    assert plan.rows == len(rows)
    few = len(went) < policy.minimum_utilization * policy.slots
    expected = FULL if len(went) == policy.slots else DELAY if few else IDLE
    assert plan.reason == (SHAPE if len(went) < len(alive) else expected)
    if few and plan.reason == DELAY:
        assert at_ns >= oldest + policy.max_delay_ns, "it went before its time"
    assert np.array_equal([ticket.request.rows for ticket in plan.tickets], [1] * len(rows))
