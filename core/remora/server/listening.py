"""Listening sockets: connections are accepted also when a server ends, and when it has no descriptor left.

The event loop's own servers do neither: they reset the connections that the kernel has established when they close, and
close or forget the ones for which there is no descriptor.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import ssl
import struct
import sys
from collections.abc import Callable

_log = logging.getLogger("remora.server")

BACKLOG = 1024
"""Connections that the kernel may keep until they are accepted."""

_AT_ONCE = 64
"""Connections that are accepted in one turn of the event loop."""
_PAUSE_S = 1.0
"""How long no connection is accepted when there is no descriptor for it."""
_ROOM_S = 0.01
"""How long idle connections may take to close that make room."""
_WARNING_S = 60.0
"""How often the log tells that descriptors run out."""


async def bind(address: str, port: int, *, reuse_port: bool) -> list[socket.socket]:
    """Return listening sockets for an address, which may be a name. Raises OSError."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        asyncio.Protocol, address, port, reuse_port=reuse_port or None, start_serving=False
    )
    sockets = [socket.socket(fileno=os.dup(each.fileno())) for each in server.sockets]
    server.close()
    for each in sockets:
        each.listen(BACKLOG)
    return sockets


class Port:
    """Accepts connections of one port until it is closed. To be used in the event loop's thread.

    Args:
        sockets: listen already.
        protocol: makes the protocol of a connection.
        make_room: closes idle connections because descriptors have run out; False if there are none.
        context: for TLS.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        protocol: Callable[[], asyncio.BaseProtocol],
        make_room: Callable[[], bool],
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._protocol = protocol
        self._make_room = make_room
        self._context = context
        self._opening: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._warned_at = -_WARNING_S
        self.number = int(sockets[0].getsockname()[1])
        for each in sockets:
            each.setblocking(False)
        self._resume()

    @property
    def opening(self) -> int:
        """How many accepted connections have no protocol yet."""
        return len(self._opening)

    def adopt(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted."""
        connection.setblocking(False)
        opening = self._loop.create_task(self._open(connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    def close(self) -> None:
        """Accept the connections that clients have made so far, and no more."""
        sockets, self._sockets = self._sockets, []
        if self._pause is not None:
            self._pause.cancel()
        for each in sockets:
            self._loop.remove_reader(each.fileno())
            _refuse_new(each)
            while self._accept(each):
                pass
            each.close()

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._context)
        except (OSError, asyncio.CancelledError) as error:  # the client has left, or speaks no TLS
            _log.debug("a connection was not opened: %r", error)

    def _resume(self) -> None:
        self._pause = None
        for each in self._sockets:
            self._loop.add_reader(each.fileno(), self._accept_some, each)

    def _accept_some(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if not self._accept(listening):
                return

    def _accept(self, listening: socket.socket) -> bool:
        """Accept one connection; False if there is none, or no descriptor for it."""
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:  # the client has left
            return True
        except OSError as error:
            self._starve(error)
            return False
        self.adopt(connection)
        return True

    def _starve(self, error: OSError) -> None:
        """Stop accepting for a moment: a descriptor is missing, and the kernel would report that without pause."""
        if self._pause is not None or not self._sockets:
            return
        made_room = self._make_room()
        now = self._loop.time()
        if now - self._warned_at >= _WARNING_S:
            self._warned_at = now
            _log.warning(
                "port %d cannot accept a connection: %s; %s. Raise the limit of open files (ulimit -n), or lower "
                "--idle-connection-secs",
                self.number,
                error.strerror or error,
                "the longest idle connections are closed" if made_room else "no connection is idle",
            )
        for each in self._sockets:
            self._loop.remove_reader(each.fileno())
        self._pause = self._loop.call_later(_ROOM_S if made_room else _PAUSE_S, self._resume)


_SO_ATTACH_FILTER = 26
_WITHOUT_SYN = b"".join(
    struct.pack("HBBI", code, if_true, if_false, value)
    for code, if_true, if_false, value in (
        (0x30, 0, 0, 13),  # load the byte of the TCP header that has the flags
        (0x45, 0, 1, 0x02),  # is SYN among them?
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFFFFFF),  # keep
    )
)


def _refuse_new(listening: socket.socket) -> None:
    """Let the kernel establish no further connection, so that none is reset between the last accept and the close.

    Clients try again, and are then refused or find another server. Linux alone can do it.
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(_WITHOUT_SYN)
    try:
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 4, ctypes.addressof(program)))
    except OSError:  # a sandbox without filters: a connection may come between
        _log.debug("new connections cannot be refused before the port is closed", exc_info=True)
