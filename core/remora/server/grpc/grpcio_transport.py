"""The V2 gRPC front end on grpcio; the law: it carries bytes between grpcio and `rpcs` and decides nothing.

Calls that may last have a large pool of threads, those that only ask a small one of their own, and a stream has two
threads to itself, see `grpc_stream`. It is taken with `--grpc-transport=grpcio`; nothing in the engine but this and its
`grpcio_*` imports grpc.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from remora.errors import UnavailableError
from remora.protocols.grpc.infer import MAX_MESSAGE_BYTES, SERVICE
from remora.protocols.restriction import Restrictions
from remora.server.grpc.reflection import Reflection
from remora.server.grpc.rpcs import HEALTH_SERVICE, Behaviour, CallContext, EngineCalls, Rpcs, status_of_error
from remora.server.grpc.tls import read
from remora.tensors.shared_memory import DISABLED, Regions

_CODES: Mapping[int, Any] = {code.value[0]: code for code in grpc.StatusCode}


class GrpcioCalls:
    """Those of one server. Thread-safe."""

    def __init__(self) -> None:
        self._pools: list[ThreadPoolExecutor] = []
        self._changed = threading.Condition()
        self._under_way = 0

    def pool(self, threads: int, name: str) -> ThreadPoolExecutor:
        """Threads for calls, which `close` ends."""
        pool = _Pool(self, threads, name)
        self._pools.append(pool)
        return pool

    def unary(self, behaviour: Behaviour, pool: ThreadPoolExecutor | None = None) -> Any:
        """A handler on bytes, errors turned into statuses; ``pool`` for other threads than the server's."""

        def serve(message: bytes, context: CallContext) -> bytes:
            self._follow(context)
            try:
                return behaviour(message, context)
            except Exception as error:
                _abort(context, error)

        if pool is not None:
            # grpcio's own health service chooses its threads by this attribute, too.
            serve.experimental_thread_pool = pool  # type: ignore[attr-defined]
        return grpc.unary_unary_rpc_method_handler(serve)

    def streaming(
        self, behaviour: Callable[[Iterator[bytes], CallContext], Iterator[bytes]], pool: ThreadPoolExecutor
    ) -> Any:
        """A handler on streams of bytes, errors turned into statuses, its answers written by threads of ``pool``."""

        def serve(messages: Iterator[bytes], context: CallContext) -> Iterator[bytes]:
            self._follow(context)
            try:
                yield from behaviour(messages, context)
            except Exception as error:
                _abort(context, error)

        serve.experimental_thread_pool = pool  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(serve)

    def begin(self) -> None:
        """One more thing is under way."""
        with self._changed:
            self._under_way += 1

    def end(self) -> None:
        """One of them has ended."""
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def _follow(self, context: CallContext) -> None:
        """Count a call until it is over, its answer sent."""
        self.begin()
        if not context.add_callback(self.end):
            self.end()

    def wait(self, timeout_s: float) -> bool:
        """Until none is under way; False when that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, timeout_s)

    def close(self) -> None:
        """End the threads, each after what it does."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)


class _Pool(ThreadPoolExecutor):
    """Counts what waits for a thread, too."""

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
    raise error  # abort has raised already; this is for those who do not know.


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """How the gRPC front end listens and what it lets through.

    Args:
        address: the interface to bind; all of them is ``0.0.0.0`` or ``::`` (Triton's ``--grpc-address``).
        port: the port to bind, 0 for any free one (``--grpc-port``), -1 for none.
        inner: a socket of this machine besides, by its name in Linux's abstract namespace; "" for none. Never TLS.
        reuse_port: let other processes bind the same port (``--reuse-grpc-port``).
        workers: how many inferences, loads and reflection streams may be under way at once. The default fills the
            usual batch sizes; further calls wait in grpcio.
        restricted: groups of RPCs that need a secret, as ``Restrictions`` takes them (``--grpc-restricted-protocol``).
        streams: how many ModelStreamInfer calls may be open at once; further ones are refused.
        max_message_bytes: the longest message in either direction.
        max_request_bytes: the longest message from a client, where that is less.
        forward_pattern: metadata whose keys match it become request parameters; "" for none
            (``--grpc-header-forward-pattern``, [R16]).
        use_ssl: serve TLS with ``server_cert`` and ``server_key`` [R17].
        use_ssl_mutual: besides, accept only clients whose certificate ``root_cert`` vouches for.
        server_cert: PEM file of the server's certificate chain.
        server_key: PEM file of its private key.
        root_cert: PEM file of the authorities that vouch for clients.
        keepalive_time_ms: silence after which the server pings ([R19], as all that follow).
        keepalive_timeout_ms: how long it waits for the answer before it closes the connection.
        keepalive_permit_without_calls: ping connections that carry no call, too.
        http2_max_pings_without_data: pings sent before data or headers must have been sent; 0 for any number.
        http2_min_recv_ping_interval_ms: a client that pings more often without data gets a strike.
        http2_max_ping_strikes: strikes before the connection is closed; 0 for any number.
        max_connection_idle_ms: time without a call after which clients are asked to connect anew; 0 for any.
        max_connection_age_ms: age at which clients are asked to connect anew; 0 for never.
        max_connection_age_grace_ms: time for their running calls then; 0 for any.
        compression: how much answers are compressed: none, low, medium or high [R18].
    """

    address: str = "127.0.0.1"
    port: int = 8001
    inner: str = ""
    reuse_port: bool = False
    workers: int = 64
    streams: int = 256
    restricted: tuple[str, ...] = ()
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_request_bytes: int = MAX_MESSAGE_BYTES
    forward_pattern: str = ""
    use_ssl: bool = False
    use_ssl_mutual: bool = False
    server_cert: str = ""
    server_key: str = ""
    root_cert: str = ""
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_ms: int = 300_000
    http2_max_ping_strikes: int = 2
    max_connection_idle_ms: int = 0
    max_connection_age_ms: int = 0
    max_connection_age_grace_ms: int = 0
    compression: str = "none"


