"""Listener of HTTP/1.1: the state that its connections share, and what makes them."""

from __future__ import annotations

from remora.server.http.http1 import Connection
from remora.server.http.http1_listener_state import ListenerState


class Listener(ListenerState[Connection]):
    """Listener of one port; see `ListenerState`."""

    def connection(self) -> Connection:
        """Return the protocol of a new connection."""
        return Connection(self)
