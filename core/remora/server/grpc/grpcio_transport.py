"""Transport of V2 over gRPC on the grpcio library, as a reference and fallback.

It passes bytes between grpcio and `rpcs`, which answers on both transports. Long calls run in a large thread pool,
short calls in a small one, and each stream uses two threads (`stream`). Only `--grpc-transport=grpcio` imports this
module, and no other module imports grpc.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

import grpc

from remora.errors import UnavailableError
from remora.options import ServerOptions
from remora.protocols.grpc.infer import MAX_MESSAGE_BYTES, SERVICE
from remora.protocols.restriction import Restrictions
from remora.server.grpc.reflection import REFLECTION_METHOD, REFLECTION_SERVICES, Reflection
from remora.server.grpc.rpcs import (
    HEALTH_SERVICE,
    MAX_STREAMS,
    Behaviour,
    CallContext,
    EngineCalls,
    Rpcs,
    status_of_error,
)
from remora.server.grpc.tls import read
from remora.tensors.shared_memory import DISABLED, Regions

_CODES: Mapping[int, Any] = {code.value[0]: code for code in grpc.StatusCode}


class GrpcioCalls:
    """Handlers, thread pools and calls in flight of one grpcio server. Thread-safe."""

    def __init__(self) -> None:
        self._pools: list[ThreadPoolExecutor] = []
        self._changed = threading.Condition()
        self._under_way = 0

    def pool(self, threads: int, name: str) -> ThreadPoolExecutor:
        """Create a thread pool for calls; `close` shuts it down."""
        pool = _Pool(self, threads, name)
        self._pools.append(pool)
        return pool

    def unary(self, behaviour: Behaviour, pool: ThreadPoolExecutor | None = None) -> Any:
        """Return a unary handler on bytes that maps errors to statuses; ``pool`` replaces the server's threads."""

        def serve(message: bytes, context: CallContext) -> bytes:
            self._follow(context)
            try:
                return behaviour(message, context)
            except Exception as error:
                _abort(context, error)

        if pool is not None:
            # grpcio's health service selects its thread pool by this attribute, too.
            serve.experimental_thread_pool = pool  # type: ignore[attr-defined]
        return grpc.unary_unary_rpc_method_handler(serve)

    def streaming(
        self, behaviour: Callable[[Iterator[bytes], CallContext], Iterator[bytes]], pool: ThreadPoolExecutor
    ) -> Any:
        """Return a streaming handler on bytes that maps errors to statuses; threads of ``pool`` write its answers."""

        def serve(messages: Iterator[bytes], context: CallContext) -> Iterator[bytes]:
            self._follow(context)
            try:
                yield from behaviour(messages, context)
            except Exception as error:
                _abort(context, error)

        serve.experimental_thread_pool = pool  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(serve)

    def begin(self) -> None:
        """Count one more call or task in flight."""
        with self._changed:
            self._under_way += 1

    def end(self) -> None:
        """Count one call or task less in flight."""
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def _follow(self, context: CallContext) -> None:
        """Count a call as in flight until its answer is sent."""
        self.begin()
        if not context.add_callback(self.end):
            self.end()

    def wait(self, timeout_s: float) -> bool:
        """Wait until no call is in flight; return False after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, timeout_s)

    def close(self) -> None:
        """Shut down the threads without waiting; running work finishes."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)


class _Pool(ThreadPoolExecutor):
    """Thread pool whose queued work counts as in flight, too."""

    def __init__(self, calls: GrpcioCalls, threads: int, name: str) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._calls = calls

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._calls.begin()
        try:
            future = super().submit(work, *args, **kwargs)
        except BaseException:
            self._calls.end()
            raise
        future.add_done_callback(lambda _: self._calls.end())
        return future


def _abort(context: Any, error: Exception) -> NoReturn:
    number, text = status_of_error(error)
    context.abort(_CODES[number], text)
    raise error  # unreachable: `abort` raises, which type checkers do not know


_LEVELS = ("none", "low", "medium", "high")
_GOODBYE_S = 1.0
"""How long clients without a call have to disconnect at shutdown, because a vanished client never does."""


