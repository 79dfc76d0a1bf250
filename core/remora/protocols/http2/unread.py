"""Decision which responses to give up because an HTTP/2 client does not read them.

Time is an argument. Invariant: a response is given up only if its client had opened no window for it, or had read
nothing of the connection at all, for the whole patience; a client that reads slowly and steadily loses nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S", bound=Hashable)


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


class GiveUp(NamedTuple, Generic[S]):
    """Responses to give up now: those of ``streams``, or all of the ``connection``."""

    streams: list[S]
    connection: bool


class UnreadResponses(Generic[S]):
    """What the client of one connection has not read, since when."""

    __slots__ = ("_moved", "_since", "_streams")

    def __init__(self) -> None:
        self._moved: Hashable = None
        self._since = 0.0  # since when nothing of the connection has moved
        self._streams: dict[S, tuple[Hashable, float]] = {}

    def clear(self) -> None:
        """Forget everything, because nothing waits."""
        self._moved, self._streams = None, {}

    def due(
        self, now: float, patience_s: float, moved: Hashable, waiting: Iterable[Waiting[S]], *, bound: bool
    ) -> GiveUp[S]:
        """Return what to give up if the client has read nothing for ``patience_s``.

        Args:
            now: time in seconds.
            patience_s: how long the client may read nothing.
            moved: a value that changes when any part of any response is sent to the client.
            waiting: responses that wait for a window.
            bound: True to give up the whole connection if nothing of it has moved.
        """
        if moved != self._moved:
            self._moved, self._since = moved, now
        silent = now - self._since > patience_s
        before, self._streams = self._streams, {}
        late = []
        for stream, stamp, in_turn in waiting:
            last, since = before.get(stream, (stamp, now))
            since = since if last == stamp else now
            self._streams[stream] = (stamp, since)
            if now - since > patience_s and (silent or not in_turn):
                late.append(stream)
        for stream in late:
            del self._streams[stream]
        return GiveUp(late, silent and bound)
