"""One stream of an HTTP/2 connection: what receives its request, and the sending of its response (RFC 9113 8.1).

A response that fits the windows is sent in one step. Pure: the connection collects the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from remora.protocols.http2.flow_control import Flow, Sender
from remora.protocols.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    FRAME_BYTES,
    HEADERS,
    PROTOCOL_ERROR,
)


class Receiver(Protocol):
    """Server side of one stream. Its methods must not raise; they may send."""

    def received(self, data: bytes, ended: bool, /) -> None:
        """Take a piece of the body, perhaps empty.

        It counts against the windows until `Stream.consumed` is called.
        """

    def lost(self) -> None:
        """Handle a reset by the client or the loss of the connection.

        Nothing can be sent on the stream any more; its response was not complete.
        """

    def sent(self, size: int, /) -> None:
        """Handle the sending of ``size`` bytes of paused body data."""

    def stalls(self) -> bool:
        """Return True if the request is incomplete and does not progress."""


Opener = Callable[["Stream"], Receiver | None]
"""Opens a stream for a request; returns None if the request has been answered."""


class _Answered:
    """Receiver of a stream whose request was answered when it was opened."""

    def received(self, data: bytes, ended: bool) -> None: ...

    def lost(self) -> None: ...

    def sent(self, size: int) -> None: ...

    def stalls(self) -> bool:
        return False


ANSWERED = _Answered()


class Owner(Protocol):
    """Owner of a connection. Its methods must not raise unless documented."""

    @property
    def backlog(self) -> int:
        """Bytes of all streams that the client has not read."""

    @property
    def peer(self) -> str:
        """Address of the client, "" if it is unknown."""

    def hold(self, size: int, /) -> bool:
        """See `Stream.hold`."""

    def has_room(self, size: int, /) -> bool:
        """Return True if ``size`` more bytes of answers may wait for the client."""

    def spend(self, time_ns: int, /) -> None:
        """See `Stream.spend`."""


class Connection(Protocol):
    """Connection of a stream; see `remora.protocols.http2.connection.Http2`."""

    sender: Sender
    awake: bool

    @property
    def handler(self) -> Owner:
        """Owner of the connection."""

    def finished(self, number: int, /) -> None:
        """Close a stream whose response is complete."""

    def consumed(self, stream: Stream, size: int, /) -> None:
        """Return consumed bytes of a stream's body to its window."""

    def reset(self, stream: Stream, code: int, /) -> None:
        """Reset an open stream."""

    def wake(self) -> None:
        """Have the output sent."""


class Stream(Flow):
    """One stream of a connection, for sending. After its end the methods have no effect.

    Use it in the connection's thread.
    """

    __slots__ = ("_connection", "credit", "ended", "is_open", "receiver", "taken")

    def __init__(self, connection: Connection, number: int, window: int, credit: int, ended: bool) -> None:
        self.number = number
        self.window = window
        self.paused = None
        self.credit = credit
        """Bytes that the client may still send."""
        self.ended = ended
        """True if the client has half-closed it."""
        self.taken = 0
        """Bytes consumed and not yet returned to its window."""
        self.is_open = True
        self.receiver: Receiver = ANSWERED
        self._connection = connection

    @property
    def connection(self) -> object:
        """Identity of the connection that the stream belongs to."""
        return self._connection.handler

    @property
    def backlog(self) -> int:
        """Bytes of all streams of the connection that the client has not read."""
        return self._connection.handler.backlog

    @property
    def peer(self) -> str:
        return self._connection.handler.peer

    def hold(self, size: int) -> bool:
        """Count ``size`` more bytes of a request that its receiver holds.

        Returns False if that would exceed a limit. A negative ``size`` gives them back.
        """
        return self._connection.handler.hold(size)

    def has_room(self, size: int) -> bool:
        """Return True if ``size`` bytes can be sent now, or may wait for the client to read them."""
        connection = self._connection
        fits = self.paused is None and size <= self.window and size <= connection.sender.window
        return (fits and not connection.handler.backlog) or connection.handler.has_room(size)

    def respond(self, head: bytes, data: bytes | memoryview, trailers: bytes = b"") -> None:
        """Send a complete response of headers, body and trailers, if any. `pack` makes the blocks."""
        if not self.is_open:
            return
        connection, number = self._connection, self.number
        sender = connection.sender
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        if (
            size <= self.window
            and size <= sender.window
            and size <= sender.frame_bytes
            and self.paused is None
            and len(head) <= FRAME_BYTES
            and len(trailers) <= FRAME_BYTES
        ):
            sender.sent_data = True
            sender.window -= size
            self.window -= size
            sender.out += (
                FRAME.pack(0, len(head), HEADERS, END_HEADERS, number),
                head,
                FRAME.pack(size >> 16, size & 0xFFFF, DATA, 0 if trailers else END_STREAM, number),
                data,
            )
            if trailers:
                sender.out += FRAME.pack(0, len(trailers), HEADERS, END_HEADERS | END_STREAM, number), trailers
            connection.finished(number)
        else:
            sender.headers(self, head, end=False)
            sender.data(self, data, end=not trailers)
            if trailers:
                sender.headers(self, trailers, end=True)
            self.receiver = ANSWERED  # frees the request while the response waits for a window
        if not connection.awake:
            connection.wake()

    def headers(self, block: bytes, *, end: bool = False) -> None:
        """Send a header block made by `pack`. With ``end`` it is the trailers, or replaces a body."""
        if self.is_open:
            self._connection.sender.headers(self, block, end=end)
            self._connection.wake()

    def data(self, data: bytes | memoryview, *, end: bool = False) -> int:
        """Send a piece of the body within the windows and return the number of bytes that must wait.

        Paused data is not copied: ``data`` must not change.
        """
        connection = self._connection
        if not self.is_open:
            return 0
        sender, size = connection.sender, len(data)
        waits = 0
        if (
            type(data) is bytes
            and not end
            and size <= self.window
            and size <= sender.window
            and size <= sender.frame_bytes
            and self.paused is None
        ):  # the usual case: a piece that fits
            sender.sent_data = True
            sender.window -= size
            self.window -= size
            sender.out += FRAME.pack(size >> 16, size & 0xFFFF, DATA, 0, self.number), data
        else:
            waits = sender.data(self, data, end=end)
        if not connection.awake:
            connection.wake()
        return waits

    def consumed(self, size: int) -> None:
        """Return ``size`` consumed bytes of the request body to the window."""
        if self.is_open and not self.ended:
            self._connection.consumed(self, size)
            self._connection.wake()

    def reset(self, code: int) -> None:
        if self.is_open:
            self._connection.reset(self, code)
            self._connection.wake()

    def spend(self, time_ns: int) -> None:
        """Count time that the request took in this turn of the loop.

        After a limit, further requests of the connection wait for the next turn.
        """
        self._connection.handler.spend(time_ns)


class Malformed:
    """Opener that refuses a header block that is not a valid request.

    The block may be valid trailers.
    """

    __slots__ = ("is_trailer",)

    def __init__(self, *, is_trailer: bool) -> None:
        self.is_trailer = is_trailer

    def __call__(self, stream: Stream) -> None:
        stream.reset(PROTOCOL_ERROR)
