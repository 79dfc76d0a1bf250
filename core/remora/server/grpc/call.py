"""gRPC calls on the built-in HTTP/2 transport, unary and streaming.

Received data, sent data and the end of a call are handled in the event loop. Behaviours use `rpcs.CallContext`, which
is thread-safe.

Invariant: a call ends once, with a status, and then runs its callbacks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from remora.errors import RemoraError
from remora.messages import Mailbox
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
from remora.server.held_mailbox import HeldMailbox
from remora.server.http.exchange import Cancellable
from remora.server.http.held_bytes import FREE_BYTES, TEXT

_log = logging.getLogger("remora.grpc")

_UNTAKEN_ITEMS = 65_536
"""Messages of a stream that may wait to be processed, because flow control counts bytes and messages may be empty."""
_LATE = "Deadline Exceeded"
_ENDED = "the call was ended by the server"
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


class StreamThreads(Threads, Protocol):
    """Interface of the front end that opens streams."""

    mailbox: Mailbox

    def stream_ended(self, call: Streaming, /) -> None:
        """Remove a stream from the count."""


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
        self._front.post(self.fail, CANCELLED, _ENDED)

    # -- in the loop ------------------------------------------------------------------------------------------------

    def fail(self, status: int, text: str) -> None:
        """End the call with a status."""
        raise NotImplementedError

    def lost(self) -> None:
        self._end()

    def _late(self) -> None:
        self.fail(DEADLINE_EXCEEDED, _LATE)

    def _feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete now. Raises StatusError as `Messages.feed`."""
        if self._messages is None:
            self._messages = Messages(self._front.max_message_bytes, self.opening.encoding)
        return self._messages.feed(data)

    def _hold(self, size: int) -> None:
        """Count ``size`` bytes of the request as held. Raises StatusError if that exceeds a limit."""
        size = size if size > FREE_BYTES else 0
        if size != self._held:
            if not self._link.hold(size - self._held):
                raise StatusError(RESOURCE_EXHAUSTED, TEXT)
            self._held = size

    @property
    def _partial(self) -> int:
        """Bytes of a message that has begun and not ended."""
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
                for message in self._feed(data):
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

    def answer(self, message: bytes) -> None:
        """End the call with its answer."""
        if self.coding:
            self._front.convert(self, lambda: framed(message, self.coding), self._send)
            return
        try:
            self._send(framed(message))
        except StatusError as error:
            self.fail(error.status, error.message)

    def _send(self, body: bytes) -> None:
        self.respond(body, self.coding)

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

    def lost(self) -> None:
        if self._end() and self.ticket is not None:
            self.ticket.cancel()


class StreamBehaviour(Protocol):
    """Behaviour of a call with any number of messages and answers, in the loop."""

    @property
    def backlog(self) -> int:
        """Number of messages that wait to be processed."""

    def receive(self, message: bytes, credit: int, /) -> None:
        """Take a message. The client may send ``credit`` more bytes once it is processed."""

    def half_close(self) -> None:
        """Handle the end of the messages."""

    def leave(self) -> None:
        """Handle the end of the call."""


