"""State of an HTTP/1.1 connection: its phase, and when it times out. Pure."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from remora.server.http.exchange import SILENCE_S
from remora.server.http.held_bytes import ROOM_WAIT_S, UNREAD_S

SWEEP_S = 5.0
"""Interval at which connections are checked for timeouts."""
STALL_LIMIT_S = 120.0
"""How long a request may take to arrive; also the timeout for the first request of a connection."""


class Phase(Enum):
    """State of a connection, by what it does with the bytes that arrive.

    ===========  =========================================  ======================================================
    Phase        Bytes that arrive                          Next phase
    ===========  =========================================  ======================================================
    IDLE         begin a head                               ANSWERING with a whole request, else HEAD, BODY, CHUNKS
    HEAD         continue the head                          as IDLE
    BODY         fill the buffer of a long body             ANSWERING when it is full
    CHUNKS       continue a chunked body                    ANSWERING after its last chunk
    WAITING      wait, because there is no memory for them  BODY or CHUNKS with memory, else ANSWERING
    ANSWERING    wait, because they are pipelined           STREAMING on `begin`; AHEAD or IDLE on `respond`
    STREAMING    wait, because they are pipelined           AHEAD or IDLE on `finish`
    AHEAD        follow those that wait                     as IDLE, when the answers before are written and read
    LINGERING    are discarded by `lingering`               none, because the last answer is written
    ===========  =========================================  ======================================================

    Only ANSWERING accepts `begin` and `respond`, only STREAMING `send` and `finish`.
    """

    IDLE = 0
    HEAD = 1
    BODY = 2
    CHUNKS = 3
    ANSWERING = 4
    STREAMING = 5
    AHEAD = 6
    WAITING = 7
    LINGERING = 8


class Streaming(NamedTuple):
    """Framing of a streamed answer: its chunks, and whether the connection stays open."""

    chunked: bool
    keep: bool


NOT_STREAMING = Streaming(chunked=False, keep=False)


class Progress(NamedTuple):
    """What a connection has received and sent.

    Attributes:
        requests: complete requests so far.
        is_idle: no request is received or answered.
        receiving_since: loop time at the first bytes of an incomplete request, else 0.
        received: bytes of it.
        expected: length of its body, if it is known, else 0.
        unread: bytes of answers that wait for the client.
    """

    requests: int
    is_idle: bool
    receiving_since: float
    received: int
    expected: int
    unread: int


class Due(Enum):
    """Why a connection times out, if it does; the value is the reason in the metrics."""

    NOTHING = ""
    IDLE = "idle"  # no request for the idle time
    SILENT = "first_byte"  # no byte since it was opened
    SLOW = "slow_request"  # a request is not complete in time
    GIVE_UP = "unread_answer"  # the client reads nothing
    REFUSE = "slow_body"  # the request arrives too slowly while others wait for memory


TURN_REQUESTS = 32
"""Pipelined requests of one connection that are answered in a turn of the loop."""
TURN_NS = 5_000_000
"""Time in a turn of the loop after which further requests of one connection wait for the next turn."""


def is_turn_over(requests: int, time_ns: int) -> bool:
    """Return True if a connection has used its requests or its time in this turn of the loop."""
    return requests >= TURN_REQUESTS or time_ns > TURN_NS


class Timeouts:
    """Decision when to close a connection."""

    __slots__ = ("_received", "_received_at", "_requests", "_unread", "_unread_since", "idle_since")

    def __init__(self) -> None:
        self.idle_since = 0.0
        """Loop time of the last sweep that saw a request."""
        self._requests = 0  # at the last sweep
        self._received = -1
        self._received_at = 0.0  # when that number last changed
        self._unread = 0
        self._unread_since = 0.0  # since when it has not decreased

    def note_read(self) -> None:
        """Note that the client has read a part of its answers.

        More may wait at the next sweep nevertheless, because more is written.
        """
        self._unread = 0

    def due(self, now: float, limit_s: float, idle_s: float, seen: Progress, memory_awaited: bool) -> Due:
        """Return what is due at a sweep; see `Listener.sweep`.

        With ``memory_awaited``, a body must arrive at a rate that completes it within ``limit_s``.
        """
        if not seen.unread or seen.unread < self._unread or not self._unread:
            self._unread, self._unread_since = seen.unread, now
        elif now - self._unread_since > UNREAD_S:
            return Due.GIVE_UP
        if seen.receiving_since:
            since_s = now - seen.receiving_since
            if since_s > limit_s:
                return Due.SLOW
            late = seen.received * limit_s < seen.expected * since_s
            return Due.REFUSE if memory_awaited and since_s > ROOM_WAIT_S and late else Due.NOTHING
        if seen.requests != self._requests or not seen.is_idle:
            self._requests = seen.requests
            self.idle_since = now
        elif now - self.idle_since > (idle_s if seen.requests else min(limit_s, idle_s)):
            return Due.IDLE if seen.requests else Due.SILENT
        return Due.NOTHING

    def is_awaited(self, now: float, seen: Progress) -> bool:
        """Return True if a connection that owes no answer is kept during shutdown.

        It is while bytes of its request arrive, or its first request may be in transit.
        """
        if seen.is_idle:
            return not seen.requests and now - self.idle_since <= SILENCE_S
        return not self._is_silent(now, seen.received)

    def _is_silent(self, now: float, received: int) -> bool:
        """Return True if no byte of the request has arrived for ``SILENCE_S``."""
        if received != self._received:
            self._received, self._received_at = received, now
        return now - self._received_at > SILENCE_S
