"""End of an HTTP/1.1 connection whose client may still send when its answer is written.

Closing at once would reset the connection, and a client that has yet to read its answer would lose it (RFC 9112 9.6).
The sending side is closed instead, and what arrives is discarded until the client closes, within limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SILENCE_S = 5.0
"""How long the client may send nothing before its connection is closed."""
_MOST_S = 30.0
"""How long a client may send at all."""
MOST_BYTES = 1 << 30
"""Discarded bytes after which a connection is closed."""
MOST_CONNECTIONS = 256
"""Lingering connections of one port, beyond which the oldest is closed."""
_SCRATCH = memoryview(bytearray(65_536))
"""Buffer of all such connections, because nothing reads what they receive."""


class Lingering(asyncio.BufferedProtocol):
    """Connection that discards what it receives and closes when its client has closed.

    Args:
        transport: the connection, which gets this protocol.
        most_bytes: bytes after which it closes: the rest of the body if its length is known.
        ended: called when the connection is closed.
    """

    def __init__(self, transport: asyncio.Transport, most_bytes: float, ended: Callable[[Lingering], object]) -> None:
        self._transport = transport
        self._left = min(most_bytes, MOST_BYTES)
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._end_at = self._loop.time() + _MOST_S
        self._seen = self._left
        transport.set_protocol(self)
        if transport.can_write_eof():  # TLS cannot close one direction
            transport.write_eof()
        if not transport.is_reading():
            transport.resume_reading()
        self._timer = self._loop.call_later(SILENCE_S, self._check)

    def _check(self) -> None:
        """Close a client that is silent or has sent for too long."""
        if self._left == self._seen or self._loop.time() >= self._end_at:
            self.abort()
            return
        self._seen = self._left
        self._timer = self._loop.call_later(SILENCE_S, self._check)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _SCRATCH

    def buffer_updated(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left <= 0:
            self._transport.close()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._ended(self)

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()
