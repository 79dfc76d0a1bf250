"""gRPC calls on the built-in HTTP/2 transport; this module has those of one message.

Received data, sent data and the end of a call are handled in the event loop. Behaviours use `rpcs.CallContext`, which
is thread-safe.

Invariant: a call ends once, with a status, and then runs its callbacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from remora.messages import Ticket
from remora.protocols.grpc.framing import (
    CANCELLED,
    GOOD,
    HEADS,
    INTERNAL,
    PREFIX_BYTES,
    RESOURCE_EXHAUSTED,
    Messages,
    Opening,
    Packed,
    StatusError,
    framed,
    trailers,
)
from remora.protocols.http2.stream import Stream
from remora.server.grpc.rpcs import DEADLINE_EXCEEDED, FOREVER_S, status_of_error
from remora.server.http.exchange import Cancellable
from remora.server.http.held_bytes import FREE_BYTES, TEXT

_LATE = "Deadline Exceeded"
ENDED = "the call was ended by the server"
T = TypeVar("T")


class Threads(Protocol):
    """Interface of the front end that opens calls."""

    max_message_bytes: int

    def post(self, work: Callable[..., object], /, *arguments: Any) -> None:
        """Schedule ``work`` in the loop's thread."""

    def convert(self, call: GrpcCall, work: Callable[[], T], then: Callable[[T], None], /) -> None:
        """Call ``work``, such as inflating a message, in another thread, then ``then`` in the loop.

        An error ends the call.
        """


def status_of_failure(error: Exception) -> tuple[int, str]:
    """Return the status code and text with which a failed call ends."""
    return (error.status, error.message) if isinstance(error, StatusError) else status_of_error(error)


