"""How long a connection of HTTP/2 lives, and who may ask how often whether it does; the law: pure, time is an argument.

The rules are those of gRPC's own servers, so that a command line means the same with either transport: silence is
followed by a ping, a ping that nothing follows ends the connection, clients that ping for nothing are sent away, and
a connection of some age is given up in good order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

_IDLE_PING_S = 7_200.0
"""How seldom a client may ping while it has no call, unless such pings are permitted."""


@dataclass(frozen=True, slots=True)
class KeepalivePolicy:
    """What a server asks of its connections.

    Args:
        silence_s: after so much of it a client is pinged.
        answer_s: how long it may say nothing then.
        without_calls: whether connections without a call are pinged, and may ping as often as others.
        pings: how many are sent before data or headers must have been; 0 for any number.
        ping_interval_s: a client that pings more often, while it is sent nothing, gets a strike.
        strikes: so many are forgiven; 0 for any number.
        age_s: when a connection is this old its client is asked to connect anew.
        grace_s: how long its running calls may take then.
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
    """What is to be done now, and when to look again; ``ends`` says why the connection is to be closed, if it is."""

    wake: float
    pings: bool = False
    leaves: bool = False
    ends: str = ""


class Keepalive:
    """One connection's. Its age is multiplied with ``spread``, so that those made together do not end together."""

    __slots__ = (
        "_age_at",
        "_asked",
        "_grace_at",
        "_left",
        "_pings",
        "_quiet_since",
        "_seen",
        "_strikes",
        "_terms",
        "heard",
    )

    def __init__(self, terms: KeepalivePolicy, now: float, spread: float = 1.0) -> None:
        self._terms = terms
        self.heard = now
        """When anything came from the client. The transport's to set."""
        self._quiet_since = now  # as `heard`, or since a ping was due that was not sent
        self._asked: float | None = None  # since when a ping of ours waits for anything to come
        self._pings = 0
        self._seen = -inf  # when the client pinged last
        self._strikes = 0
        self._age_at = now + terms.age_s * spread
        self._grace_at = self._age_at + terms.grace_s
        self._left = False

    def spoke(self) -> None:
        """Data, headers or a window were sent: pings count anew, both ways."""
        self._pings = self._strikes = 0
        self._seen = -inf

    def is_too_much(self, now: float, calls: int) -> bool:
        """Whether the ping that the client sends now is one too many."""
        terms = self._terms
        interval_s = terms.ping_interval_s if calls or terms.without_calls else _IDLE_PING_S
        soon, self._seen = now < self._seen + interval_s, now
        self._strikes += soon
        return soon and 0 < terms.strikes < self._strikes

    def due(self, now: float, calls: int) -> KeepaliveAction:
        """What is to be done now, with so many calls under way."""
        terms = self._terms
        if now >= self._grace_at:
            return KeepaliveAction(inf, ends="it is too old")
        leaves = now >= self._age_at and not self._left
        self._left = self._left or leaves
        age_at = self._grace_at if self._left else self._age_at
        if self._asked is not None and self.heard >= self._asked:
            self._asked = None
        if self._asked is None:
            self._quiet_since = max(self._quiet_since, self.heard)
            silence_at = self._quiet_since + terms.silence_s
            if now < silence_at:
                return KeepaliveAction(min(age_at, silence_at), leaves=leaves)
            self._quiet_since = now
            if not (calls or terms.without_calls) or 0 < terms.pings <= self._pings:
                return KeepaliveAction(min(age_at, now + terms.silence_s), leaves=leaves)
            self._pings += 1
            self._asked = now
            return KeepaliveAction(min(age_at, now + terms.answer_s), pings=True, leaves=leaves)
        answer_at = self._asked + terms.answer_s
        if now >= answer_at:
            return KeepaliveAction(inf, ends="a ping stays unanswered")
        return KeepaliveAction(min(age_at, answer_at), leaves=leaves)
