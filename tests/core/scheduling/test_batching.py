"""The batching decider: tables for spec D01-D05, D12, D13, and three families of properties.

Safety: each ticket leaves once, in order, lawfully. Maximality: a batch is as large as it may be. Promptness: what may
go goes, and ``wake_ns`` is exact. The mutants at the end show that the properties would notice.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import ticket_of
from remora.config import BatchPolicy, QueuePolicy
from remora.errors import CancelledError, UnavailableError
from remora.messages import Ticket
from remora.scheduling import batching
from remora.scheduling.batching import (
    DELAY,
    FULL,
    IDLE,
    PREFERRED,
    REASONS,
    SHAPE,
    SINGLE,
    BatchQueue,
    ExpiredError,
    Plan,
)

MS = 1_000_000
START = 1_000 * MS


def dynamic(limit: int = 8, *, preferred: tuple[int, ...] = (), delay_ms: int = 0, max_size: int = 0) -> BatchPolicy:
    return BatchPolicy(
        max_batch_size=limit,
        dynamic=True,
        preferred=preferred,
        max_delay_ns=delay_ms * MS,
        queues=(QueuePolicy(max_size=max_size),),
    )


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
        pytest.param(dynamic(preferred=(4,), delay_ms=300), (3, 3), "", [(6, PREFERRED)], [], id="D02-jumped-over"),
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
    queue = filled(BatchPolicy(max_batch_size=4, queues=(QueuePolicy(max_size=1),)), 1, 1, 1)
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


def test_a_cancelled_ticket_ends_the_wait_of_nobody_else() -> None:
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


def test_a_ticket_runs_until_its_deadline() -> None:
    queue = BatchQueue(BatchPolicy(max_batch_size=1))
    ticket = ticket_of(arrival_ns=START)
    ticket.deadline_ns = START + 5 * MS
    queue.push(ticket)
    assert queue.poll(START + 5 * MS - 1).tickets == [ticket]


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


# -- properties -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """A request that comes ``after_ms`` after the one before it; with it one may be cancelled. 0 is no deadline."""

    after_ms: int
    rows: int
    key: str
    cancel: bool
    deadline_ms: int


@st.composite
def policies(draw: st.DrawFn) -> BatchPolicy:
    limit = draw(st.integers(1, 6))
    if draw(st.integers(0, 5)) == 0:
        return BatchPolicy(max_batch_size=limit)
    preferred = tuple(sorted(draw(st.sets(st.integers(1, limit), max_size=2))))
    return dynamic(limit, preferred=preferred, delay_ms=draw(st.sampled_from([0, 1, 5])))


def arrivals_with(deadlines_ms: list[int]) -> st.SearchStrategy[list[Arrival]]:
    one = st.builds(
        Arrival,
        after_ms=st.sampled_from([0, 0, 0, 1, 2, 7]),
        rows=st.integers(1, 3),
        key=st.sampled_from("aaab"),
        cancel=st.sampled_from([False, False, False, True]),
        deadline_ms=st.sampled_from(deadlines_ms),
    )
    return st.lists(one, max_size=14)


timeless = arrivals_with([0])
arrivals = timeless | arrivals_with([0, 0, 1, 3])


def check(queue_type: type[BatchQueue], policy: BatchPolicy, plan_of_arrivals: list[Arrival]) -> None:
    """Play arrivals against a queue, polling once after each and then whenever it asks to be woken; check all laws."""
    queue = queue_type(policy)
    waiting: list[Ticket] = []
    left: list[Ticket] = []
    pushed: list[Ticket] = []
    now = START

    def poll(at_ns: int) -> Plan:
        plan = queue.poll(at_ns)
        check_safety(policy, waiting, plan, at_ns)
        gone = {*plan.tickets, *(ticket for ticket, _ in plan.dropped)}
        alive = [ticket for ticket in waiting if not is_dead(ticket, at_ns)]
        waiting[:] = [ticket for ticket in waiting if ticket not in gone]
        left.extend(gone)
        check_maximality(policy, alive, plan, at_ns)
        check_promptness(policy, alive, plan, at_ns)
        return plan

    for arrival in plan_of_arrivals:
        now += arrival.after_ms * MS
        rows = min(arrival.rows, policy.max_batch_size)
        ticket = ticket_of(rows, shape_key=arrival.key, arrival_ns=now)
        ticket.deadline_ns = now + arrival.deadline_ms * MS if arrival.deadline_ms else 0
        queue.push(ticket)
        waiting.append(ticket)
        pushed.append(ticket)
        if arrival.cancel:
            pushed[len(pushed) // 2].cancel()
        poll(now)
    for _ in range(4 * len(pushed) + 4):
        plan = poll(now)
        if not plan.tickets and not plan.dropped:
            if not plan.wake_ns:
                break
            early = poll(plan.wake_ns - 1)
            assert early.dropped or not early.tickets, "a batch went before its time"
            now = plan.wake_ns
            if not early.dropped:
                late = poll(now)
                assert late.tickets or late.dropped, "nothing went when the queue asked to be woken"
    assert not waiting, "tickets were left behind"
    assert sorted(map(id, left)) == sorted(map(id, pushed)), "a ticket left twice or never"
    assert len(queue) == 0


def is_dead(ticket: Ticket, now_ns: int) -> bool:
    """Whether a ticket may not run any more."""
    return ticket.request.cancelled or 0 < ticket.deadline_ns <= now_ns


def check_safety(policy: BatchPolicy, waiting: list[Ticket], plan: Plan, now_ns: int) -> None:
    alive = [ticket for ticket in waiting if not is_dead(ticket, now_ns)]
    assert plan.tickets == alive[: len(plan.tickets)], "not first in, first out"
    for ticket, error in plan.dropped:
        assert ticket in waiting, "dropped twice"
        assert is_dead(ticket, now_ns), "dropped without a reason"
        assert type(error) is (CancelledError if ticket.request.cancelled else ExpiredError)
    if plan.tickets:
        assert plan.rows == sum(ticket.request.rows for ticket in plan.tickets)
        assert plan.rows <= policy.max_batch_size
        assert len({ticket.request.shape_key for ticket in plan.tickets}) == 1, "two shapes in a batch"
        assert plan.reason in REASONS
        assert policy.dynamic or len(plan.tickets) == 1
    else:
        assert plan.rows == 0
        assert plan.reason == ""


def largest_lawful(policy: BatchPolicy, alive: list[Ticket]) -> int:
    """How many tickets FIFO, shape and limit allow together."""
    count = rows = 0
    for ticket in alive:
        rows += ticket.request.rows
        if rows > policy.max_batch_size or ticket.request.shape_key != alive[0].request.shape_key:
            break
        count += 1
    return count


def preferred_counts(policy: BatchPolicy, alive: list[Ticket]) -> list[int]:
    """The counts of tickets that add up to a preferred size."""
    most = largest_lawful(policy, alive)
    return [n for n in range(1, most + 1) if sum(t.request.rows for t in alive[:n]) in policy.preferred]


def check_maximality(policy: BatchPolicy, alive: list[Ticket], plan: Plan, now_ns: int) -> None:
    if not plan.tickets or not policy.dynamic:
        return
    most = largest_lawful(policy, alive)
    expired = policy.max_delay_ns and now_ns - alive[0].arrival_ns >= policy.max_delay_ns
    preferred = preferred_counts(policy, alive)
    wanted = preferred[-1] if preferred and not expired else most
    assert len(plan.tickets) == wanted, f"{len(plan.tickets)} tickets went where {wanted} could"
    rows = sum(ticket.request.rows for ticket in alive[:most])
    if plan.reason == FULL:
        more = alive[most].request.rows if len(alive) > most else 0
        assert plan.rows == policy.max_batch_size or rows + more > policy.max_batch_size
    if plan.reason == SHAPE:
        assert alive[most].request.shape_key != alive[0].request.shape_key
    if plan.reason == DELAY:
        assert expired
    if plan.reason == IDLE:
        assert policy.max_delay_ns == 0


def check_promptness(policy: BatchPolicy, alive: list[Ticket], plan: Plan, now_ns: int) -> None:
    if plan.tickets:
        return
    if not alive:
        assert plan.wake_ns == 0, "woken for nothing"
        return
    assert policy.dynamic, "without batching nothing waits"
    assert policy.max_delay_ns, "without a delay nothing waits"
    assert plan.wake_ns == alive[0].arrival_ns + policy.max_delay_ns
    assert plan.wake_ns > now_ns, "the delay is over"
    most = largest_lawful(policy, alive)
    assert most == len(alive), "a batch that cannot grow waited"
    assert sum(ticket.request.rows for ticket in alive) < policy.max_batch_size, "a full batch waited"
    assert not preferred_counts(policy, alive), "a preferred size waited"


@settings(max_examples=400)
@given(policies(), arrivals)
def test_every_ticket_leaves_once_in_lawful_batches_that_are_large_and_prompt(
    policy: BatchPolicy, plan_of_arrivals: list[Arrival]
) -> None:
    check(BatchQueue, policy, plan_of_arrivals)


# -- do the properties notice? --------------------------------------------------------------------------------------

MUTANTS = [
    ("rows + request.rows > limit and count", "rows + request.rows > limit + 1 and count"),
    ("rows + request.rows > limit and count", "rows + request.rows >= limit and count"),
    ("request.shape_key is not key and request.shape_key != key", "False"),
    ("if rows in self._preferred:", "if rows in self._preferred and not best_count:"),
    ("if rows in self._preferred:", "if False:"),
    ("expired = bool(delay_ns) and", "expired ="),
    ("now_ns - self._waiting[0].arrival_ns >= delay_ns", "now_ns - self._waiting[0].arrival_ns > delay_ns"),
    ("now_ns - self._waiting[0].arrival_ns >= delay_ns", "now_ns - self._waiting[0].arrival_ns >= delay_ns - 1"),
    ("if best_count and not expired:", "if best_count:"),
    ("if stop:", "if stop and (expired or not delay_ns):"),
    ("wake_ns=self._waiting[0].arrival_ns", "wake_ns=self._waiting[-1].arrival_ns"),
    ("wake_ns=self._waiting[0].arrival_ns + self._policy.max_delay_ns", "wake_ns=now_ns + self._policy.max_delay_ns"),
    ("self._waiting.extendleft(reversed(kept))", "self._waiting.extendleft(kept)"),
    ("if ticket.request.cancelled:", "if False:"),
    ("ticket.deadline_ns and ticket.deadline_ns <= now_ns", "False"),
    ("ticket.deadline_ns and ticket.deadline_ns <= now_ns", "ticket.deadline_ns <= now_ns"),
    ("ticket.deadline_ns and ticket.deadline_ns <= now_ns", "ticket.deadline_ns and ticket.deadline_ns < now_ns"),
    ("while self._waiting and rows <= reach:", "while self._waiting and rows < 2:"),
    ("dropped = self._drop_dead(now_ns)", "dropped = self._drop_dead(now_ns) and []"),
]


@pytest.mark.parametrize(("original", "mutation"), MUTANTS)
def test_a_planted_mistake_is_noticed(original: str, mutation: str) -> None:
    mutant = mutated(original, mutation)

    # Deadlines thin out the queues: only mistakes about deadlines are looked for among them.
    @settings(max_examples=600, database=None, report_multiple_bugs=False, print_blob=False)
    @given(policies(), arrivals if "deadline" in original else timeless)
    def play(policy: BatchPolicy, plan_of_arrivals: list[Arrival]) -> None:
        check(mutant, policy, plan_of_arrivals)

    with pytest.raises((AssertionError, IndexError)):
        play()


def mutated(original: str, mutation: str) -> type[BatchQueue]:
    """BatchQueue with one piece of its source replaced."""
    source = textwrap.dedent(inspect.getsource(BatchQueue))
    assert source.count(original) == 1, f"the source has changed: {original}"
    scope: dict[str, Any] = dict(vars(batching))
    exec(
        compile(source.replace(original, mutation), "mutant", "exec", dont_inherit=True, flags=annotations_flag()),
        scope,
    )
    mutant: type[BatchQueue] = scope["BatchQueue"]
    return mutant


def annotations_flag() -> int:
    """The compiler's flag for ``from __future__ import annotations``."""
    return annotations.compiler_flag
