"""Output of an HTTP/2 connection: what was written, what waits, and what the client's system has taken.

A transport of TLS passes all that it holds to the transport below it at once and then counts it no more. Therefore it
gets a long output in pieces, and the rest waits here, so that at most some pieces are not counted.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from typing import NamedTuple

if sys.platform == "linux":
    import fcntl
    import termios

_PIECE_BYTES = 262_144
"""Bytes that a transport of TLS gets at a time."""
_ACKED = slice(120, 128)
"""Place of ``tcpi_bytes_acked`` in ``struct tcp_info`` (linux/tcp.h), from Linux 4.1 on."""


class Progress(NamedTuple):
    """Bytes of a connection.

    Attributes:
        taken: those that the client's system has taken. Where the system does not tell, those that this one has taken.
        end: the value of ``taken`` once it has taken all that was written.
    """

    taken: int
    end: int


class Output:
    """Output of one connection.

    Args:
        transport: its transport.
        secured: True if the transport is one of TLS.
    """

    __slots__ = ("_secured", "_transport", "_waiting", "_waiting_bytes", "_written", "blocked")

    def __init__(self, transport: asyncio.Transport, *, secured: bool) -> None:
        self._transport = transport
        self._secured = secured
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._written = 0
        self.blocked = False
        """True if the client reads too slowly: the transport holds more than it should."""

    @property
    def unsent(self) -> int:
        """Bytes that the system has not taken, but for some pieces of `_PIECE_BYTES` with TLS."""
        return self._waiting_bytes + self._transport.get_write_buffer_size()

    @property
    def left(self) -> int:
        """Bytes that the client's system has not taken, less what TLS adds to them."""
        taken, end = self.progress()
        return max(end, self._written) - taken

    def write(self, data: bytes) -> None:
        """Write bytes, or keep them until the transport can take them."""
        self._written += len(data)
        if not self._secured or (len(data) <= _PIECE_BYTES and not self.blocked):
            self._transport.write(data)
            return
        self._waiting.append(memoryview(data))
        self._waiting_bytes += len(data)
        self._pass_on()

    def unblock(self) -> bool:
        """Write what waits, because the transport takes more; return False if it is blocked again."""
        self.blocked = False
        self._pass_on()
        return not self.blocked

    def _pass_on(self) -> None:
        waiting = self._waiting
        while waiting and not self.blocked:  # `transport.write` sets it through `pause_writing`
            piece = waiting[0][:_PIECE_BYTES]
            rest = waiting[0][_PIECE_BYTES:]
            if rest:
                waiting[0] = rest
            else:
                waiting.popleft()
            self._waiting_bytes -= piece.nbytes
            self._transport.write(piece)

    def write_last(self, data: bytes) -> None:
        """Write the last bytes of the connection.

        They are dropped if output waits, which is dropped too: the connection closes before the client could read it.
        """
        if not self._waiting:
            self._transport.write(data)
        self.drop()

    def drop(self) -> None:
        """Drop what waits."""
        self._waiting.clear()
        self._waiting_bytes = 0

    def progress(self) -> Progress:
        """Return what was taken so far; costs two system calls."""
        unsent = self.unsent
        if sys.platform == "linux":
            sock = self._transport.get_extra_info("socket")
            try:
                acked = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.stop)[_ACKED]
                queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
            except (AttributeError, OSError):  # no socket, or one of another kind
                acked = queued = b""
            if len(acked) == 8:
                taken = int.from_bytes(acked, sys.byteorder)
                return Progress(taken, taken + int.from_bytes(queued, sys.byteorder) + unsent)
        return Progress(self._written - unsent, self._written)