class Streaming(GrpcCall):
    """Call with any number of messages and answers, without a thread.

    It implements `stream.StreamCall` and `exchange.Flow`. Its behaviour begins with the first message, so that calls
    without messages do not count as streams.

    Args:
        begin: returns the behaviour, or raises an error that ends the call.
        convert: applied to each message in another thread before the behaviour receives it.
    """

    __slots__ = (
        "_answers", "_begin", "_behaviour", "_coding", "_convert", "_ending", "_headed", "_incoming", "_packing",
        "_resumes", "_streams", "_untaken", "mailbox", "paused",
    )  # fmt: skip

    def __init__(
        self,
        front: StreamThreads,
        opening: Opening,
        begin: Callable[[Streaming], StreamBehaviour],
        coding: bytes,
        link: Stream,
        convert: Callable[[bytes], bytes] | None = None,
    ) -> None:
        super().__init__(front, opening, link)
        self._streams = front
        self.mailbox = front.mailbox
        """See `stream.StreamCall`."""
        self._begin = begin
        self._behaviour: StreamBehaviour | None = None
        self._coding = coding
        self._convert = convert
        self._incoming: deque[tuple[bytes | None, int]] = deque()  # messages behind one that a thread converts
        self._answers: list[bytes] = []  # answers to be compressed
        self._packing = False  # a thread compresses answers
        self._ending: tuple[int, str] | None = None  # status of a call that ends when they are sent
        self._headed = False
        self._resumes: list[Callable[[], None]] = []
        self._untaken = 0  # bytes received and not credited
        self.paused = 0
        """Bytes of answers that wait for the client's windows, or to be compressed."""

    # -- from the client ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the behaviour, unless it has begun or the call has ended."""
        if self._behaviour is None and not self._ended:
            try:
                self._behaviour = self._begin(self)
            except Exception as error:
                self.fail(*status_of_failure(error))

    def received(self, data: bytes, ended: bool) -> None:
        if self._ended:
            return
        try:
            messages = self._feed(data) if data else []
            self._untaken += len(data)
            self._hold(self._untaken + self._partial)
        except StatusError as error:
            self.fail(error.status, error.message)
            return
        if not messages and not ended:
            self.consumed(len(data))
            return
        self.begin()
        # Received bytes are credited when the last message that they complete is processed.
        for at, message in enumerate(messages, 1):
            self._pass_on(message, len(data) if at == len(messages) else 0)
        if ended:
            self._pass_on(None, 0)
        if self._behaviour is not None and self._behaviour.backlog + len(self._incoming) > _UNTAKEN_ITEMS:
            self.fail(RESOURCE_EXHAUSTED, f"more than {_UNTAKEN_ITEMS} messages wait to be read: send larger ones")

    def _pass_on(self, message: bytes | None, credit: int) -> None:
        """Pass a message, or None for the end, to the behaviour, behind those that a thread converts."""
        if self._incoming or isinstance(message, Packed) or self._convert is not None:
            self._incoming.append((message, credit))
            if len(self._incoming) == 1:
                self._convert_next()
        else:
            self._deliver(message, credit)

    def _convert_next(self) -> None:
        """Pass on the messages up to the next that a thread must convert, and have it converted."""
        while self._incoming and not self._ended:
            message, credit = self._incoming[0]
            if isinstance(message, Packed) or (self._convert is not None and message is not None):
                self._front.convert(self, partial(self._converted, message), self._go_on)
                return
            self._incoming.popleft()
            self._deliver(message, credit)

    def _deliver(self, message: bytes | None, credit: int) -> None:
        if self._behaviour is None or self._ended:
            return
        if message is None:
            self._behaviour.half_close()
        else:
            self._behaviour.receive(message, credit)

    def _converted(self, message: bytes) -> bytes:
        plain = self._plain(message)
        return plain if self._convert is None else self._convert(plain)

    def _go_on(self, message: bytes) -> None:
        if not self._ended:
            _, credit = self._incoming.popleft()
            self._deliver(message, credit)
            self._convert_next()

    def lost(self) -> None:
        self._end()

    def sent(self, size: int) -> None:
        self.paused -= size
        if not self.unsent:
            self._resume()

    def stalls(self) -> bool:
        return False

    # -- for the behaviour -------------------------------------------------------------------------------------------

    @property
    def connection(self) -> object:
        """Identity of the connection."""
        return self._link.connection

    def hold(self) -> HeldMailbox:
        """See `stream.StreamCall.hold`."""
        return HeldMailbox(self.mailbox, self)

    def consumed(self, size: int) -> None:
        """Let the client send ``size`` more bytes."""
        self._untaken -= size
        self._link.consumed(size)
        if self._held and not self._ended:
            self._hold(min(self._untaken + self._partial, self._held))

    def post(self, work: Callable[..., object], /, *arguments: Any) -> None:
        """Schedule ``work`` in the loop's thread. Any thread may call it."""
        self._front.post(work, *arguments)

    def wait(self, work: Callable[[], object], then: Callable[[Exception | None], None]) -> None:
        """See `stream.StreamCall.wait`."""

        def waited() -> Exception | None:
            try:
                work()
            except Exception as error:
                return error
            return None

        self._front.convert(self, waited, then)

    def send(self, message: bytes) -> None:
        """Send an answer."""
        if self._ended:
            return
        if self._coding:
            self.paused += len(message)
            self._answers.append(message)
            if not self._packing:
                self._pack()
        else:
            self._send(framed(message))

    def end(self, error: RemoraError | None) -> None:
        """End the call with the error's status, or with success."""
        status = (0, "") if error is None else status_of_error(error)
        if self._packing:
            self._ending = self._ending or status
        else:
            self.fail(*status)

    def _pack(self) -> None:
        answers, self._answers = self._answers, []
        self._packing = True
        self._front.convert(
            self,
            lambda: b"".join([framed(each, self._coding) for each in answers]),
            partial(self._packed, sum(map(len, answers))),
        )

    def _packed(self, size: int, body: bytes) -> None:
        self._packing = False
        self._send(body)
        self.sent(size)
        if self._answers and not self._ended:
            self._pack()
        elif self._ending is not None:
            self.fail(*self._ending)

    def _send(self, body: bytes) -> None:
        if self._ended:
            return
        if not self._headed:
            self._headed = True
            self._link.headers(HEADS[self._coding])
        if len(body) > FREE_BYTES and not self._link.has_room(len(body)):
            self.fail(RESOURCE_EXHAUSTED, TEXT)
            return
        self.paused += self._link.data(body)

    def fail(self, status: int, text: str) -> None:
        if self._end():
            self._link.headers(trailers(status, text, alone=not self._headed), end=True)

    def _end(self) -> bool:
        ended = super()._end()
        if ended:
            self._incoming.clear()
            if self._behaviour is not None:
                self._behaviour.leave()
            self._streams.stream_ended(self)
            self._resume()
        return ended

    @property
    def unsent(self) -> int:
        """See `exchange.Flow`."""
        return 0 if self._ended else self.paused + self._link.backlog

    def when_sent(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` once, when all answers are sent or the call has ended."""
        self._resumes.append(resume)

    def give_up(self, reason: str) -> None:
        """See `exchange.Flow`."""
        _log.warning("a client of gRPC %s: its call is ended", reason)
        self.fail(CANCELLED, _ENDED)

    def _resume(self) -> None:
        resumes, self._resumes = self._resumes, []
        for resume in resumes:
            resume()


class Converted:
    """Behaviour that answers each message with its conversion."""

    backlog = 0

    def __init__(self, call: Streaming) -> None:
        self._call = call

    def receive(self, message: bytes, credit: int) -> None:
        """See `StreamBehaviour.receive`."""
        if credit:
            self._call.consumed(credit)
        self._call.send(message)

    def half_close(self) -> None:
        """See `StreamBehaviour.half_close`."""
        self._call.end(None)

    def leave(self) -> None:
        """See `StreamBehaviour.leave`."""
