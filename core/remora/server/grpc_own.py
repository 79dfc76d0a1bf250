"""gRPC on our own HTTP/2: its ports and its end; the law: what is under way is answered before a connection closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from remora.protocols.restriction import Restrictions
from remora.protocols.v2_grpc import MAX_MESSAGE_BYTES, SERVICE
from remora.regions import Regions
from remora.server.doors import Inside
from remora.server.early_port import BACKLOG
from remora.server.grpc_http2 import GrpcFront, StreamBehaviour
from remora.server.http import Handover, Service
from remora.server.http2 import Http2Listener
from remora.server.rpcs import HEALTH_SERVICE, Context, Rpcs

_STREAMS = 256


class OwnGrpc:
    """Answers gRPC on a port of its own and on HTTP's. All of it in the loop's thread.

    Raises ConfigError when the forward pattern is no regular expression.
    """

    def __init__(self, inside: Inside, restricted: Restrictions, regions: Regions) -> None:
        self._inside = inside
        options = inside.options
        self._calls = Rpcs(inside.engine, restricted, _STREAMS, options.grpc_header_forward_pattern, regions)
        self._fronts: list[GrpcFront] = []
        self._sockets: list[asyncio.Server] = []
        self.listeners: list[Http2Listener] = []
        """Of all ports, whose connections are the server's to close."""

    async def listen(self) -> int:
        """Open gRPC's own port; returns it. Raises OSError."""
        options = self._inside.options
        address = options.grpc_address or options.http_address
        listener = self._listener(None, MAX_MESSAGE_BYTES)
        server = await asyncio.get_running_loop().create_server(
            listener.connection,
            address,
            options.grpc_port,
            backlog=BACKLOG,
            reuse_port=options.reuse_grpc_port or None,
        )
        self._sockets.append(server)
        return int(server.sockets[0].getsockname()[1])

    def beside(self, service: Service) -> Handover:
        """What takes the connections of HTTP/2 on HTTP's port: ``service`` answers what is not gRPC there."""
        return self._listener(service, self._inside.options.http_max_input_size).take

    def _listener(self, service: Service | None, most_bytes: int) -> Http2Listener:
        inside = self._inside
        front = GrpcFront(
            inside.engine,
            self._calls,
            inside.mailbox,
            most_bytes,
            workers=inside.options.grpc_infer_thread_count,
            streams=_STREAMS,
            reflection=reflection((SERVICE, HEALTH_SERVICE)),
        )
        self._fronts.append(front)
        listener = Http2Listener(front.open, service, inside.options.http_max_input_size)
        self.listeners.append(listener)
        return listener

    def end(self) -> None:
        """Take no more connections, and no more inference on those there are."""
        self._calls.drain()
        for server in self._sockets:
            server.close()

    def close(self) -> None:
        """Let go of the threads."""
        for front in self._fronts:
            front.close()


def reflection(services: Sequence[str]) -> Callable[[str], StreamBehaviour | None]:
    """gRPC's reflection, which a package of grpcio's answers; nothing without it."""
    known: list[Any] = []

    def find(path: str) -> StreamBehaviour | None:
        if not path.startswith("/grpc.reflection."):
            return None
        if not known:
            try:
                from remora.server.grpcio_reflection import Reflection
            except ImportError:
                return None
            known.append(Reflection(services))
        handler = known[0].service(_Asked(path))
        if handler is None:
            return None

        def answer(messages: Iterator[bytes], context: Context) -> Iterator[bytes]:
            asked = map(handler.request_deserializer, messages)
            return map(handler.response_serializer, handler.stream_stream(asked, context))

        return answer

    return find


class _Asked(NamedTuple):
    """What grpcio's handlers are asked with."""

    method: str
