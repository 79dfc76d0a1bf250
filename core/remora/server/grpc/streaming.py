"""gRPC calls of any number of messages and answers on the built-in HTTP/2 transport.

Received data is split into messages when the behaviour takes them, because empty messages would need many times the
memory of their bytes.

Invariant: messages are processed in order, and a call without messages has no behaviour.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from remora.errors import RemoraError
from remora.messages import Mailbox
from remora.protocols.grpc.framing import (
    CANCELLED,
    HEADS,
    RESOURCE_EXHAUSTED,
    Opening,
    Packed,
    StatusError,
    framed,
    trailers,
)
from remora.protocols.http2.stream import Stream
from remora.server.grpc.call import ENDED, GrpcCall, Threads, status_of_failure
from remora.server.grpc.rpcs import status_of_error
from remora.server.held_mailbox import HeldMailbox
from remora.server.http.held_bytes import FREE_BYTES, TEXT

_log = logging.getLogger("remora.grpc")

_SLICE = 16
"""Messages of one stream that are processed before other streams have their turn."""


class StreamThreads(Threads, Protocol):
    """Interface of the front end that opens streams."""

    mailbox: Mailbox

    def stream_ended(self, call: Streaming, /) -> None:
        """Remove a stream from the count."""

    def take_turn(self) -> bool:
        """Return True if one more message may be processed in this turn of the loop."""

    def await_turn(self, resume: Callable[[], None], /) -> None:
        """Call ``resume`` when further messages may be processed, after the streams that wait already."""


class StreamBehaviour(Protocol):
    """Behaviour of a call with any number of messages and answers, in the loop."""

    @property
    def backlog(self) -> int:
        """Number of messages that wait to be processed."""

    def receive(self, message: bytes, credit: int, /) -> None:
        """Take a message. Call `Streaming.consumed` with ``credit`` once it is processed."""

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
        "_answers", "_begin", "_behaviour", "_blocked", "_coding", "_convert", "_converting", "_ending", "_half_closed",
        "_headed", "_packing", "_resumes", "_streams", "_uncredited", "_untaken", "_waits", "mailbox", "paused",
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
        self._converting = -1  # credit of the message that a thread converts, negative without one
        self._waits = False  # the next messages wait for their turn
        self._blocked = False  # the behaviour takes no further message until it has processed one
        self._half_closed = False  # the client has ended its messages
        self._answers: list[bytes] = []  # answers to be compressed
        self._packing = False  # a thread compresses answers
        self._ending: tuple[int, str] | None = None  # status of a call that ends when they are sent
        self._headed = False
        self._resumes: list[Callable[[], None]] = []
        self._untaken = 0  # bytes received and not credited
        self._uncredited = 0  # those of them that are not split into messages
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
        messages = self._splitter()
        if data:
            messages.add(data)
            self._untaken += len(data)
            self._uncredited += len(data)
        self._half_closed = self._half_closed or ended
        try:
            self._hold(self._size)
        except StatusError as error:
            self.fail(error.status, error.message)
            return
        if not self._waits:
            self._process()

    @property
    def _size(self) -> int:
        """Bytes that were received and are not processed."""
        return self._untaken + self._partial - self._uncredited

    def _process(self) -> None:
        """Pass messages to the behaviour, as many as it takes and as the turn of the loop permits."""
        self._waits = False
        for _ in range(_SLICE):
            if self._ended or self._converting >= 0:
                return
            if self._behaviour is not None and self._behaviour.backlog:
                self._blocked = True
                return
            assert self._messages is not None
            if not self._messages.held:
                self._processed_all()
                return
            if not self._streams.take_turn():
                break
            try:
                message = self._messages.next()
            except StatusError as error:
                self.fail(error.status, error.message)
                return
            if message is None:
                self._processed_all()
                return
            self.begin()
            if self._ended:  # refused, and its messages are dropped
                return
            # The bytes of a message that took several pieces were credited when they arrived.
            credit = max(self._uncredited - self._messages.held, 0)
            self._uncredited -= credit
            if isinstance(message, Packed) or self._convert is not None:
                self._converting = credit
                self._front.convert(self, partial(self._converted, message), self._go_on)
            elif self._behaviour is not None and not self._ended:
                self._behaviour.receive(message, credit)
        self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        if not (self._waits or self._ended):
            self._waits = True
            self._streams.await_turn(self._process)

    def _processed_all(self) -> None:
        """Let the client go on with a message that is not complete, or end the behaviour's messages."""
        if self._half_closed:
            self.begin()
            if self._behaviour is not None and not self._ended:
                self._behaviour.half_close()
        elif self._uncredited:
            credit, self._uncredited = self._uncredited, 0
            self._credit(credit)

    def _converted(self, message: bytes) -> bytes:
        plain = self._plain(message)
        return plain if self._convert is None else self._convert(plain)

    def _go_on(self, message: bytes) -> None:
        credit, self._converting = self._converting, -1
        if not self._ended and self._behaviour is not None:
            self._behaviour.receive(message, credit)
            if not self._waits:
                self._process()

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
        return HeldMailbox(self.mailbox, self)

    def consumed(self, size: int) -> None:
        """Let the client send ``size`` more bytes, because the behaviour has processed a message."""
        if size:
            self._credit(size)
        if self._blocked:
            self._blocked = False
            self._wait_for_turn()

    def _credit(self, size: int) -> None:
        self._untaken -= size
        self._link.consumed(size)
        if self._held and not self._ended:
            self._hold(min(self._size, self._held))

    def post(self, work: Callable[..., object], /, *arguments: Any) -> None:
        """Schedule ``work`` in the loop's thread. Any thread may call it."""
        self._front.post(work, *arguments)

    def wait(self, work: Callable[[], object], then: Callable[[Exception | None], None]) -> None:
        def waited() -> Exception | None:
            try:
                work()
            except Exception as error:
                return error
            return None

        self._front.convert(self, waited, then)

    def send(self, message: bytes) -> None:
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
            if self._behaviour is not None:
                self._behaviour.leave()
            self._streams.stream_ended(self)
            self._resume()
        return ended

    @property
    def unsent(self) -> int:
        return 0 if self._ended else self.paused + self._link.backlog

    def when_sent(self, resume: Callable[[], None]) -> None:
        self._resumes.append(resume)

    def give_up(self, reason: str) -> None:
        _log.warning("a client of gRPC %s: its call is ended", reason)
        self.fail(CANCELLED, ENDED)

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
        self._call.consumed(credit)
        self._call.send(message)

    def half_close(self) -> None:
        """See `StreamBehaviour.half_close`."""
        self._call.end(None)

    def leave(self) -> None:
        """See `StreamBehaviour.leave`."""
