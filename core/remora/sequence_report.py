"""What operators can see of a model's sequences, as plain data."""

from __future__ import annotations

from typing import NamedTuple


class LiveSequence(NamedTuple):
    """A sequence that lives: ``state`` is "active", or "backlog" while it waits for a slot.

    ``instance`` and ``slot`` are empty and -1 in the backlog. ``waiting`` are its requests that have not run yet,
    without the one that is ``running``. ``idle_ns`` is for how long it has had nothing to do.
    """

    id: int | str
    state: str
    instance: str
    slot: int
    running: bool
    waiting: int
    idle_ns: int


class PastSequence(NamedTuple):
    """A sequence that ended ``ago_ns`` ago: "done", "idle", "cancelled", "timeout" or "stopped"."""

    id: int | str
    instance: str
    slot: int
    why: str
    ago_ns: int


class RefusedRequest(NamedTuple):
    """A request that broke a rule of sequences: what it was told, and what explains that."""

    id: int | str
    request_id: str
    error: str
    explanation: str
    ago_ns: int


class SequenceReport(NamedTuple):
    """The sequences of one model version (spec S01-S06).

    ``slots`` are those of all instances; ``active`` and ``backlog`` count sequences. ``live`` are the first of them, in
    the order in which they began; ``ended`` and ``refused`` the last of their kind, the last one first.
    """

    strategy: str
    slots: int
    active: int
    backlog: int
    idle_limit_ns: int
    live: tuple[LiveSequence, ...]
    ended: tuple[PastSequence, ...]
    refused: tuple[RefusedRequest, ...]
