"""One HTTP/2 connection on the event loop; the law: its streams are gRPC's calls or HTTP's requests, side by side.

`remora.protocols.http2` keeps the connection's state; here its bytes are read and written, and its streams are given to
whoever answers them. What a client does not read waits, and when that is much, the client is not read either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, cast

from remora.messages import Buffer
from remora.protocols.grpc_wire import CONTENT_TYPE
from remora.protocols.http1 import BadRequest, Head, too_large
from remora.protocols.http2 import Http2
from remora.protocols.http2_frames import CANCEL, INTERNAL_ERROR, PROTOCOL_ERROR, Fields, Http2Error, pack
from remora.protocols.http_answer import INTERNAL, Headers, HttpAnswer, failure
from remora.server.exchange import STREAM_BACKLOG, Cancellable
from remora.server.http import Service

_log = logging.getLogger("remora.http")

_SCRATCH_BYTES = 262_144
_UNSENT_BYTES = 1 << 20
"""How much may wait in a connection that the client does not read before nothing of it is read."""
_ENDS_IN_HTTP_2 = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"proxy-connection"))


class Stream(Protocol):
    """What takes a request in, and answers it."""

    def received(self, data: bytes, ended: bool, /) -> None:
        """A piece of the body. `Link.took` is to be called when it is used."""

    def lost(self) -> None:
        """The client gave it up, or is gone."""

    def sent(self, size: int, /) -> None:
        """So much of the answer has left that had to wait."""

    def stalls(self) -> bool:
        """Whether it waits for the rest of a request."""


class Link:
    """A stream's way to its client; everything in the loop's thread. After the client is gone it does nothing."""

    __slots__ = ("_connection", "_stream")

    def __init__(self, connection: Http2Connection, stream: int) -> None:
        self._connection = connection
        self._stream = stream

    def took(self, size: int) -> None:
        """So much of the body is used."""
        self._connection.machine.took(self._stream, size)
        self._connection.flush_soon()

    def respond(self, head: bytes, data: bytes | memoryview, trailers: bytes = b"") -> None:
        """Send a whole answer; see `Http2.respond`."""
        self._connection.machine.respond(self._stream, head, data, trailers)
        self._connection.flush_soon()

    def headers(self, block: bytes, *, end: bool = False) -> None:
        """Send a header block; see `Http2.send_headers`."""
        self._connection.machine.send_headers(self._stream, block, end=end)
        self._connection.flush_soon()

    def data(self, data: bytes | memoryview, *, end: bool = False) -> int:
        """Send a piece of the body; see `Http2.send_data`."""
        waits = self._connection.machine.send_data(self._stream, data, end=end)
        self._connection.flush_soon()
        return waits

    def reset(self, code: int) -> None:
        """Give the stream up."""
        self._connection.machine.reset(self._stream, code)
        self._connection.flush_soon()


OpenCall = Callable[[Link, Fields], Stream | None]
"""Takes a gRPC call; None when it is answered already."""


class Http2Listener:
    """What all HTTP/2 connections of one port share.

    Args:
        open_call: answers gRPC.
        service: answers HTTP; None where only gRPC is served.
        max_body_bytes: the longest body of HTTP.
    """

    def __init__(self, open_call: OpenCall, service: Service | None = None, max_body_bytes: int = 0) -> None:
        self.open_call = open_call
        self.service = service
        self.max_body_bytes = max_body_bytes
        self.closing = False
        """Whether clients are to go elsewhere: they are told so with the next answer."""
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.connections: set[Http2Connection] = set()

    def connection(self) -> Http2Connection:
        """A protocol for a new connection."""
        return Http2Connection(self)

    def take(self, transport: asyncio.Transport, received: bytes) -> None:
        """Take a connection over, with the bytes that were received of it."""
        connection = Http2Connection(self)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.take_in(received)

    def is_alone(self) -> bool:
        """Whether there is one connection with one stream: then nothing else can arrive while it is answered."""
        if len(self.connections) != 1:
            return False
        machine = next(iter(self.connections)).machine
        return machine.open == 1 and not machine.ahead

    def close_idle(self) -> int:
        """From now on answer what is under way and close; how many connections are still busy."""
        self.closing = True
        for connection in list(self.connections):
            connection.flush()
        return len(self.connections)

    def drop_stalled(self, now: float, limit_s: float) -> None:
        """Give up requests that have been coming for longer than ``limit_s``. To be called now and then."""
        for connection in list(self.connections):
            connection.drop_stalled(now, limit_s)


class Http2Connection(asyncio.BufferedProtocol):
    """One client."""

    def __init__(self, listener: Http2Listener) -> None:
        self._listener = listener
        self._transport = cast(asyncio.Transport, None)
        self._loop = cast(asyncio.AbstractEventLoop, None)
        self._streams: dict[int, Stream] = {}
        self._coming: dict[int, float] = {}  # requests that were not whole when last looked at, and since when
        self._receiving = False
        self._flushing = False
        self._unread = False
        self._gone = False
        self.machine = Http2(self)

    # -- the transport's side ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self._listener.connections.add(self)
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._gone = True
        self._listener.connections.discard(self)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.lost()

    def eof_received(self) -> bool:
        """A client that sends no more cannot open windows: it is gone."""
        return False

    def pause_writing(self) -> None:
        self._unread = True

    def resume_writing(self) -> None:
        self._unread = False
        self._transport.resume_reading()
        self.flush()

    def get_buffer(self, hint: int) -> memoryview:
        return self._listener.scratch

    def buffer_updated(self, count: int) -> None:
        self.take_in(bytes(self._listener.scratch[:count]))

    def take_in(self, data: bytes) -> None:
        """Handle what was received."""
        self._receiving = True
        try:
            self.machine.receive(data)
        except Http2Error as error:
            _log.debug("HTTP/2: %s", error)
            self._transport.write(self.machine.goodbye(error))
            self._transport.close()
            return
        except Exception:
            _log.exception("an HTTP/2 connection failed in a way nobody foresaw")
            self._transport.write(self.machine.goodbye(Http2Error(INTERNAL_ERROR, INTERNAL)))
            self._transport.close()
            return
        finally:
            self._receiving = False
        self.flush()

    # -- sending ----------------------------------------------------------------------------------------------------

    def flush_soon(self) -> None:
        """Write what is to be sent, together with what else this turn of the loop brings."""
        if not (self._receiving or self._flushing or self._gone):
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what is to be sent. A connection that is to close does so once nothing is under way."""
        self._flushing = False
        if self._gone or self._transport.is_closing():
            return
        if self._listener.closing:
            self.machine.leave()
        if self.machine.has_output:
            self._transport.write(self.machine.take())
            if self._unread and self._transport.get_write_buffer_size() > _UNSENT_BYTES:
                self._transport.pause_reading()
        if self._listener.closing and not self.machine.open:
            self._transport.close()

    # -- the machine's side -----------------------------------------------------------------------------------------

    def opened(self, stream: int, fields: Fields, ended: bool) -> None:
        link = Link(self, stream)
        found: Stream | None = None
        kind = next((value for name, value in fields if name == b"content-type"), b"")
        if kind.startswith(CONTENT_TYPE):
            found = self._listener.open_call(link, fields)
        elif self._listener.service is not None:
            found = _Request(link, fields, self._listener.service, self._listener.max_body_bytes)
        else:
            link.headers(pack(((b":status", b"415"),)), end=True)
        if found is None:
            return
        self._streams[stream] = found
        if ended:
            self.received(stream, b"", ended=True)

    def received(self, stream: int, data: bytes, ended: bool) -> None:
        found = self._streams.get(stream)
        if found is not None:
            found.received(data, ended)

    def lost(self, stream: int) -> None:
        found = self._streams.pop(stream, None)
        if found is not None:
            found.lost()

    def done(self, stream: int) -> None:
        self._streams.pop(stream, None)

    def sent(self, stream: int, size: int) -> None:
        found = self._streams.get(stream)
        if found is not None:
            found.sent(size)

    # -- the end ----------------------------------------------------------------------------------------------------

    @property
    def owes_an_answer(self) -> bool:
        """Whether a request is being answered."""
        return self.machine.open > 0

    def drop_stalled(self, now: float, limit_s: float) -> None:
        """See `Http2Listener.drop_stalled`."""
        self.machine.forgive()
        coming = {number: self._coming.get(number, now) for number, each in self._streams.items() if each.stalls()}
        for number in [number for number, since in coming.items() if now - since > limit_s]:
            stalled = self._streams[number]
            self.machine.reset(number, CANCEL)
            stalled.lost()
        self._coming = coming
        self.flush()

    def abort(self) -> None:
        """Close without further ado."""
        self._transport.abort()


