"""HTTP/1.1 connections on the event loop.

`Phase` is the state of a connection. Small requests are read through one buffer that all connections share; a body that
arrives after its head is received directly into its final buffer. A connection has one request in flight. Pipelined
requests wait in a bounded buffer; the socket is not read while that buffer is full or the client does not read its
answers. Pieces of a stream are written at once; their sender is held up while the client does not read
(`held_mailbox`).

Invariant: answers leave in the order of their requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from remora.messages import Buffer
from remora.protocols.http1 import (
    HEAD_LIMIT,
    HTTP2_PREFACE,
    LAST_CHUNK,
    BadRequest,
    ChunkDecoder,
    Head,
    chunk,
    head_too_long,
    response_head,
    stream_head,
    too_large,
)
from remora.protocols.rest.answer import INTERNAL, Headers, HttpAnswer, body_length, failure, fixed_part, refusal_of
from remora.server.http.exchange import SILENCE_S, STREAM_BACKLOG, Bound, Cancellable, peer_of

if TYPE_CHECKING:
    from remora.server.http.http1_listener import Listener

_log = logging.getLogger("remora.http")

_AHEAD_LIMIT = 1_048_576
"""Bytes of pipelined requests after which the socket of a connection is no longer read."""
_TURN_REQUESTS = 32
"""Pipelined requests of one connection that are answered in a turn of the loop."""
_JOIN_BYTES = 8_192
_KEPT = (b"Connection", b"keep-alive")  # clients of HTTP/1.0 that ask for it expect this header (RFC 9112 C.2.2)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_ALIGNMENT = 64
_TLS_RECORD = 0x16
"""First byte of a TLS connection, which never begins an HTTP request (RFC 8446 5.1)."""


class Phase(Enum):
    """State of a connection, by what it does with the bytes that arrive.

    ===========  =========================================  ======================================================
    Phase        Bytes that arrive                          Next phase
    ===========  =========================================  ======================================================
    IDLE         begin a head                               ANSWERING with a whole request, else HEAD, BODY, CHUNKS
    HEAD         continue the head                          as IDLE
    BODY         fill the buffer of a long body             ANSWERING when it is full
    CHUNKS       continue a chunked body                    ANSWERING after its last chunk
    ANSWERING    wait, because they are pipelined           STREAMING on `begin`; AHEAD or IDLE on `respond`
    STREAMING    wait, because they are pipelined           AHEAD or IDLE on `finish`
    AHEAD        follow those that wait                     as IDLE, when the answers before are written and read
    ===========  =========================================  ======================================================

    Only ANSWERING accepts `begin` and `respond`, only STREAMING `send` and `finish`.
    """

    IDLE = 0
    HEAD = 1
    BODY = 2
    CHUNKS = 3
    ANSWERING = 4
    STREAMING = 5
    AHEAD = 6


_IDLE, _ANSWERING = Phase.IDLE, Phase.ANSWERING  # globals are cheaper than attributes of an Enum
_OWING = (Phase.ANSWERING, Phase.STREAMING)


class _Streaming(NamedTuple):
    """Framing of a streamed answer: in chunks or not, and whether the connection stays open after it."""

    chunked: bool
    keep: bool


_NOT_STREAMING = _Streaming(chunked=False, keep=False)


class Connection(asyncio.BufferedProtocol):
    """Connection of one client."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._loop = cast(asyncio.AbstractEventLoop, None)
        self._loop_time: Callable[[], float] = lambda: 0.0
        self._phase = Phase.IDLE
        self._rest = b""  # received and not parsed yet: part of a head, or pipelined requests
        self._bound: Bound | None = None  # the request being received or answered
        self._body: memoryview | None = None  # buffer of a long body; `_body_at` bytes of it are received
        self._body_at = 0
        self._chunks: ChunkDecoder | None = None
        self._ticket: Cancellable | None = None
        self._streaming = _NOT_STREAMING
        self._unneeded = 0  # bytes of a body that arrive after the answer, which does not depend on them
        self._paused = False  # the socket is not read, because too many pipelined bytes wait
        self._unread = False  # the write buffer is full
        self._half_closed = False  # the client has closed its sending side, and its last requests wait for their turn
        self._ended = False  # the client has closed its sending side
        self._peer: str | None = None  # the client's address once it was used
        self._requests = 0
        self._swept_requests = 0  # their number at the last sweep
        self._come = -1  # received bytes of the request at the last check during shutdown,
        self._came_at = 0.0  # and when that number last changed
        self.receiving_since = 0.0
        self.idle_since = 0.0
        """Loop time of the last sweep that saw a request."""
        self._sent: Callable[[], None] | None = None  # called when the client has read what was sent

    # -- transport callbacks -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self._loop_time = self._loop.time
        self.idle_since = self._loop_time()
        self._listener.connections[self] = None

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.connections.pop(self, None)
        self._cancel()
        self._notify()

    def _cancel(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.cancel()

    def eof_received(self) -> bool:
        """Handle a half-close: the client may be gone or may still read.

        Cancel a queued request [Q09]; send a response that is being computed. Received requests that wait for their
        turn come first.
        """
        self._half_closed = bool(self._rest) and self._phase in (Phase.AHEAD, Phase.CHUNKS)
        if self._half_closed:
            return True
        self._ended = True
        self._cancel()
        return self._phase in _OWING or self._unread  # keep the connection open until the answers are sent

    def pause_writing(self) -> None:
        """Stop handling requests until the client reads its answers."""
        self._unread = True

    def resume_writing(self) -> None:
        self._unread = False
        self._notify()
        self._resume()

    def get_buffer(self, hint: int) -> memoryview:
        if self._body is not None:
            return self._body[self._body_at :]
        return self._listener.view

    def buffer_updated(self, count: int) -> None:
        listener = self._listener
        if self._phase is _IDLE and not self._unread:  # the usual case: one whole request whose head is memoized
            stop = listener.scratch.find(b"\r\n\r\n", 0, count) + 4
            bound = listener.heads.known(bytes(listener.view[:stop]))
            if bound is not None and stop + bound.length == count:
                self._bound = bound
                self._complete(bytes(listener.view[stop:count]))
                return
        elif self._phase is Phase.BODY:
            self._fill_body(count)
            return
        try:
            self._receive(listener.scratch, count)
        except BadRequest as error:
            self._refuse(error)
        except MemoryError:
            self._refuse(_out_of_memory(self._bound))

    # -- receiving --------------------------------------------------------------------------------------------------

    def _fill_body(self, count: int) -> None:
        body = self._body
        assert body is not None
        self._body_at += count
        if self._body_at == len(body):
            self._body = None
            self._complete(body)
            self._resume()

    def _receive(self, data: bytearray | bytes, end: int) -> None:
        if self._rest:
            data = self._rest + bytes(memoryview(data)[:end])
            end = len(data)
            self._rest = b""
        if self._phase in (Phase.HEAD, Phase.AHEAD):
            self._phase = Phase.IDLE
        at = begun = 0
        while at < end and not self._transport.is_closing():
            if self._phase in _OWING or self._unread:
                self._keep_ahead(bytes(memoryview(data)[at:end]))
                return
            if self._phase is Phase.CHUNKS:
                at += self._receive_chunks(memoryview(data)[at:end])
                if at < end and self._phase is Phase.CHUNKS:
                    self._rest_for_next_turn(bytes(memoryview(data)[at:end]))
                    return
                continue
            if data[at] == _TLS_RECORD and not self._requests:
                self._listener.tls_notice.log(self._transport, self._loop_time())
                raise BadRequest(400, "this port speaks plain HTTP, not TLS")
            stop = data.find(b"\r\n\r\n", at, end)
            if stop < 0:
                self._keep_partial_head(bytes(memoryview(data)[at:end]))
                return
            if stop - at > HEAD_LIMIT:
                raise head_too_long()
            try:
                bound = self._listener.heads.parse(bytes(memoryview(data)[at : stop + 4]))
            except BadRequest:
                if at or not self._hands_over(bytes(memoryview(data)[:end])):
                    raise
                return
            at = self._begin(bound, memoryview(data), stop + 4, end)
            begun += 1
            if begun == _TURN_REQUESTS and at < end and self._phase is Phase.IDLE:
                self._rest_for_next_turn(bytes(memoryview(data)[at:end]))
                return

    def _rest_for_next_turn(self, data: bytes) -> None:
        """Let other connections have their turn before the further requests of this one."""
        self._keep_ahead(data)
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._loop.call_soon(self._resume)

    def _hands_over(self, data: bytes) -> bool:
        """Hand a connection over to the HTTP/2 listener if it began with the HTTP/2 preface.

        Returns True then.
        """
        http2 = self._listener.http2
        if http2 is None or self._requests or not data.startswith(HTTP2_PREFACE):
            return False
        self.receiving_since = 0.0
        self._listener.connections.pop(self, None)
        http2(self._transport, data)
        return True

    def _keep_ahead(self, data: bytes) -> None:
        self._rest = data
        if self._phase is Phase.IDLE:
            self._phase = Phase.AHEAD
        if len(data) >= _AHEAD_LIMIT and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _keep_partial_head(self, data: bytes) -> None:
        if len(data) > HEAD_LIMIT:
            raise head_too_long()
        self._rest = data
        self._phase = Phase.HEAD
        self.receiving_since = self.receiving_since or self._loop_time()

    def _begin(self, bound: Bound, view: memoryview, at: int, end: int) -> int:
        """Begin a request whose head is complete.

        Returns the offset of the first byte that was not consumed.
        """
        self._bound = bound
        head, length = bound.head, bound.head.content_length
        if (head.chunked or at + length > end) and not self._listener.reads_body(head):
            self._complete_early(bound, end - at)
            return end
        if length > self._listener.max_body_bytes:
            raise too_large(length, self._listener.max_body_bytes, head)
        if head.expects_continue and at == end and (length or head.chunked):
            self._transport.write(_CONTINUE)
        if head.chunked:
            self._chunks = ChunkDecoder(self._listener.max_body_bytes, head, self._listener.max_chunks)
            self._phase = Phase.CHUNKS
            self.receiving_since = self._loop_time()
            return at
        if at + length <= end:
            self._complete(bytes(view[at : at + length]))
            return at + length
        self.receiving_since = self._loop_time()
        self._body = _aligned_memory(length, head)
        self._body[: end - at] = view[at:end]
        self._body_at = end - at
        self._phase = Phase.BODY
        return end

    def _complete_early(self, bound: Bound, received: int) -> None:
        """Pass a request without its body to a service that does not read it; the connection closes after the answer.

        ``received`` bytes of the body have arrived.
        """
        most = self._listener.max_body_bytes
        self._unneeded = max(most if bound.head.chunked else min(bound.head.content_length, most) - received, 1)
        self._bound = bound.closing()
        self._complete(b"")

    def _receive_chunks(self, view: memoryview) -> int:
        chunks = self._chunks
        assert chunks is not None
        taken = chunks.feed(view)
        if chunks.done:
            self._chunks = None
            self._complete(chunks.body)
        return taken

    def _complete(self, body: Buffer) -> None:
        """Pass a complete request to the service, which may read ``receiving_since``."""
        self._phase = _ANSWERING
        self._requests += 1
        bound: Bound = self._bound  # type: ignore[assignment]  # set before the body is received
        try:
            ticket = bound.answer(body, self)
            self.receiving_since = 0.0
        except Exception:
            self.receiving_since = 0.0
            _log.exception("%s %s", bound.head.method, bound.head.path)
            if self._phase is Phase.STREAMING:
                self.abort()  # the client must not mistake the partial answer for a whole one
                return
            self._respond_error(500, INTERNAL)
            return
        if self._phase in _OWING:
            self._ticket = ticket

    # -- answering --------------------------------------------------------------------------------------------------

    def respond(self, answer: HttpAnswer) -> None:
        """Write the answer of the request in flight and continue with pipelined data."""
        bound, self._bound = self._bound, None
        self._ticket = None
        transport = self._transport
        if self._phase is not _ANSWERING or transport.is_closing():
            return
        self._phase = Phase.AHEAD if self._rest else _IDLE
        self._listener.answers[answer.status] += 1
        wire, body = answer.wire, answer.body
        if (
            wire is not None
            and bound is not None
            and bound.persists
            and not (self._listener.closing or self._ended)
            and len(body) == 2
            and type(body[1]) is bytes
        ):
            if not wire.start:
                wire.start = fixed_part(answer)
            transport.write(wire.start + body[1])  # the usual case
            if self._rest or self._paused:
                self._go_on(keep=True)
            return
        head = bound.head if bound is not None else None
        keep = head is not None and head.keep_alive and not self._listener.closing
        keep = keep and (not self._ended or bool(self._rest))
        asks_to_keep = keep and head is not None and head.http10
        headers = (*answer.headers, _KEPT) if asks_to_keep else answer.headers
        self._write(answer, headers, keep, bodyless=head is not None and head.method == "HEAD")
        if not keep or self._rest or self._paused:
            self._go_on(keep)

    def _write(self, answer: HttpAnswer, headers: Headers, keep: bool, *, bodyless: bool) -> None:
        """Write a whole answer; one to HEAD has its length and no body (RFC 9110 9.3.2)."""
        start = response_head(answer.status, headers, body_length(answer.body), keep_alive=keep)
        if bodyless:
            self._transport.write(start)
        elif body_length(answer.body) <= _JOIN_BYTES:
            self._transport.write(b"".join((start, *answer.body)))
        else:
            self._transport.writelines([start, *answer.body])

    def begin(self, status: int, headers: Headers) -> None:
        """Write the head of an answer that comes in pieces: `send` them, then `finish`."""
        bound, transport = self._bound, self._transport
        if self._phase is not Phase.ANSWERING or bound is None or transport.is_closing():
            return
        self._phase = Phase.STREAMING
        self._listener.answers[status] += 1
        chunked = not bound.head.http10
        keep = bound.head.keep_alive and chunked and not self._listener.closing
        self._streaming = _Streaming(chunked, keep)
        transport.write(stream_head(status, headers, chunked=chunked, keep_alive=keep))

    def send(self, piece: Buffer) -> None:
        """Write the next piece of the answer that has begun.

        A client that does not read is given up at some point.
        """
        transport = self._transport
        if self._phase is not Phase.STREAMING or transport.is_closing() or not len(piece):
            return
        if self._unread and transport.get_write_buffer_size() > STREAM_BACKLOG:
            self.give_up(f"left {STREAM_BACKLOG} bytes of its stream unread")
            return
        transport.write(chunk(piece) if self._streaming.chunked else piece)

    def finish(self) -> None:
        """End the answer that has begun and go on with what the client sent meanwhile."""
        if self._phase is not Phase.STREAMING:
            return
        self._phase = Phase.AHEAD if self._rest else Phase.IDLE
        self._bound = self._ticket = None
        if self._transport.is_closing():
            return
        if self._streaming.chunked:
            self._transport.write(LAST_CHUNK)
        keep = self._streaming.keep and not self._listener.closing and (not self._ended or bool(self._rest))
        if not keep or self._rest or self._paused:
            self._go_on(keep)

    @property
    def peer(self) -> str:
        """See `exchange.Exchange`."""
        if self._peer is None:
            self._peer = peer_of(self._transport)
        return self._peer

    @property
    def flow(self) -> Connection:
        """See `exchange.Flow`."""
        return self

    @property
    def unsent(self) -> int:
        """See `exchange.Flow`."""
        return self._transport.get_write_buffer_size() if self._unread else 0

    def when_sent(self, resume: Callable[[], None]) -> None:
        """See `exchange.Flow`."""
        self._sent = resume

    def give_up(self, reason: str) -> None:
        """See `exchange.Flow`."""
        _log.warning("a client %s: its request is cancelled", reason)
        self._cancel()
        self.abort()

    def _notify(self) -> None:
        sent, self._sent = self._sent, None
        if sent is not None:
            sent()

    def _go_on(self, keep: bool) -> None:
        """Continue with a pipelined request after an answer, or close."""
        if keep:
            self._loop.call_soon(self._resume)
        elif self._unneeded and not self._ended:
            self._listener.linger(self, self._transport, self._unneeded)
        else:
            self._transport.close()

    def _resume(self) -> None:
        """Parse pipelined data after the request before it is answered."""
        if self._phase in _OWING or self._unread or self._transport.is_closing():
            return
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        if self._rest:
            data, self._rest = self._rest, b""
            try:
                self._receive(data, len(data))
            except BadRequest as error:
                self._refuse(error)
            except MemoryError:
                self._refuse(_out_of_memory(self._bound))
        if self._half_closed and not self._rest and not self.eof_received():
            self._transport.close()
        if self._ended and self._phase not in _OWING:
            self._transport.close()

    def _refuse(self, error: BadRequest) -> None:
        """Answer an invalid request and close, because the start of the next request is unknown."""
        self._phase = Phase.ANSWERING
        self._bound = None
        self._rest = b""
        self.respond(refusal_of(error))

    def _respond_error(self, status: int, text: str) -> None:
        self._bound = None
        self.respond(failure(status, text, plain=True))

    @property
    def owes_an_answer(self) -> bool:
        """True if a request is in flight."""
        return self._phase in _OWING

    def close_when_done(self) -> None:
        """Close now if idle, otherwise after the answer in flight.

        It is called repeatedly during shutdown. A request that is being received is awaited while bytes arrive, and the
        first request of a new connection for ``SILENCE_S``.
        """
        if self._phase in _OWING or self._phase is Phase.AHEAD:
            return
        now = self._loop_time()
        if self._phase is Phase.IDLE:
            awaited = not self._requests and now - self.idle_since <= SILENCE_S  # its first request may be in transit
        else:
            awaited = not self._is_silent(now)
        if not awaited:
            self._transport.close()

    @property
    def is_idle(self) -> bool:
        """True if no request is in flight and no part of one is received."""
        return self._phase is Phase.IDLE

    def sweep(self, now: float, limit_s: float, idle_s: float) -> None:
        """See `Listener.sweep`."""
        if self.receiving_since:
            if now - self.receiving_since > limit_s:
                self.abort()
            return
        if self._requests != self._swept_requests or self._phase is not Phase.IDLE:
            self._swept_requests = self._requests
            self.idle_since = now
        elif now - self.idle_since > (idle_s if self._requests else min(limit_s, idle_s)):
            self.abort()

    def _is_silent(self, now: float) -> bool:
        """Return True if no byte of the request has arrived for ``SILENCE_S``."""
        come = len(self._rest) + self._body_at + (len(self._chunks.body) if self._chunks is not None else 0)
        if come != self._come:
            self._come, self._came_at = come, now
        return now - self._came_at > SILENCE_S

    def abort(self) -> None:
        """Close at once and drop unsent data."""
        self._transport.abort()


def _out_of_memory(bound: Bound | None) -> BadRequest:
    head = bound.head if bound is not None else None
    _log.error("out of memory for the body of %s", f"{head.method} {head.path}" if head is not None else "a request")
    return BadRequest(503, "out of memory for the body of this request")


def _aligned_memory(length: int, head: Head | None) -> memoryview:
    """Return memory for a body with aligned tensors.

    The tensors, after the JSON header, begin at an aligned address.
    """
    offset = 0
    header_length = head.get(b"inference-header-content-length") if head is not None else None
    if header_length is not None and header_length.isdigit() and len(header_length) < 12:
        offset = -int(header_length) % _ALIGNMENT
    memory = np.empty(length + offset + _ALIGNMENT, np.uint8)
    offset += -memory.ctypes.data % _ALIGNMENT
    return memory.data[offset : offset + length]
