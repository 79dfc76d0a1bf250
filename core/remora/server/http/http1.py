"""HTTP/1.1 connections on the event loop.

Small requests are read through one buffer that all connections share; a body that arrives after its head is received
directly into its final buffer. A connection has one request in flight. Pipelined requests wait in a bounded buffer; the
socket is not read while that buffer is full or the client does not read its answers. Pieces of a stream are written at
once; their sender is held up while the client does not read (`held_mailbox`).

Invariant: answers leave in the order of their requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import Protocol, cast

import numpy as np

from remora.messages import Buffer
from remora.protocols.http1 import (
    HEAD_LIMIT,
    HTTP2_PREFACE,
    LAST_CHUNK,
    MAX_CHUNKS,
    BadRequest,
    ChunkDecoder,
    Head,
    HeadParser,
    chunk,
    head_too_long,
    response_head,
    stream_head,
    too_large,
)
from remora.protocols.rest.answer import INTERNAL, Headers, HttpAnswer, failure, refusal_of
from remora.server.http.exchange import SILENCE_S, STREAM_BACKLOG, Cancellable, Exchange

_log = logging.getLogger("remora.http")

_SCRATCH_BYTES = 262_144
_AHEAD_LIMIT = 1_048_576
"""Bytes of pipelined requests after which the socket of a connection is no longer read."""
_JOIN_BYTES = 8_192
_KEPT = (b"Connection", b"keep-alive")  # clients of HTTP/1.0 that ask for it expect this header (RFC 9112 C.2.2)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_ALIGNMENT = 64
_TLS_RECORD = 0x16
"""First byte of a TLS connection, which never begins an HTTP request (RFC 8446 5.1)."""
_TLS_QUIET_S = 60.0


class Service(Protocol):
    """Handler of the requests on a port."""

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None: ...


Handover = Callable[[asyncio.Transport, bytes], None]
"""Takes over a connection and the bytes received so far."""


class Listener:
    """State that all connections of one port share: the service, the limits, the receive buffer, the connections.

    Connections that begin with the HTTP/2 preface are handed over to ``http2`` with their first bytes; without
    ``http2`` they are refused as an unsupported version.
    """

    def __init__(
        self,
        service: Service,
        *,
        max_body_bytes: int,
        max_chunks: int = MAX_CHUNKS,
        http2: Handover | None = None,
    ) -> None:
        self.service = service
        self.max_body_bytes = max_body_bytes
        self.max_chunks = max_chunks
        self.http2 = http2
        self.heads = HeadParser()
        self.scratch = bytearray(_SCRATCH_BYTES)
        self.view = memoryview(self.scratch)
        self.connections: dict[Connection, None] = {}
        self.closing = False
        self.protocol = "http1"
        self._tls_quiet_until = 0.0

    def connection(self) -> Connection:
        """Return the protocol of a new connection."""
        return Connection(self)

    def is_alone(self) -> bool:
        """Return True if there is one connection, because no other request can arrive while its request is handled."""
        return len(self.connections) == 1

    def close_idle(self) -> int:
        """Close connections after the answer in flight from now on; return the number of open connections."""
        self.closing = True
        for connection in list(self.connections):
            connection.close_when_done()
        return len(self.connections)

    def note_tls(self, transport: asyncio.Transport, now: float) -> None:
        """Log that a client spoke TLS, at most once a minute."""
        if now >= self._tls_quiet_until:
            self._tls_quiet_until = now + _TLS_QUIET_S
            peer, here = (transport.get_extra_info(name) or ("?", 0) for name in ("peername", "sockname"))
            _log.warning("a client from %s spoke TLS on port %s, which speaks plain HTTP", peer[0], here[1])

    def sweep(self, now: float, limit_s: float, idle_s: float = inf) -> None:
        """Close connections that time out; call it every few seconds.

        ``limit_s`` bounds the time to receive one request or the first byte, ``idle_s`` the time without a request.
        """
        for connection in list(self.connections):
            connection.sweep(now, limit_s, idle_s)


class Connection(asyncio.BufferedProtocol):
    """Connection of one client."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._loop_time: Callable[[], float] = lambda: 0.0
        self._rest = b""  # received and not parsed yet: part of a head, or pipelined requests
        self._head: Head | None = None  # the request being received or answered
        self._body: memoryview | None = None  # buffer of a long body; `_body_at` bytes of it are received
        self._body_at = 0
        self._chunks: ChunkDecoder | None = None
        self._used = False  # a request has arrived
        self._busy = False  # a request is being answered
        self._ticket: Cancellable | None = None
        self._paused = False
        self._unread = False  # the write buffer is full
        self._ended = False  # the client has closed its sending side
        self._streaming = False  # a streamed answer has begun;
        self._chunked = False  # its pieces are framed as chunks,
        self._keep = False  # and the connection stays open after it
        self._come = -1  # received bytes of the request at the last check during shutdown,
        self._came_at = 0.0  # and when that number last changed
        self.receiving_since = 0.0
        self.idle_since = 0.0
        """Loop time of the last sweep that saw a request."""
        self._stirred = False  # a request arrived since the last sweep
        self._sent: Callable[[], None] | None = None  # called when the client has read what was sent

    # -- transport callbacks -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop_time = asyncio.get_running_loop().time
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

        Cancel a queued request [Q09]; send a response that is being computed.
        """
        self._ended = True
        self._cancel()
        return self._busy or self._unread  # keep the connection open until the answers are sent

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
        if not (self._busy or self._rest or self._unread) and self._body is None and self._chunks is None:
            # Fast path: one whole request whose head is memoized.
            stop = listener.scratch.find(b"\r\n\r\n", 0, count) + 4
            head = listener.heads.known(bytes(listener.view[:stop]))
            if (
                head is not None
                and stop + head.content_length == count
                and head.content_length <= listener.max_body_bytes
                and not head.chunked
            ):
                self._head = head
                self._complete(bytes(listener.view[stop:count]))
                return
        if self._body is not None:
            self._body_at += count
            if self._body_at == len(self._body):
                body, self._body = self._body, None
                self._complete(body)
                self._resume()
            return
        try:
            self._receive(listener.scratch, count)
        except BadRequest as error:
            self._refuse(error)
        except MemoryError:
            self._refuse(_out_of_memory(self._head))

    # -- receiving --------------------------------------------------------------------------------------------------

    def _receive(self, data: bytearray | bytes, end: int) -> None:
        if self._rest:
            data = self._rest + bytes(memoryview(data)[:end])
            end = len(data)
            self._rest = b""
        at = 0
        while at < end and not self._transport.is_closing():
            if self._busy or self._unread:
                self._keep_ahead(bytes(memoryview(data)[at:end]))
                return
            if self._chunks is not None:
                at += self._receive_chunks(memoryview(data)[at:end])
                continue
            if data[at] == _TLS_RECORD and not self._used:
                self._listener.note_tls(self._transport, self._loop_time())
                raise BadRequest(400, "this port speaks plain HTTP, not TLS")
            stop = data.find(b"\r\n\r\n", at, end)
            if stop < 0:
                self._keep_partial_head(bytes(memoryview(data)[at:end]))
                return
            if stop - at > HEAD_LIMIT:
                raise head_too_long()
            try:
                head = self._listener.heads.parse(bytes(memoryview(data)[at : stop + 4]))
            except BadRequest:
                if at or not self._hands_over(bytes(memoryview(data)[:end])):
                    raise
                return
            at = self._begin(head, memoryview(data), stop + 4, end)

    def _hands_over(self, data: bytes) -> bool:
        """Hand a connection that began with the HTTP/2 preface over to the HTTP/2 listener; return True then."""
        http2 = self._listener.http2
        if http2 is None or self._used or not data.startswith(HTTP2_PREFACE):
            return False
        self.receiving_since = 0.0
        self._listener.connections.pop(self, None)
        http2(self._transport, data)
        return True

    def _keep_ahead(self, data: bytes) -> None:
        self._rest = data
        if len(data) >= _AHEAD_LIMIT and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _keep_partial_head(self, data: bytes) -> None:
        if len(data) > HEAD_LIMIT:
            raise head_too_long()
        self._rest = data
        self.receiving_since = self.receiving_since or self._loop_time()

    def _begin(self, head: Head, view: memoryview, at: int, end: int) -> int:
        """Begin a request whose head is complete; return the offset of the first byte that was not consumed."""
        self._head = head
        length = head.content_length
        if length > self._listener.max_body_bytes:
            raise too_large(length, self._listener.max_body_bytes, head)
        if head.expects_continue and at == end and (length or head.chunked):
            self._transport.write(_CONTINUE)
        if head.chunked:
            self._chunks = ChunkDecoder(self._listener.max_body_bytes, head, self._listener.max_chunks)
            self.receiving_since = self._loop_time()
            return at
        if at + length <= end:
            self._complete(bytes(view[at : at + length]))
            return at + length
        self.receiving_since = self._loop_time()
        self._body = _aligned_memory(length, head)
        self._body[: end - at] = view[at:end]
        self._body_at = end - at
        return end

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
        self._busy = self._used = self._stirred = True
        head: Head = self._head  # type: ignore[assignment]  # set before the body is received
        try:
            ticket = self._listener.service.handle(head, body, self)
            self.receiving_since = 0.0
        except Exception:
            self.receiving_since = 0.0
            _log.exception("%s %s", head.method, head.path)
            if self._streaming:
                self.abort()  # the client must not mistake the partial answer for a whole one
                return
            self._respond_error(500, INTERNAL)
            return
        if self._busy:
            self._ticket = ticket

    # -- answering --------------------------------------------------------------------------------------------------

    def respond(self, answer: HttpAnswer) -> None:
        """Write the answer of the request in flight and continue with pipelined data."""
        head, self._head = self._head, None
        self._ticket = None
        transport = self._transport
        if not self._busy or transport.is_closing():
            return
        self._busy = False
        keep = head is not None and head.keep_alive and not self._listener.closing
        keep = keep and (not self._ended or bool(self._rest))
        wire, body = answer.wire, answer.body
        asks_to_keep = keep and head is not None and head.http10
        if wire is not None and keep and not asks_to_keep and len(body) == 2 and type(body[1]) is bytes:
            if not wire.start:
                wire.start = fixed_part(answer)
            transport.write(wire.start + body[1])  # fast path
        else:
            headers = (*answer.headers, _KEPT) if asks_to_keep else answer.headers
            self._write(answer, headers, keep, bodyless=head is not None and head.method == "HEAD")
        if not keep or self._rest or self._paused:
            self._go_on(keep)

    def _write(self, answer: HttpAnswer, headers: Headers, keep: bool, *, bodyless: bool) -> None:
        """Write a whole answer; one to HEAD has its length and no body (RFC 9110 9.3.2)."""
        start = response_head(answer.status, headers, _length(answer.body), keep_alive=keep)
        if bodyless:
            self._transport.write(start)
        elif _length(answer.body) <= _JOIN_BYTES:
            self._transport.write(b"".join((start, *answer.body)))
        else:
            self._transport.writelines([start, *answer.body])

    def begin(self, status: int, headers: Headers) -> None:
        """Write the head of an answer that comes in pieces: `send` them, then `finish`."""
        head, transport = self._head, self._transport
        if not self._busy or transport.is_closing():
            return
        self._streaming = True
        self._chunked = head is not None and not head.http10
        self._keep = head is not None and head.keep_alive and self._chunked and not self._listener.closing
        transport.write(stream_head(status, headers, chunked=self._chunked, keep_alive=self._keep))

    def send(self, piece: Buffer) -> None:
        """Write the next piece of the answer that has begun. A client that does not read is given up at some point."""
        transport = self._transport
        if not self._streaming or transport.is_closing() or not len(piece):
            return
        if self._unread and transport.get_write_buffer_size() > STREAM_BACKLOG:
            self.give_up(f"left {STREAM_BACKLOG} bytes of its stream unread")
            return
        transport.write(chunk(piece) if self._chunked else piece)

    def finish(self) -> None:
        """End the answer that has begun and go on with what the client sent meanwhile."""
        if not self._streaming:
            return
        self._streaming = self._busy = False
        self._head = self._ticket = None
        if self._transport.is_closing():
            return
        if self._chunked:
            self._transport.write(LAST_CHUNK)
        keep = self._keep and not self._listener.closing and (not self._ended or bool(self._rest))
        if not keep or self._rest or self._paused:
            self._go_on(keep)

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
            asyncio.get_running_loop().call_soon(self._resume)
        else:
            self._transport.close()

    def _resume(self) -> None:
        """Parse pipelined data after the request before it is answered."""
        if self._busy or self._unread or self._transport.is_closing():
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
                self._refuse(_out_of_memory(self._head))
        if self._ended and not self._busy:
            self._transport.close()

    def _refuse(self, error: BadRequest) -> None:
        """Answer an invalid request and close, because the start of the next request is unknown."""
        self._busy = True
        self._head = None
        self._rest = b""
        self.respond(refusal_of(error))

    def _respond_error(self, status: int, text: str) -> None:
        self._head = None
        self.respond(failure(status, text, plain=True))

    @property
    def owes_an_answer(self) -> bool:
        """True if a request is in flight."""
        return self._busy

    def close_when_done(self) -> None:
        """Close now if idle, otherwise after the answer in flight; call it repeatedly during shutdown.

        A request that is being received is awaited while bytes arrive, and the first request of a new connection for
        ``SILENCE_S``.
        """
        if self._busy or (self._rest and not self.receiving_since):
            return
        now = self._loop_time()
        if self.receiving_since:
            awaited = not self._is_silent(now)
        else:
            awaited = not self._used and now - self.idle_since <= SILENCE_S  # its first request may be in transit
        if not awaited:
            self._transport.close()

    @property
    def is_idle(self) -> bool:
        """True if no request is in flight and no part of one is received."""
        return not (self._busy or self.receiving_since or self._rest)

    def sweep(self, now: float, limit_s: float, idle_s: float) -> None:
        """See `Listener.sweep`."""
        if self.receiving_since:
            if now - self.receiving_since > limit_s:
                self.abort()
            return
        if self._stirred or not self.is_idle:
            self._stirred = False
            self.idle_since = now
        elif now - self.idle_since > (idle_s if self._used else min(limit_s, idle_s)):
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


def _out_of_memory(head: Head | None) -> BadRequest:
    _log.error("out of memory for the body of %s", f"{head.method} {head.path}" if head is not None else "a request")
    return BadRequest(503, "out of memory for the body of this request")


def _length(parts: list[Buffer]) -> int:
    return sum([part.nbytes if isinstance(part, memoryview) else len(part) for part in parts])


def fixed_part(answer: HttpAnswer) -> bytes:
    """Return the bytes that all answers with this wire form share."""
    head = response_head(answer.status, answer.headers, _length(answer.body), keep_alive=True)
    return head + bytes(answer.body[0])


def _aligned_memory(length: int, head: Head | None) -> memoryview:
    """Return memory for a body whose tensors, after the JSON header, begin at an aligned address."""
    offset = 0
    header_length = head.get(b"inference-header-content-length") if head is not None else None
    if header_length is not None and header_length.isdigit() and len(header_length) < 12:
        offset = -int(header_length) % _ALIGNMENT
    memory = np.empty(length + offset + _ALIGNMENT, np.uint8)
    offset += -memory.ctypes.data % _ALIGNMENT
    return memory.data[offset : offset + length]
