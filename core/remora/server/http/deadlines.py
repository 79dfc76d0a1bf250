"""Deadlines of HTTP requests.

The header ``X-Request-Timeout-Ms`` gives the time that a client waits. At the deadline a queued request is dropped, a
running one is cancelled, and a later answer is discarded. Requests without a deadline cost nothing here.

Invariant: a request with a deadline is answered once, at its deadline at the latest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from remora.messages import Buffer, Ticket
from remora.protocols.rest.answer import Headers, HttpAnswer, Refusal, encode_error
from remora.protocols.rest.generate import error_object, event
from remora.scheduling.batching import expired_error
from remora.server.http.exchange import Exchange, ForwardingExchange

CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]

HEADER = b"x-request-timeout-ms"
_MAX_DIGITS = 10


def timeout_ns(value: bytes | None, *, plain: bool) -> int:
    """Return the header's time in nanoseconds, 0 without one.

    Raises Refusal (400) for an invalid value.
    """
    if value is None:
        return 0
    if not value.isdigit() or len(value) > _MAX_DIGITS or not int(value):
        shown = value[:40].decode("latin-1")
        raise Refusal(
            400, f"X-Request-Timeout-Ms must be a whole number of milliseconds from 1, got '{shown}'", plain=plain
        )
    return int(value) * 1_000_000


class TimedExchange(ForwardingExchange):
    """Exchange that is answered with 503 at its deadline [H10].

    A stream that has begun ends with an error event.

    Args:
        exchange: receives the answer.
        plain: True for a text/plain refusal, as for inference; False for JSON.
    """

    __slots__ = ("_begun", "_open", "_plain", "_ticket", "_timer")

    def __init__(self, exchange: Exchange, *, plain: bool) -> None:
        super().__init__(exchange)
        self._plain = plain
        self._open = True
        self._begun = False
        self._ticket: Ticket | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, ticket: Ticket, timeout_ns: int, call_later: CallLater | None = None) -> None:
        """Set the request's deadline, counted from its arrival, and start the timer.

        ``call_later`` defaults to that of the loop running in this thread.
        """
        ticket.deadline_ns = ticket.arrival_ns + timeout_ns
        if self._open:
            self._ticket = ticket
            start = call_later or asyncio.get_running_loop().call_later
            self._timer = start(timeout_ns / 1e9, self._expire)

    def respond(self, answer: HttpAnswer) -> None:
        if self._close():
            self._exchange.respond(answer)

    def begin(self, status: int, headers: Headers) -> None:
        if self._open:
            self._begun = True
            self._exchange.begin(status, headers)

    def send(self, piece: Buffer) -> None:
        if self._open:
            self._exchange.send(piece)

    def finish(self) -> None:
        if self._close():
            self._exchange.finish()

    def _close(self) -> bool:
        """Close the exchange; return True if it was open."""
        was_open, self._open = self._open, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return was_open

    def _expire(self) -> None:
        ticket = self._ticket
        if ticket is None or not self._close():
            return
        ticket.cancel()
        error = expired_error(ticket)
        if self._begun:
            self._exchange.send(event(error_object(error.message)))
            self._exchange.finish()
        else:
            self._exchange.respond(encode_error(error, plain=self._plain))
