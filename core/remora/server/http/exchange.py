"""One HTTP request being answered: the seam between what makes answers and whatever carries them to the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import Headers, HttpAnswer
from remora.tracing.tracer import Arrival

STREAM_BACKLOG = 16_777_216
"""A client that leaves this many bytes of a stream unread when the next piece comes is given up, where the sender of
the pieces cannot be held up."""
SILENCE_S = 2.0
"""How long nothing may come of a request that is being sent when the server ends."""


class Flow(Protocol):
    """How a client takes an answer that comes in pieces. To be used in the exchange's own thread."""

    @property
    def unsent(self) -> int:
        """Bytes that wait for a client that does not keep up; 0 for one that does."""

    def when_sent(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` once, when the client has taken what waits or has left. A later call replaces it."""

    def give_up(self, reason: str) -> None:
        """Cancel the request and end the exchange, because its client ``reason``."""


class Exchange(Protocol):
    """One request on a connection, answered once: by `respond`, or by `begin`, any number of `send`, and `finish`.

    Call the methods in the exchange's thread, and not after the end: a connection then answers the next request. They
    do not raise, and do nothing after the client has disconnected.
    """

    @property
    def receiving_since(self) -> float:
        """Loop time in seconds when the first bytes of a request in pieces arrived; 0 for one that arrived whole."""

    @property
    def flow(self) -> Flow | None:
        """How the client takes an answer in pieces; None if its reading cannot be observed."""

    def respond(self, answer: HttpAnswer) -> None:
        """Send the whole answer."""

    def begin(self, status: int, headers: Headers) -> None:
        """Begin an answer whose body comes in pieces."""

    def send(self, piece: Buffer) -> None:
        """The next piece of the body: it is sent without waiting for more. An empty one is nothing."""

    def finish(self) -> None:
        """No more pieces come."""


class ForwardingExchange:
    """Exchange in front of another one; subclasses override the methods that differ."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @property
    def receiving_since(self) -> float:
        """Return when the first bytes of the request arrived."""
        return self._exchange.receiving_since

    @property
    def flow(self) -> Flow | None:
        """Return how the client takes an answer in pieces."""
        return self._exchange.flow

    def respond(self, answer: HttpAnswer) -> None:
        """Send the whole answer."""
        self._exchange.respond(answer)

    def begin(self, status: int, headers: Headers) -> None:
        """Begin an answer whose body comes in pieces."""
        self._exchange.begin(status, headers)

    def send(self, piece: Buffer) -> None:
        """Send the next piece of the body."""
        self._exchange.send(piece)

    def finish(self) -> None:
        """End the body."""
        self._exchange.finish()


class Cancellable(Protocol):
    """A request that is not answered yet: a ticket, or what waits to become one."""

    def cancel(self) -> None:
        """Ask that the request never run, or end early; it is still answered. In the exchange's own thread."""


def arrival_of(head: Head, exchange: Exchange, *_: object) -> Arrival:
    """Return how a request arrived, for its trace."""
    return Arrival("HTTP", head.get, int(exchange.receiving_since * 1e9))
