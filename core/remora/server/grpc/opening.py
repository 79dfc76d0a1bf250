"""Choice of the gRPC transport by the options.

The package of a transport is imported here and may be missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from remora.protocols.http2 import frames
from remora.protocols.restriction import Restrictions
from remora.server.host import ServerContext
from remora.server.http.exchange import Service
from remora.server.http.http1_listener_state import Handover
from remora.server.shutdown import Drainable, in_own_thread
from remora.system.install_advice import install_command
from remora.tensors.shared_memory import Regions

if TYPE_CHECKING:
    from remora.server.connections import Accept
    from remora.server.grpc.grpcio_transport import GrpcServer
    from remora.server.grpc.listener import OwnGrpc
    from remora.server.http.http2 import Http2Listener
    from remora.server.listening import Port

_log = logging.getLogger("remora.server")


class GrpcTransport(Drainable, Protocol):
    """gRPC as a part of the server."""

    @property
    def listeners(self) -> Sequence[Http2Listener]:
        """Listeners of all its ports, whose connections the server sweeps and closes."""

    @property
    def ports(self) -> Sequence[Port]:
        """Its open ports."""

    @property
    def on_http_port(self) -> bool:
        """True if the HTTP port accepts gRPC."""

    @property
    def starts_late(self) -> bool:
        """True if `start` opens the port, while the models load and the HTTP port answers."""

    async def listen(self) -> int:
        """Open the dedicated port before the models load, and return its number or 0."""

    async def start(self) -> int:
        """Open the dedicated port after imports in another thread, and return its number or 0."""

    def share_port(self, service: Service) -> Handover:
        """Return the handover for HTTP/2 connections on the HTTP port.

        ``service`` answers requests other than gRPC.
        """


def open_grpc(context: ServerContext, restricted: Restrictions, regions: Regions, accept: Accept) -> GrpcTransport:
    """Return the transport that the options select, or `NoGrpc` without its package.

    Raises ConfigError if the forward pattern is not a regular expression.
    """
    options = context.options
    if not (options.allow_grpc or options.grpc_on_http_port):
        return NoGrpc()
    open_own = partial(_open_own, context, restricted, regions, accept)
    if options.grpc_transport == "grpcio":
        return Grpcio(context, regions, (open_own() or NoGrpc()) if options.grpc_on_http_port else NoGrpc())
    return (open_own() or NoGrpc()) if options.grpc_on_http_port else LateGrpc(open_own)


def _open_own(context: ServerContext, restricted: Restrictions, regions: Regions, accept: Accept) -> OwnGrpc | None:
    """Return gRPC on the built-in HTTP/2, or None without its package."""
    try:
        from remora.server.grpc.listener import OwnGrpc
    except ImportError as error:
        _raise_unless_foreign(error)
        _log.warning("gRPC is off: %s. Install it with: %s", error, install_command("grpc"))
        return None
    return OwnGrpc(context, restricted, regions, accept)


def _raise_unless_foreign(error: ImportError) -> None:
    """Raise if a module of remora itself cannot be imported: no further package would mend that."""
    if (error.name or "").partition(".")[0] == "remora":
        raise error


class NoGrpc:
    """Absence of gRPC: it is disabled, or its package is not installed."""

    listeners: Sequence[Http2Listener] = ()
    ports: Sequence[Port] = ()
    on_http_port = False
    starts_late = False

    async def listen(self) -> int:
        return 0

    async def start(self) -> int:
        return 0

    def share_port(self, _service: Service) -> Handover:
        """Return a handover that refuses HTTP/2."""
        return _refuse_http2

    def announce(self) -> None:
        """Do nothing."""

    def stop_accepting(self) -> None:
        """Do nothing."""

    async def drain(self, _end: float) -> bool:
        """Return True."""
        return True

    def close(self) -> bool:
        """Return True."""
        return True


class LateGrpc(NoGrpc):
    """gRPC on the built-in HTTP/2 and a dedicated port, imported while the HTTP port answers.

    The import would delay the first answer over HTTP.

    Args:
        open_own: imports and returns the transport, or None without its package. It runs in another thread.
    """

    starts_late = True

    def __init__(self, open_own: Callable[[], OwnGrpc | None]) -> None:
        self._open_own = open_own
        self._own: OwnGrpc | None = None

    async def start(self) -> int:
        """See `GrpcTransport.start`. Raises as `OwnGrpc` and `OwnGrpc.listen` do."""
        own = await asyncio.get_running_loop().run_in_executor(None, self._open_own)
        if own is None:
            return 0
        self._own, self.listeners, self.ports = own, own.listeners, own.ports
        return await own.listen()

    def stop_accepting(self) -> None:
        """See `OwnGrpc.stop_accepting`."""
        if self._own is not None:
            self._own.stop_accepting()

    def close(self) -> bool:
        """See `OwnGrpc.close`."""
        return self._own is None or self._own.close()


class Grpcio(NoGrpc):
    """gRPC on grpcio and a dedicated port, opened and stopped in other threads.

    Both would block the event loop. grpcio cannot take over a connection of the HTTP port.

    Args:
        context: the parts of the server.
        regions: shared-memory regions of clients.
        on_http: the transport of the HTTP port, whose `GrpcTransport.listen` is not called.
    """

    starts_late = True

    def __init__(self, context: ServerContext, regions: Regions, on_http: GrpcTransport) -> None:
        self._context = context
        self._regions = regions
        self._on_http = on_http
        self.on_http_port = on_http.on_http_port
        self._server: GrpcServer | None = None
        self._opening: asyncio.Future[int] | None = None

    async def listen(self) -> int:
        """Return 0, because `start` opens the port."""
        self.listeners = self._on_http.listeners
        return 0

    def share_port(self, service: Service) -> Handover:
        """See `GrpcTransport.share_port`."""
        return self._on_http.share_port(service)

    def stop_accepting(self) -> None:
        """See `Drainable.stop_accepting`."""
        self._on_http.stop_accepting()

    def close(self) -> bool:
        """See `Drainable.close`."""
        return self._on_http.close()

    async def start(self) -> int:
        """See `GrpcTransport.start`."""
        self.listeners = ()  # because the server has those of the HTTP port since `listen`
        self._opening = asyncio.get_running_loop().run_in_executor(None, self.start_server)
        return await asyncio.shield(self._opening)

    def start_server(self) -> int:
        """Import grpcio and open its port; return the port number, or 0 without grpcio. It blocks."""
        try:
            from remora.server.grpc.grpcio_transport import GrpcServer
        except ImportError as error:
            _raise_unless_foreign(error)
            _log.warning("gRPC is off: %s. Install it with: %s", error, install_command("grpcio"))
            return 0
        server = GrpcServer(self._context.engine, self._context.options, self._regions, keys=self._context.keys)
        port = server.start()
        self._server = server
        return port

    async def drain(self, end: float) -> bool:
        """See `Drainable.drain`; a port that is being opened is awaited first."""
        loop = asyncio.get_running_loop()
        if self._opening is not None:
            await asyncio.wait((self._opening,), timeout=max(end - loop.time(), 0.0))
        if self._server is None:
            return True
        return await in_own_thread(self._server.stop, max(end - loop.time(), 0.0))


def _refuse_http2(transport: asyncio.Transport, _received: bytes) -> None:
    """Close an HTTP/2 connection with HTTP_1_1_REQUIRED (RFC 9113 section 7)."""
    text = b"gRPC is off, its package is not installed: use HTTP/1.1"
    transport.write(frames.settings() + frames.goaway(0, frames.HTTP_1_1_REQUIRED, text))
    transport.close()