class GrpcCall:
    """Deadline, end and callbacks of a call, unary or streaming.

    It implements `rpcs.CallContext`.
    """

    __slots__ = (
        "_callbacks", "_ended", "_front", "_held", "_link", "_messages", "_now", "_timer", "deadline", "opening",
    )  # fmt: skip

    def __init__(self, front: Threads, opening: Opening, link: Stream) -> None:
        self._front = front
        self._link = link
        self.opening = opening
        self._messages: Messages | None = None
        self._held = 0  # bytes of the request that are counted
        self._ended = False
        self._callbacks: list[Callable[[], None]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.deadline = 0.0
        """Loop time in seconds at which the call times out; 0 without a deadline."""
        if opening.timeout_s is not None:
            self._start_timer(opening.timeout_s)

    def _start_timer(self, timeout_s: float) -> None:
        if timeout_s < FOREVER_S:
            loop = asyncio.get_running_loop()
            self._now: Callable[[], float] = loop.time
            self.deadline = loop.time() + timeout_s
            self._timer = loop.call_at(self.deadline, self._late)

    # -- for behaviours, in any thread ------------------------------------------------------------------------------

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self.opening.metadata

    @property
    def ended(self) -> bool:
        """True if the call is answered or its client has disconnected."""
        return self._ended

    def time_remaining(self) -> float | None:
        return self.deadline - self._now() if self.deadline else None

    def left_ns(self) -> int:
        """Return the nanoseconds until the deadline, at least 1; 0 without a deadline."""
        return max(int((self.deadline - self._now()) * 1e9), 1) if self.deadline else 0

    def add_callback(self, callback: Callable[[], None], /) -> bool:
        if self._callbacks is None:  # a call has one behaviour at a time, so that no other thread assigns it
            self._callbacks = []
        callbacks = self._callbacks
        callbacks.append(callback)
        if not self._ended:  # checked after registering, so that an end in between cannot be missed
            return True
        try:
            callbacks.remove(callback)
        except ValueError:  # the end has called it
            return True
        return False

    def cancel(self) -> None:
        self._front.post(self.fail, CANCELLED, ENDED)

    # -- in the loop ------------------------------------------------------------------------------------------------

    def fail(self, status: int, text: str) -> None:
        raise NotImplementedError

    def lost(self) -> None:
        self._end()

    def _late(self) -> None:
        self.fail(DEADLINE_EXCEEDED, _LATE)

    def _splitter(self) -> Messages:
        """Return what splits the received data into messages, created by the first data."""
        if self._messages is None:
            self._messages = Messages(self._front.max_message_bytes, self.opening.encoding)
        return self._messages

    def _hold(self, size: int) -> None:
        """Count ``size`` bytes of the request as held. Raises StatusError if that exceeds a limit."""
        size = size if size > FREE_BYTES else 0
        if size != self._held:
            if not self._link.hold(size - self._held):
                raise StatusError(RESOURCE_EXHAUSTED, TEXT)
            self._held = size

    @property
    def _partial(self) -> int:
        """Bytes of messages that are not complete, or not processed."""
        return 0 if self._messages is None else self._messages.held

    def _plain(self, message: bytes) -> bytes:
        """Return a received message decompressed; see `Messages.plain`."""
        assert self._messages is not None
        return self._messages.plain(message)

    def _end(self) -> bool:
        """Mark the call as ended and run its callbacks; return False if it had ended before."""
        if self._ended:
            return False
        self._ended = True
        self._clean_up()
        return True

    def _clean_up(self) -> None:
        """Stop the timer and run the callbacks of a call that has ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._held:
            self._hold(0)
            self._messages = None
        callbacks = self._callbacks
        while callbacks:
            try:
                callback = callbacks.pop()
            except IndexError:  # `add_callback` took back the last one
                break
            callback()


class UnaryCall(GrpcCall):
    """Call with one request message and one answer."""

    __slots__ = ("_begin", "_begun", "_message", "_progress", "coding", "ticket")

    def __init__(
        self,
        front: Threads,
        opening: Opening,
        begin: Callable[[UnaryCall, bytes], None],
        coding: bytes,
        link: Stream,
    ) -> None:
        # The attributes of `GrpcCall`, set here because a further call would cost every inference.
        self._front = front
        self._link = link
        self.opening = opening
        self._messages = None
        self._held = 0
        self._ended = False
        self._callbacks = None
        self._timer = None
        self.deadline = 0.0
        self._begin = begin
        self.coding = coding
        """Compression of the answer, empty for none."""
        self._message: bytes | None = None
        self._begun = False
        self._progress = False  # data has arrived since the last call of `stalls`
        self.ticket: Cancellable | None = None
        if opening.timeout_s is not None:
            self._start_timer(opening.timeout_s)

    def received(self, data: bytes, ended: bool) -> None:
        if self._ended or self._begun:
            return
        if ended and self._messages is None and len(data) >= PREFIX_BYTES and not data[0]:
            size = int.from_bytes(data[1:PREFIX_BYTES], "big")
            if size + PREFIX_BYTES == len(data) and size <= self._front.max_message_bytes:
                self._begun = True  # the usual case: one message in one piece
                self._begin(self, data[PREFIX_BYTES:])
                return
        self._progress = True
        try:
            if data:
                for message in self._splitter().feed(data):
                    if self._message is not None:
                        raise StatusError(INTERNAL, "Too many requests sent for a unary RPC")
                    self._message = message
                self._hold(self._partial + len(self._message or b""))
                if not ended:
                    self._link.consumed(len(data))
            if not ended:
                return
            if self._message is None:
                raise StatusError(INTERNAL, "No request sent for a unary RPC")
        except StatusError as error:
            self.fail(error.status, error.message)
            return
        self._begun = True
        message, self._message = self._message, None
        if isinstance(message, Packed):
            self._front.convert(self, lambda: self._plain(message), self._go_on)
        else:
            self._begin(self, message)

    def _go_on(self, message: bytes) -> None:
        if not self._ended:
            self._begin(self, message)

    def sent(self, _size: int) -> None:
        """Ignore the progress of sending, because the connection buffers the answer."""

    def stalls(self) -> bool:
        """Return True if no data has arrived since the last call.

        A long message may take long, as with grpcio.
        """
        progress, self._progress = self._progress, False
        return not (progress or self._begun or self._ended)

    def spend(self, time_ns: int) -> None:
        """See `Stream.spend`."""
        self._link.spend(time_ns)

    def answer(self, message: bytes) -> None:
        if self.coding:
            self.answer_later(lambda: message)
            return
        try:
            self._send(framed(message))
        except StatusError as error:
            self.fail(error.status, error.message)

    def answer_later(self, encode: Callable[[], bytes]) -> None:
        """End the call with the answer that ``encode`` returns, which another thread calls."""
        self._front.convert(self, lambda: framed(encode(), self.coding), self._send)

    def _send(self, body: bytes) -> None:
        self.respond(body, self.coding)
        ticket, self.ticket = self.ticket, None
        if isinstance(ticket, Ticket):
            ticket.context = None  # refers to this call; the access log has read it

    def respond(self, body: bytes | memoryview, coding: bytes = b"") -> None:
        """End the call with its answer as `framed` returns it."""
        if self._ended:
            return
        if len(body) > FREE_BYTES and not self._link.has_room(len(body)):
            self.fail(RESOURCE_EXHAUSTED, TEXT)
            return
        self._ended = True
        if self._timer is not None or self._callbacks is not None or self._held:
            self._clean_up()
        self._link.respond(HEADS[coding], body, GOOD)

    def fail(self, status: int, text: str) -> None:
        if self._end():
            if self.ticket is not None:
                self.ticket.cancel()
            self._link.headers(trailers(status, text, alone=True), end=True)
            self.ticket = None

    def lost(self) -> None:
        if self._end() and self.ticket is not None:
            self.ticket.cancel()
            self.ticket = None
