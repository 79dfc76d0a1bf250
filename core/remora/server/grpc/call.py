"""gRPC calls on the built-in HTTP/2 transport, unary and streaming.

Received data, sent data and the end of a call are handled in the event loop. Behaviours use `rpcs.CallContext`, which
is thread-safe.

Invariant: a call ends once, with a status, and then runs its callbacks.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from queue import SimpleQueue
from typing import Any, Protocol

from remora.errors import UnavailableError
from remora.messages import Ticket
from remora.protocols.grpc.framing import (
    CANCELLED,
    GOOD,
    HEADS,
    INTERNAL,
    RESOURCE_EXHAUSTED,
    Messages,
    Opening,
    Packed,
    StatusError,
    framed,
    trailers,
)
from remora.scheduling.backpressure import Backpressure
from remora.server.grpc.rpcs import DEADLINE_EXCEEDED, FOREVER_S, CallContext, status_of_error
from remora.server.http.http2 import StreamConnection

_UNSENT_ITEMS, _UNSENT_BYTES = 64, 1 << 20
"""Answers of a stream that may wait for the client's flow-control windows."""
_UNTAKEN_ITEMS = 65_536
"""Messages of a stream that may wait for its thread, because flow control counts bytes and messages may be empty."""
_LATE = "Deadline Exceeded"

StreamBehaviour = Callable[[Iterator[bytes], CallContext], Iterator[bytes]]


class Threads(Protocol):
    """Interface of the front end that opens calls."""

    max_message_bytes: int

    def post(self, work: Callable[..., object], /, *arguments: Any) -> None:
        """Schedule ``work`` in the loop's thread."""

    def begin(self, call: Streaming, connection: object, work: Callable[[], None], /) -> None:
        """Run a stream in a thread.

        Raises UnavailableError if its connection has too many streams or the server is shutting down.
        """

    def stream_ended(self, call: Streaming, /) -> None:
        """Remove a stream from the count."""

    def convert(self, call: UnaryCall, work: Callable[[], bytes], then: Callable[[bytes], None], /) -> None:
        """Inflate or compress a message in another thread, then call ``then`` in the loop."""


def status_of_failure(error: Exception) -> tuple[int, str]:
    """Return the status code and text with which a failed call ends."""
    return (error.status, error.message) if isinstance(error, StatusError) else status_of_error(error)


