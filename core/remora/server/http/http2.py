"""One HTTP/2 connection on the event loop; the law: its streams are gRPC's calls or HTTP's requests, side by side.

`remora.protocols.http2` holds the connection's state and its keepalive policy; here its bytes are
read and written, and its streams are given to whoever answers them. What a client does not read waits, and when that is
much, the client is not read either.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from math import inf
from typing import Protocol, cast

from remora.protocols.grpc.framing import CONTENT_TYPE
from remora.protocols.http2.connection import Http2
from remora.protocols.http2.frames import CANCEL, ENHANCE_YOUR_CALM, INTERNAL_ERROR, NO_ERROR, Fields, Http2Error, pack
from remora.protocols.http2.keepalive import Keepalive, KeepalivePolicy
from remora.protocols.rest.answer import INTERNAL
from remora.server.http.exchange import SILENCE_S

_log = logging.getLogger("remora.http")

ALPN = "h2"

_SCRATCH_BYTES = 262_144
_UNSENT_BYTES = 1 << 20
"""How much may wait in a connection that the client does not read before nothing of it is read."""
_GOODBYE_S = 1.0
"""How long a client may take to hear that its connection ends. One that is gone, or does not read, never does."""
_SPREAD = 0.1
"""By how much the ages of connections may differ, as gRPC has it."""


class Stream(Protocol):
    """What takes a request in, and answers it."""

    def received(self, data: bytes, ended: bool, /) -> None:
        """A piece of the body. `StreamConnection.took` is to be called when it is used."""

    def lost(self) -> None:
        """The client gave it up, or is gone."""

    def sent(self, size: int, /) -> None:
        """So much of the answer has left that had to wait."""

    def stalls(self) -> bool:
        """Whether it waits for the rest of a request, which does not come."""


class StreamConnection:
    """A stream's way to its client; everything in the loop's thread. After the client is gone it does nothing."""

    __slots__ = ("_connection", "_stream")

    def __init__(self, connection: Http2Connection, stream: int) -> None:
        self._connection = connection
        self._stream = stream

    @property
    def backlog(self) -> int:
        """Bytes of all streams that the client lets wait in the connection."""
        return self._connection.backlog

    @property
    def connection(self) -> object:
        """What all streams of one client's connection have in common."""
        return self._connection

    def took(self, size: int) -> None:
        """So much of the body is used."""
        self._connection.machine.consumed(self._stream, size)
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


OpenStream = Callable[[StreamConnection, Fields], Stream | None]
"""Takes a call or a request; None when it is answered already."""
_TERMS = KeepalivePolicy()


class Http2Listener:
    """What all HTTP/2 connections of one port share.

    Args:
        open_call: answers gRPC.
        open_request: answers HTTP; None where only gRPC is served.
        terms: see there.
    """

    def __init__(
        self, open_call: OpenStream, open_request: OpenStream | None = None, terms: KeepalivePolicy = _TERMS
    ) -> None:
        self.open_call = open_call
        self.open_request = open_request
        self.terms = terms
        self.protocol = "http2"
        self.closing = False
        """Whether clients are to go elsewhere: they are told so with the next answer."""
        self.ending = False
        """Whether they are told so at once."""
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.connections: dict[Http2Connection, None] = {}

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
        self.closing = self.ending = True
        for connection in list(self.connections):
            connection.close_when_done()
        return len(self.connections)

    def sweep(self, now: float, limit_s: float, idle_s: float = inf) -> None:
        """Give up requests that have been coming for longer than ``limit_s``, connections that have been sending their
        preface or one header block for that long, and those without a stream for longer than ``idle_s``. To be called
        every few seconds."""
        for connection in list(self.connections):
            connection.sweep(now, limit_s, idle_s)


