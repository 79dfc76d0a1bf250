"""The HTTP port while the server is still being imported; the law: it answers /livez, and whatever else comes waits.

The first bytes of a connection are looked at and not taken. What does not ask for /livez is the server's to answer, as
soon as it is there: nobody is refused who would have been served.
"""

from __future__ import annotations

import selectors
import socket
import threading

_BACKLOG = 1024
_ASKED = (b"GET /livez ", b"HEAD /livez ")
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nCache-Control: no-store\r\n"
    b"Content-Length: 3\r\nConnection: close\r\n\r\n"
)


class EarlyPort:
    """Listens in a thread of its own until `take` hands over what it holds.

    Raises OSError when the address, which must be one of numbers, cannot be listened to.
    """

    def __init__(self, address: str, port: int, *, reuse_port: bool = False) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        socket.inet_pton(family, address)
        self._listening = socket.create_server((address, port), family=family, backlog=_BACKLOG, reuse_port=reuse_port)
        self._listening.setblocking(False)
        self._told, self._end = socket.socketpair()
        self._held: dict[socket.socket, None] = {}  # who came first is served first
        self._thread = threading.Thread(target=self._answer, name="remora early port", daemon=True)
        self._thread.start()

    def take(self) -> tuple[socket.socket, list[socket.socket]]:
        """Stop; returns the listening socket and the connections that wait, in their order. To be called once."""
        self._end.close()
        self._thread.join()
        return self._listening, [*self._held]

    def _answer(self) -> None:
        with selectors.DefaultSelector() as selector, self._told:
            selector.register(self._told, selectors.EVENT_READ)
            selector.register(self._listening, selectors.EVENT_READ, self._accept)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    key.data(key.fileobj, selector)

    def _accept(self, listening: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, ConnectionError):  # gone again
            return
        except OSError:  # too many are open, which would be said without pause: the server will see to it
            selector.unregister(listening)
            return
        connection.setblocking(False)
        self._held[connection] = None
        selector.register(connection, selectors.EVENT_READ, self._look_at)

    def _look_at(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        """Answer it when it asks for /livez, else leave it to the server, which meets its faults."""
        selector.unregister(connection)
        try:
            asked = connection.recv(4096, socket.MSG_PEEK)
            if not asked.startswith(_ASKED) or not asked.endswith(b"\r\n\r\n"):
                return
            connection.recv(len(asked))  # what is closed with bytes unread is reset
            connection.send(_HEAD if asked.startswith(b"HEAD") else _HEAD + b"ok\n")
        except OSError:
            pass
        self._held.pop(connection, None)
        connection.close()
