"""Interface between services, which produce answers, and the connections that send them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import Headers, HttpAnswer
from remora.tracing.tracer import Arrival

STREAM_BACKLOG = 16_777_216
"""Unread bytes of a stream at which a client is dropped if its sender cannot be blocked."""
SILENCE_S = 2.0
"""How long a partially received request may stay without data during shutdown."""


class Flow(Protocol):
    """Flow control of an answer sent in pieces. Use it in the exchange's thread."""

    @property
    def unsent(self) -> int:
        """Number of bytes that wait for a slow client; 0 if the client keeps up."""

    def when_sent(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` once, when all bytes are sent or the client has disconnected. A later call replaces it."""

    def give_up(self, reason: str) -> None:
        """Cancel the request and end the exchange; ``reason`` is a verb phrase about the client, for the log."""


class Exchange(Protocol):
    """One request on a connection and its answer.

    Answer it once: with `respond`, or with `begin`, any number of `send`, and `finish`. Call the methods in the
    exchange's thread, and never after the end, because the connection may then be answering its next request. They do
    not raise, and have no effect after the client has disconnected.
    """

    @property
    def receiving_since(self) -> float:
        """Loop time in seconds at the first bytes of a request that arrived in pieces; else 0."""

    @property
    def flow(self) -> Flow | None:
        """Flow control of an answer in pieces; None if the client's reading cannot be observed."""

    def respond(self, answer: HttpAnswer) -> None:
        """Send the whole answer."""

    def begin(self, status: int, headers: Headers) -> None:
        """Begin an answer whose body comes in pieces."""

    def send(self, piece: Buffer) -> None:
        """Send the next piece of the body at once. An empty piece has no effect."""

    def finish(self) -> None:
        """End the body."""


class ForwardingExchange:
    """Exchange that forwards to another exchange; subclasses override the methods that differ."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @property
    def receiving_since(self) -> float:
        """See `Exchange.receiving_since`."""
        return self._exchange.receiving_since

    @property
    def flow(self) -> Flow | None:
        """See `Exchange.flow`."""
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
    """Unanswered request: a ticket, or a request that waits for its model."""

    def cancel(self) -> None:
        """Cancel the request, which is still answered. Call it in the exchange's thread."""


def arrival_of(head: Head, exchange: Exchange, *_: object) -> Arrival:
    """Return how a request arrived, for its trace."""
    return Arrival("HTTP", head.get, int(exchange.receiving_since * 1e9))
