"""Connections of all ports: opened, counted, swept for timeouts and drained at shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from remora.options import ServerOptions
from remora.server.early_port import EarlyPort
from remora.server.http.exchange import Service
from remora.server.http.held_bytes import HeldBytes
from remora.server.http.http1 import Connection
from remora.server.http.http1_listener import Listener
from remora.server.http.http1_listener_state import Handover
from remora.server.http.http1_state import STALL_LIMIT_S, SWEEP_S
from remora.server.listening import Port, bind
from remora.server.option_checks import StartError
from remora.statistics import HeldLoad, Histogram, ServerLoad
from remora.system.tuning import give_back

if TYPE_CHECKING:
    from remora.server.host_routes import HostRoute
    from remora.server.http.http2 import Http2Connection, Http2Listener
    from remora.server.tls import PortTls

    Accept = Callable[[list[socket.socket], Listener | Http2Listener, "PortSpec", PortTls | None], Port]
    """Returns a port on listening sockets that serves their connections by the listener; see `Connections.accept`."""

_log = logging.getLogger("remora.http")

_REPORT_S = 60.0
_TRIM_S = 1.0
"""Shortest time between two calls of the allocator to return memory to the system."""
_POLL_S = 0.01
_READ_TURNS = 2
"""Turns of the loop until it has read what had arrived before them: asyncio reads after the tasks of a turn."""
_CLOSED_AT_ONCE = 8
"""Idle connections to close at a time when file descriptors run out."""


class PortSpec(NamedTuple):
    """A port to open.

    Attributes:
        what: name in messages.
        address: address to listen on.
        port: number, 0 for any free one.
        routes: routes of the port's platform, which front processes need because they do not run its service.
    """

    what: str
    address: str
    port: int
    routes: Sequence[HostRoute] = ()


async def _read_arrived() -> None:
    """Have the loop read what clients have sent so far.

    After a pause of the process it may run timers first, and a client whose request has arrived seems to be silent.
    """
    for _ in range(_READ_TURNS):
        await asyncio.sleep(0)


class Connections:
    """Listeners, ports and connections of one server. Use it in the loop's thread.

    It is a `Drainable`: connections close after the answer in flight.

    Args:
        options: addresses and limits.
        early: the HTTP port, if it is already open.
        processes: number of processes with connections, which share the limit of held bytes.
    """

    def __init__(self, options: ServerOptions, early: EarlyPort | None = None, processes: int = 1) -> None:
        self._options = options
        self._early = early
        self._listeners: list[Listener | Http2Listener] = []
        self._inferring: list[Listener | Http2Listener] = []  # all but those of metrics
        self._ports: list[Port] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._shed: Counter[str] = Counter()
        self._reported: dict[str, int] = {}
        self._report_at = 0.0
        self.held = HeldBytes(options.max_held_bytes, options.max_connection_bytes, processes)
        """Bytes that the connections hold."""
        self.held.when_closed = self._return_memory
        self._return_at = 0.0

    def is_alone(self) -> bool:
        """Return True if no other inference can arrive in this loop turn while a request is handled.

        That is the case if one connection is open, and it has sent one request.
        """
        alone: Listener | Http2Listener | None = None
        for listener in self._inferring:
            if listener.connections:
                if alone is not None:
                    return False
                alone = listener
        return alone is not None and alone.is_alone()

    async def listen(self, service: Service, spec: PortSpec, http2: Handover | None = None) -> int:
        """Open a port, serve HTTP/1.1 on it and return its number.

        ``http2`` takes over HTTP/2 connections. Raises StartError if the address cannot be bound.
        """
        options, what = self._options, spec.what
        listener = Listener(
            service,
            max_body_bytes=options.http_max_input_size,
            max_chunks=options.http_max_chunks,
            http2=http2,
            held=self.held,
        )
        waiting: list[socket.socket] = []
        try:
            if what == "HTTP" and self._early is not None:
                listening, waiting = self._early.take()
                sockets = [listening]
            else:
                # A metrics port is not shared, because each scrape would reach a random process and its counts only.
                reuse = options.reuse_http_port and what != "metrics"
                sockets = await bind(spec.address, spec.port, reuse_port=reuse)
        except OSError as error:
            reason = f"{error.strerror or error}{self._remedy(what)}"
            raise StartError(f"cannot listen for {what} on {spec.address}:{spec.port}: {reason}") from error
        accepting = self.accept(sockets, listener, spec, self._tls(http2) if what == "HTTP" else None)
        self.add([listener], [accepting], infers=what != "metrics")
        for each in waiting:
            accepting.adopt(each)
        return accepting.number

    def _tls(self, http2: Handover | None) -> PortTls | None:
        """Return the TLS of the HTTP port. Raises ConfigError."""
        if not self._options.http_server_cert:
            return None
        from remora.server.tls import PortTls, http_files  # imported here, because most servers have no TLS

        files = http_files(self._options)
        return None if files is None else PortTls(files, ("http/1.1",) if http2 is None else ("h2", "http/1.1"))

    def accept(
        self,
        sockets: list[socket.socket],
        listener: Listener | Http2Listener,
        spec: PortSpec,
        tls: PortTls | None = None,
    ) -> Port:
        """Return a port on listening sockets that serves their connections by ``listener``.

        ``spec`` is for subclasses whose ports other processes serve.
        """
        return Port(sockets, listener.connection, self.make_room, tls)

    def add(self, listeners: Sequence[Listener | Http2Listener], ports: Sequence[Port], *, infers: bool = True) -> None:
        """Take over listeners and ports that another part has opened.

        ``infers`` is False for ports of metrics.
        """
        self._listeners += listeners
        self._inferring += listeners if infers else ()
        self._ports += ports

    def sweep(self) -> None:
        """Close connections that have timed out, now and every few seconds until `close`."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            listener.sweep(loop.time(), STALL_LIMIT_S, self._options.idle_connection_secs or inf)
        self._report_closed(loop.time())
        self._return_memory()
        self._sweeper = loop.call_later(SWEEP_S, self.sweep)

    def _return_memory(self) -> None:
        """Have the allocator return memory to the system if connections have given back much."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._return_at and self.held.has_freed_much():
            self._return_at = loop.time() + _TRIM_S
            loop.call_soon(loop.run_in_executor, None, give_back)  # when the objects of the connection are freed

    def _report_closed(self, now: float) -> None:
        """Log how many connections were closed, at most once a minute."""
        closed = Connections.closed(self)
        if closed == self._reported or now < self._report_at:
            return
        counts = (f"{count - self._reported.get(reason, 0)} {reason}" for reason, count in sorted(closed.items()))
        _log.info("connections closed: %s", ", ".join(each for each in counts if not each.startswith("0 ")))
        self._reported, self._report_at = closed, now + _REPORT_S

    def make_room(self) -> bool:
        """Close the lingering or else the longest idle connections.

        Returns False if there are none. This happens when descriptors have run out.
        """
        if any(listener.abort_lingering() for listener in self._listeners):
            return True
        idle = [connection for connection in self._open() if connection.is_idle]
        for connection in sorted(idle, key=lambda connection: connection.idle_since)[:_CLOSED_AT_ONCE]:
            connection.abort()
            self._shed["no_descriptor"] += 1
        return bool(idle)

    def count(self) -> dict[str, int]:
        """Return the number of open connections per protocol."""
        counts = {"http1": 0, "http2": 0}
        for listener in self._listeners:
            counts[listener.protocol] += len(listener.connections)
        return counts

    def answers(self) -> dict[int, int]:
        """Return the number of answers over HTTP by status, without those of the port of metrics."""
        counts: Counter[int] = Counter()
        for listener in self._inferring:
            counts.update(dict(listener.answers))
        return dict(counts)

    def closed(self) -> dict[str, int]:
        """Return the number of connections and HTTP/2 streams closed, by reason.

        The reasons are timeouts, errors of the client and a lack of descriptors.
        """
        counts = Counter(self._shed)
        for listener in self._listeners:
            counts.update(listener.closed.copy())
        return dict(counts)

    def held_load(self) -> HeldLoad:
        """Return the bytes that the connections hold."""
        return self.held.load()

    def load(self, lateness: Histogram) -> ServerLoad:
        """Return the load for the metrics."""
        return ServerLoad(self.answers(), lateness, self.held_load(), self.closed())

    def announce(self) -> None:
        """See `Drainable.announce`: answers carry ``Connection: close`` from now on."""
        for listener in self._listeners:
            listener.closing = True

    def stop_accepting(self) -> None:
        for port in self._ports:
            port.close()

    async def drain(self, end: float) -> bool:
        """See `Drainable.drain`.

        `close` tells whether a client still waits, because the engine may yet answer it.
        """
        loop = asyncio.get_running_loop()
        await _read_arrived()
        while self._close_idle() and loop.time() < end:
            await asyncio.sleep(_POLL_S)
            await _read_arrived()
        return True

    def close(self) -> bool:
        self._return_at = inf  # the executor may soon take no more work, and the process returns all its memory
        if self._sweeper is not None:
            self._sweeper.cancel()
        connections = self._open()
        answered = not any(connection.owes_an_answer for connection in connections)
        for connection in connections:
            connection.abort()
        for listener in self._listeners:
            listener.abort_lingering()
        return answered

    def _open(self) -> list[Connection | Http2Connection]:
        return [connection for listener in self._listeners for connection in listener.connections]

    def _close_idle(self) -> int:
        """Close connections without a request.

        Returns the number of those that remain or are being opened.
        """
        opening = sum(port.opening for port in self._ports)
        return sum(listener.close_idle() for listener in self._listeners) + opening

    def _remedy(self, what: str) -> str:
        flag = {"HTTP": "--http-port", "metrics": "--metrics-port"}.get(what)
        remedy = f"; is another server there? Choose another {flag}" if flag else ""
        if what == "metrics" and self._options.reuse_http_port:
            remedy += ": each process that shares the HTTP port needs its own, or --allow-metrics=false"
        return remedy
