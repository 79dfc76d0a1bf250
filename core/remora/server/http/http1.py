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
from math import inf
from typing import TYPE_CHECKING, cast

from remora.messages import Buffer
from remora.protocols.http1 import (
    CONTINUE,
    HEAD_LIMIT,
    LAST_CHUNK,
    BadRequest,
    ChunkDecoder,
    chunk,
    head_too_long,
    stream_head,
    too_large,
)
from remora.protocols.rest.answer import (
    INTERNAL,
    Headers,
    HttpAnswer,
    body_length,
    failure,
    fixed_part,
    refusal_of,
    whole_answer,
)
from remora.server.http.exchange import STREAM_BACKLOG, Bound, Cancellable, peer_of
from remora.server.http.held_bytes import (
    FREE_BYTES,
    UNREAD_S,
    CapacityWait,
    aligned_memory,
    out_of_memory,
    overloaded,
    retry_later,
    too_slow,
)
from remora.server.http.http1_state import NOT_STREAMING, Due, Phase, Progress, Streaming, Timeouts, is_turn_over

if TYPE_CHECKING:
    from remora.server.http.http1_listener_state import ListenerState

_log = logging.getLogger("remora.http")

AHEAD_LIMIT = 1_048_576
"""Bytes of pipelined requests after which the socket of a connection is no longer read."""
_TLS_RECORD = 0x16
"""First byte of a TLS connection, which never begins an HTTP request (RFC 8446 5.1)."""


_IDLE, _ANSWERING = Phase.IDLE, Phase.ANSWERING  # globals are cheaper than attributes of an Enum
_OWING = (Phase.ANSWERING, Phase.STREAMING)
_BUSY = (*_OWING, Phase.WAITING, Phase.LINGERING)


