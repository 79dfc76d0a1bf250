"""Keepalive and maximum age of an HTTP/2 connection, as a pure decider.

Time is an argument. The rules are those of gRPC's own servers, so that a command line means the same with either
transport: silence is followed by a ping, an unanswered ping closes the connection, a client that pings too often is
disconnected, and a connection beyond its maximum age is drained.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

_IDLE_PING_S = 7_200.0
"""Shortest time between pings of a client without a call, unless such pings are permitted."""


@dataclass(frozen=True, slots=True)
class KeepalivePolicy:
    """Keepalive options of a server.

    Args:
        silence_s: silence after which a client is pinged.
        answer_s: how long the client may then stay silent.
        without_calls: also ping connections without a call, and let them ping as often as others.
        pings: largest number of pings sent without data or headers in between; 0 for any number.
        ping_interval_s: shortest time between pings of a client that is sent nothing; each earlier ping is a strike.
        strikes: number of tolerated strikes; 0 for any number.
        age_s: age at which the client must reconnect.
        grace_s: how long running calls may then take.
    """

    silence_s: float = 7_200.0
    answer_s: float = 20.0
    without_calls: bool = False
    pings: int = 2
    ping_interval_s: float = 300.0
    strikes: int = 2
    age_s: float = inf
    grace_s: float = inf


class KeepaliveAction(NamedTuple):
    """Actions that are due now, and ``wake``, the time of the next check.

    ``ping`` sends a ping, ``drain`` starts the drain, and a non-empty ``close_reason`` closes the connection.
    """

    wake: float
    ping: bool = False
    drain: bool = False
    close_reason: str = ""


class Keepalive:
    """Keepalive state of one connection.

    Its maximum age is multiplied by ``spread``, so that connections opened together do not end together.
    """

    __slots__ = (
        "_age_at",
        "_client_pinged_at",
        "_grace_at",
        "_left",
        "_pinged_at",
        "_pings",
        "_policy",
        "_quiet_since",
        "_strikes",
        "last_received",
    )

    def __init__(self, policy: KeepalivePolicy, now: float, spread: float = 1.0) -> None:
        self._policy = policy
        self.last_received = now
        """Time of the last bytes from the client, set by the transport."""
        self._quiet_since = now  # as `last_received`, or the time of a ping that was due but not sent
        self._pinged_at: float | None = None  # time of the ping that awaits an answer
        self._pings = 0
        self._client_pinged_at = -inf  # time of the client's last ping
        self._strikes = 0
        self._age_at = now + policy.age_s * spread
        self._grace_at = self._age_at + policy.grace_s
        self._left = False

    def record_sent(self) -> None:
        """Reset the counts of pings and strikes, because data, headers or a window were sent."""
        self._pings = self._strikes = 0
        self._client_pinged_at = -inf

    def is_excess_ping(self, now: float, calls: int) -> bool:
        """Return True if the ping that the client sends now is one strike too many."""
        policy = self._policy
        interval_s = policy.ping_interval_s if calls or policy.without_calls else _IDLE_PING_S
        soon, self._client_pinged_at = now < self._client_pinged_at + interval_s, now
        self._strikes += soon
        return soon and 0 < policy.strikes < self._strikes

    def due(self, now: float, calls: int) -> KeepaliveAction:
        """Return the actions due now, with ``calls`` calls in flight."""
        policy = self._policy
        if now >= self._grace_at:
            return KeepaliveAction(inf, close_reason="the maximum connection age is exceeded")
        drain = now >= self._age_at and not self._left
        self._left = self._left or drain
        age_at = self._grace_at if self._left else self._age_at
        if self._pinged_at is not None and self.last_received >= self._pinged_at:
            self._pinged_at = None
        if self._pinged_at is None:
            self._quiet_since = max(self._quiet_since, self.last_received)
            silence_at = self._quiet_since + policy.silence_s
            if now < silence_at:
                return KeepaliveAction(min(age_at, silence_at), drain=drain)
            self._quiet_since = now
            if not (calls or policy.without_calls) or 0 < policy.pings <= self._pings:
                return KeepaliveAction(min(age_at, now + policy.silence_s), drain=drain)
            self._pings += 1
            self._pinged_at = now
            return KeepaliveAction(min(age_at, now + policy.answer_s), ping=True, drain=drain)
        answer_at = self._pinged_at + policy.answer_s
        if now >= answer_at:
            return KeepaliveAction(inf, close_reason="a keepalive ping was not answered")
        return KeepaliveAction(min(age_at, answer_at), drain=drain)
