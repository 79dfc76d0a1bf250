"""End of an HTTP/1.1 connection whose answer did not need the rest of the request.

Closing at once would reset the connection, and a client that has yet to read its answer would lose it (RFC 9112 9.6).
"""

from __future__ import annotations

import asyncio

_LINGER_S = 10.0
_SCRATCH = memoryview(bytearray(65_536))
"""Buffer of all such connections, because nothing reads what they receive."""


def linger(transport: asyncio.Transport, most_bytes: int) -> None:
    """Close a connection when its client has, after ``most_bytes``, or after some seconds."""
    transport.set_protocol(_Lingering(transport, most_bytes))
    if transport.can_write_eof():  # TLS cannot close one direction
        transport.write_eof()
    if not transport.is_reading():
        transport.resume_reading()


class _Lingering(asyncio.BufferedProtocol):
    """Connection that discards what it receives."""

    def __init__(self, transport: asyncio.Transport, most_bytes: int) -> None:
        self._transport = transport
        self._left = most_bytes
        self._timer = asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)

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
