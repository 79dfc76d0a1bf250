"""Who is refused on arrival: by what is predicted for the requests in front."""

from __future__ import annotations

import math

import pytest

from remora.config import BatchPolicy, QueuePolicy
from remora.errors import QueueFullError
from remora.messages import Ticket
from remora.scheduling.admission import MARGIN, AdmittingQueue
from remora.scheduling.batching import BatchQueue
from remora.scheduling.costs import CostModel
from support.engine.fakes import MS, START, dynamic, ticket_of


def cost_ms(rows: int) -> float:
    return 2 + rows


def costs_of(*sizes: int) -> CostModel:
    costs = CostModel()
    for size in sizes:
        costs.learn(size, int(cost_ms(size) * MS))
    return costs


def admitting(
    policy: BatchPolicy | None = None, *, instances: int = 1, sizes: tuple[int, ...] = (1, 2, 4, 8)
) -> AdmittingQueue:
    policy = policy or dynamic(8)
    return AdmittingQueue(BatchQueue(policy), policy, costs_of(*sizes), instances)


def due(in_ms: float, rows: int = 1, **settings: int) -> Ticket:
    """A request that arrives at START and is taken if it is expected to be answered within ``in_ms``."""
    ticket = ticket_of(rows, arrival_ns=START, **settings)  # type: ignore[arg-type]
    ticket.deadline_ns = START + math.ceil(in_ms * (1 + MARGIN) * MS)
    return ticket


def admits(queue: AdmittingQueue, ticket: Ticket) -> bool:
    try:
        queue.push(ticket)
    except QueueFullError:
        return False
    return True


@pytest.mark.parametrize(
    ("waiting", "deadline_ms", "admitted"),
    [
        pytest.param(0, 3, True, id="alone-just-in-time"),
        pytest.param(0, 2.9, False, id="alone-too-late"),
        pytest.param(3, 6, True, id="in-the-first-batch"),
        pytest.param(3, 5.9, False, id="in-the-first-batch-too-late"),
        pytest.param(8, 20, True, id="in-the-second-batch"),
        pytest.param(8, 19.9, False, id="in-the-second-batch-too-late"),
    ],
)
def test_a_request_is_accepted_if_it_will_be_answered_in_time(waiting: int, deadline_ms: float, admitted: bool) -> None:
    queue = admitting()
    for _ in range(waiting):
        queue.push(ticket_of(arrival_ns=START))
    assert admits(queue, due(deadline_ms)) is admitted
    assert len(queue) == waiting + admitted


def test_cancelled_requests_that_were_taken_out_are_not_waited_for() -> None:
    queue = admitting()
    gone = [ticket_of(arrival_ns=START) for _ in range(8)]
    for ticket in gone:
        queue.push(ticket)
        ticket.cancel()
    assert not admits(queue, due(3))
    assert [ticket for ticket, _ in queue.drop_cancelled()] == gone
    assert admits(queue, due(3))


def test_the_batch_that_runs_is_waited_for_as_long_as_it_will_still_take() -> None:
    queue = admitting()
    queue.push(ticket_of(4, arrival_ns=START - 2 * MS))
    queue.poll(START - 2 * MS)  # until 4 ms after START
    assert not admits(queue, due(6.9))
    assert admits(queue, due(7))


def test_with_two_instances_the_one_that_ends_first_counts() -> None:
    queue = admitting(instances=2)
    for rows in (8, 1):
        queue.push(ticket_of(rows, arrival_ns=START))
        queue.poll(START)
    assert not admits(queue, due(5.9))
    assert admits(queue, due(6))


def test_with_two_instances_two_batches_run_at_once() -> None:
    queue = admitting(instances=2)
    queue.push(ticket_of(8, arrival_ns=START))
    assert not admits(queue, due(9.9))
    assert admits(queue, due(10))


