"""Search for clients that have gone behind a half-closed HTTP/1.1 connection.

A client that has closed its sending side may still read its answers (RFC 9112 9.6), and cannot be told from one that
has closed the connection. While such a client waits for long, an interim response is sent (RFC 9110 15.2): the system
of a client that has gone resets the connection, and the request is cancelled. No other client is disturbed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from remora.protocols.http1 import CONTINUE

_FIRST_S = 3.0
"""Wait before the first interim response; each later one comes after twice the time."""
_REPLY_S = 0.5
"""Time in which the client's system resets the connection."""


def watch(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, may_send: Callable[[], bool]) -> None:
    """Abort a half-closed connection once its client is known to have gone, until it is closed.

    ``may_send`` returns True while the client waits for an answer that an interim response may precede.
    """
    _Watch(loop, transport, may_send).wait(_FIRST_S)


class _Watch:
    """Timer of one half-closed connection."""

    __slots__ = ("_loop", "_may_send", "_transport")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, may_send: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._may_send = may_send
        self._loop = loop

    def wait(self, seconds: float) -> None:
        """Send the next interim response after some time."""
        self._loop.call_later(seconds, self._send, seconds)

    def _send(self, waited_s: float) -> None:
        if self._transport.is_closing():
            return
        if self._may_send():
            self._transport.write(CONTINUE)
            self._loop.call_later(_REPLY_S, self._check)
        self.wait(2 * waited_s)

    def _check(self) -> None:
        if self._transport.is_closing():
            return
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