_GOODBYE_S = 1.0
"""How long clients without a call have to leave when they are told of the end. One that is gone never does."""


class GrpcServer:
    """V2, health and reflection on one port. `start` once, `stop` once; neither is for an event loop's thread."""

    def __init__(self, engine: EngineCalls, options: GrpcOptions | None = None, regions: Regions = DISABLED) -> None:
        """Nothing is bound yet. Raises ConfigError when the forward pattern is no regular expression."""
        self._options = options or GrpcOptions()
        restricted = Restrictions(self._options.restricted, "--grpc-restricted-protocol")
        self._rpcs = Rpcs(engine, restricted, self._options.streams, self._options.forward_pattern, regions)
        self._calls = GrpcioCalls()
        self._asking = self._calls.pool(4, "remora-grpc-asking")
        self._working = self._calls.pool(self._options.workers, "remora-grpc")
        self._streaming = self._calls.pool(self._options.streams + 2, "remora-grpc-stream")
        self._reading = self._calls.pool(self._options.streams, "remora-grpc-reading")
        self._server: Any = None

    def start(self) -> int:
        """Bind and serve; returns the bound port.

        Raises UnavailableError when the address cannot be bound, ConfigError when TLS files cannot be read.
        """
        options = self._options
        server = grpc.server(self._working, options=_channel_options(options))
        server.add_generic_rpc_handlers((*self._services(), Reflection((SERVICE, HEALTH_SERVICE))))
        port = self._bind(server) if options.port >= 0 else 0
        if options.inner:
            server.add_insecure_port(f"unix-abstract:{options.inner}")
        server.start()
        self._server = server
        return port

    def _bind(self, server: Any) -> int:
        options = self._options
        host = f"[{options.address}]" if ":" in options.address else options.address
        target = f"{host}:{options.port}"
        try:
            if options.use_ssl or options.use_ssl_mutual:
                return int(server.add_secure_port(target, _credentials(options)))
            return int(server.add_insecure_port(target))
        except RuntimeError as error:
            raise UnavailableError(
                f"gRPC cannot listen on {target}: {error}; is another server there? Choose another --grpc-port"
            ) from error

    def drain(self) -> None:
        """Refuse new inference from now on [R21] and report NOT_SERVING; what is under way goes on."""
        self._rpcs.drain()

    def stop(self, grace_s: float) -> bool:
        """Stop listening, let calls under way end within ``grace_s`` seconds, cancel the others, and return then.

        False when there were others.
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
        return [grpc.method_handlers_generic_handler(service, rpcs) for service, rpcs in handlers.items()]

    def _stream(self, messages: Iterator[bytes], context: CallContext) -> Iterator[bytes]:
        return self._rpcs.stream(messages, context, self._reading.submit)


def _channel_options(options: GrpcOptions) -> list[tuple[str, int]]:
    chosen = {
        "grpc.max_receive_message_length": min(options.max_message_bytes, options.max_request_bytes),
        "grpc.max_send_message_length": options.max_message_bytes,
        "grpc.so_reuseport": int(options.reuse_port),
        "grpc.keepalive_time_ms": options.keepalive_time_ms,
        "grpc.keepalive_timeout_ms": options.keepalive_timeout_ms,
        "grpc.keepalive_permit_without_calls": int(options.keepalive_permit_without_calls),
        "grpc.http2.max_pings_without_data": options.http2_max_pings_without_data,
        "grpc.http2.min_ping_interval_without_data_ms": options.http2_min_recv_ping_interval_ms,
        "grpc.http2.max_ping_strikes": options.http2_max_ping_strikes,
        "grpc.default_compression_level": ("none", "low", "medium", "high").index(options.compression),
    }
    if options.max_connection_idle_ms:
        chosen["grpc.max_connection_idle_ms"] = options.max_connection_idle_ms
    if options.max_connection_age_ms:
        chosen["grpc.max_connection_age_ms"] = options.max_connection_age_ms
    if options.max_connection_age_grace_ms:
        chosen["grpc.max_connection_age_grace_ms"] = options.max_connection_age_grace_ms
    return list(chosen.items())


def _credentials(options: GrpcOptions) -> Any:
    pair = (read("server-key", options.server_key), read("server-cert", options.server_cert))
    if not options.use_ssl_mutual:
        return grpc.ssl_server_credentials([pair])
    return grpc.ssl_server_credentials([pair], read("root-cert", options.root_cert), require_client_auth=True)
