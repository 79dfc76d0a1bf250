"""State that all HTTP/1.1 connections of one port share, without what makes the connections."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from remora.protocols.http1 import HTTP2_PREFACE, MAX_CHUNKS, Head, HeadParser
from remora.server.http.exchange import Bound, Service, TlsNotice, binder_of, body_reader_of
from remora.server.http.held_bytes import HeldBytes
from remora.system.clock import SystemClock

if TYPE_CHECKING:
    from remora.server.http.lingering import Lingering

_SCRATCH_BYTES = 262_144

Handover = Callable[[asyncio.Transport, bytes], None]
"""Takes over a connection and the bytes received so far."""


class OpenConnection(Protocol):
    """Connection of a client, as far as its listener ends it."""

    def close_when_done(self) -> None:
        """Close the connection after the answer in flight."""

    def sweep(self, now: float, limit_s: float, idle_s: float) -> None:
        """Close the connection if it has timed out; see `ListenerState.sweep`."""


C = TypeVar("C", bound=OpenConnection)


class ListenerState(Generic[C]):
    """State that all connections of one port share.

    It holds the service, the limits, the receive buffer and the connections. Connections that begin with the HTTP/2
    preface are handed over to ``http2`` with their first bytes; without ``http2`` they are refused as an unsupported
    version. ``now`` returns monotonic time in nanoseconds.
    """

    def __init__(
        self,
        service: Service,
        *,
        max_body_bytes: int,
        max_chunks: int = MAX_CHUNKS,
        http2: Handover | None = None,
        held: HeldBytes | None = None,
        now: Callable[[], int] = SystemClock.monotonic_ns,
    ) -> None:
        self.service = service
        self._bind_head = binder_of(service)
        self.now = now
        self.reads_body = body_reader_of(service)
        """Returns False if a request with a head is answered without its body."""
        self.max_body_bytes = max_body_bytes
        self.max_chunks = max_chunks
        self.http2 = http2
        self.held = held or HeldBytes()
        """Bytes that the connections of all ports hold."""
        self.heads = HeadParser(self._bind)
        self.scratch = bytearray(_SCRATCH_BYTES)
        self.view = memoryview(self.scratch)
        self.connections: dict[C, None] = {}
        self.lingering: dict[Lingering, None] = {}
        """Connections that are answered and whose clients may still send, the oldest first."""
        self.closing = False
        self.answers: defaultdict[int, int] = defaultdict(int)
        """Answers by status."""
        self.closed: defaultdict[str, int] = defaultdict(int)
        """Connections closed by timeouts, by reason."""
        self.protocol = "http1"
        self.tls_notice = TlsNotice("HTTP")

    def _bind(self, head: Head) -> Bound:
        return Bound(head, self._bind_head(head), self.max_body_bytes)

    def bind_unread(self, head: Head) -> Bound:
        """Return the last request of its connection, whose body is not read."""
        head = head.without_body()
        head.keep_alive = False
        return self._bind(head)

    def hand_over(self, connection: C, transport: asyncio.Transport, data: bytes) -> bool:
        """Hand a connection over to HTTP/2 if it began with the HTTP/2 preface.

        ``data`` is all that it has received.
        """
        if self.http2 is None or not data.startswith(HTTP2_PREFACE):
            return False
        del self.connections[connection]
        self.http2(transport, data)
        return True

    def linger(self, connection: C, transport: asyncio.Transport, most_bytes: float) -> None:
        """Close a connection whose client may still send up to ``most_bytes`` that are not needed."""
        from remora.server.http.lingering import MOST_CONNECTIONS, Lingering  # imported here, because few refuse a body

        del self.connections[connection]
        if len(self.lingering) >= MOST_CONNECTIONS:
            next(iter(self.lingering)).abort()
        self.lingering[Lingering(transport, most_bytes, self._end_lingering)] = None

    def _end_lingering(self, connection: Lingering) -> None:
        self.lingering.pop(connection, None)

    def abort_lingering(self) -> bool:
        """Close the lingering connections; return False without any."""
        ending = list(self.lingering)
        for connection in ending:
            connection.abort()
        return bool(ending)

    def is_alone(self) -> bool:
        """Return True if there is one connection.

        No other request can arrive then while its request is handled.
        """
        return len(self.connections) == 1

    def close_idle(self) -> int:
        """Close connections after the answer in flight from now on.

        Returns the number of open connections.
        """
        self.closing = True
        for connection in list(self.connections):
            connection.close_when_done()
        return len(self.connections)

    def sweep(self, now: float, limit_s: float, idle_s: float = inf) -> None:
        """Close connections that time out; call it every few seconds.

        ``limit_s`` bounds the time to receive one request or the first byte, ``idle_s`` the time without a request.
        """
        for connection in list(self.connections):
            connection.sweep(now, limit_s, idle_s)