class GrpcServer:
    """Server of V2, health and reflection on grpcio.

    Call `start` and `stop` once each, outside an event loop's thread.

    Args:
        engine: performs the calls.
        options: address, TLS, keepalive, compression and number of threads.
        regions: shared-memory regions of clients.
        streams: number of ModelStreamInfer calls that may be open at the same time; further ones are refused.

    Raises ConfigError if the pattern of forwarded metadata is not a regular expression.
    """

    def __init__(
        self, engine: EngineCalls, options: ServerOptions, regions: Regions = DISABLED, streams: int = MAX_STREAMS
    ) -> None:
        self._options = options
        restricted = Restrictions(options.grpc_restricted_protocol, "--grpc-restricted-protocol")
        self._rpcs = Rpcs(engine, restricted, streams, options.grpc_header_forward_pattern, regions)
        self._calls = GrpcioCalls()
        self._asking = self._calls.pool(4, "remora-grpc-asking")
        self._working = self._calls.pool(options.grpc_infer_thread_count, "remora-grpc")
        self._streaming = self._calls.pool(streams + 2, "remora-grpc-stream")
        self._reading = self._calls.pool(streams, "remora-grpc-reading")
        self._server: Any = None

    def start(self) -> int:
        """Bind the port, start serving and return the port number.

        Raises UnavailableError if the address cannot be bound, ConfigError if TLS files cannot be read.
        """
        server = grpc.server(self._working, options=_channel_options(self._options))
        server.add_generic_rpc_handlers(self._services())
        port = self._bind(server)
        server.start()
        self._server = server
        return port

    def _bind(self, server: Any) -> int:
        options = self._options
        address = options.grpc_address or options.http_address
        target = f"[{address}]:{options.grpc_port}" if ":" in address else f"{address}:{options.grpc_port}"
        try:
            if options.grpc_use_ssl or options.grpc_use_ssl_mutual:
                return int(server.add_secure_port(target, _credentials(options)))
            return int(server.add_insecure_port(target))
        except RuntimeError as error:
            raise UnavailableError(
                f"gRPC cannot listen on {target}: {error}; is another server there? Choose another --grpc-port"
            ) from error

    def drain(self) -> None:
        """Refuse new inference from now on [R21] and report NOT_SERVING; calls in flight continue."""
        self._rpcs.drain()

    def stop(self, grace_s: float) -> bool:
        """Stop listening, wait up to ``grace_s`` seconds for calls in flight, then cancel the rest.

        Returns False if calls were cancelled.
        """
        self.drain()
        done = True
        if self._server is not None:
            stopped = self._server.stop(grace_s)
            done = self._calls.wait(grace_s)
            if done:
                self._server.stop(min(grace_s, _GOODBYE_S))
            stopped.wait()
        self._calls.close()
        return done

    def _services(self) -> Any:
        handlers: dict[str, dict[str, Any]] = {SERVICE: {}, HEALTH_SERVICE: {}}
        for path, unary in self._rpcs.unary.items():
            _, service, name = path.split("/")
            handlers[service][name] = self._calls.unary(unary.behaviour, None if unary.lasts else self._asking)
        handlers[SERVICE]["ModelStreamInfer"] = self._calls.streaming(self._stream, self._streaming)
        reflection = Reflection((SERVICE, HEALTH_SERVICE))
        for service in REFLECTION_SERVICES:
            handlers[service] = {REFLECTION_METHOD: self._calls.streaming(reflection.answer, self._working)}
        return [grpc.method_handlers_generic_handler(service, rpcs) for service, rpcs in handlers.items()]

    def _stream(self, messages: Iterator[bytes], context: CallContext) -> Iterator[bytes]:
        return self._rpcs.stream(messages, context, self._reading.submit)


def _channel_options(options: ServerOptions) -> list[tuple[str, int]]:
    chosen = {
        "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
        "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
        "grpc.so_reuseport": int(options.reuse_grpc_port),
        "grpc.keepalive_time_ms": options.grpc_keepalive_time,
        "grpc.keepalive_timeout_ms": options.grpc_keepalive_timeout,
        "grpc.keepalive_permit_without_calls": int(options.grpc_keepalive_permit_without_calls),
        "grpc.http2.max_pings_without_data": options.grpc_http2_max_pings_without_data,
        "grpc.http2.min_ping_interval_without_data_ms": options.grpc_http2_min_recv_ping_interval_without_data,
        "grpc.http2.max_ping_strikes": options.grpc_http2_max_ping_strikes,
        "grpc.default_compression_level": _LEVELS.index(options.grpc_infer_response_compression_level),
    }
    for name, milliseconds in (
        ("grpc.max_connection_idle_ms", options.idle_connection_secs * 1000),
        ("grpc.max_connection_age_ms", options.grpc_max_connection_age),
        ("grpc.max_connection_age_grace_ms", options.grpc_max_connection_age_grace),
    ):
        if milliseconds:  # 0 means unlimited, which is grpcio's default
            chosen[name] = milliseconds
    return list(chosen.items())


def _credentials(options: ServerOptions) -> Any:
    pair = (read("server-key", options.grpc_server_key), read("server-cert", options.grpc_server_cert))
    if not options.grpc_use_ssl_mutual:
        return grpc.ssl_server_credentials([pair])
    return grpc.ssl_server_credentials([pair], read("root-cert", options.grpc_root_cert), require_client_auth=True)
