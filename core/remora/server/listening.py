"""Listening sockets that lose no connection at shutdown or when descriptors run out.

The event loop's servers do: they reset connections that the kernel has established when they close, and drop those for
which there is no descriptor.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from remora.server.listening_sockets import BACKLOG, is_numeric, listen

if TYPE_CHECKING:
    from remora.server.tls import PortTls

_log = logging.getLogger("remora.server")

_AT_ONCE = 64
"""Connections to accept in one turn of the event loop."""
_PAUSE_S = 1.0
"""How long accepting pauses when there is no descriptor and no idle connection to close."""
_ROOM_S = 0.01
"""How long accepting pauses while idle connections are being closed."""
_WARNING_S = 60.0
"""Minimum interval between warnings about missing descriptors."""
_SPARE = 16
"""Descriptors that connections leave to model files, modules that are imported late and pages that read /proc."""


async def bind(address: str, port: int, *, reuse_port: bool) -> list[socket.socket]:
    """Return listening sockets for an address or a host name. Raises OSError."""
    if is_numeric(address):  # a numeric address needs no resolver, whose codec for names takes a millisecond to import
        try:
            return [listen(address, port, reuse_port=reuse_port)]
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(error.errno, os.strerror(error.errno)) from error  # without the address, which callers name
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
    """Port that accepts connections until it is closed. Use it in the event loop's thread.

    Args:
        sockets: listening sockets; none if connections are only adopted.
        protocol: creates the protocol of a connection.
        make_room: closes idle connections if descriptors have run out; returns False if there are none.
        tls: TLS of the connections; None for plain ones.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        protocol: Callable[[], asyncio.BaseProtocol],
        make_room: Callable[[], bool],
        tls: PortTls | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._protocol = protocol
        self._make_room = make_room
        self._tls = tls
        if tls is not None:
            tls.follow()
        self._opening: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._is_held = False
        self._warned_at = -_WARNING_S
        self.number = int(sockets[0].getsockname()[1]) if sockets else 0
        for each in sockets:
            each.setblocking(False)
        self._resume()

    @property
    def opening(self) -> int:
        """Number of accepted connections without a protocol so far."""
        return len(self._opening)

    def adopt(self, connection: socket.socket) -> None:
        """Serve an accepted connection."""
        connection.setblocking(False)
        opening = self._loop.create_task(self._open(connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    def hold(self) -> None:
        """Accept nothing until `go_on`; connections wait in the kernel's queue."""
        self._is_held = True
        for each in self._sockets:
            self._loop.remove_reader(each.fileno())

    def go_on(self) -> None:
        """Accept again after `hold`."""
        self._is_held = False
        if self._pause is None:
            self._resume()

    def close(self) -> None:
        """Accept the connections that are already established, then stop listening."""
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
            context = self._tls.context if self._tls is not None else None
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=context)
        except (OSError, asyncio.CancelledError) as error:  # the client has disconnected or does not use TLS
            _log.debug("a connection was not opened: %r", error)

    def _resume(self) -> None:
        self._pause = None
        for each in self._sockets if not self._is_held else ():
            self._loop.add_reader(each.fileno(), self._accept_some, each)

    def _accept_some(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if not self._accept(listening):
                return

    def _accept(self, listening: socket.socket) -> bool:
        """Accept one connection; return False if there is no connection or no descriptor."""
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:  # the client has disconnected
            return True
        except OSError as error:
            if self._pause is None and self._sockets:
                made_room = self._make_room()
                self._warn(f"cannot accept a connection: {error.strerror or error}", made_room)
                self._rest(_ROOM_S if made_room else _PAUSE_S)
            return False
        self.adopt(connection)
        if _is_among_last(connection.fileno()) and self._pause is None and self._sockets and self._make_room():
            self._warn(f"has fewer than {_SPARE} descriptors left", made_room=True)
            self._rest(_ROOM_S)
            return False
        return True

    def _warn(self, problem: str, made_room: bool) -> None:
        now = self._loop.time()
        if now - self._warned_at < _WARNING_S:
            return
        self._warned_at = now
        _log.warning(
            "port %d %s; %s. Raise the limit of open files (ulimit -n), or lower --idle-connection-secs",
            self.number,
            problem,
            "the longest idle connections are closed" if made_room else "no connection is idle",
        )

    def _rest(self, seconds: float) -> None:
        """Pause accepting while descriptors are missing.

        The socket would stay readable and the loop would spin.
        """
        for each in self._sockets:
            self._loop.remove_reader(each.fileno())
        self._pause = self._loop.call_later(seconds, self._resume)


def _is_among_last(descriptor: int) -> bool:
    """Tell whether nearly all descriptors of the process are in use.

    The kernel gives out the lowest free number.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - _SPARE


_SO_ATTACH_FILTER = 26
_WITHOUT_SYN = b"".join(
    struct.pack("HBBI", code, if_true, if_false, value)
    for code, if_true, if_false, value in (
        (0x30, 0, 0, 13),  # load the flags byte of the TCP header
        (0x45, 0, 1, 0x02),  # test the SYN flag
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFFFFFF),  # keep
    )
)


def _refuse_new(listening: socket.socket) -> None:
    """Make the kernel drop new SYN packets.

    A connection established between the last accept and the close would otherwise be reset. Clients retry, and are then
    refused or reach another server. This works on Linux only.
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(_WITHOUT_SYN)
    try:
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 4, ctypes.addressof(program)))
    except OSError:  # a sandbox without socket filters; a connection may be reset
        _log.debug("new connections cannot be refused before the port is closed", exc_info=True)
