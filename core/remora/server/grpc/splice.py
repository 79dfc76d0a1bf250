"""Connections handed on, byte for byte, to a server behind a private socket; the law: little waits, and ends are told.

What one side sends is written to the other. A side that does not read leaves the other unread. A client that sends no
more may still be answered; a server that sends no more is done, and so is the connection once the client has it all;
a side that is lost takes the other with it. Nothing here looks at the bytes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import cast

_log = logging.getLogger("remora.http")

_HTTP_1_1_REQUIRED = 0xD
"""The reason of HTTP/2 (RFC 9113 7) that sends clients to HTTP/1.1."""


def goaway(reason: str) -> bytes:
    """What a server that does not speak HTTP/2 says in it: empty settings, and the end of the connection."""
    text = reason.encode("ascii", "replace")
    settings = b"\0\0\0\4\0\0\0\0\0"
    length = (8 + len(text)).to_bytes(3, "big")
    return settings + length + b"\7\0\0\0\0\0" + b"\0\0\0\0" + _HTTP_1_1_REQUIRED.to_bytes(4, "big") + text


class NoServerError(Exception):
    """There is nobody to hand connections to; the text is for the client."""


class Splices:
    """The connections of a port that were handed on.

    ``open_server`` gives the address of the socket to hand them to, in the abstract namespace of Linux; it is asked
    for each, so the server may be started for the first. It raises NoServerError. All in the loop's thread.
    """

    def __init__(self, open_server: Callable[[], Awaitable[str]]) -> None:
        self._open_server = open_server
        self._clients: dict[_Side, asyncio.Task[None] | None] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def take(self, transport: asyncio.Transport, received: bytes) -> None:
        """Hand a connection on, with what was received of it. Its protocol hears nothing more."""
        transport.pause_reading()
        client = _Side(self._forget)
        client.transport = transport
        transport.set_protocol(client)
        self._clients[client] = asyncio.get_running_loop().create_task(self._join(client, received))

    def end(self) -> None:
        """Their clients may send no more: the server closes them, and each ends once its client has what was sent."""
        for client in self._clients:
            client.eof_received()

    def abort(self) -> None:
        """Close all of them without further ado."""
        for client in list(self._clients):
            client.transport.abort()

    async def _join(self, client: _Side, received: bytes) -> None:
        loop = asyncio.get_running_loop()
        server = _Side()
        server.other = client  # a server of HTTP/2 may speak first
        try:
            address = await self._open_server()
            inner = socket.socket(socket.AF_UNIX)
            inner.setblocking(False)
            try:
                inner.connect(f"\0{address}")  # at once, or not at all: it is a queue of this machine
                transport, _ = await loop.create_unix_connection(lambda: server, sock=inner)
            except BaseException:
                inner.close()
                raise
        except NoServerError as error:
            client.refuse(str(error))
            return
        except OSError as error:
            _log.warning("a connection could not be handed on: %s", error)
            client.transport.abort()
            return
        except Exception:  # unread, it would stay open for ever
            _log.exception("a connection could not be handed on")
            client.transport.abort()
            return
        if client.transport.is_closing():
            transport.abort()
            return
        self._clients[client] = None
        client.other = server
        client.transport.resume_reading()  # first: what is written may be too much to read on
        transport.write(received)

    def _forget(self, client: _Side) -> None:
        task = self._clients.pop(client, None)
        if task is not None:
            task.cancel()


class _Side(asyncio.Protocol):
    """One end: what is received here, the other sends."""

    def __init__(self, lost: Callable[[_Side], None] | None = None) -> None:
        self.transport = cast(asyncio.Transport, None)
        self.other: _Side | None = None
        self._lost = lost  # for a client: who is to hear of its end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        """This end sends no more. A client stays, to be answered; without its server it is closed by its loss."""
        other = self.other
        if self._lost is None or other is None or other.transport.is_closing():
            return False
        other.transport.write_eof()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if self._lost is not None:
            self._lost(self)
        other = self.other
        if other is None or other.transport.is_closing():
            return
        if error is None:
            other.transport.close()  # once it has what was sent
        else:
            other.transport.abort()

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def refuse(self, reason: str) -> None:
        """Say in HTTP/2 that it is not spoken here, and end."""
        if not self.transport.is_closing():
            self.transport.write(goaway(reason))
            self.transport.close()
