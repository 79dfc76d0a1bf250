"""Ports and shutdown of gRPC on the built-in HTTP/2 transport.

Invariant: calls in flight are answered before their connection closes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

from remora.errors import UnavailableError
from remora.options import ServerOptions
from remora.protocols.grpc.infer import SERVICE
from remora.protocols.grpc.status import open_forward
from remora.protocols.http2.keepalive import KeepalivePolicy
from remora.protocols.restriction import Restrictions
from remora.server.connections import PortSpec
from remora.server.grpc.front import GrpcFront
from remora.server.grpc.rpcs import HEALTH_SERVICE, MAX_STREAMS, Rpcs
from remora.server.host import ServerContext
from remora.server.http.exchange import Service
from remora.server.http.http1_listener_state import Handover
from remora.server.http.http2 import ALPN, Http2Listener, OpenRequest
from remora.server.http.http2_requests import Requests
from remora.server.listening import Port, bind
from remora.server.tls import PortTls, grpc_files
from remora.tensors.shared_memory import Regions

if TYPE_CHECKING:
    from remora.server.connections import Accept
    from remora.server.grpc.reflection import Reflection


class OwnGrpc:
    """gRPC server on a dedicated port and on the HTTP port. Use it in the loop's thread.

    Raises ConfigError if the forward pattern is not a regular expression.
    """

    def __init__(
        self,
        context: ServerContext,
        restricted: Restrictions,
        regions: Regions,
        accept: Accept,
    ) -> None:
        self.starts_late = False
        self._context = context
        self._accept = accept
        options = context.options
        withholds = None if context.keys is None else context.keys.withholds
        forward = open_forward(options.grpc_header_forward_pattern, withholds)
        self._calls = Rpcs(context.engine, restricted, MAX_STREAMS, forward, regions)
        if context.keys is not None:
            self._calls.check_content = context.keys.check_content
        self._fronts: list[GrpcFront] = []
        self.ports: list[Port] = []
        self.listeners: list[Http2Listener] = []
        """Listeners of all ports; the server closes their connections."""

    @property
    def on_http_port(self) -> bool:
        """See `GrpcTransport.on_http_port`."""
        return self._context.options.grpc_on_http_port

    async def listen(self) -> int:
        """Open the dedicated gRPC port and return its number, or 0 if the options disable it.

        Raises UnavailableError if the address cannot be bound, ConfigError if TLS files cannot be used.
        """
        options = self._context.options
        if not options.allow_grpc:
            return 0
        address, port = options.grpc_address or options.http_address, options.grpc_port
        files = grpc_files(options)
        tls = None if files is None else PortTls(files, (ALPN,))
        listener = self._listener(None, options.message_bytes)
        try:
            sockets = await bind(address, port, reuse_port=options.reuse_grpc_port)
        except OSError as error:
            target = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            raise UnavailableError(
                f"gRPC cannot listen on {target}: {error.strerror or error}; is another server there? "
                "Choose another --grpc-port"
            ) from error
        self.ports.append(self._accept(sockets, listener, PortSpec("gRPC", address, port), tls))
        return self.ports[0].number

    async def start(self) -> int:
        """Return the number of the dedicated port, which `listen` has opened, or 0."""
        return self.ports[0].number if self.ports else 0

    def share_port(self, service: Service) -> Handover:
        """Return the handover for HTTP/2 connections on the HTTP port.

        ``service`` answers requests other than gRPC.
        """
        return self._listener(service, self._context.options.http_max_input_size).take

    def _listener(self, service: Service | None, most_bytes: int) -> Http2Listener:
        context = self._context
        front = GrpcFront(
            context.engine,
            self._calls,
            context.mailbox,
            most_bytes,
            workers=context.options.grpc_infer_thread_count,
            streams=MAX_STREAMS,
            reflection=_reflection_of((SERVICE, HEALTH_SERVICE)),
            compression=context.options.grpc_infer_response_compression_level,
        )
        self._fronts.append(front)
        requests = Requests(service, context.options.http_max_input_size) if service is not None else None
        open_call: OpenRequest = front.open
        if context.keys is not None:
            open_call = context.keys.over_calls(open_call)
        if context.access_log is not None:  # outside, so that refused calls are logged, too
            open_call = context.access_log.over_calls(open_call)
        open_request = None if requests is None else requests.open
        listener = Http2Listener(open_call, open_request, terms_of(context.options), context.held)
        if requests is not None:
            listener.answers = requests.answers
        self.listeners.append(listener)
        return listener

    def announce(self) -> None:
        """Do nothing, because the listeners announce the end on their connections."""

    def stop_accepting(self) -> None:
        """Accept no new connections and refuse new inference on open connections."""
        self._calls.drain()
        for front in self._fronts:
            front.drain()
        for port in self.ports:
            port.close()

    async def drain(self, _end: float) -> bool:
        """Return True, because the calls in flight drain with their connections."""
        return True

    def close(self) -> bool:
        """Shut down the threads without waiting."""
        for front in self._fronts:
            front.close()
        return True


def terms_of(options: ServerOptions) -> KeepalivePolicy:
    """Return the keepalive policy with the age limits of connections [R19].

    The options are in milliseconds.
    """
    return KeepalivePolicy(
        silence_s=options.grpc_keepalive_time / 1e3,
        answer_s=options.grpc_keepalive_timeout / 1e3,
        without_calls=options.grpc_keepalive_permit_without_calls,
        pings=options.grpc_http2_max_pings_without_data,
        ping_interval_s=options.grpc_http2_min_recv_ping_interval_without_data / 1e3,
        strikes=options.grpc_http2_max_ping_strikes,
        age_s=options.grpc_max_connection_age / 1e3 or inf,
        grace_s=options.grpc_max_connection_age_grace / 1e3 or inf,
    )


def _reflection_of(services: Sequence[str]) -> Callable[[str], Callable[[bytes], bytes] | None]:
    """Return a function that finds reflection RPCs by path.

    It imports reflection at the first such call.
    """
    opened: list[Reflection] = []

    def find(path: str) -> Callable[[bytes], bytes] | None:
        if not path.startswith("/grpc.reflection."):
            return None
        if not opened:
            from remora.server.grpc.reflection import Reflection

            opened.append(Reflection(services))
        return opened[0].find(path)

    return find
