"""Life of one version of a model: states, events and the legal transitions.

A life begins with a load and ends with the memory that the version took. A version that is retired never serves again:
a later load of the same number begins a new life beside the one that ends. Pure: the caller keeps the state, sends the
events and performs the effects.

Invariant: after RETIRE every version ends in CLOSED, whatever else happens.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from remora.errors import InternalError


class State(Enum):
    """State of a version."""

    WAITING = auto()
    """No load has begun."""
    LOADING = auto()
    """A load opens it, for the first time or after it was unloaded."""
    RETRYING = auto()
    """A load opens it after an earlier load failed."""
    FAILED = auto()
    """The last load failed. The version holds nothing."""
    OPENED = auto()
    """It can run requests, and waits for the other versions of its load."""
    READY = auto()
    """It serves."""
    DRAINING = auto()
    """It gets no new sequences; those that began here go on."""
    CLOSING = auto()
    """It refuses requests, and is closed after those in flight and after a load in progress."""
    CLOSED = auto()
    """It holds nothing and never serves again."""


class Event(Enum):
    """What happens to a version."""

    BEGIN = auto()
    """A load of the version begins."""
    OPENED = auto()
    """The load has opened it, with its instances."""
    FAILED = auto()
    """The load cannot open it."""
    PUBLISHED = auto()
    """All versions of the load serve from now on."""
    RETIRE = auto()
    """The version must go: it is replaced or unloaded, its load is given up, or the server stops."""
    DRAINED = auto()
    """Its sequences have ended, or are not waited for any longer."""
    CLOSED = auto()
    """Its memory is free."""


class Effect(Enum):
    """What the sender of an event must do."""

    DRAIN = auto()
    """Let open sequences end, and then send DRAINED."""
    CLOSE = auto()
    """Finish the requests in flight, close the version, and then send CLOSED."""
    FORGET = auto()
    """List it no longer, because it never served."""


class Step(NamedTuple):
    """The next state, and the effect to perform, if any."""

    state: State
    effect: Effect | None = None


TRANSITIONS = {
    (State.WAITING, Event.BEGIN): Step(State.LOADING),
    (State.WAITING, Event.RETIRE): Step(State.CLOSED, Effect.FORGET),
    (State.LOADING, Event.BEGIN): Step(State.LOADING),  # because an interrupted load leaves no result
    (State.LOADING, Event.OPENED): Step(State.OPENED),
    (State.LOADING, Event.FAILED): Step(State.FAILED),
    (State.LOADING, Event.RETIRE): Step(State.CLOSING, Effect.FORGET),
    (State.FAILED, Event.BEGIN): Step(State.RETRYING),
    (State.FAILED, Event.FAILED): Step(State.FAILED),
    (State.FAILED, Event.RETIRE): Step(State.CLOSED, Effect.FORGET),
    (State.RETRYING, Event.BEGIN): Step(State.RETRYING),
    (State.RETRYING, Event.OPENED): Step(State.OPENED),
    (State.RETRYING, Event.FAILED): Step(State.FAILED),
    (State.RETRYING, Event.RETIRE): Step(State.CLOSING, Effect.FORGET),
    (State.OPENED, Event.PUBLISHED): Step(State.READY),
    (State.OPENED, Event.RETIRE): Step(State.CLOSING, Effect.CLOSE),
    (State.READY, Event.RETIRE): Step(State.DRAINING, Effect.DRAIN),
    (State.DRAINING, Event.RETIRE): Step(State.DRAINING),
    (State.DRAINING, Event.DRAINED): Step(State.CLOSING, Effect.CLOSE),
    (State.CLOSING, Event.OPENED): Step(State.CLOSING, Effect.CLOSE),
    (State.CLOSING, Event.FAILED): Step(State.CLOSED),
    (State.CLOSING, Event.RETIRE): Step(State.CLOSING),
    (State.CLOSING, Event.DRAINED): Step(State.CLOSING, Effect.CLOSE),  # because a close may have timed out
    (State.CLOSING, Event.CLOSED): Step(State.CLOSED),
    (State.CLOSED, Event.RETIRE): Step(State.CLOSED),
    (State.CLOSED, Event.DRAINED): Step(State.CLOSED),
    (State.CLOSED, Event.CLOSED): Step(State.CLOSED),  # because two threads may close it at once
}
"""The legal transitions; every other event is a fault of its sender."""

BEING_LOADED = frozenset({State.LOADING, State.RETRYING})
RETIRED = frozenset({State.DRAINING, State.CLOSING, State.CLOSED})


def step(state: State, event: Event) -> Step:
    """Return what follows from an event.

    Raises InternalError if the event is illegal in this state.
    """
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise InternalError(f"a version that is {state.name} cannot take the event {event.name}")
    return following


def begin_load(state: State) -> State:
    """Return the state of a version whose load begins.

    A version that was retired begins a new life.
    """
    return step(State.WAITING if state in RETIRED else state, Event.BEGIN).state
