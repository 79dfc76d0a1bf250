"""Turns at shared resources: what there is, who goes, and the three families of properties [I08-I10]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.config import RatePolicy
from remora.errors import ConfigError
from remora.scheduling.rate_limiter import Resource, Seat, Turns, capacities


def needs(*resources: tuple[str, int | None, int], priority: int = 1) -> RatePolicy:
    return RatePolicy(tuple(((name, device), count) for name, device, count in resources), priority)


def seated(*policies: RatePolicy, stated: Mapping[Resource, int] | None = None) -> tuple[Turns, list[Seat]]:
    turns = Turns(stated or {})
    return turns, turns.join(policies)


# -- what there is --------------------------------------------------------------------------------------------------


def test_with_nothing_stated_there_is_what_the_most_demanding_instance_needs() -> None:
    policies = [needs(("R", 0, 2), ("G", None, 1)), needs(("R", 0, 4)), needs(("R", 1, 3))]
    assert capacities(policies, {}) == {("R", 0): 4, ("R", 1): 3, ("G", None): 1}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        pytest.param({("R", None): 5}, 5, id="every-device"),
        pytest.param({("R", 1): 5}, 5, id="this-device"),
        pytest.param({("R", 1): 5, ("R", None): 7}, 7, id="the-larger-one"),
        pytest.param({("R", 1): 7, ("R", None): 5}, 7, id="the-larger-one-the-other-way-round"),
    ],
)
def test_what_is_stated_for_a_device_or_for_all_is_what_there_is(stated: Mapping[Resource, int], expected: int) -> None:
    assert capacities([needs(("R", 1, 2))], stated) == {("R", 1): expected}


def test_a_shared_resource_takes_what_is_stated_for_any_device() -> None:
    assert capacities([needs(("G", None, 2))], {("G", 3): 6, ("H", None): 9}) == {("G", None): 6}


@pytest.mark.parametrize("stated", [{("R", None): 3}, {("R", 10): 9, ("R", 0): 3}])
def test_too_little_is_refused_with_tritons_text(stated: Mapping[Resource, int]) -> None:
    text = (
        'Resource count for "R" is limited to 3 which will prevent scheduling of one or more model instances, '
        "the minimum required count is 4"
    )
    with pytest.raises(ConfigError) as caught:
        capacities([needs(("R", 0, 4)), needs(("R", 0, 1))], stated)
    assert str(caught.value) == text


def test_what_is_not_stated_is_not_there_once_anything_is() -> None:
    with pytest.raises(ConfigError, match=r'^Resource count for "S" is limited to 0 .* count is 1$'):
        capacities([needs(("S", 0, 1))], {("R", None): 3})


def test_a_name_that_is_shared_and_of_a_device_is_refused_with_tritons_text() -> None:
    text = 'Resource "R" is present as both global and device-specific resource in the model configuration.'
    with pytest.raises(ConfigError) as caught:
        capacities([needs(("R", None, 1)), needs(("R", 0, 1))], {})
    assert str(caught.value) == text


def test_a_model_that_does_not_fit_does_not_join() -> None:
    turns, [first] = seated(needs(("R", 0, 1)), stated={("R", None): 1})
    with pytest.raises(ConfigError):
        turns.join([needs(("R", 0, 2))])
    turns.ask(first)
    assert turns.grant() == [first]
    turns.join([needs(("R", 0, 1))])


# -- who goes -------------------------------------------------------------------------------------------------------


def test_the_others_wait_until_there_is_enough() -> None:
    turns, [one, two] = seated(needs(("R", 0, 1)), needs(("R", 0, 1)))
    turns.ask(one)
    turns.ask(two)
    assert turns.grant() == [one]
    assert turns.grant() == []
    turns.done(one, ran=True)
    assert turns.grant() == [two]


def test_who_needs_nothing_never_waits() -> None:
    turns, [one, free] = seated(needs(("R", 0, 1)), needs())
    for seat in (one, free):
        turns.ask(seat)
    assert set(turns.grant()) == {one, free}


def test_devices_do_not_stand_in_each_others_way() -> None:
    turns, seats = seated(needs(("R", 0, 1)), needs(("R", 1, 1)))
    for seat in seats:
        turns.ask(seat)
    assert turns.grant() == seats


def test_one_that_needs_much_is_not_starved_by_those_that_need_little() -> None:
    turns, [big, *small] = seated(needs(("R", 0, 3)), needs(("R", 0, 1)), needs(("R", 0, 1)))
    for seat in (*small, big):
        turns.ask(seat)
    assert turns.grant() == small
    turns.done(small[0], ran=True)
    turns.ask(small[0])
    assert turns.grant() == [], "what the big one waits for was given away"
    turns.done(small[1], ran=True)
    turns.ask(small[1])
    assert turns.grant() == [big]


def test_what_the_first_in_line_does_not_need_is_used_meanwhile() -> None:
    turns, [runs, first, other] = seated(needs(("R", 0, 1)), needs(("R", 0, 1)), needs(("S", 0, 1)))
    for seat in (runs, first, other):
        turns.ask(seat)
    assert turns.grant() == [runs, other]


def test_a_turn_that_was_not_used_is_not_counted() -> None:
    turns, [one, two] = seated(needs(("R", 0, 1)), needs(("R", 0, 1)))
    turns.ask(one)
    assert turns.grant() == [one]
    turns.done(one, ran=False)
    turns.ask(one)
    turns.ask(two)
    assert turns.grant() == [one]


def test_who_comes_late_does_not_make_up_for_turns_it_did_not_want() -> None:
    turns, [busy] = seated(needs(("R", 0, 1)))
    for _ in range(100):
        turns.ask(busy)
        turns.grant()
        turns.done(busy, ran=True)
    [late] = turns.join([needs(("R", 0, 1))])
    assert runs_of(turns, [busy, late], 10) == [5, 5]


def test_who_leaves_gives_back_what_it_holds_and_raises_no_bar() -> None:
    turns, [one, big] = seated(needs(("R", 0, 1)), needs(("R", 0, 2)))
    for seat in (big, one):
        turns.ask(seat)
    assert turns.grant() == [big]
    turns.leave(big)
    turns.leave(big)
    assert turns.grant() == [one]
    turns.done(big, ran=True)
    [another] = turns.join([needs(("R", 0, 1))])
    turns.ask(another)
    assert turns.grant() == [], "the one that left still counts: only one unit is left"
    turns.leave(another)
    turns.done(one, ran=True)
    assert turns.grant() == []


def test_when_the_most_demanding_leaves_there_is_less() -> None:
    turns, [big, one, two] = seated(needs(("R", 0, 2)), needs(("R", 0, 1)), needs(("R", 0, 1)))
    turns.leave(big)
    for seat in (one, two):
        turns.ask(seat)
    assert turns.grant() == [one]


def runs_of(turns: Turns, seats: Sequence[Seat], rounds: int) -> list[int]:
    """How often each ran, when all of them always want to and one runs at a time."""
    runs = dict.fromkeys(seats, 0)
    for seat in seats:
        turns.ask(seat)
    for _ in range(rounds):
        [seat] = turns.grant()
        runs[seat] += 1
        turns.done(seat, ran=True)
        turns.ask(seat)
    return list(runs.values())


def test_priority_two_gets_half_the_turns_and_zero_counts_as_one() -> None:
    turns, seats = seated(*(needs(("R", 0, 1), priority=priority) for priority in (1, 2, 0)))
    assert runs_of(turns, seats, 50) == [20, 10, 20]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 80))
def test_turns_are_as_the_priorities_at_any_time(priorities: list[int], rounds: int) -> None:
    turns, seats = seated(*(needs(("R", 0, 1), priority=priority) for priority in priorities))
    runs = runs_of(turns, seats, rounds)
    scaled = [count * priority for count, priority in zip(runs, priorities, strict=True)]
    assert max(scaled) - min(scaled) <= max(priorities)


# -- properties -----------------------------------------------------------------------------------------------------

some_policies = st.lists(
    st.builds(
        RatePolicy,
        st.dictionaries(st.sampled_from([("R", 0), ("R", 1), ("G", None)]), st.integers(0, 3)).map(
            lambda needed: tuple(needed.items())
        ),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=5,
)
steps = st.lists(st.tuples(st.sampled_from(["ask", "done", "idle", "leave"]), st.integers(0, 4)), max_size=40)


@settings(max_examples=300)
@given(some_policies, steps)
def test_nothing_runs_beyond_what_there_is_and_nothing_waits_that_could_run(
    policies: list[RatePolicy], plan: list[tuple[str, int]]
) -> None:
    turns, seats = seated(*policies)
    there: dict[Resource, int] = {}
    for policy in policies:
        for resource, count in policy.resources:
            there[resource] = max(there.get(resource, 0), count)
    waiting: list[Seat] = []
    running: list[Seat] = []
    here = list(seats)
    for what, number in plan:
        seat = seats[number % len(seats)]
        if what == "ask" and seat in here and seat not in waiting + running:
            turns.ask(seat)
            waiting.append(seat)
        elif what in ("done", "idle") and seat in running:
            turns.done(seat, ran=what == "done")
            running.remove(seat)
        elif what == "leave" and len(here) > 1 and seat in here:
            turns.leave(seat)
            for seats_of_it in (here, waiting, running):
                if seat in seats_of_it:
                    seats_of_it.remove(seat)
        granted = turns.grant()
        assert set(granted) <= set(waiting), "a turn for one that did not wait for it"
        waiting = [seat for seat in waiting if seat not in granted]
        running += granted
        free = {resource: count - held(running, resource) for resource, count in there.items()}
        assert min(free.values(), default=0) >= 0, "more runs than there is"
        if len(here) == len(seats):  # else there may be less now than what is still held
            check_maximal(waiting, free)
            assert not waiting or running, "a batch waits although none runs"
        assert turns.grant() == [], "not all that could go went at once"


def held(seats: Sequence[Seat], resource: Resource) -> int:
    return sum(dict(seat.policy.resources).get(resource, 0) for seat in seats)


def check_maximal(waiting: list[Seat], free: dict[Resource, int]) -> None:
    """Each that waits lacks something that is not free, or that one before it waits for."""
    in_line = sorted(waiting, key=lambda seat: seat.turn)
    for place, seat in enumerate(in_line):
        lacks = [
            resource
            for resource, count in seat.policy.resources
            if count + held(in_line[:place], resource) > free[resource]
        ]
        assert lacks, "one could run without holding up any other"
