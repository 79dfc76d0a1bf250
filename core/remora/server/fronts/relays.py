"""Exchange and stream of requests that a front relays, as the services of the engine's process see them.

Invariant: each relayed request ends once, and its front learns of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from remora.messages import Buffer
from remora.protocols.http2.stream import Receiver, Stream
from remora.protocols.rest.answer import INTERNAL, Headers, HttpAnswer, failure
from remora.server.fronts import codec
from remora.server.fronts.codec import ENDED, Kind, Part, TooLargeError
from remora.server.http.exchange import Cancellable

_log = logging.getLogger("remora.server")


class Link(Protocol):
    """Way to the front; see `link.FrontLink`."""

    def send(
        self,
        kind: int,
        number: int = 0,
        parts: Sequence[Part] = (),
        flags: int = 0,
        ref: int = 0,
        extra: int = 0,
        since: int = 0,
    ) -> None:
        """Send a message. Raises TooLargeError."""

    def request_ended(self, number: int, /) -> None:
        """Drop a request that is answered."""

    def call_ended(self, number: int, /) -> None:
        """Drop a call that is answered."""


def _send_large(link: Link, kind: Kind, number: int, parts: Sequence[Part], flags: int = 0, ref: int = 0) -> bool:
    """Send a message that may be too large; return False then."""
    try:
        link.send(kind, number, parts, flags, ref)
    except TooLargeError as error:
        _log.error("an answer cannot cross to its front process: %s", error)
        return False
    return True


class RelayExchange:
    """HTTP exchange whose connection a front owns, with its own flow control."""

    def __init__(self, link: Link, number: int, receiving_since: float, peer: str = "") -> None:
        self._link = link
        self._number = number
        self.peer = peer
        self.receiving_since = receiving_since
        self._cancellable: Cancellable | None = None
        self._open = True
        self._begun = False
        self._unsent = 0
        self._resume: Callable[[], None] | None = None

    def follow(self, cancellable: Cancellable | None) -> None:
        """Cancel this if the client disconnects before the answer."""
        if self._open:
            self._cancellable = cancellable

    def cancel(self) -> None:
        """Cancel the request, because its client has disconnected."""
        cancellable, self._cancellable = self._cancellable, None
        if cancellable is not None:
            cancellable.cancel()
        self._unsent = 0
        self._notify()

    def fail(self) -> None:
        """Answer that the service failed, or break off the answer that has begun."""
        if self._begun:
            self.give_up("gets no more of its stream, because its service failed")
            self._end()
        else:
            self.respond(failure(500, INTERNAL, plain=True))

    def sent(self, size: int) -> None:
        """Record bytes that the client has taken."""
        self._unsent = max(self._unsent - size, 0)
        if not self._unsent:
            self._notify()

    @property
    def flow(self) -> RelayExchange:
        """See `exchange.Flow`."""
        return self

    @property
    def unsent(self) -> int:
        return self._unsent

    def when_sent(self, resume: Callable[[], None]) -> None:
        self._resume = resume

    def give_up(self, reason: str) -> None:
        """See `exchange.Flow`; the front closes the connection."""
        self._link.send(Kind.GIVE_UP, self._number, [reason.encode()])
        self.cancel()

    def respond(self, answer: HttpAnswer) -> None:
        """See `Exchange.respond`."""
        if not self._open:
            return
        self._end()
        head = codec.to_json(codec.plain_headers(answer.headers))
        if not _send_large(self._link, Kind.RESPOND, self._number, [head, *answer.body], ref=answer.status):
            refusal = failure(500, "the response is too large for --frontends: see the server's log", plain=True)
            head = codec.to_json(codec.plain_headers(refusal.headers))
            self._link.send(Kind.RESPOND, self._number, [head, *refusal.body], ref=refusal.status)

    def begin(self, status: int, headers: Headers) -> None:
        """See `Exchange.begin`."""
        if self._open:
            self._begun = True
            self._link.send(Kind.BEGIN, self._number, [codec.to_json(codec.plain_headers(headers))], ref=status)

    def send(self, piece: Buffer) -> None:
        """See `Exchange.send`."""
        if self._open and self._begun and len(piece):
            self._unsent += len(piece)
            if not _send_large(self._link, Kind.PIECE, self._number, [piece]):
                self.give_up("cannot be sent a piece of its stream")

    def finish(self) -> None:
        """See `Exchange.finish`."""
        if self._open and self._begun:
            self._end()
            self._link.send(Kind.PIECE, self._number, flags=ENDED)

    def _end(self) -> None:
        self._open = False
        self._cancellable = None
        self._link.request_ended(self._number)
        self._notify()

    def _notify(self) -> None:
        resume, self._resume = self._resume, None
        if resume is not None:
            resume()


class RelayCall(Stream):
    """Connection of a gRPC call that a front owns."""

    __slots__ = ("_identity", "_link", "_number", "_peer", "stream")

    def __init__(self, link: Link, number: int, identity: object, peer: str = "") -> None:
        self._link = link
        self._peer = peer
        self._number = number
        self._identity = identity
        self.is_open = True
        self.stream: Receiver | None = None

    def received(self, data: bytes, ended: bool) -> None:
        """Pass a piece of the request's body to the call."""
        if self.stream is not None:
            self.stream.received(data, ended)

    def lost(self) -> None:
        """Cancel the call, because its client has disconnected."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.lost()

    @property
    def backlog(self) -> int:
        return 0

    @property
    def connection(self) -> object:
        return self._identity

    @property
    def peer(self) -> str:
        return self._peer

    def hold(self, _size: int) -> bool:  # the front counts, because it has the connection
        return True

    def has_room(self, _size: int) -> bool:
        return True

    def spend(self, _time_ns: int) -> None:
        """Do nothing, because the front has the connection, and reads it in another process."""

    def consumed(self, size: int) -> None:
        self._link.send(Kind.TOOK, self._number, extra=size)

    def respond(self, head: bytes, data: bytes | memoryview, trailers: bytes = b"") -> None:
        self._end()
        _send_large(self._link, Kind.CALL_RESPOND, self._number, [head, data, trailers])

    def headers(self, block: bytes, *, end: bool = False) -> None:
        if end:
            self._end()
        self._link.send(Kind.CALL_HEADERS, self._number, [block], ENDED if end else 0)

    def data(self, data: bytes | memoryview, *, end: bool = False) -> int:
        if end:
            self._end()
        _send_large(self._link, Kind.CALL_DATA, self._number, [data], ENDED if end else 0)
        return len(data)

    def reset(self, code: int) -> None:
        self._end()
        self._link.send(Kind.RESET, self._number, ref=code)

    def _end(self) -> None:
        self.stream = None
        self._link.call_ended(self._number)
