"""The table of sequences: slots, backlog, rules, time, cancellation, and all of it against a simple reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from remora.config import SequencePolicy
from remora.errors import CancelledError, InvalidArgumentError, UnavailableError
from remora.messages import InferForm, Ticket
from remora.scheduling.sequences.table import Orders, Place, SequenceTable
from support.engine.fakes import ticket_of

IDLE_NS = 1000
NOW = 10


def ask(
    sequence_id: int | str, *, start: bool = False, end: bool = False, timeout_us: int = 0, rows: int = 1
) -> Ticket:
    ticket = ticket_of(rows, arrival_ns=NOW)
    ticket.request.form = InferForm(
        (), sequence_id=sequence_id, sequence_start=start, sequence_end=end, timeout_us=timeout_us
    )
    return ticket


def table_of(slots: int = 2, instances: int = 1, *, iterative: bool = False) -> SequenceTable:
    return SequenceTable(SequencePolicy(slots=slots, idle_ns=IDLE_NS, iterative=iterative), instances, "m")


def gone(orders: Orders) -> list[Ticket]:
    return [step.ticket for step in orders.steps]


def test_a_batch_of_two_is_refused_with_tritons_text() -> None:
    with pytest.raises(InvalidArgumentError, match="must specify batch-size 1 due to requirements of sequence batcher"):
        table_of().admit(ask(1, start=True, rows=2), NOW)


@pytest.mark.parametrize("nothing", [0, ""])
def test_a_request_without_an_id_is_refused_with_tritons_text(nothing: int | str) -> None:
    with pytest.raises(InvalidArgumentError, match="must specify a non-zero or non-empty correlation ID"):
        table_of().admit(ask(nothing, start=True), NOW)


@pytest.mark.parametrize("name", [7, "seven"])
def test_an_unknown_sequence_must_begin_with_start(name: int | str) -> None:
    table = table_of()
    with pytest.raises(InvalidArgumentError) as caught:
        table.admit(ask(name, end=True), NOW)
    assert str(caught.value) == (
        f"inference request for sequence {name} to model 'm' must specify the START flag on the first request of the "
        "sequence"
    )
    assert table.sequences() == []


def test_requests_of_one_sequence_go_one_at_a_time_and_in_order() -> None:
    table = table_of()
    first, second, third = ask(1, start=True), ask(1), ask(1, end=True)
    assert gone(table.admit(first, NOW)) == [first]
    assert gone(table.admit(second, NOW)) == gone(table.admit(third, NOW)) == []
    assert gone(table.released(first, NOW)) == [second]
    assert gone(table.released(second, NOW)) == [third]
    assert gone(table.released(third, NOW)) == []
    assert table.sequences() == []
    assert not table.busy


def test_the_lowest_slots_of_all_instances_are_given_first() -> None:
    table = table_of(2, 2)
    places = [table.admit(ask(number, start=True), NOW).steps[0].place for number in range(1, 5)]
    assert places == [Place(0, 0), Place(0, 1), Place(1, 0), Place(1, 1)]


def test_the_backlog_is_served_in_the_order_in_which_sequences_began() -> None:
    table = table_of(1)
    held, second, third = ask(1, start=True, end=True), ask(2, start=True, end=True), ask(3, start=True)
    table.admit(held, NOW)
    assert gone(table.admit(second, NOW)) == gone(table.admit(third, NOW)) == []
    assert gone(table.released(held, NOW)) == [second]
    assert gone(table.released(second, NOW)) == [third]


def test_after_end_has_arrived_only_start_may_follow_and_it_queues_behind_the_others() -> None:
    table = table_of(1)
    first, other, anew = ask(1, start=True, end=True), ask(2, start=True, end=True), ask(1, start=True)
    table.admit(first, NOW)
    table.admit(other, NOW)
    with pytest.raises(InvalidArgumentError, match="START"):
        table.admit(ask(1), NOW)
    table.admit(anew, NOW)
    assert gone(table.released(first, NOW)) == [other]
    assert gone(table.released(other, NOW)) == [anew]


def test_a_silent_sequence_loses_its_slot_exactly_when_its_time_is_over() -> None:
    table = table_of(1)
    first, waiting = ask(1, start=True), ask(2, start=True)
    table.admit(first, NOW)
    table.admit(waiting, NOW)
    assert table.wake_ns == 0
    table.released(first, NOW)
    assert table.wake_ns == NOW + IDLE_NS
    assert gone(table.sweep(NOW + IDLE_NS - 1)) == []
    assert gone(table.sweep(NOW + IDLE_NS)) == [waiting]
    with pytest.raises(InvalidArgumentError, match="START"):
        table.admit(ask(1), NOW + IDLE_NS)


def test_idle_time_is_seen_on_arrival_too() -> None:
    table = table_of(1)
    first = ask(1, start=True)
    table.admit(first, NOW)
    table.released(first, NOW)
    with pytest.raises(InvalidArgumentError, match="START"):
        table.admit(ask(1), NOW + IDLE_NS)


def test_a_sequence_whose_wait_for_a_slot_is_over_is_answered_with_tritons_text() -> None:
    table = table_of(1)
    table.admit(ask(1, start=True), NOW)
    late, later = ask(2, start=True, timeout_us=3), ask(2)
    table.admit(late, NOW)
    table.admit(later, NOW)
    assert table.wake_ns == NOW + 3000
    assert table.sweep(NOW + 2999).dropped == []
    dropped = table.sweep(NOW + 3000).dropped
    assert [ticket for ticket, _ in dropped] == [late, later]
    assert {type(error) for _, error in dropped} == {UnavailableError}
    assert str(dropped[0][1]) == "timeout of the corresponding sequence has been expired"
    assert table.wake_ns == 0
    assert len(table.sequences()) == 1


def test_what_follows_when_the_wait_for_a_slot_is_over_must_begin_the_sequence_anew() -> None:
    table = table_of(1)
    table.admit(ask(1, start=True), NOW)
    table.admit(ask(2, start=True, timeout_us=1), NOW)
    table.admit(ask(2), NOW + 999)
    with pytest.raises(InvalidArgumentError, match="must specify the START flag"):
        table.admit(ask(2), NOW + 1000)


def test_start_with_the_id_of_a_sequence_whose_end_is_queued_begins_another_one_beside_it() -> None:
    table = table_of(2)
    first, end, anew, after = ask(1, start=True), ask(1, end=True), ask(1, start=True), ask(1)
    table.admit(first, NOW)
    table.admit(end, NOW)
    (step,) = table.admit(anew, NOW).steps
    assert (step.ticket, step.place.slot, step.states) == (anew, 1, {})
    step.states["s"] = np.zeros(1)
    table.admit(after, NOW)
    assert [(row.id, row.pending) for row in table.sequences()] == [(1, 1), (1, 1)]
    assert gone(table.released(first, NOW)) == [end]
    table.released(end, NOW)
    assert table.is_live(1)
    (step,) = table.released(anew, NOW).steps
    assert (step.ticket, list(step.states)) == (after, ["s"])


def test_each_sequence_of_one_id_waits_in_the_backlog_by_itself() -> None:
    table = table_of(1)
    table.admit(ask(2, start=True), NOW)
    for _ in range(3):
        table.admit(ask(1, start=True, end=True), NOW)
    assert (table.backlog, table.count) == (3, 4)


def test_cancelling_a_sequence_leaves_the_next_one_of_its_id_alone() -> None:
    table = table_of(1)
    first, end, anew = ask(1, start=True), ask(1, end=True), ask(1, start=True)
    for ticket in (first, end, anew):
        table.admit(ticket, NOW)
    end.cancel()
    assert [ticket for ticket, _ in table.sweep(NOW).dropped] == [end]
    assert gone(table.released(first, NOW)) == [anew]


def test_one_cancelled_request_takes_all_that_wait_in_its_sequence_along() -> None:
    table = table_of(1)
    first, second, third, other = ask(1, start=True), ask(1), ask(1), ask(2, start=True)
    for ticket in (first, second, third, other):
        table.admit(ticket, NOW)
    third.cancel()
    orders = table.sweep(NOW)
    assert [ticket for ticket, _ in orders.dropped] == [second, third]
    assert all(isinstance(error, CancelledError) for _, error in orders.dropped)
    with pytest.raises(InvalidArgumentError, match="START"):
        table.admit(ask(1), NOW)
    assert gone(table.released(first, NOW)) == [other]


def test_a_sequence_begun_anew_after_a_cancelled_one_lives_on() -> None:
    table = table_of(1)
    first, second, anew, after = ask(1, start=True), ask(1), ask(1, start=True), ask(1)
    table.admit(first, NOW)
    table.admit(second, NOW)
    second.cancel()
    table.sweep(NOW)
    table.admit(anew, NOW)
    assert gone(table.released(first, NOW)) == [anew]
    assert table.released(anew, NOW) == Orders([], [], [])
    assert gone(table.admit(after, NOW)) == [after]


def test_an_iterative_request_goes_again_before_those_that_came_after_it() -> None:
    table = table_of(1, iterative=True)
    first, second = ask(1), ask(1)
    table.admit(first, NOW)
    table.admit(second, NOW)
    assert gone(table.released(first, NOW, rescheduled=True)) == [first]
    assert gone(table.released(first, NOW)) == [second]


def test_a_sequence_that_begins_anew_has_no_states_left() -> None:
    table = table_of(1)
    first, again = ask(1, start=True), ask(1, start=True)
    (step,) = table.admit(first, NOW).steps
    step.states["s"] = np.zeros(1)
    table.released(first, NOW)
    (step,) = table.admit(again, NOW).steps
    assert step.states == {}


def test_a_later_timeout_does_not_lengthen_the_wait_for_a_slot() -> None:
    table = table_of(1)
    table.admit(ask(1, start=True), NOW)
    waiting = [ask(2, start=True, timeout_us=1), ask(2, timeout_us=5)]
    for ticket in waiting:
        table.admit(ticket, NOW)
    assert [ticket for ticket, _ in table.sweep(NOW + 1000).dropped] == waiting


def test_the_first_of_what_time_will_end_is_what_it_wakes_up_for() -> None:
    table = table_of(1)
    first = ask(1, start=True)
    table.admit(first, NOW)
    table.admit(ask(2, start=True, timeout_us=9), NOW)
    assert table.wake_ns == NOW + 9000
    table.released(first, NOW)
    assert table.wake_ns == NOW + IDLE_NS


def test_an_id_is_given_out_once() -> None:
    table = table_of(iterative=True)
    table.admit(ask(1), NOW)
    assert table.unused_id() == 2
    assert table.unused_id() == 3


def test_an_iterative_request_goes_again_until_it_is_released_for_good() -> None:
    table = table_of(1, iterative=True)
    ticket = ask(table.unused_id())
    (first,) = table.admit(ticket, NOW).steps
    (second,) = table.released(ticket, NOW, rescheduled=True).steps
    assert (first.start, second.start) == (True, False)
    assert first.place == second.place
    assert table.released(ticket, NOW).steps == []
    assert table.sequences() == []


def test_a_cancelled_iterative_request_is_answered_when_it_asks_for_another_turn() -> None:
    table = table_of(1, iterative=True)
    ticket = ask(1)
    table.admit(ticket, NOW)
    ticket.cancel()
    orders = table.released(ticket, NOW, rescheduled=True)
    assert orders.steps == []
    assert [ticket for ticket, _ in orders.dropped] == [ticket]
    assert not table.busy


def test_closing_frees_the_slots_of_those_that_have_nothing_to_do() -> None:
    table = table_of(1)
    first, waiting = ask(1, start=True), ask(2, start=True)
    table.admit(first, NOW)
    table.admit(waiting, NOW)
    assert gone(table.close(NOW)) == []
    assert gone(table.released(first, NOW)) == [waiting]
    table.released(waiting, NOW)
    assert not table.busy
    assert table.sequences() == []


@dataclass(eq=False)
class Asked:
    """What the reference knows of one sequence."""

    number: int
    tickets: list[Ticket] = field(default_factory=list)  # not answered yet
    alive: bool = True  # a request without START may follow
    quiet_since: int = 0


class Sequences(RuleBasedStateMachine):
    """The table against a reference that knows only which sequences began and the requests of each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table_of(2, 2)
        self.now = NOW
        self.asked: list[Asked] = []
        self.running: dict[Ticket, Place] = {}
        self.answered: set[Ticket] = set()

    def open(self, number: int) -> Asked | None:
        return next((each for each in self.asked if each.number == number and each.alive), None)

    def of(self, ticket: Ticket) -> Asked:
        return next(each for each in self.asked if ticket in each.tickets)

    def obey(self, orders: Orders) -> None:
        for ticket, _ in orders.dropped:
            assert ticket not in self.answered
            self.answered.add(ticket)
            each = self.of(ticket)
            each.tickets.remove(ticket)
            each.alive = False
        for ticket, place, start, end, _ in orders.steps:
            form = ticket.request.form
            each = self.of(ticket)
            assert each.tickets[0] is ticket, "out of order"
            assert place not in self.running.values(), "two requests at one place"
            assert (start, end) == (form.sequence_start, form.sequence_end)
            self.running[ticket] = place
            each.quiet_since = 0

    def reap(self) -> None:
        for each in self.asked:
            if each.quiet_since and self.now - each.quiet_since >= IDLE_NS:
                each.alive = False
                each.quiet_since = 0

    @rule(number=st.integers(1, 7), start=st.booleans(), end=st.booleans())
    def arrive(self, number: int, start: bool, end: bool) -> None:
        self.reap()
        ticket = ask(number, start=start, end=end)
        each = self.open(number)
        if each is None:
            if not start:
                with pytest.raises(InvalidArgumentError):
                    self.table.admit(ticket, self.now)
                self.obey(self.table.sweep(self.now))
                return
            each = Asked(number)
            self.asked.append(each)
        each.tickets.append(ticket)
        each.alive = not end
        each.quiet_since = 0
        self.obey(self.table.admit(ticket, self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(list(self.running)))
        del self.running[ticket]
        each = self.of(ticket)
        each.tickets.remove(ticket)
        self.answered.add(ticket)
        if not each.tickets and each.alive:
            each.quiet_since = self.now
        self.obey(self.table.released(ticket, self.now))

    @rule(ns=st.integers(1, IDLE_NS))
    def wait(self, ns: int) -> None:
        self.now += ns
        self.reap()
        self.obey(self.table.sweep(self.now))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiting = [row for each in self.asked for row in each.tickets if row not in self.running]
        if waiting:
            ticket = data.draw(st.sampled_from(waiting))
            ticket.cancel()
            each = self.of(ticket)
            self.obey(self.table.sweep(self.now))
            assert all(row in self.running for row in each.tickets), "a cancelled sequence still waits"

    @invariant()
    def the_same_sequences_live_in_the_order_in_which_they_began(self) -> None:
        self.asked = [each for each in self.asked if each.alive or each.tickets]
        assert [row.id for row in self.table.sequences()] == [each.number for each in self.asked]
        assert all(self.table.is_live(each.number) for each in self.asked)

    @invariant()
    def nothing_waits_that_could_go(self) -> None:
        rows = self.table.sequences()
        held = [row.place for row in rows if row.place is not None]
        assert len(held) == len(set(held)) <= 4
        if any(row.place is None for row in rows):
            assert len(held) == 4, "a slot is free while a sequence waits for one"
        assert all(row.running for row in rows if row.place is not None and row.pending)
        assert self.table.waiting == sum(len(each.tickets) for each in self.asked) - len(self.running)

    @invariant()
    def the_next_look_is_at_the_earliest_end_of_silence(self) -> None:
        since = [each.quiet_since for each in self.asked if each.quiet_since]
        assert self.table.wake_ns == min(since, default=-IDLE_NS) + IDLE_NS


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
