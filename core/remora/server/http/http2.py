"""HTTP/2 connections on the event loop, whose streams are gRPC calls or HTTP requests.

`remora.protocols.http2` holds the connection's state and its keepalive policy; this module reads and writes the bytes
and dispatches the streams. Unread output waits in the connection; when it exceeds a bound, the socket is not read.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from math import inf
from typing import cast

from remora.protocols.grpc.framing import CONTENT_TYPE
from remora.protocols.http2.connection import Http2
from remora.protocols.http2.frames import CANCEL, ENHANCE_YOUR_CALM, INTERNAL_ERROR, NO_ERROR, Fields, Http2Error, pack
from remora.protocols.http2.keepalive import Keepalive, KeepalivePolicy
from remora.protocols.http2.stream import Opener, Stream
from remora.protocols.http2.unread import Patience, Seen, UnreadResponses, Waiting
from remora.protocols.rest.answer import INTERNAL
from remora.server.http.exchange import SILENCE_S, TlsNotice, peer_of
from remora.server.http.held_bytes import UNREAD_BYTES_S, UNREAD_FULL_S, UNREAD_S, HeldBytes
from remora.server.http.http1_state import TURN_NS, Due
from remora.server.http.http2_output import Output

_log = logging.getLogger("remora.http")

ALPN = "h2"
_TLS_RECORD = b"\x16"
"""First byte of a TLS connection, which never begins an HTTP/2 connection (RFC 8446 5.1)."""

_SCRATCH_BYTES = 262_144
"""Bytes that one connection may receive in a turn of the loop."""
_UNSENT_BYTES = 1 << 20
"""Unread output in bytes after which the socket of a connection is no longer read."""
_GOODBYE_S = 1.0
"""Time in seconds between the first GOAWAY and the close, for clients that have gone or do not read."""
_ABUSE, _FAULT = "abuse", "protocol_error"
"""Reasons in the metrics for connections that end with an error of the client."""
_SPREAD = 0.1
"""Relative jitter of the maximum connection age, as in gRPC."""


OpenRequest = Callable[[Fields], Opener]
"""Returns how a request with these header fields is opened. Pure, because the result is memoized."""
_TERMS = KeepalivePolicy()
_PATIENCE = Patience(UNREAD_S, UNREAD_FULL_S, UNREAD_BYTES_S)


class Http2Listener:
    """State that all HTTP/2 connections of one port share.

    Args:
        open_call: opens gRPC calls.
        open_request: opens HTTP requests; None if the port serves gRPC only.
        terms: keepalive policy of the connections.
        held: bytes that the connections of all ports hold; None if they are not limited.
    """

    def __init__(
        self,
        open_call: OpenRequest,
        open_request: OpenRequest | None = None,
        terms: KeepalivePolicy = _TERMS,
        held: HeldBytes | None = None,
    ) -> None:
        self.open_call = open_call
        self.open_request = open_request
        self.terms = terms
        self.held = held or HeldBytes()
        self.tls_notice = TlsNotice("gRPC")
        self.answers: Mapping[int, int] = {}
        """Answers to HTTP requests by status."""
        self.closed: defaultdict[str, int] = defaultdict(int)
        """Connections and streams closed by timeouts or for errors of the client, by reason."""
        self.protocol = "http2"
        self.closing = False
        """True if clients get a GOAWAY with their next answer."""
        self.ending = False
        """True if clients get a GOAWAY at once."""
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.connections: dict[Http2Connection, None] = {}

    def connection(self) -> Http2Connection:
        """Return the protocol of a new connection."""
        return Http2Connection(self)

    def take(self, transport: asyncio.Transport, received: bytes) -> None:
        """Take over a connection and the bytes received so far."""
        connection = Http2Connection(self)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.take_in(received)

    def is_alone(self) -> bool:
        """Return True if there is one stream.

        No other request can arrive then while it is answered.
        """
        if len(self.connections) != 1:
            return False
        machine = next(iter(self.connections)).machine
        return machine.open == 1 and not machine.ahead

    def abort_lingering(self) -> bool:
        """Return False, because a response over HTTP/2 ends its stream and not the connection."""
        return False

    def close_idle(self) -> int:
        """Close connections after the answer in flight from now on.

        Returns the number of open connections.
        """
        self.closing = self.ending = True
        for connection in list(self.connections):
            connection.close_when_done()
        return len(self.connections)

    def sweep(self, now: float, limit_s: float, idle_s: float = inf) -> None:
        """Reset requests and close connections that time out; call it every few seconds.

        ``limit_s`` bounds the time to receive a request, the preface or a header block, ``idle_s`` the time without a
        stream.
        """
        for connection in list(self.connections):
            connection.sweep(now, limit_s, idle_s)


class Http2Connection(asyncio.BufferedProtocol):
    """Connection of one client."""

    def __init__(self, listener: Http2Listener) -> None:
        self._listener = listener
        self._transport = cast(asyncio.Transport, None)
        self._loop = cast(asyncio.AbstractEventLoop, None)
        self._account = listener.held.account()
        self._unread_responses = UnreadResponses[Stream](_PATIENCE)
        self._coming: dict[Stream, float] = {}  # incomplete requests at the last sweep, and since when
        self._upkeep = cast(Keepalive, None)
        self._look_again: asyncio.TimerHandle | None = None
        self._parting: asyncio.TimerHandle | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._output = cast(Output, None)
        self._pausing = False  # the socket is not read until the next turn
        self.peer = ""
        """Address of the client, "" if it is unknown."""
        self._gone = False
        self.idle_since = 0.0
        """Loop time of the last sweep that saw a stream."""
        self._spent_ns = 0  # time of requests in this turn of the loop
        self._half_since = inf  # since when sweeps have seen an incomplete preface or header block
        self.machine = Http2(self, most_paused=listener.held.most_unread)

    # -- transport callbacks -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.peer = peer_of(transport)
        self._loop = asyncio.get_running_loop()
        secured = transport.get_extra_info("ssl_object")
        self._output = Output(self._transport, secured=secured is not None)
        if secured is not None and secured.selected_alpn_protocol() != ALPN:
            self._gone = True  # a TLS client must negotiate h2 by ALPN, as in gRPC servers
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
        for receiver in self.machine.abandon():
            receiver.lost()
        self._output.drop()
        self._account.close()
        self._coming = {}
        self._unread_responses.clear()

    def eof_received(self) -> bool:
        """Close, because a client that has closed its sending side cannot open windows."""
        return False

    def pause_writing(self) -> None:
        self._output.blocked = True

    def resume_writing(self) -> None:
        if not self._output.unblock():
            self._count_answers()
            return
        if not self._pausing:
            self._transport.resume_reading()
        self.flush()
        for stream in list(self.machine.streams):
            stream.receiver.sent(0)

    def get_buffer(self, hint: int) -> memoryview:
        return self._listener.scratch

    def buffer_updated(self, count: int) -> None:
        self.take_in(bytes(self._listener.scratch[:count]))
        if count == _SCRATCH_BYTES:  # the transport may have more, which uvloop would read in the same turn
            self._wait_for_next_turn()

    def take_in(self, data: bytes) -> None:
        """Handle received bytes."""
        if self._gone:
            return
        self._upkeep.last_received = self._loop.time()
        self._spent_ns = 0
        try:
            self.machine.receive(data)
        except Http2Error as error:
            if data[:1] == _TLS_RECORD and self.machine.is_half:
                self._listener.tls_notice.log(self._transport, self._loop.time())
            self._end(error)
            return
        except Exception:
            _log.exception("unexpected failure of an HTTP/2 connection")
            self._end(Http2Error(INTERNAL_ERROR, INTERNAL))
            return
        self.flush()
        if self.machine.paused:
            self._wait_for_next_turn()

    def _wait_for_next_turn(self) -> None:
        """Let other connections have their turn before more of this one is handled."""
        if not self._pausing and not self._gone and not self._transport.is_closing():
            self._pausing = True
            if self._transport.is_reading():
                self._transport.pause_reading()
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Handle the frames that exceeded the budget of the last turn, or read on."""
        self._pausing = False
        if self._gone or self._transport.is_closing():
            return
        if self.machine.paused:
            self.take_in(b"")
            self._wait_for_next_turn()  # because what the socket has would get another budget in this turn
        elif not self._output.blocked or self._output.unsent <= _UNSENT_BYTES:
            self._transport.resume_reading()

    # -- sending ----------------------------------------------------------------------------------------------------

    def output_ready(self) -> None:
        """Write the pending output at the end of this loop turn, in one call for all streams."""
        self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write the pending output; close a connection that is ending once it has no stream."""
        transport, machine = self._transport, self.machine
        if self._gone or transport.is_closing():
            return
        if self._listener.closing and (self._listener.ending or machine.answered):
            self._leave()
        output = machine.take()
        if output:
            self._output.write(output)
            if self._output.blocked and self._output.unsent > _UNSENT_BYTES:
                transport.pause_reading()
        if machine.sender.paused_bytes or self._output.blocked or self._account.answers:
            self._count_answers()
        if machine.left and not machine.open and not self._output.blocked:
            self._close(self._output.left / UNREAD_BYTES_S)

    def spend(self, time_ns: int) -> None:
        """See `Stream.spend`. A pause holds even without further frames, because the transport would read more."""
        self._spent_ns += time_ns
        if self._spent_ns > TURN_NS:
            self.machine.paused = True

    def _count_answers(self) -> None:
        unread = self._output.unsent if self._output.blocked else 0
        self._account.set_answers(self.machine.sender.paused_bytes + unread)

    def hold(self, size: int) -> bool:
        """See `Stream.hold`."""
        if size > 0 and not self._account.has_room(size):
            return False
        self._account.add(size)
        return True

    def has_room(self, size: int) -> bool:
        """Return True if ``size`` more bytes of answers may wait for the client."""
        if self._gone:
            return False
        self._count_answers()
        return self._account.has_room(size)

    # -- keepalive and shutdown ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Perform the due action of `Keepalive`."""
        if self._gone or self._transport.is_closing():
            return
        if self.machine.sent_data():
            self._upkeep.record_sent()
        due = self._upkeep.due(self._loop.time(), self.machine.open)
        if due.close_reason:
            self._end(Http2Error(NO_ERROR, due.close_reason))
            return
        if due.ping:
            self.machine.ping()
        if due.drain:
            self._leave()
        if due.wake < inf:
            self._look_again = self._loop.call_at(due.wake, self._look)
        self.flush()

    def pinged(self) -> None:
        if self.machine.sent_data():
            self._upkeep.record_sent()
        if self._upkeep.is_excess_ping(self._loop.time(), self.machine.open):
            raise Http2Error(ENHANCE_YOUR_CALM, "too_many_pings")  # the text makes gRPC clients ping less

    def _leave(self) -> None:
        """Send GOAWAY; the connection closes once the client has seen it and no stream is open."""
        if self._parting is None:
            self._parting = self._loop.call_later(_GOODBYE_S, self._part)
            self.machine.leave()

    def _part(self) -> None:
        self.machine.stop_accepting()
        self.flush()

    def _end(self, error: Http2Error, reason: str = "") -> None:
        """Close the connection after a final GOAWAY with the error.

        The error's code selects the reason in the metrics without a ``reason``.
        """
        if not reason and error.code not in (NO_ERROR, INTERNAL_ERROR):
            reason = _ABUSE if error.code == ENHANCE_YOUR_CALM else _FAULT
        if reason:
            self._listener.closed[reason] += 1
        _log.debug("HTTP/2: %s", error)
        self._output.write_last(self.machine.final_goaway(error))
        self._close()

    def _close(self, reading_s: float = 0.0) -> None:
        """Close once the output is written, at the latest after some seconds.

        Args:
            reading_s: time that a slow client needs to read the output.
        """
        self._transport.close()
        if self._ending is None and not self._gone:
            self._ending = self._loop.call_later(_GOODBYE_S + reading_s, self._transport.abort)

    def read(self, fields: Fields) -> Opener:
        """Return how a request is opened.

        A content type of gRPC makes it a call.
        """
        kind = next((value for name, value in fields if name == b"content-type"), b"")
        if kind.startswith(CONTENT_TYPE):
            return self._listener.open_call(fields)
        if self._listener.open_request is not None:
            return self._listener.open_request(fields)
        return _refuse_type

    # -- shutdown ----------------------------------------------------------------------------------------------------

    @property
    def backlog(self) -> int:
        """Bytes in the write buffer if the client does not read, otherwise 0."""
        return self._output.unsent if self._output.blocked and not self._gone else 0

    @property
    def owes_an_answer(self) -> bool:
        """True if a request is in flight."""
        return self.machine.open > 0

    @property
    def is_idle(self) -> bool:
        """True if no stream is open and all answers were sent."""
        return not self.machine.open and not self._output.blocked

    def sweep(self, now: float, limit_s: float, idle_s: float) -> None:
        """See `Http2Listener.sweep`."""
        self._half_since = min(self._half_since, now) if self.machine.is_half else inf
        if now - self._half_since > limit_s:
            self._listener.closed[(Due.SLOW if self.machine.has_received else Due.SILENT).value] += 1
            self.abort()
            return
        if self.machine.has_opened() or not self.is_idle:
            self.idle_since = now
        elif now - self.idle_since > idle_s:
            self._listener.closed[Due.IDLE.value] += 1
            self._leave()
        self.machine.decay_abuse()
        self._drop_unread(now)
        self.drop_stalled(now, limit_s)

    def drop_stalled(self, now: float, limit_s: float) -> None:
        """Reset requests that have been incomplete for longer than ``limit_s``."""
        coming = {each: self._coming.get(each, now) for each in self.machine.streams if each.receiver.stalls()}
        late = [stream for stream, since in coming.items() if now - since > limit_s]
        if late:
            self._listener.closed[Due.SLOW.value] += len(late)
        for stream in late:
            stream.reset(CANCEL)
            stream.receiver.lost()
        self._coming = coming
        self.flush()

    def _drop_unread(self, now: float) -> None:
        """Reset the streams, or close the connection, of which the client reads nothing.

        The connection is closed if its answers fill the socket, or exceed what may wait on it.
        """
        sender, blocked = self.machine.sender, self._output.blocked
        if not sender.paused_bytes and not blocked:
            self._unread_responses.clear()
            return
        self._count_answers()
        held = self._account.answers
        full = 0 < self._listener.held.most_unread < held
        taken, end = self._output.progress()
        moved = (sender.moved, sender.window)
        seen = Seen(moved, taken, end, sender.unconfirmed, full=full, bound=full or blocked)
        waiting = [
            Waiting(stream, stream.moved, stream.window > 0)
            for stream in self.machine.streams
            if stream.paused is not None
        ]
        late, closes = self._unread_responses.due(now, seen, waiting)
        if closes:
            silent_s = now - self._unread_responses.silent_since
            _log.warning(
                "a client has read nothing of %d bytes of answers for %.0f s: its connection is closed", held, silent_s
            )
            self._end(Http2Error(ENHANCE_YOUR_CALM, "no answers were read"), Due.GIVE_UP.value)
            return
        if late:
            self._listener.closed[Due.GIVE_UP.value] += len(late)
            _log.warning("a client has read nothing of %d answers for %g s: they are dropped", len(late), UNREAD_S)
        for stream in late:
            stream.reset(CANCEL)
            stream.receiver.lost()

    def close_when_done(self) -> None:
        """See `Http2Listener.close_idle`; incomplete requests of a silent client are dropped."""
        now = self._loop.time()
        if now - self._upkeep.last_received > SILENCE_S:
            self.drop_stalled(now, -1.0)
        self.flush()

    def abort(self) -> None:
        """Close at once and drop unsent data."""
        self._transport.abort()


def _refuse_type(stream: Stream) -> None:
    """Refuse an HTTP request on a port that serves gRPC only, as gRPC prescribes."""
    stream.headers(pack(((b":status", b"415"),)), end=True)
