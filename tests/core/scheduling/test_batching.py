"""The batching decider: tables for [D01-D13 and D16]. Its properties are in `test_batching_properties`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.config import BatchPolicy, QueuePolicy
from remora.errors import CancelledError, UnavailableError
from remora.messages import Ticket
from remora.scheduling.batching import (
    DELAY,
    FULL,
    IDLE,
    PREFERRED,
    SHAPE,
    SINGLE,
    BatchQueue,
    Choice,
    ExpiredError,
    Plan,
    Walk,
    choose,
)
from support.engine.fakes import MS, START, dynamic, ticket_of


def filled(policy: BatchPolicy, *rows: int, keys: str = "") -> BatchQueue:
    """A queue with one ticket for each of ``rows``, all of them arrived at START."""
    queue = BatchQueue(policy)
    for index, count in enumerate(rows):
        queue.push(ticket_of(count, shape_key=keys[index] if keys else "a", arrival_ns=START, id=str(index)))
    return queue


def sizes(queue: BatchQueue, now_ns: int) -> list[tuple[int, str]]:
    """(rows, reason) of all batches that go at ``now_ns``."""
    found = []
    while (plan := queue.poll(now_ns)).tickets:
        found.append((plan.rows, plan.reason))
    return found


# -- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "rows", "keys", "at_once", "after_delay"),
    [
        pytest.param(BatchPolicy(max_batch_size=8), (1, 3), "", [(1, SINGLE), (3, SINGLE)], [], id="D01-no-batcher"),
        pytest.param(BatchPolicy(), (1, 1), "", [(1, SINGLE)] * 2, [], id="D01-no-batching-at-all"),
        pytest.param(dynamic(preferred=(4,), delay_ms=300), (1,) * 6, "", [(4, PREFERRED)], [(2, DELAY)], id="D02-six"),
        pytest.param(
            dynamic(preferred=(2, 4), delay_ms=300), (1,) * 5, "", [(4, PREFERRED)], [(1, DELAY)], id="D02-max"
        ),
        pytest.param(dynamic(preferred=(4,), delay_ms=300), (1,) * 3, "", [], [(3, DELAY)], id="D02-not-reached"),
        pytest.param(
            dynamic(preferred=(4,), delay_ms=300), (3, 3), "", [(3, PREFERRED)], [(3, DELAY)], id="D02-jumped-over"
        ),
        pytest.param(
            dynamic(preferred=(2, 4), delay_ms=300), (1, 1, 3), "", [(2, PREFERRED)], [(3, DELAY)], id="D02-a-smaller"
        ),
        pytest.param(
            dynamic(preferred=(2, 4), delay_ms=300), (1, 1, 1, 2), "", [(2, PREFERRED)], [(3, DELAY)], id="D02-exact"
        ),
        pytest.param(dynamic(preferred=(4,), delay_ms=300), (5, 1), "", [(5, PREFERRED)], [(1, DELAY)], id="D02-one"),
        pytest.param(dynamic(preferred=(4,), delay_ms=300), (5,), "", [(5, PREFERRED)], [], id="D02-beyond-them-all"),
        pytest.param(dynamic(preferred=(4,)), (3, 3), "", [(6, IDLE)], [], id="D02-jumped-over-no-delay"),
        pytest.param(dynamic(preferred=(4,)), (1,) * 6, "", [(4, PREFERRED), (2, IDLE)], [], id="D02-no-delay"),
        pytest.param(dynamic(preferred=(8,), delay_ms=300), (1,) * 8, "", [(8, FULL)], [], id="D02-preferred-is-limit"),
        pytest.param(dynamic(), (1,) * 6, "", [(6, IDLE)], [], id="D03-no-delay"),
        pytest.param(dynamic(delay_ms=300), (1,) * 6, "", [], [(6, DELAY)], id="D03-waits"),
        pytest.param(dynamic(delay_ms=300), (1,) * 11, "", [(8, FULL)], [(3, DELAY)], id="D03-full-does-not-wait"),
        pytest.param(dynamic(), (1,) * 4, "aaba", [(2, SHAPE), (1, SHAPE), (1, IDLE)], [], id="D04-no-skipping"),
        pytest.param(dynamic(delay_ms=300), (1,) * 3, "aab", [(2, SHAPE)], [(1, DELAY)], id="D04-with-delay"),
        pytest.param(dynamic(), (5, 5), "", [(5, FULL), (5, IDLE)], [], id="D05-never-split"),
        pytest.param(dynamic(), (8, 1), "", [(8, FULL), (1, IDLE)], [], id="D05-one-fills-it"),
        pytest.param(dynamic(limit=0), (1, 1), "", [(1, FULL)] * 2, [], id="a-limit-of-none"),
    ],
)
def test_batches_go_at_once_or_when_the_delay_is_over(
    policy: BatchPolicy,
    rows: tuple[int, ...],
    keys: str,
    at_once: list[tuple[int, str]],
    after_delay: list[tuple[int, str]],
) -> None:
    queue = filled(policy, *rows, keys=keys)
    assert sizes(queue, START) == at_once
    assert sizes(queue, START + policy.max_delay_ns) == after_delay
    assert len(queue) == 0


def test_an_expired_delay_sends_everything_up_to_the_limit_and_no_preferred_size() -> None:
    queue = filled(dynamic(preferred=(4,), delay_ms=300), *(1,) * 6)
    assert sizes(queue, START + 300 * MS) == [(6, DELAY)]
    queue = filled(dynamic(preferred=(4,), delay_ms=300), *(1,) * 9)
    assert sizes(queue, START + 300 * MS) == [(8, FULL), (1, DELAY)]


def test_the_delay_counts_from_the_oldest_request() -> None:
    queue = filled(dynamic(delay_ms=300), 1)
    queue.push(ticket_of(arrival_ns=START + 299 * MS))
    assert queue.poll(START + 299 * MS).wake_ns == START + 300 * MS
    assert sizes(queue, START + 300 * MS) == [(2, DELAY)]


def test_an_empty_queue_has_nothing_to_wake_up_for() -> None:
    assert BatchQueue(dynamic(delay_ms=300)).poll(START) == Plan([])


def test_shape_keys_are_compared_by_value() -> None:
    queue = BatchQueue(dynamic())
    for size in (1, 1):
        queue.push(ticket_of(shape_key=("IN", [size])))
    assert sizes(queue, START) == [(2, IDLE)]


def test_a_full_queue_refuses_with_tritons_text_and_keeps_what_it_has() -> None:
    queue = filled(dynamic(max_size=2), 1, 1)
    with pytest.raises(UnavailableError, match=r"^\[request id: r7\] Exceeds maximum queue size$"):
        queue.push(ticket_of(id="r7"))
    with pytest.raises(UnavailableError, match=r"^\[request id: <id_unknown>\] Exceeds maximum queue size$"):
        queue.push(ticket_of())
    assert sizes(queue, START) == [(2, IDLE)]


def test_a_queue_without_batching_has_no_limit() -> None:
    queue = filled(BatchPolicy(max_batch_size=4, queue=QueuePolicy(max_size=1)), 1, 1, 1)
    assert len(queue) == 3


def test_a_cancelled_ticket_is_dropped_with_its_id_and_makes_room_for_its_neighbours() -> None:
    queue = BatchQueue(dynamic(limit=2))
    tickets = [ticket_of(id=str(index)) for index in range(3)]
    for ticket in tickets:
        queue.push(ticket)
    tickets[0].cancel()
    plan = queue.poll(START)
    assert plan.tickets == tickets[1:]
    ((dropped, error),) = plan.dropped
    assert dropped is tickets[0]
    assert isinstance(error, CancelledError)
    assert "[request id: 0]" in str(error)


@pytest.mark.parametrize(
    "policy", [BatchPolicy(), dynamic(limit=2), dynamic()._replace(queue=QueuePolicy(default_timeout_ns=9 * MS))]
)
def test_all_cancelled_tickets_can_be_taken_out_and_the_others_keep_their_order(policy: BatchPolicy) -> None:
    queue = BatchQueue(policy)
    tickets = [ticket_of(id=str(index), arrival_ns=START) for index in range(9)]
    for ticket in tickets:
        queue.push(ticket)
    for ticket in tickets[2::3]:
        ticket.cancel()
    dropped = queue.drop_cancelled()
    assert [ticket for ticket, _ in dropped] == tickets[2::3]
    assert [str(error) for _, error in dropped] == [
        f"[request id: {n}] request was cancelled before it ran" for n in (2, 5, 8)
    ]
    assert queue.drop_cancelled() == []
    assert queue.drain() == [ticket for ticket in tickets if not ticket.request.cancelled]


def test_a_cancelled_ticket_does_not_end_the_delay_of_others() -> None:
    queue = filled(dynamic(delay_ms=300), 1)
    late = ticket_of(arrival_ns=START + 10 * MS)
    late.cancel()
    queue.push(late)
    plan = queue.poll(START + 20 * MS)
    assert plan.tickets == []
    assert [ticket for ticket, _ in plan.dropped] == [late]
    assert plan.wake_ns == START + 300 * MS


def test_an_expired_ticket_is_dropped_with_its_id_and_makes_room_for_its_neighbours() -> None:
    queue = BatchQueue(dynamic(limit=2))
    tickets = [ticket_of(id=str(index), arrival_ns=START) for index in range(3)]
    tickets[0].deadline_ns = START + 5 * MS
    for ticket in tickets:
        queue.push(ticket)
    plan = queue.poll(START + 5 * MS)
    assert plan.tickets == tickets[1:]
    ((dropped, error),) = plan.dropped
    assert dropped is tickets[0]
    assert isinstance(error, UnavailableError)
    assert str(error) == "[request id: 0] Request timeout expired"


def test_a_level_that_refuses_the_late_does_so_with_tritons_text() -> None:
    queue = BatchQueue(BatchPolicy(1, dynamic=True, queue=QueuePolicy(default_timeout_ns=5 * MS)))
    ticket = ticket_of(arrival_ns=START, id="r")
    queue.push(ticket)
    ((dropped, error),) = queue.poll(START + 5 * MS).dropped
    assert dropped is ticket
    assert isinstance(error, ExpiredError)
    assert str(error) == "Request timeout expired"


def test_the_next_refusal_is_what_the_queue_wakes_up_for() -> None:
    policy = dynamic(delay_ms=300)._replace(queue=QueuePolicy(default_timeout_ns=9 * MS))
    assert (queue := filled(policy, 1)).poll(START).wake_ns == START + 9 * MS
    assert queue.poll(START + 9 * MS).dropped


def test_a_demoted_request_lets_the_others_fill_a_preferred_size_at_that_moment() -> None:
    lenient = QueuePolicy(reject_on_timeout=False, default_timeout_ns=9000 * MS, allow_override=True)
    policy = BatchPolicy(32, dynamic=True, preferred=(4, 32), max_delay_ns=5000 * MS, queue=lenient)
    queue = BatchQueue(policy)
    for rows, timeout_us in ((2, 0), (1, 1_000_000), (2, 0)):
        queue.push(ticket_of(rows, arrival_ns=START, timeout_us=timeout_us))
    assert queue.poll(START).wake_ns == START + 1000 * MS
    assert queue.poll(START + 1000 * MS).rows == 4


def test_a_deadline_that_passes_lets_the_others_fill_a_preferred_size_at_that_moment() -> None:
    queue = BatchQueue(BatchPolicy(32, dynamic=True, preferred=(4, 32), max_delay_ns=5000 * MS))
    for rows, deadline_ns in ((2, 0), (1, START + MS), (2, 0)):
        ticket = ticket_of(rows, arrival_ns=START)
        ticket.deadline_ns = deadline_ns
        queue.push(ticket)
    assert queue.poll(START).wake_ns == START + MS
    assert queue.poll(START + MS).rows == 4


def test_a_ticket_that_may_run_late_runs_last() -> None:
    lenient = QueuePolicy(reject_on_timeout=False, default_timeout_ns=5 * MS)
    queue = BatchQueue(BatchPolicy(1, dynamic=True, queue=lenient))
    first, second = ticket_of(arrival_ns=START), ticket_of(arrival_ns=START + MS)
    queue.push(first)
    queue.push(second)
    assert [queue.poll(START + 5 * MS).tickets for _ in range(2)] == [[second], [first]]


@pytest.mark.parametrize(
    ("walk", "waited_ns", "delay_ns", "expected"),
    [
        (Walk(2, 3, 0, 0, "", START), 0, 0, Choice(2, 3, IDLE)),
        (Walk(2, 8, 0, 0, FULL, START), 0, 0, Choice(2, 8, FULL)),
        (Walk(2, 3, 0, 0, SHAPE, START), 0, 0, Choice(2, 3, SHAPE)),
        (Walk(2, 3, 0, 0, SHAPE, START), 0, MS, Choice(2, 3, SHAPE)),
        (Walk(2, 3, 0, 0, "", START), 0, MS, Choice(0, wake_ns=START + MS)),
        (Walk(2, 3, 0, 0, "", START), MS - 1, MS, Choice(0, wake_ns=START + MS)),
        (Walk(2, 3, 0, 0, "", START), MS, MS, Choice(2, 3, DELAY)),
        (Walk(2, 8, 0, 0, FULL, START), MS, MS, Choice(2, 8, FULL)),
        (Walk(3, 5, 2, 4, "", START), 0, MS, Choice(2, 4, PREFERRED)),
        (Walk(3, 5, 2, 4, SHAPE, START), 0, MS, Choice(2, 4, PREFERRED)),
        (Walk(3, 8, 3, 8, FULL, START), 0, MS, Choice(3, 8, FULL)),
        (Walk(3, 5, 2, 4, "", START), MS, MS, Choice(3, 5, DELAY)),
        (Walk(3, 6, 0, 0, "", START), 0, MS, Choice(3, 6, PREFERRED)),
    ],
)
def test_a_walk_is_dispatched_by_its_size_its_end_and_its_age(
    walk: Walk, waited_ns: int, delay_ns: int, expected: Choice
) -> None:
    assert choose(walk, START + waited_ns, limit=8, largest=6, delay_ns=delay_ns) == expected


@pytest.mark.parametrize(
    "policy",
    [
        dynamic(),
        dynamic(preferred=(2, 4), delay_ms=1),
        BatchPolicy(max_batch_size=8, dynamic=True, queue=QueuePolicy(default_timeout_ns=2 * MS)),
        BatchPolicy(max_batch_size=4),
    ],
    ids=["line", "preferred", "levels", "single"],
)
@given(steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=40))
def test_rows_ahead_follows_every_change_of_the_queue(policy: BatchPolicy, steps: list[tuple[int, int]]) -> None:
    queue, now_ns, queued = BatchQueue(policy), START, list[Ticket]()
    for step, rows in steps:
        now_ns += MS // 2
        gone: list[Ticket] = []
        if step < 3:
            queued.append(ticket_of(rows, arrival_ns=now_ns))
            queue.push(queued[-1])
        elif step == 3:
            plan = queue.poll(now_ns)
            gone = [*plan.tickets, *(ticket for ticket, _ in plan.dropped)]
        elif step == 4 and queued:
            queued[rows % len(queued)].request.cancelled = True
            gone = [ticket for ticket, _ in queue.drop_cancelled()]
        elif step == 5:
            plan = queue.ahead(now_ns, 1)
            gone = [ticket for ticket, _ in plan.dropped]
            queue.put_back(plan.tickets)
        queued = [ticket for ticket in queued if ticket not in gone]
        assert len(queue) == len(queued)
        total = sum(ticket.request.rows for ticket in queued)
        if policy.dynamic:
            assert queue.rows_ahead == min(total, policy.max_batch_size)
        else:
            assert queue.rows_ahead == (queued[0].request.rows if queued else 0)
    queue.drain()
    assert queue.rows_ahead == 0


@pytest.mark.parametrize(("queued", "instances", "ahead"), [(4, 1, 4), (3, 1, 0), (7, 2, 0), (8, 2, 4)])
def test_a_batch_goes_ahead_only_if_enough_is_queued_for_all_instances(queued: int, instances: int, ahead: int) -> None:
    assert len(filled(dynamic(4), *[1] * queued).ahead(START, instances).tickets) == ahead


def test_a_held_queue_sends_nothing_before_that_many_wait_and_holds_back_but_once() -> None:
    queue = BatchQueue(dynamic(limit=2), hold=3)
    for _ in range(2):
        queue.push(ticket_of())
        assert queue.poll(START) == Plan([])
    queue.push(ticket_of())
    assert sizes(queue, START) == [(2, FULL), (1, IDLE)]


def test_without_a_batcher_nothing_is_held() -> None:
    queue = BatchQueue(BatchPolicy(max_batch_size=2), hold=3)
    queue.push(ticket_of())
    assert sizes(queue, START) == [(1, SINGLE)]


def test_a_queue_that_stops_waiting_dispatches_at_once() -> None:
    queue = BatchQueue(dynamic(delay_ms=300), hold=3)
    queue.push(ticket_of(arrival_ns=START))
    queue.stop_waiting()
    assert sizes(queue, START) == [(1, IDLE)]


def test_a_ticket_runs_until_its_deadline_and_not_at_it() -> None:
    queue = BatchQueue(BatchPolicy(max_batch_size=1))
    ticket = ticket_of(arrival_ns=START)
    ticket.deadline_ns = START + 5 * MS
    queue.push(ticket)
    assert queue.poll(START + 5 * MS - 1).tickets == [ticket]
    queue.push(ticket)
    assert [gone for gone, _ in queue.poll(START + 5 * MS).dropped] == [ticket]


def test_a_drained_queue_is_empty() -> None:
    queue = filled(dynamic(), 1, 2)
    assert [ticket.request.rows for ticket in queue.drain()] == [1, 2]
    assert len(queue) == 0
    assert queue.poll(START) == Plan([])


@pytest.mark.parametrize(
    ("policy", "rows", "expected"),
    [
        (dynamic(), (), 0),
        (dynamic(), (1, 2), 3),
        (dynamic(), (5, 5), 8),
        (dynamic(limit=2), (1,) * 5, 2),
        (BatchPolicy(max_batch_size=8), (3, 5), 3),
        (BatchPolicy(max_batch_size=8), (), 0),
    ],
)
def test_rows_ahead_bounds_the_next_batch(policy: BatchPolicy, rows: tuple[int, ...], expected: int) -> None:
    assert filled(policy, *rows).rows_ahead == expected