class Http2Connection(asyncio.BufferedProtocol):
    """One client."""

    def __init__(self, listener: Http2Listener) -> None:
        self._listener = listener
        self._transport = cast(asyncio.Transport, None)
        self._loop = cast(asyncio.AbstractEventLoop, None)
        self._streams: dict[int, Stream] = {}
        self._coming: dict[int, float] = {}  # requests that were not whole when last looked at, and since when
        self._upkeep = cast(Keepalive, None)
        self._look_again: asyncio.TimerHandle | None = None
        self._parting: asyncio.TimerHandle | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._receiving = False
        self._flushing = False
        self._unread = False
        self._answered = False
        self._gone = False
        self.idle_since = 0.0
        """Since when there was no stream, as far as sweeps have seen."""
        self._stirred = False  # a stream was opened since the last sweep
        self._half_since = inf  # since when sweeps have seen half a preface or header block
        self.machine = Http2(self)

    # -- the transport's side ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        secured = transport.get_extra_info("ssl_object")
        if secured is not None and secured.selected_alpn_protocol() != ALPN:
            self._gone = True  # as gRPC's own servers do: who speaks TLS has to say that HTTP/2 is meant
            self._transport.abort()
            return
        spread = random.uniform(1 - _SPREAD, 1 + _SPREAD)
        self.idle_since = self._loop.time()
        self._upkeep = Keepalive(self._listener.terms, self.idle_since, spread)
        self._listener.connections[self] = None
        self._look()

    def connection_lost(self, error: Exception | None) -> None:
        self._gone = True
        self._listener.connections.pop(self, None)
        for timer in (self._look_again, self._parting, self._ending):
            if timer is not None:
                timer.cancel()
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
        for stream in list(self._streams.values()):
            stream.sent(0)

    def get_buffer(self, hint: int) -> memoryview:
        return self._listener.scratch

    def buffer_updated(self, count: int) -> None:
        self.take_in(bytes(self._listener.scratch[:count]))

    def take_in(self, data: bytes) -> None:
        """Handle what was received."""
        if self._gone:
            return
        self._upkeep.last_received = self._loop.time()
        self._receiving = True
        try:
            self.machine.receive(data)
        except Http2Error as error:
            self._end(error)
            return
        except Exception:
            _log.exception("an HTTP/2 connection failed in a way nobody foresaw")
            self._end(Http2Error(INTERNAL_ERROR, INTERNAL))
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
        if self._listener.ending or (self._listener.closing and self._answered):
            self._leave()
        if self.machine.has_output:
            self._transport.write(self.machine.take())
            if self._unread and self._transport.get_write_buffer_size() > _UNSENT_BYTES:
                self._transport.pause_reading()
        if self.machine.left and not self.machine.open:
            self._close()

    # -- its life ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Do what `Keepalive` says that is due."""
        if self._gone or self._transport.is_closing():
            return
        if self.machine.sent_data():
            self._upkeep.record_sent()
        due = self._upkeep.due(self._loop.time(), self.machine.open)
        if due.ends:
            self._end(Http2Error(NO_ERROR, due.ends))
            return
        if due.pings:
            self.machine.ping()
        if due.leaves:
            self._leave()
        if due.wake < inf:
            self._look_again = self._loop.call_at(due.wake, self._look)
        self.flush()

    def pinged(self) -> None:
        if self.machine.sent_data():
            self._upkeep.record_sent()
        if self._upkeep.is_too_much(self._loop.time(), self.machine.open):
            raise Http2Error(ENHANCE_YOUR_CALM, "too_many_pings")  # clients know the word, and ping less often

    def _leave(self) -> None:
        """Have the client go elsewhere; once it knows and nothing is under way, the connection is closed."""
        if self._parting is None:
            self._parting = self._loop.call_later(_GOODBYE_S, self._part)
            self.machine.leave()

    def _part(self) -> None:
        self.machine.stop_accepting()
        self.flush()

    def _end(self, error: Http2Error) -> None:
        """The connection cannot go on."""
        _log.debug("HTTP/2: %s", error)
        self._transport.write(self.machine.final_goaway(error))
        self._close()

    def _close(self) -> None:
        self._transport.close()
        if self._ending is None and not self._gone:
            self._ending = self._loop.call_later(_GOODBYE_S, self._transport.abort)

    # -- the machine's side -----------------------------------------------------------------------------------------

    def opened(self, stream: int, fields: Fields, ended: bool) -> None:
        self._stirred = True
        link = StreamConnection(self, stream)
        found: Stream | None = None
        kind = next((value for name, value in fields if name == b"content-type"), b"")
        if kind.startswith(CONTENT_TYPE):
            found = self._listener.open_call(link, fields)
        elif self._listener.open_request is not None:
            found = self._listener.open_request(link, fields)
        else:
            link.headers(pack(((b":status", b"415"),)), end=True)
        if found is None or not self.machine.is_open(stream):
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
        self._answered = True
        self._streams.pop(stream, None)

    def sent(self, stream: int, size: int) -> None:
        found = self._streams.get(stream)
        if found is not None:
            found.sent(size)

    # -- the end ----------------------------------------------------------------------------------------------------

    @property
    def backlog(self) -> int:
        """Bytes that wait in the transport because the client does not read; 0 for one that does."""
        return self._transport.get_write_buffer_size() if self._unread and not self._gone else 0

    @property
    def owes_an_answer(self) -> bool:
        """Whether a request is being answered."""
        return self.machine.open > 0

    @property
    def is_idle(self) -> bool:
        """True if no stream is open."""
        return not self.machine.open

    def sweep(self, now: float, limit_s: float, idle_s: float) -> None:
        """See `Http2Listener.sweep`."""
        self._half_since = min(self._half_since, now) if self.machine.is_half else inf
        if now - self._half_since > limit_s:
            self.abort()
            return
        if self._stirred or not self.is_idle:
            self._stirred = False
            self.idle_since = now
        elif now - self.idle_since > idle_s:
            self._leave()
        self.machine.decay_abuse()
        self.drop_stalled(now, limit_s)

    def drop_stalled(self, now: float, limit_s: float) -> None:
        """Give up requests that have been coming for longer than ``limit_s``."""
        coming = {number: self._coming.get(number, now) for number, each in self._streams.items() if each.stalls()}
        for number in [number for number, since in coming.items() if now - since > limit_s]:
            stalled = self._streams[number]
            self.machine.reset(number, CANCEL)
            stalled.lost()
        self._coming = coming
        self.flush()

    def close_when_done(self) -> None:
        """See `Http2Listener.close_idle`; what a client that has fallen silent has sent by half is not waited for."""
        now = self._loop.time()
        if now - self._upkeep.last_received > SILENCE_S:
            self.drop_stalled(now, -1.0)
        self.flush()

    def abort(self) -> None:
        """Close without further ado."""
        self._transport.abort()
