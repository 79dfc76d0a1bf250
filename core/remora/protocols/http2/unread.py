"""Decision which responses to give up because an HTTP/2 client does not read them.

Time is an argument. The client's system takes the bytes before the client reads them, and the client opens a window
only after it has read much of it. Invariant: a response is given up only if for the whole patience neither a window was
opened for it nor the client's system took any data before its end. A client that may hold data in its system has more
time, as much as reading it takes at `Patience.bytes_per_s`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from math import inf
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S", bound=Hashable)


class Patience(NamedTuple):
    """How long a client may read nothing.

    Attributes:
        usual_s: time in seconds.
        full_s: the same for a connection with so many unread responses that it is full, from then on.
        bytes_per_s: slowest rate at which a client is expected to read what its system holds already.
    """

    usual_s: float
    full_s: float
    bytes_per_s: float


class Waiting(NamedTuple, Generic[S]):
    """Response that waits for a window.

    Attributes:
        stream: its stream.
        moved: a value that changes when a part of the response is sent.
        in_turn: True if the stream's own window is open, so that the response waits for the connection's window.
    """

    stream: S
    moved: Hashable
    in_turn: bool


class Seen(NamedTuple):
    """A connection as a sweep sees it.

    Attributes:
        moved: a value that changes when a part of any response is sent, or a window opens.
        taken: bytes that the client's system has taken so far.
        end: the value of ``taken`` once it has taken all that was written.
        unconfirmed: bytes of responses that were sent since the client last opened a window.
        full: True if so much is unread that the client has less time.
        bound: True to give up the whole connection if nothing of it moves.
    """

    moved: Hashable
    taken: int
    end: int
    unconfirmed: int
    full: bool
    bound: bool


class GiveUp(NamedTuple, Generic[S]):
    """Responses to give up now: those of ``streams``, or all of the ``connection``."""

    streams: list[S]
    connection: bool


class _Wait(NamedTuple):
    """Wait of one response.

    Attributes:
        moved: see `Waiting`.
        end: the value of `Seen.taken` once the client's system has taken the parts that were sent.
        since: when it last moved, or the client's system last took bytes before ``end``.
    """

    moved: Hashable
    end: int
    since: float


class UnreadResponses(Generic[S]):
    """What the client of one connection has not read, since when."""

    __slots__ = ("_end", "_full_since", "_moved", "_patience", "_streams", "_taken", "silent_since")

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._streams: dict[S, _Wait] = {}
        self.silent_since = 0.0
        """Since when nothing of the connection has moved."""
        self.clear()

    def clear(self) -> None:
        """Forget everything, because nothing waits."""
        self._moved: Hashable = None
        self._taken = self._end = -1  # `_end`: the value of `Seen.taken` at the end of all responses that were sent
        self._full_since = inf
        self._streams.clear()

    def due(self, now: float, seen: Seen, waiting: Iterable[Waiting[S]]) -> GiveUp[S]:
        """Return what to give up at the time ``now`` in seconds."""
        patience, before = self._patience, self._taken
        self._taken = seen.taken
        takes = seen.taken != before
        if seen.moved != self._moved:
            self._moved, self.silent_since = seen.moved, now
            self._end = seen.end
        elif before < self._end:
            self._end = max(self._end, seen.end)
            if takes:
                self.silent_since = now
        # after that end the client's system takes answers to pings only, which says nothing about the client
        self._full_since = min(self._full_since, now) if seen.full else inf
        reading_s = seen.unconfirmed / patience.bytes_per_s
        more_s = reading_s if seen.taken >= self._end else 0.0
        silent = (
            now - self.silent_since > patience.usual_s + more_s
            or now - max(self.silent_since, self._full_since) > patience.full_s + more_s
        )
        waits, late = dict[S, _Wait](), list[S]()
        for stream, moved, in_turn in waiting:
            wait = self._streams.get(stream)
            if wait is None or wait.moved != moved:
                wait = _Wait(moved, seen.end, now)
            elif takes and before < wait.end:
                wait = wait._replace(since=now)
            more_s = reading_s if seen.taken >= wait.end else 0.0
            if now - wait.since > patience.usual_s + more_s and (silent or not in_turn):
                late.append(stream)
            else:
                waits[stream] = wait
        self._streams = waits
        return GiveUp(late, silent and seen.bound)
