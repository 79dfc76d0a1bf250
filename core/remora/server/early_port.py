"""HTTP port that is open while the server is still being imported.

It peeks at the first bytes of each connection and answers /livez. All other connections wait for the server.

Invariant: no connection is refused or loses bytes that the server needs.
"""

from __future__ import annotations

import selectors
import socket
import threading

from remora.server.listening_sockets import listen

_LIVEZ_REQUESTS = (b"GET /livez ", b"HEAD /livez ")
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nCache-Control: no-store\r\n"
    b"Content-Length: 3\r\nConnection: close\r\n\r\n"
)


class EarlyPort:
    """Port that listens in a dedicated thread until `take` returns its sockets.

    Raises OSError if the address is not numeric or cannot be bound.
    """

    def __init__(self, address: str, port: int, *, reuse_port: bool = False) -> None:
        self._listening = listen(address, port, reuse_port=reuse_port)
        self._listening.setblocking(False)
        self._stop_receiver, self._stop_sender = socket.socketpair()
        self._waiting: dict[socket.socket, None] = {}  # in order of arrival
        self._thread = threading.Thread(target=self._answer, name="remora early port", daemon=True)
        self._thread.start()

    def take(self) -> tuple[socket.socket, list[socket.socket]]:
        """Stop, and return the listening socket and the waiting connections in order of arrival.

        Call it once.
        """
        self._stop_sender.close()
        self._thread.join()
        return self._listening, [*self._waiting]

    def _answer(self) -> None:
        with selectors.DefaultSelector() as selector, self._stop_receiver:
            selector.register(self._stop_receiver, selectors.EVENT_READ)
            selector.register(self._listening, selectors.EVENT_READ, self._accept)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    key.data(key.fileobj, selector)

    def _accept(self, listening: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, ConnectionError):  # the client has disconnected
            return
        except OSError:  # no descriptors: stop polling, which would spin, and leave the connection to the server
            selector.unregister(listening)
            return
        connection.setblocking(False)
        self._waiting[connection] = None
        selector.register(connection, selectors.EVENT_READ, self._look_at)

    def _look_at(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        """Answer a request for /livez; leave every other connection to the server."""
        selector.unregister(connection)
        try:
            request = connection.recv(4096, socket.MSG_PEEK)
            if not request.startswith(_LIVEZ_REQUESTS) or not request.endswith(b"\r\n\r\n"):
                return
            connection.recv(len(request))  # because closing a socket with unread bytes resets the connection
            connection.send(_HEAD if request.startswith(b"HEAD") else _HEAD + b"ok\n")
        except OSError:
            pass
        self._waiting.pop(connection, None)
        connection.close()