class Connection(asyncio.BufferedProtocol):
    """Connection of one client."""

    def __init__(self, listener: ListenerState[Connection]) -> None:
        self._listener = listener
        self._account = listener.held.account()
        self._waiting: CapacityWait | None = None
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
        self._streaming = NOT_STREAMING
        self._unneeded = 0.0  # bytes that may arrive after the answer, which does not depend on them
        self._paused = False  # the socket is not read, because too many pipelined bytes wait
        self._unread = False  # the write buffer is full
        self._ended = False  # the client has closed its sending side, and its last requests may wait for their turn
        self.peer = ""
        """Address of the client, "" if it is unknown."""
        self._requests = 0
        self.timeouts = Timeouts()
        self.receiving_since = 0.0
        self._sent: Callable[[], None] | None = None  # called when the client has read what was sent

    # -- transport callbacks -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.peer = peer_of(transport)
        self._loop = asyncio.get_running_loop()
        self._loop_time = self._loop.time
        self.timeouts.idle_since = self._loop_time()
        self._listener.connections[self] = None

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.connections.pop(self, None)
        if self._waiting is not None:
            self._waiting.end()
        self._account.close()
        self._body = self._chunks = self._bound = None
        self._rest = b""
        self._cancel()
        self._notify()

    def _cancel(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.cancel()

    def eof_received(self) -> bool:
        """Handle a half-close, which ends the requests and not their answers (RFC 9112 9.6).

        A stream that has begun is cancelled. A client that has gone is noticed by what is written to it [Q09].
        """
        is_new, self._ended = not self._ended, True
        if self._phase is Phase.STREAMING:
            self._cancel()
        elif self._is_through():
            return self._unread
        elif is_new:
            from remora.server.http.half_close import watch  # imported here, because few clients half-close

            watch(self._loop, self._transport, self._may_interim)
        return True

    def _may_interim(self) -> bool:
        """Return True if the client waits for an answer of HTTP/1.1 that has not begun."""
        return self._phase is _ANSWERING and not (self._bound is None or self._bound.head.http10)

    def _is_through(self) -> bool:
        """Return True if nothing is left to answer for a client that sends no more."""
        if self._phase in (Phase.AHEAD, Phase.CHUNKS):
            return not self._rest
        return self._phase not in _BUSY

    def pause_writing(self) -> None:
        """Stop handling requests until the client reads its answers."""
        self._unread = True
        self._account.set_answers(self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._unread = False
        self.timeouts.note_read()
        self._account.set_answers(0)
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
                if count <= FREE_BYTES or self._admit(bound.length):
                    self._complete(bytes(listener.view[stop:count]))
                return
        elif self._phase is Phase.BODY:
            self._fill_body(count)
            return
        self._receive(listener.scratch, count)

    # -- receiving --------------------------------------------------------------------------------------------------

    def _fill_body(self, count: int) -> None:
        body = self._body
        assert body is not None
        self._body_at += count
        if self._body_at == len(body):
            self._body = None
            self._complete(body)
            (self._yield_turn if self._phase is _IDLE else self._resume)()

    def _receive(self, data: bytearray | bytes, end: int) -> None:
        try:
            self._parse(data, end)
        except BadRequest as error:
            self._refuse(error)
        except MemoryError:
            self._refuse(out_of_memory(None if self._bound is None else self._bound.head))

    def _parse(self, data: bytearray | bytes, end: int) -> None:
        if self._rest:
            data = self._rest + bytes(memoryview(data)[:end])
            end = len(data)
            self._rest = b""
        if self._phase in (Phase.HEAD, Phase.AHEAD):
            self._phase = Phase.IDLE
        at = begun = 0
        began_ns = self._listener.now()
        while at < end and not self._transport.is_closing() and self._phase is not Phase.LINGERING:
            if self._phase in _BUSY or self._unread:
                self._keep_ahead(bytes(memoryview(data)[at:end]))
                return
            if self._phase is Phase.CHUNKS:
                at += self._receive_chunks(memoryview(data)[at:end])
                if at < end and self._phase is Phase.CHUNKS:
                    self._keep_ahead(bytes(memoryview(data)[at:end]))
                    self._yield_turn()
                    return
                continue
            if data[at] == _TLS_RECORD and not self._requests:
                self._listener.tls_notice.log(self._transport, self._loop_time())
                raise BadRequest(400, "this port speaks plain HTTP, not TLS")
            stop = data.find(b"\r\n\r\n", at, end)
            if stop < 0:
                self._keep_partial_head(bytes(memoryview(data)[at:end]))
                break
            if stop - at > HEAD_LIMIT:
                raise head_too_long()
            try:
                bound = self._listener.heads.parse(bytes(memoryview(data)[at : stop + 4]))
            except BadRequest:
                if at or self._requests or not self._listener.hand_over(self, self._transport, bytes(data[:end])):
                    raise
                return
            at = self._begin(bound, memoryview(data), stop + 4, end)
            begun += 1
            if at < end and self._phase is Phase.IDLE and is_turn_over(begun, self._listener.now() - began_ns):
                self._keep_ahead(bytes(memoryview(data)[at:end]))
                self._yield_turn()
                return
        if begun and end >= len(self._listener.scratch) and self._phase in (Phase.IDLE, Phase.HEAD):
            self._yield_turn()  # the transport would read further requests in this turn

    def _yield_turn(self) -> None:
        """Let other connections have their turn before the further requests of this one."""
        self._pause()
        self._loop.call_soon(self._resume)

    def _keep_ahead(self, data: bytes) -> None:
        self._rest = data
        if self._phase is Phase.IDLE:
            self._phase = Phase.AHEAD
        if len(data) >= AHEAD_LIMIT:
            self._pause()

    def _pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
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
            self._transport.write(CONTINUE)
        if head.chunked:
            self._chunks = ChunkDecoder(self._listener.max_body_bytes, head, self._listener.max_chunks)
            self._phase = Phase.CHUNKS
            self.receiving_since = self._loop_time()
            return at
        if at + length <= end:
            if length <= FREE_BYTES or self._admit(length):
                self._complete(bytes(view[at : at + length]))
            return at + length
        self.receiving_since = self._loop_time()
        if not self._account.take(length):
            self._wait_for_room(length, bytes(view[at:end]))
            return end
        return self._begin_body(bound, view[:end], at)

    def _begin_body(self, bound: Bound, view: memoryview, at: int) -> int:
        """Begin a long body, whose memory is counted, with the received bytes."""
        stop = min(at + bound.head.content_length, len(view))
        self._body = aligned_memory(bound.head.content_length, bound.head)
        self._body[: stop - at] = view[at:stop]
        self._body_at = 0
        self._phase = Phase.BODY
        self._fill_body(stop - at)
        return stop

    # -- memory ---------------------------------------------------------------------------------------------------

    def _admit(self, size: int) -> bool:
        """Count the body of a whole request, or refuse the request."""
        if self._account.has_room(size):
            self._account.add(size)
            return True
        self._phase = _ANSWERING
        self._requests += 1
        self.respond(overloaded())
        return False

    def _wait_for_room(self, size: int, data: bytes) -> None:
        """Stop reading until ``size`` bytes may be held; refuse the request if that takes too long."""
        self._rest, self._phase = data, Phase.WAITING
        self._pause()
        self._waiting = CapacityWait(self._listener.held, self._account, size, self._receive_on, self._refuse)

    def _receive_on(self) -> None:
        """Receive the rest of a request whose memory is counted now."""
        data, self._rest = self._rest, b""
        bound = self._bound
        if self._chunks is not None or bound is None:
            self._phase, self._rest = Phase.CHUNKS, data
        else:
            try:
                self._rest = data[self._begin_body(bound, memoryview(data), 0) :]
            except MemoryError:
                self._refuse(out_of_memory(bound.head))
        self._loop.call_soon(self._resume)

    def _complete_early(self, bound: Bound, received: int) -> None:
        """Pass a request without its body to a service that does not read it, then close.

        ``received`` bytes of the body have arrived.
        """
        self._unneeded = inf if bound.head.chunked else max(bound.head.content_length - received, 1)
        self._bound = self._listener.bind_unread(bound.head)
        self._complete(b"")

    def _receive_chunks(self, view: memoryview) -> int:
        chunks = self._chunks
        assert chunks is not None
        size = len(chunks.body) + len(view)
        if size > max(FREE_BYTES, self._account.requests) and not self._account.take(size - self._account.requests):
            self._wait_for_room(size - self._account.requests, bytes(view))
            return len(view)
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
            self._bound = None
            self.respond(failure(500, INTERNAL, plain=True))
            return
        if self._phase in _OWING:
            self._ticket = ticket

    # -- answering --------------------------------------------------------------------------------------------------

    def respond(self, answer: HttpAnswer) -> None:
        """Write the answer of the request in flight and continue with pipelined data."""
        bound, self._bound = self._bound, None
        self._ticket = None
        if self._account.requests:
            self._account.set_requests(0)
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
            and (len(body[1]) <= FREE_BYTES or not self._account.exceeded(len(body[1])))
        ):
            if not wire.start:
                wire.start = fixed_part(answer)
            transport.write(wire.start + body[1])  # the usual case
            if self._rest or self._paused:
                self._go_on(keep=True)
            return
        if body_length(body) > FREE_BYTES and not self._account.has_room(body_length(body)):
            answer = overloaded()
        head = bound.head if bound is not None else None
        keep = head is not None and head.keep_alive and not self._listener.closing
        pieces = whole_answer(answer, None if head is None else head.method, keep, http10=bool(head and head.http10))
        transport.writelines(pieces) if len(pieces) > 1 else transport.write(pieces[0])
        self._go_on(keep)

    def begin(self, status: int, headers: Headers) -> None:
        """Write the head of an answer that comes in pieces: `send` them, then `finish`."""
        bound, transport = self._bound, self._transport
        if self._phase is not Phase.ANSWERING or bound is None or transport.is_closing():
            return
        self._phase = Phase.STREAMING
        self._listener.answers[status] += 1
        chunked = not bound.head.http10
        self._streaming = Streaming(chunked, bound.head.keep_alive and chunked and not self._listener.closing)
        transport.write(stream_head(status, headers, chunked=chunked, keep_alive=self._streaming.keep))

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
        if self._unread:
            self._account.set_answers(transport.get_write_buffer_size())

    def finish(self) -> None:
        """End the answer that has begun and go on with what the client sent meanwhile."""
        if self._phase is not Phase.STREAMING:
            return
        self._phase = Phase.AHEAD if self._rest else Phase.IDLE
        self._bound = self._ticket = None
        self._account.set_requests(0)
        if self._transport.is_closing():
            return
        if self._streaming.chunked:
            self._transport.write(LAST_CHUNK)
        self._go_on(self._streaming.keep and not self._listener.closing)

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
            if self._rest or self._paused or self._ended:
                self._loop.call_soon(self._resume)
        elif (self._unneeded or self._rest or self._paused) and not self._ended:
            self._account.close()
            self._phase = Phase.LINGERING
            self._listener.linger(self, self._transport, self._unneeded)
        else:
            self._transport.close()

    def _resume(self) -> None:
        """Parse pipelined data after the request before it is answered."""
        if self._phase in _BUSY or self._unread or self._transport.is_closing():
            return
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        if self._rest:
            data, self._rest = self._rest, b""
            self._receive(data, len(data))
        if self._ended and self._is_through():
            self._transport.close()

    def _refuse(self, error: BadRequest) -> None:
        """Answer an invalid request and close, because the start of the next request is unknown.

        The client may read the answer only after it has sent everything.
        """
        self._phase = Phase.ANSWERING
        self._unneeded = inf
        self._bound = self._body = self._chunks = None
        self._rest = b""
        self.respond(refusal_of(error, retry_later(error)))

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
        if not self.timeouts.is_awaited(self._loop_time(), self._progress()):
            self._transport.close()

    @property
    def is_idle(self) -> bool:
        """True if no request is in flight and no part of one is received."""
        return self._phase is Phase.IDLE

    def sweep(self, now: float, limit_s: float, idle_s: float) -> None:
        """See `Listener.sweep`."""
        due = self.timeouts.due(now, limit_s, idle_s, self._progress(), self._listener.held.is_awaited)
        if due is not Due.NOTHING:
            self._listener.closed[due.value] += 1
        if due is Due.GIVE_UP:
            self.give_up(f"has read nothing of its answers for {UNREAD_S:g} s")
        elif due is Due.REFUSE:
            self._refuse(too_slow())
        elif due is not Due.NOTHING:
            self.abort()

    def _progress(self) -> Progress:
        received = len(self._rest) + self._body_at + (len(self._chunks.body) if self._chunks is not None else 0)
        unread = self._transport.get_write_buffer_size() if self._unread else 0
        return Progress(self._requests, self.is_idle, self.receiving_since, received, len(self._body or b""), unread)

    @property
    def idle_since(self) -> float:
        """Loop time of the last sweep that saw a request."""
        return self.timeouts.idle_since

    def abort(self) -> None:
        """Close at once and drop unsent data."""
        self._transport.abort()
