"""The batching decider in three families of properties, against the rules in the plainest words.

Safety: each ticket leaves once, in order, lawfully. Maximality: a batch is as large as it may be. Promptness: what may
go goes, and ``wake_ns`` is exact. `make mutants` shows that they would notice.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from remora.config import BatchPolicy, QueuePolicy
from remora.errors import CancelledError, QueueFullError
from remora.messages import Ticket
from remora.scheduling.batching import (
    DELAY,
    FULL,
    IDLE,
    PREFERRED,
    REASONS,
    SHAPE,
    BatchQueue,
    ExpiredError,
    Plan,
)
from support.engine.fakes import MS, START, dynamic, ticket_of


@dataclass(frozen=True)
class Arrival:
    """A request that comes ``after_ms`` after the one before it; with it one may be cancelled. 0 means none."""

    after_ms: int
    rows: int
    key: str
    cancel: bool
    deadline_ms: int
    priority: int
    timeout_ms: int
    polled: bool


@st.composite
def policies(draw: st.DrawFn, *, plain: bool = False) -> BatchPolicy:
    limit = draw(st.integers(1, 6))
    if draw(st.integers(0, 5)) == 0:
        return BatchPolicy(max_batch_size=limit)
    preferred = tuple(sorted(draw(st.sets(st.integers(1, limit), max_size=2))))
    levels = 1 if plain else draw(st.integers(1, 3))
    policy = dynamic(limit, preferred=preferred, delay_ms=draw(st.sampled_from([0, 1, 5])))
    if plain:
        return policy
    return policy._replace(
        priority_levels=levels,
        default_level=draw(st.integers(1, levels)),
        level_queues=tuple(enumerate(draw(st.tuples(*[queue_policies] * levels)), 1)),
    )


queue_policies = st.just(QueuePolicy()) | st.builds(
    QueuePolicy, st.booleans(), st.sampled_from([0, 2 * MS, 4 * MS]), st.booleans(), st.sampled_from([0, 0, 2])
)


def arrivals_with(deadlines_ms: list[int]) -> st.SearchStrategy[list[Arrival]]:
    one = st.builds(
        Arrival,
        after_ms=st.sampled_from([0, 0, 0, 1, 2, 7]),
        rows=st.integers(1, 3),
        key=st.sampled_from("aaab"),
        cancel=st.sampled_from([False, False, False, True]),
        deadline_ms=st.sampled_from(deadlines_ms),
        priority=st.integers(0, 4),
        timeout_ms=st.sampled_from([0, 0, 1, 3]),
        polled=st.sampled_from([True, False, False]),
    )
    return st.lists(one, max_size=14)


timeless = arrivals_with([0])
arrivals = timeless | arrivals_with([0, 0, 1, 3])


def check(queue_type: type[BatchQueue], policy: BatchPolicy, plan_of_arrivals: list[Arrival]) -> None:
    """Play arrivals against a queue, polling once after each and then whenever it asks to be woken; check all laws."""
    queue = queue_type(policy)
    waiting: list[Ticket] = []
    lots: dict[Ticket, Lot] = {}
    left: list[Ticket] = []
    pushed: list[Ticket] = []
    now = START

    def poll(at_ns: int) -> Plan:
        plan = queue.poll(at_ns)
        alive = in_order([ticket for ticket in waiting if not is_dead(ticket, lots[ticket], at_ns)], lots, at_ns)
        check_safety(policy, waiting, alive, lots, plan, at_ns)
        gone = {*plan.tickets, *(ticket for ticket, _ in plan.dropped)}
        waiting[:] = [ticket for ticket in waiting if ticket not in gone]
        left.extend(gone)
        check_maximality(policy, alive, plan, at_ns)
        check_promptness(policy, alive, lots, plan, at_ns)
        return plan

    for arrival in plan_of_arrivals:
        now += arrival.after_ms * MS
        rows = min(arrival.rows, policy.max_batch_size)
        ticket = ticket_of(
            rows,
            shape_key=arrival.key,
            arrival_ns=now,
            priority=arrival.priority,
            timeout_us=arrival.timeout_ms * 1000,
        )
        ticket.deadline_ns = now + arrival.deadline_ms * MS if arrival.deadline_ms else 0
        lot = lot_of(policy, arrival, now, len(pushed))
        room = policy.queue_at(lot.level).max_size if policy.dynamic else 0
        if room and sum(lots[other].level == lot.level for other in waiting) >= room:
            assert is_refused(queue, ticket), "a full level took one more"
            continue
        queue.push(ticket)
        lots[ticket] = lot
        waiting.append(ticket)
        pushed.append(ticket)
        if arrival.cancel:
            pushed[len(pushed) // 2].cancel()
        if arrival.polled:
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
                demoted = any(lots[ticket].expiry_ns == now for ticket in waiting)
                assert late.tickets or late.dropped or demoted, "nothing went when the queue asked to be woken"
    assert not waiting, "tickets were left behind"
    assert sorted(map(id, left)) == sorted(map(id, pushed)), "a ticket left twice or never"
    assert len(queue) == 0


def is_refused(queue: BatchQueue, ticket: Ticket) -> bool:
    try:
        queue.push(ticket)
    except QueueFullError:
        return True
    return False


@dataclass(frozen=True)
class Lot:
    """What the rules say about a ticket: its level, when its time is over (0: never), what then, and its number."""

    level: int
    expiry_ns: int
    reject: bool
    number: int


def lot_of(policy: BatchPolicy, arrival: Arrival, now_ns: int, number: int) -> Lot:
    """Spec D07-D09, D11 in the plainest words."""
    if not policy.dynamic:
        return Lot(1, 0, False, number)
    level = arrival.priority if arrival.priority in range(1, policy.priority_levels + 1) else policy.default_level
    rules = policy.queue_at(level)
    timeout_ns = rules.default_timeout_ns
    if rules.allow_override and arrival.timeout_ms:
        timeout_ns = min(timeout_ns, arrival.timeout_ms * MS)
    return Lot(level, now_ns + timeout_ns if timeout_ns else 0, rules.reject_on_timeout, number)


def in_order(tickets: list[Ticket], lots: dict[Ticket, Lot], now_ns: int) -> list[Ticket]:
    """As they should run: by level, the late last."""

    def rank(ticket: Ticket) -> tuple[int, int, int]:
        lot = lots[ticket]
        return lot.level, lot.expiry_ns if 0 < lot.expiry_ns <= now_ns else 0, lot.number

    return sorted(tickets, key=rank)


def is_dead(ticket: Ticket, lot: Lot, now_ns: int) -> bool:
    """Whether a ticket may not run any more."""
    late = lot.reject and 0 < lot.expiry_ns <= now_ns
    return late or ticket.request.cancelled or 0 < ticket.deadline_ns <= now_ns


def check_safety(
    policy: BatchPolicy,
    waiting: list[Ticket],
    alive: list[Ticket],
    lots: dict[Ticket, Lot],
    plan: Plan,
    now_ns: int,
) -> None:
    assert plan.tickets == alive[: len(plan.tickets)], "not in order"
    for ticket, error in plan.dropped:
        assert ticket in waiting, "dropped twice"
        assert is_dead(ticket, lots[ticket], now_ns), "dropped without a reason"
        assert type(error) is (CancelledError if ticket.request.cancelled else ExpiredError)
    dropped = {ticket for ticket, _ in plan.dropped}
    late = {t for t in waiting if lots[t].reject and 0 < lots[t].expiry_ns <= now_ns}
    assert late <= dropped, "one that is late is still waiting"
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
    oldest_ns = min(ticket.arrival_ns for ticket in alive[:most])
    expired = policy.max_delay_ns and now_ns - oldest_ns >= policy.max_delay_ns
    preferred = preferred_counts(policy, alive)
    wanted = preferred[-1] if preferred and not expired else most
    if policy.preferred and policy.max_delay_ns and not preferred and not expired:
        wanted = max(1, sum(sum(t.request.rows for t in alive[: n + 1]) <= policy.preferred[-1] for n in range(most)))
    assert len(plan.tickets) == wanted, f"{len(plan.tickets)} tickets went where {wanted} could"
    rows = sum(ticket.request.rows for ticket in alive[:most])
    if plan.reason == FULL:
        more = alive[most].request.rows if len(alive) > most else 0
        assert plan.rows == policy.max_batch_size or rows + more > policy.max_batch_size
    if plan.reason == PREFERRED:
        assert policy.preferred
    if plan.reason == SHAPE:
        assert alive[most].request.shape_key != alive[0].request.shape_key
    if plan.reason == DELAY:
        assert expired
    if plan.reason == IDLE:
        assert policy.max_delay_ns == 0


def check_promptness(
    policy: BatchPolicy, alive: list[Ticket], lots: dict[Ticket, Lot], plan: Plan, now_ns: int
) -> None:
    if plan.tickets:
        return
    if not alive:
        assert plan.wake_ns == 0, "woken for nothing"
        return
    assert policy.dynamic, "without batching nothing waits"
    assert policy.max_delay_ns, "without a delay nothing waits"
    over_ns = min(ticket.arrival_ns for ticket in alive) + policy.max_delay_ns
    changes_ns = [ns for ticket in alive for ns in (lots[ticket].expiry_ns, ticket.deadline_ns) if ns > now_ns]
    assert plan.wake_ns == min([over_ns, *changes_ns]), "time alone changes what may run"
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


@settings(max_examples=300)
@given(st.integers(1, 4).map(dynamic) | policies(), timeless | arrivals, st.integers(1, 2))
def test_what_goes_ahead_is_what_would_run_next_and_can_be_put_back(
    policy: BatchPolicy, coming: list[Arrival], instances: int
) -> None:
    queue, twin, now, waiting = BatchQueue(policy), BatchQueue(policy), START, 0
    for arrival in coming:
        now += arrival.after_ms * MS
        ticket = ticket_of(min(arrival.rows, policy.max_batch_size), shape_key=arrival.key, arrival_ns=now)
        ticket.deadline_ns = now + arrival.deadline_ms * MS if arrival.deadline_ms else 0
        if is_refused(queue, ticket):
            continue
        twin.push(ticket)
        waiting += 1
        if arrival.cancel:
            ticket.cancel()
    hoped = queue.crowded(instances)
    plan, usual = queue.ahead(now, instances), twin.poll(now)
    one_level = not policy.dynamic or (policy.levels == 1 and not policy.queue_at(1).default_timeout_ns)
    complete = usual.reason == FULL and len(usual.tickets) > 1
    timeless = not any(ticket.deadline_ns for ticket in usual.tickets)
    size = policy.max_batch_size if policy.dynamic else 1
    enough = size > 1 and waiting >= instances * size
    assert bool(plan.tickets) == (one_level and complete and timeless and enough)
    assert (bool(plan.tickets), hoped) in ((False, False), (False, enough), (True, True))
    if plan.tickets:
        assert (plan.tickets, plan.rows, plan.reason) == (usual.tickets, usual.rows, usual.reason)
        queue.put_back(plan.tickets)
    if plan.dropped or (one_level and enough):
        assert [ticket for ticket, _ in plan.dropped] == [ticket for ticket, _ in usual.dropped]
    gone = {ticket for ticket, _ in usual.dropped}
    left, expected = [t for t in queue.drain() if t not in gone], [*usual.tickets, *twin.drain()]
    assert left == expected if one_level else set(left) == set(expected), "not as it was"


def test_nothing_with_a_deadline_goes_ahead() -> None:
    for deadline_ns, count in ((0, 2), (START + MS, 0)):
        queue = BatchQueue(dynamic(2))
        for _ in range(2):
            ticket = ticket_of(arrival_ns=START)
            ticket.deadline_ns = deadline_ns
            queue.push(ticket)
        assert len(queue.ahead(START, 1).tickets) == count


def test_nothing_that_an_instance_waits_for_goes_ahead() -> None:
    for held, count in ((frozenset(), 2), (frozenset((object(),)), 0)):
        queue = BatchQueue(dynamic(2))
        for _ in range(2):
            ticket = ticket_of(arrival_ns=START)
            ticket.request.blocking_instances = held
            queue.push(ticket)
        assert len(queue.ahead(START, 1).tickets) == count
