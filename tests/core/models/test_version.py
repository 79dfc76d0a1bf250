"""Legal transitions of a version's life, and its end after RETIRE whatever else happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import InternalError
from remora.models.version import BEING_LOADED, RETIRED, TRANSITIONS, Effect, Event, State, Step, begin_load, step

ILLEGAL = [(state, event) for state in State for event in Event if (state, event) not in TRANSITIONS]
WORK = {Effect.DRAIN: Event.DRAINED, Effect.CLOSE: Event.CLOSED}
"""The event that ends the work of an effect."""


def life(*events: Event, state: State = State.WAITING) -> tuple[State, list[Effect]]:
    """Return the state after events, and all effects on the way."""
    effects: list[Effect] = []
    for event in events:
        state, new = step(state, event)
        effects += [new] if new is not None else []
    return state, effects


@pytest.mark.parametrize(("state", "event"), ILLEGAL, ids=lambda each: str(each.name))
def test_an_event_that_is_illegal_in_a_state_is_refused(state: State, event: Event) -> None:
    with pytest.raises(InternalError, match=f"a version that is {state.name} cannot take the event {event.name}"):
        step(state, event)


def test_the_transitions_name_every_state_event_and_effect() -> None:
    steps = TRANSITIONS.values()
    assert {state for state, _ in TRANSITIONS} | {after.state for after in steps} == set(State)
    assert {event for _, event in TRANSITIONS} == set(Event)
    assert {after.effect for after in steps} - {None} == set(Effect)


BEGIN, OPENED, FAILED, PUBLISHED = Event.BEGIN, Event.OPENED, Event.FAILED, Event.PUBLISHED
RETIRE, DRAINED, CLOSED = Event.RETIRE, Event.DRAINED, Event.CLOSED
DRAIN, CLOSE, FORGET = Effect.DRAIN, Effect.CLOSE, Effect.FORGET


@pytest.mark.parametrize(
    ("events", "state", "effects"),
    [
        pytest.param((BEGIN, OPENED, PUBLISHED), State.READY, [], id="a load that succeeds"),
        pytest.param((BEGIN, FAILED), State.FAILED, [], id="a load that fails"),
        pytest.param((BEGIN, FAILED, BEGIN), State.RETRYING, [], id="a load after one that failed is no first load"),
        pytest.param((BEGIN, FAILED, BEGIN, BEGIN), State.RETRYING, [], id="a load after one that was interrupted"),
        pytest.param((BEGIN, FAILED, BEGIN, OPENED, PUBLISHED), State.READY, [], id="a load that succeeds at last"),
        pytest.param((BEGIN, FAILED, FAILED), State.FAILED, [], id="a load that fails before it opens the version"),
        pytest.param((BEGIN, FAILED, RETIRE), State.CLOSED, [FORGET], id="a failure that a later load makes obsolete"),
        pytest.param((BEGIN, OPENED, RETIRE), State.CLOSING, [CLOSE], id="another version of the load has failed"),
        pytest.param((BEGIN, OPENED, RETIRE, CLOSED), State.CLOSED, [CLOSE], id="a load that ends after the stop"),
        pytest.param((BEGIN, RETIRE, OPENED), State.CLOSING, [FORGET, CLOSE], id="a load given up before it opens"),
        pytest.param((BEGIN, RETIRE, FAILED), State.CLOSED, [FORGET], id="a load given up that fails"),
        pytest.param((BEGIN, OPENED, PUBLISHED, RETIRE), State.DRAINING, [DRAIN], id="sequences end where they began"),
        pytest.param(
            (BEGIN, OPENED, PUBLISHED, RETIRE, RETIRE), State.DRAINING, [DRAIN], id="a version is unloaded twice"
        ),
        pytest.param(
            (BEGIN, OPENED, PUBLISHED, RETIRE, DRAINED), State.CLOSING, [DRAIN, CLOSE], id="requests in flight finish"
        ),
        pytest.param(
            (BEGIN, OPENED, PUBLISHED, RETIRE, DRAINED, RETIRE, DRAINED),
            State.CLOSING,
            [DRAIN, CLOSE, CLOSE],
            id="a close that timed out is tried again",
        ),
        pytest.param(
            (BEGIN, OPENED, PUBLISHED, RETIRE, DRAINED, CLOSED, RETIRE, DRAINED, CLOSED),
            State.CLOSED,
            [DRAIN, CLOSE],
            id="a version that is closed is closed once",
        ),
    ],
)
def test_a_life_takes_this_course(events: tuple[Event, ...], state: State, effects: list[Effect]) -> None:
    assert life(*events) == (state, effects)


@pytest.mark.parametrize("state", sorted(RETIRED, key=str))
def test_a_load_of_a_retired_version_begins_a_new_life(state: State) -> None:
    with pytest.raises(InternalError):
        step(state, Event.BEGIN)
    assert begin_load(state) is State.LOADING


def test_a_version_that_serves_is_not_loaded_again() -> None:
    with pytest.raises(InternalError):
        begin_load(State.READY)


@given(st.sampled_from(State), st.data())
def test_after_retire_every_version_ends_in_closed_whatever_else_happens(state: State, data: st.DataObject) -> None:
    opening = state in BEING_LOADED
    due: list[Event] = []
    if state is State.DRAINING:
        due.append(Event.DRAINED)
    if state is State.CLOSING:
        due.append(Event.CLOSED)
    repeated = data.draw(st.integers(0, 3))
    state, effect = step(state, Event.RETIRE)
    while True:
        due += [WORK[effect]] if effect in WORK else []
        choices = {*due, *((Event.OPENED, Event.FAILED) if opening else ()), *((Event.RETIRE,) if repeated else ())}
        if not choices:
            break
        event = data.draw(st.sampled_from(sorted(choices, key=str)))
        opening = opening and event not in (Event.OPENED, Event.FAILED)
        repeated -= event is Event.RETIRE
        due = [each for each in due if each is not event]
        state, effect = step(state, event)
        assert state in RETIRED, "it serves again"
    assert state is State.CLOSED
    assert step(state, Event.RETIRE) == Step(State.CLOSED)


@given(st.sampled_from(sorted(RETIRED, key=str)), st.lists(st.sampled_from(Event)))
def test_no_event_brings_a_retired_version_back(state: State, events: list[Event]) -> None:
    for event in events:
        try:
            state, _ = step(state, event)
        except InternalError:
            continue
        assert state in RETIRED
