"""Where tickets wait: what a queue costs when many do, and what it keeps of those that have left.

What leaves, in which order and when, is looked at through the decider: see test_batching.
"""

from __future__ import annotations

import pytest

from remora.config import BatchPolicy, QueuePolicy
from remora.errors import QueueFullError
from remora.scheduling.queues import Level, Levels, Line, timeout_of, waiting_for
from support.engine.fakes import ticket_of

TIMED = QueuePolicy(default_timeout_ns=1000)


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (BatchPolicy(), Line),
        (BatchPolicy(queue=TIMED), Line),
        (BatchPolicy(dynamic=True, queue=QueuePolicy(max_size=3)), Line),
        (BatchPolicy(dynamic=True, queue=TIMED), Levels),
        (BatchPolicy(dynamic=True, priority_levels=2), Levels),
    ],
)
def test_the_simplest_queue_is_taken_that_will_do(policy: BatchPolicy, kind: type[object]) -> None:
    assert type(waiting_for(policy)) is kind


def test_the_heap_does_not_keep_all_removed_tickets() -> None:
    level = Level(TIMED)
    for _ in range(10_000):
        level.push(ticket_of())
        level.take(1)
    assert len(level._expiries) <= 66


def test_tickets_that_are_refused_make_room_wherever_they_waited() -> None:
    queue = Levels(
        BatchPolicy(dynamic=True, queue=QueuePolicy(default_timeout_ns=1000, allow_override=True, max_size=3))
    )
    tickets = [ticket_of(timeout_us=timeout_us) for timeout_us in (0, 0, 0)]
    late = ticket_of(arrival_ns=-500)
    for ticket in (tickets[0], late, tickets[1]):
        queue.push(ticket)
    with pytest.raises(QueueFullError):
        queue.push(tickets[2])
    assert queue.next_expiry_ns() == 500
    assert queue.expire(500) == [late]
    queue.push(tickets[2])
    assert list(queue) == tickets
    assert queue.drain() == tickets
    assert queue.next_expiry_ns() == 0


def test_levels_are_sparse_and_the_empty_ones_are_not_kept() -> None:
    most = 2**64 - 1
    own = QueuePolicy(max_size=1)
    queue = Levels(BatchPolicy(dynamic=True, priority_levels=most, default_level=most, level_queues=((most, own),)))
    last, first, second = ticket_of(), ticket_of(priority=5), ticket_of(priority=most - 1)
    for ticket in (last, second, first):
        queue.push(ticket)
    with pytest.raises(QueueFullError):
        queue.push(ticket_of(priority=most))
    for level in range(10, 10_000):
        passing = ticket_of(priority=level)
        queue.push(passing)
        queue.discard_all([passing])
    assert len(queue._levels) <= 64
    assert list(queue) == [first, second, last]
    assert len(queue) == 3
    assert queue.drain() == [first, second, last]


@pytest.mark.parametrize("priority", [0, 3, 99, -1])
def test_a_level_that_there_is_not_means_the_default_level(priority: int) -> None:
    queue = Levels(BatchPolicy(dynamic=True, priority_levels=2, default_level=2))
    ticket = ticket_of(priority=priority)
    queue.push(ticket)
    assert ticket.level == 2


@pytest.mark.parametrize(
    ("policy", "own_us", "expected_ns"),
    [
        (QueuePolicy(default_timeout_ns=9_000), 3, 9_000),
        (QueuePolicy(default_timeout_ns=9_000, allow_override=True), 3, 3_000),
        (QueuePolicy(default_timeout_ns=9_000, allow_override=True), 0, 9_000),
        (QueuePolicy(default_timeout_ns=9_000, allow_override=True), 20, 9_000),
        (QueuePolicy(allow_override=True), 3, 0),
    ],
    ids=["not-allowed", "shorter", "none", "longer", "no-default"],
)
def test_a_request_can_only_shorten_its_levels_timeout_and_only_where_it_may(
    policy: QueuePolicy, own_us: int, expected_ns: int
) -> None:
    assert timeout_of(policy, ticket_of(timeout_us=own_us)) == expected_ns
    assert Levels(BatchPolicy(dynamic=True, queue=policy)).next_expiry_ns() == 0
    queue = Levels(BatchPolicy(dynamic=True, queue=policy))
    queue.push(ticket_of(timeout_us=own_us))
    assert queue.next_expiry_ns() == expected_ns


def test_the_oldest_ticket_is_found_behind_other_levels_and_after_its_timeout() -> None:
    queue = QueuePolicy(default_timeout_ns=1000, reject_on_timeout=False)
    levels = Levels(BatchPolicy(dynamic=True, priority_levels=2, default_level=2, queue=queue))
    assert levels.oldest_ns() == 0
    levels.push(ticket_of(arrival_ns=500, priority=1))
    levels.push(ticket_of(arrival_ns=100))
    levels.push(ticket_of(arrival_ns=700))
    assert levels.oldest_ns() == 100
    assert levels.expire(1_200) == []
    assert levels.oldest_ns() == 100
    levels.drain()
    assert levels.oldest_ns() == 0


@pytest.mark.parametrize(("rejects", "refusal_ns"), [(True, 1_000), (False, 0)])
def test_a_timeout_that_demotes_changes_the_next_batch_and_refuses_nobody(rejects: bool, refusal_ns: int) -> None:
    queue = Levels(BatchPolicy(dynamic=True, queue=QueuePolicy(default_timeout_ns=1_000, reject_on_timeout=rejects)))
    queue.push(ticket_of())
    assert (queue.next_expiry_ns(), queue.next_refusal_ns()) == (1_000, refusal_ns)