class _Request:
    """A stream as an exchange of HTTP."""

    __slots__ = (
        "_begun",
        "_body",
        "_head",
        "_limit",
        "_link",
        "_open",
        "_service",
        "_size",
        "_ticket",
        "_unsent",
        "_whole",
    )

    def __init__(self, link: Link, fields: Fields, service: Service, limit: int) -> None:
        self._link = link
        self._service = service
        self._limit = limit
        self._body: list[bytes] = []
        self._size = 0
        self._ticket: Cancellable | None = None
        self._open = True
        self._begun = False
        self._unsent = 0
        self._whole = False  # it has come, and somebody answers it
        self._head = _head_of(fields)

    def received(self, data: bytes, ended: bool) -> None:
        if not self._open:
            return
        self._size += len(data)
        if self._head is None:
            self._open = False
            self._link.reset(PROTOCOL_ERROR)
            return
        if data:
            self._link.took(len(data))
        if self._size > self._limit:  # many clients hear of it only once they have sent all
            self._body = []
            if ended or self._size > 2 * self._limit:
                self._refuse(too_large(self._size, self._limit))
            return
        if data:
            self._body.append(data)
        if not ended:
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body, self._whole = [], True
        try:
            ticket = self._service.handle(self._head, body, self)
        except Exception:
            _log.exception("%s %s", self._head.method, self._head.path)
            if self._begun:
                self._link.reset(INTERNAL_ERROR)
            else:
                self.respond(failure(500, INTERNAL, plain=True))
            return
        if self._open:
            self._ticket = ticket

    def _refuse(self, error: BadRequest) -> None:
        self.respond(failure(error.status, error.text, plain=True))

    def lost(self) -> None:
        self._open = False
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.cancel()

    def sent(self, size: int) -> None:
        self._unsent -= size

    def stalls(self) -> bool:
        return self._open and not self._whole

    def respond(self, answer: HttpAnswer) -> None:
        if not self._open:
            return
        self._open = False
        self._ticket = None
        data = b"".join(answer.body)
        block = _block(answer.status, answer.headers, (b"content-length", b"%d" % len(data)))
        if not data or (self._head is not None and self._head.method == "HEAD"):
            self._link.headers(block, end=True)
        else:
            self._link.respond(block, data)

    def begin(self, status: int, headers: Headers) -> None:
        if self._open:
            self._begun = True
            self._link.headers(_block(status, headers))

    def send(self, piece: Buffer) -> None:
        if not self._open or not self._begun or not len(piece):
            return
        data = bytes(piece)
        if self._unsent > STREAM_BACKLOG:
            _log.warning("a client left %d bytes of its stream unread: its request is cancelled", STREAM_BACKLOG)
            self._link.reset(CANCEL)
            self.lost()
            return
        self._unsent += self._link.data(data)

    def finish(self) -> None:
        if self._open and self._begun:
            self._open = False
            self._ticket = None
            self._link.data(b"", end=True)


def _head_of(fields: Fields) -> Head | None:
    """A request's head as HTTP/1.1 has it; None for fields that are no request."""
    pseudo = {name: value for name, value in fields if name[:1] == b":"}
    try:
        method, target = pseudo[b":method"].decode("ascii"), pseudo[b":path"].decode("ascii")
    except (KeyError, UnicodeDecodeError):
        return None
    if not target.startswith("/") or any(name in _ENDS_IN_HTTP_2 for name, _ in fields):
        return None
    kept = tuple(pair for pair in fields if pair[0][:1] != b":" and pair[0] != b"content-length")
    return Head(method, target, ((b"host", pseudo.get(b":authority", b"")), *kept))


def _block(status: int, headers: Headers, *more: tuple[bytes, bytes]) -> bytes:
    named = tuple((name.lower(), value) for name, value in headers if name.lower() not in _ENDS_IN_HTTP_2)
    return pack(((b":status", b"%d" % status), *named, *more))
