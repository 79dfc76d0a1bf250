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


class Exchange(Protocol):
    """Answered once: by `respond`, or by `begin`, any number of `send`, and `finish`.

    To be called in the exchange's own thread, and no more after the end: a connection then answers the next request.
    None of it raises; when the client is gone it does nothing.
    """

    def respond(self, answer: HttpAnswer) -> None:
        """Send the whole answer."""

    def begin(self, status: int, headers: Headers) -> None:
        """Begin an answer whose body comes in pieces."""

    def send(self, piece: Buffer) -> None:
        """The next piece of the body: it is sent without waiting for more. An empty one is nothing."""

    def finish(self) -> None:
        """No more pieces come."""


class Flow(Protocol):
    """How a client takes an answer that comes in pieces. To be used in the exchange's own thread."""

    @property
    def unsent(self) -> int:
        """Bytes that wait for a client that does not keep up; 0 for one that does."""

    def when_sent(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` once, when the client has taken what waits or has left. A later call replaces it."""

    def give_up(self, reason: str) -> None:
        """Cancel the request and end the exchange, because its client ``reason``."""


def flow_of(exchange: Exchange) -> Flow | None:
    """The flow of an exchange; None for one without a client whose reading can be observed."""
    flow: Flow | None = getattr(exchange, "flow", None)
    return flow


class Cancellable(Protocol):
    """A request that is not answered yet: a ticket, or what waits to become one."""

    def cancel(self) -> None:
        """Ask that the request never run, or end early; it is still answered. In the exchange's own thread."""


def arrival_of(head: Head, exchange: Exchange) -> Arrival:
    """How a request came, for its trace: a connection knows since when it was receiving one that came in pieces."""
    return Arrival("HTTP", head.get, int(getattr(exchange, "receiving_since", 0.0) * 1e9))