def test_a_request_that_does_not_fit_the_batch_before_it_goes_with_the_next() -> None:
    queue = admitting(dynamic(4))
    queue.push(ticket_of(3, arrival_ns=START))
    assert not admits(queue, due(11.9, rows=2))
    assert admits(queue, due(12, rows=2))


def test_those_that_have_left_are_not_waited_for() -> None:
    queue = admitting()
    gone = [ticket_of(8, arrival_ns=START) for _ in range(3)]
    for ticket in gone:
        queue.push(ticket)
        ticket.cancel()
    assert not admits(queue, due(5))
    assert len(queue.poll(START).dropped) == 3
    assert admits(queue, due(5))
    queue.push(ticket_of(8, arrival_ns=START))
    assert len(queue.drain()) == 2
    assert admits(queue, due(5))


def test_only_those_of_its_level_and_above_are_waited_for() -> None:
    policy = dynamic(8)._replace(priority_levels=2, default_level=2)
    queue = admitting(policy)
    for _ in range(3):
        queue.push(ticket_of(8, arrival_ns=START))  # level 2
    assert not admits(queue, due(5))
    assert admits(queue, due(5, priority=1))
    assert not admits(queue, due(3, priority=1))


def test_without_a_batcher_requests_ahead_count_one_by_one() -> None:
    queue = admitting(BatchPolicy(max_batch_size=8))
    for _ in range(2):
        queue.push(ticket_of(arrival_ns=START))
    assert not admits(queue, due(8.9))
    assert admits(queue, due(9))


def test_a_request_without_a_deadline_is_never_refused() -> None:
    queue = admitting()
    for _ in range(1000):
        queue.push(ticket_of(arrival_ns=START))
    assert len(queue) == 1000


def test_nothing_is_refused_before_anything_has_run() -> None:
    queue = admitting(sizes=())
    assert all(admits(queue, due(1)) for _ in range(100))


def test_a_queue_timeout_that_would_refuse_it_later_refuses_it_now() -> None:
    policy = dynamic(8)._replace(queue=QueuePolicy(default_timeout_ns=20 * MS, allow_override=True))
    queue = admitting(policy)
    queue.push(ticket_of(8, arrival_ns=START))
    assert admits(queue, ticket_of(8, arrival_ns=START))  # begins after 10 ms
    assert not admits(queue, ticket_of(arrival_ns=START))  # after 20
    queue = admitting(policy)
    queue.push(ticket_of(8, arrival_ns=START))
    assert admits(queue, ticket_of(arrival_ns=START, timeout_us=11_100))
    assert not admits(queue, ticket_of(arrival_ns=START, timeout_us=10_900))
    lenient = policy._replace(queue=policy.queue._replace(reject_on_timeout=False))
    queue = admitting(lenient)
    assert all(admits(queue, ticket_of(8, arrival_ns=START)) for _ in range(9))


def test_the_refusal_says_how_late_and_when_to_come_again() -> None:
    queue = admitting()
    for _ in range(2000):
        queue.push(ticket_of(arrival_ns=START))
    ticket = due(100, id="r7")
    with pytest.raises(QueueFullError) as caught:
        queue.push(ticket)
    assert str(caught.value) == (
        "[request id: r7] refused on arrival: it would be answered in 2761 ms, which is 2651 ms too late; "
        "2000 requests are queued"
    )
    assert caught.value.retry_after_s == 3


def test_a_model_slower_than_it_was_is_noticed_from_batch_to_batch() -> None:
    queue = admitting()
    now_ns = START - 10_000 * MS
    for _ in range(200):  # each takes 20 ms in place of 10
        for _ in range(2):
            queue.push(ticket_of(8, arrival_ns=now_ns))
        queue.poll(now_ns)
        now_ns += 20 * MS
        queue.poll(now_ns)
        now_ns += 20 * MS
    assert not admits(queue, due(5.9))
    assert admits(queue, due(6.1))  # 3 ms at half the pace