class GrpcCall:
    """Deadline, end and callbacks of a call, unary or streaming. It implements `rpcs.CallContext`."""

    def __init__(self, front: Threads, link: StreamConnection, opening: Opening) -> None:
        self._front = front
        self._link = link
        self.opening = opening
        self._messages = Messages(front.max_message_bytes, opening.encoding)
        self._ended = False
        self._callbacks: list[Callable[[], None]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        if opening.timeout_s is not None and opening.timeout_s < FOREVER_S:
            loop = asyncio.get_running_loop()
            self._deadline = loop.time() + opening.timeout_s
            self._timer = loop.call_at(self._deadline, self._late)
        self._now: Callable[[], float] = asyncio.get_running_loop().time

    # -- for behaviours, in any thread ------------------------------------------------------------------------------

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self.opening.metadata

    @property
    def ended(self) -> bool:
        """True if the call is answered or its client has disconnected."""
        return self._ended

    def time_remaining(self) -> float | None:
        return self._deadline - self._now() if self._deadline else None

    def left_ns(self) -> int:
        """Return the nanoseconds until the deadline, at least 1; 0 without a deadline."""
        return max(int((self._deadline - self._now()) * 1e9), 1) if self._deadline else 0

    def add_callback(self, callback: Callable[[], None], /) -> bool:
        with _ENDING:
            if self._ended:
                return False
            self._callbacks = [*(self._callbacks or ()), callback]
            return True

    def cancel(self) -> None:
        self._front.post(self.fail, CANCELLED, "the call was ended by the server")

    # -- in the loop ------------------------------------------------------------------------------------------------

    def fail(self, status: int, text: str) -> None:
        """End the call with a status."""
        raise NotImplementedError

    def lost(self) -> None:
        self._end()

    def _late(self) -> None:
        self.fail(DEADLINE_EXCEEDED, _LATE)

    def _end(self) -> bool:
        """Mark the call as ended and run its callbacks; return False if it had ended before."""
        with _ENDING:
            if self._ended:
                return False
            self._ended = True
            callbacks, self._callbacks = self._callbacks, None
        if self._timer is not None:
            self._timer.cancel()
        for callback in callbacks or ():
            callback()
        return True


_ENDING = threading.Lock()
"""One lock for all calls, because it is held briefly and a lock per call would add to every call's cost."""


class UnaryCall(GrpcCall):
    """Call with one request message and one answer."""

    def __init__(
        self,
        front: Threads,
        link: StreamConnection,
        opening: Opening,
        begin: Callable[[UnaryCall, bytes], None],
        coding: bytes = b"",
    ) -> None:
        super().__init__(front, link, opening)
        self._begin = begin
        self._coding = coding
        self._message: bytes | None = None
        self._begun = False
        self._progress = False  # data has arrived since the last call of `stalls`
        self.ticket: Ticket | None = None

    def received(self, data: bytes, ended: bool) -> None:
        if self._ended or self._begun:
            return
        self._progress = True
        try:
            if data:
                for message in self._messages.feed(data):
                    if self._message is not None:
                        raise StatusError(INTERNAL, "Too many requests sent for a unary RPC")
                    self._message = message
                if not ended:
                    self._link.took(len(data))
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
            self._front.convert(self, lambda: self._messages.plain(message), self._go_on)
        else:
            self._begin(self, message)

    def _go_on(self, message: bytes) -> None:
        if not self._ended:
            self._begin(self, message)

    def sent(self, _size: int) -> None:
        """Ignore the progress of sending, because the connection buffers the answer."""

    def stalls(self) -> bool:
        """Return True if no data has arrived since the last call; a long message may take long, as with grpcio."""
        progress, self._progress = self._progress, False
        return not (progress or self._begun or self._ended)

    def answer(self, message: bytes) -> None:
        """End the call with its answer."""
        if self._coding:
            self._front.convert(self, lambda: framed(message, self._coding), self._send)
            return
        try:
            self._send(framed(message))
        except StatusError as error:
            self.fail(error.status, error.message)

    def _send(self, body: bytes) -> None:
        if self._end():
            self._link.respond(HEADS[self._coding], body, GOOD)

    def fail(self, status: int, text: str) -> None:
        if self._end():
            if self.ticket is not None:
                self.ticket.cancel()
            self._link.headers(trailers(status, text, alone=True), end=True)

    def lost(self) -> None:
        if self._end() and self.ticket is not None:
            self.ticket.cancel()


class Streaming(GrpcCall):
    """Call with any number of messages and answers.

    Its behaviour runs in a thread from the first message on, so that calls without messages occupy no threads.
    """

    def __init__(
        self, front: Threads, link: StreamConnection, opening: Opening, behaviour: StreamBehaviour, coding: bytes = b""
    ) -> None:
        super().__init__(front, link, opening)
        self._behaviour = behaviour
        self._coding = coding
        self._incoming: SimpleQueue[tuple[bytes, int] | None] = SimpleQueue()
        self._unsent = Backpressure(_UNSENT_ITEMS, _UNSENT_BYTES)
        self._headed = False
        self._waiting: deque[list[int]] = deque()  # [size, unsent bytes] of each answer that is not fully sent
        self._begun = False

    def begin(self) -> None:
        """Start the call's thread, unless it is running or the call has ended."""
        if self._begun or self._ended:
            return
        self._begun = True
        try:
            self._front.begin(self, self._link.connection, self._run)
        except UnavailableError as error:
            self.fail(*status_of_error(error))

    def received(self, data: bytes, ended: bool) -> None:
        if self._ended:
            return
        try:
            messages = self._messages.feed(data) if data else []
        except StatusError as error:
            self.fail(error.status, error.message)
            return
        # Received bytes are credited when the last message that they complete is read, or at once if there is none.
        for at, message in enumerate(messages, 1):
            self._incoming.put((message, len(data) if at == len(messages) else 0))
        if ended:
            self._incoming.put(None)
        elif not messages:
            self._link.took(len(data))
        if messages and self._incoming.qsize() > _UNTAKEN_ITEMS:
            self.fail(RESOURCE_EXHAUSTED, f"more than {_UNTAKEN_ITEMS} messages wait to be read: send larger ones")
        elif messages or ended:
            self.begin()

    def stalls(self) -> bool:
        return False

    def sent(self, size: int) -> None:
        while size and self._waiting:
            first = self._waiting[0]
            part = min(size, first[1])
            first[1] -= part
            size -= part
            if not first[1]:
                self._unsent.give(first[0])
                self._waiting.popleft()

    def lost(self) -> None:
        self._end()

    def _end(self) -> bool:
        ended = super()._end()
        self._incoming.put(None)
        self._unsent.close()
        self._front.stream_ended(self)
        return ended

    # -- in threads -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        answers = self._behaviour(self._taken(), self)
        try:
            for answer in answers:
                body = framed(answer, self._coding)
                if not self._unsent.take(len(body)):
                    return
                self._front.post(self._send, body)
        except Exception as error:
            self._front.post(self.fail, *status_of_failure(error))
        else:
            self._front.post(self.fail, 0, "")
        finally:
            if isinstance(answers, Generator):
                answers.close()

    def _taken(self) -> Iterator[bytes]:
        while (item := self._incoming.get()) is not None and not self._ended:
            message, size = item
            try:
                plain = self._messages.plain(message)
            except StatusError as error:
                self._front.post(self.fail, error.status, error.message)
                return
            yield plain
            if size:
                self._front.post(self._link.took, size)

    # -- in the loop ------------------------------------------------------------------------------------------------

    def _send(self, body: bytes) -> None:
        if self._ended:
            return
        if not self._headed:
            self._headed = True
            self._link.headers(HEADS[self._coding])
        waits = self._link.data(body)
        if waits:
            self._waiting.append([len(body), waits])
        else:
            self._unsent.give(len(body))

    def fail(self, status: int, text: str) -> None:
        if self._end():
            self._link.headers(trailers(status, text, alone=not self._headed), end=True)
