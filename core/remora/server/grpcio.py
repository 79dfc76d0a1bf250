"""The V2 gRPC front end on grpcio; the law: it carries bytes between grpcio and the codecs and decides nothing.

Handlers get and give bytes, on two thread pools: a call that may last (inference, loading, a look at repositories or at
a model on its way) holds a thread of the large one until it is answered; what only asks (health, statistics, settings)
has a small one of its own, so that a probe is answered while every other thread waits for a model. A stream has two
threads of its own, see `grpcio_stream`. This is the reference transport and the one for TLS; nothing in the engine but
this and its `grpcio_*` imports grpc.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import grpc

from remora.errors import (
    CancelledError,
    ConfigError,
    RemoraError,
    RetiredError,
    UnavailableError,
    UnsupportedError,
    error_of,
)
from remora.messages import (
    Call,
    Data,
    InferForm,
    ModelConfig,
    ModelMetadata,
    Outcome,
    Response,
    ServerReady,
    Ticket,
)
from remora.model_table import LoadingError
from remora.protocols.restriction import GROUP_OF_RPC, Restrictions
from remora.protocols.v2_grpc import (
    DECOUPLED_TEXT,
    MAX_MESSAGE_BYTES,
    RPCS,
    SERVICE,
    SHUTDOWN_TEXT,
    Rpc,
    encode_infer,
    forward_pattern,
    forwarded,
    read_infer,
)
from remora.protocols.v2_grpc_stream import is_strict
from remora.protocols.v2_regions import REGION_RPCS
from remora.regions import DISABLED, Regions
from remora.server.grpcio_calls import Behaviour, Calls, Context, DeadlinePassedError
from remora.server.grpcio_reflection import Reflection
from remora.server.grpcio_stream import InferStream
from remora.tracing.tracer import Arrival, Traces

_log = logging.getLogger(__name__)

HEALTH_SERVICE = "grpc.health.v1.Health"


class Engine(Protocol):
    """What this front end asks of the engine. `perform` may block; each may raise RemoraError.

    `resolve` gives something with ``name``, ``version`` and ``decoupled``; `submit` takes it back and calls ``reply``
    exactly once, from any thread.
    """

    @property
    def traces(self) -> Traces: ...

    def perform(self, call: Call, /) -> Any: ...

    def wait_for(self, model: str, version: int, timeout_s: float | None = None, /) -> Any: ...

    def submit(
        self,
        served: Any,
        form: InferForm,
        data: list[Data],
        reply: Callable[[Ticket, Outcome], None],
        /,
        *,
        timeout_ns: int = 0,
    ) -> Ticket: ...


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
            (``--grpc-header-forward-pattern``, spec R16).
        use_ssl: serve TLS with ``server_cert`` and ``server_key`` (spec R17).
        use_ssl_mutual: besides, accept only clients whose certificate ``root_cert`` vouches for.
        server_cert: PEM file of the server's certificate chain.
        server_key: PEM file of its private key.
        root_cert: PEM file of the authorities that vouch for clients.
        keepalive_time_ms: silence after which the server pings (spec R19, as all that follow).
        keepalive_timeout_ms: how long it waits for the answer before it closes the connection.
        keepalive_permit_without_calls: ping connections that carry no call, too.
        http2_max_pings_without_data: pings sent before data or headers must have been sent; 0 for any number.
        http2_min_recv_ping_interval_ms: a client that pings more often without data gets a strike.
        http2_max_ping_strikes: strikes before the connection is closed; 0 for any number.
        max_connection_age_ms: age at which clients are asked to connect anew; 0 for never.
        max_connection_age_grace_ms: time for their running calls then; 0 for any.
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
    max_connection_age_ms: int = 0
    max_connection_age_grace_ms: int = 0


_SECRET_PREFIX = "triton-grpc-protocol-"
_LASTING = ("ModelConfig", "ModelMetadata", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload")
"""Management RPCs that may wait for a model, load one, or look at repositories."""


_GOODBYE_S = 1.0
"""How long clients without a call have to leave when they are told of the end. One that is gone never does."""


class GrpcServer:
    """V2, health and reflection on one port. `start` once, `stop` once; neither is for an event loop's thread."""

    def __init__(self, engine: Engine, options: GrpcOptions | None = None, regions: Regions = DISABLED) -> None:
        """Nothing is bound yet. Raises ConfigError when the forward pattern is no regular expression."""
        self._engine = engine
        self._regions = regions
        self._options = options or GrpcOptions()
        self._pattern = forward_pattern(self._options.forward_pattern)
        self._draining = False
        self._calls = Calls()
        self._asking = self._calls.pool(4, "remora-grpc-asking")
        self._working = self._calls.pool(self._options.workers, "remora-grpc")
        self._streaming = self._calls.pool(self._options.streams + 2, "remora-grpc-stream")
        self._reading = self._calls.pool(self._options.streams, "remora-grpc-reading")
        self._streams: set[InferStream] = set()
        self._restrictions = Restrictions(self._options.restricted, "--grpc-restricted-protocol")
        self._server: Any = None

    def start(self) -> int:
        """Bind and serve; returns the bound port.

        Raises UnavailableError when the address cannot be bound, ConfigError when TLS files cannot be read.
        """
        options = self._options
        server = grpc.server(self._working, options=_channel_options(options))
        server.add_generic_rpc_handlers((self._inference(), self._health(), Reflection((SERVICE, HEALTH_SERVICE))))
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
        """Refuse new inference from now on (spec R21) and report NOT_SERVING; what is under way goes on."""
        self._draining = True
        for stream in list(self._streams):
            stream.drain()

    def stop(self, grace_s: float) -> None:
        """Stop listening, let calls under way end within ``grace_s`` seconds, cancel the others, and return then."""
        self.drain()
        if self._server is not None:
            stopped = self._server.stop(grace_s)
            if self._calls.wait(grace_s):
                self._server.stop(min(grace_s, _GOODBYE_S))
            stopped.wait()
        self._calls.close()

    # -- The services -----------------------------------------------------------------------------------------------

    def _inference(self) -> Any:
        handlers = {}
        for name, work in REGION_RPCS.items():
            handlers[name] = self._calls.unary(self._unlocked(name, self._in_regions(work)), self._asking)
        for name, rpc in RPCS.items():
            behaviour = self._unlocked(name, self._performing(rpc))
            handlers[name] = self._calls.unary(behaviour, None if name in _LASTING else self._asking)
        handlers["ModelInfer"] = self._calls.unary(self._unlocked("ModelInfer", self._infer))
        handlers["ModelStreamInfer"] = self._calls.streaming(self._stream, self._streaming)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _health(self) -> Any:
        check = self._calls.unary(self._unlocked("Health.Check", self._check), self._asking)
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, {"Check": check})

    def _check(self, _message: bytes, _context: Context) -> bytes:
        """grpc.health.v1: HealthCheckResponse, the same for every service name (spec R02)."""
        serving = not self._draining and self._engine.perform(ServerReady())
        return b"\x08\x01" if serving else b"\x08\x02"

    def _unlocked(self, rpc: str, behaviour: Behaviour) -> Behaviour:
        """The behaviour behind the secret of its group, where it has one (spec R15)."""
        if not self._restrictions:
            return behaviour

        def guarded(message: bytes, context: Context) -> bytes:
            self._check_secret(rpc, context)
            return behaviour(message, context)

        return guarded

    def _check_secret(self, rpc: str, context: Context) -> None:
        def value_of(key: str) -> bytes | None:
            wanted = f"{_SECRET_PREFIX}{key}".lower()
            values = (value for name, value in context.invocation_metadata() if name == wanted)
            value = next(values, None)
            return value.encode() if isinstance(value, str) else value

        key = self._restrictions.missing(GROUP_OF_RPC[rpc], value_of)
        if key is not None:
            raise UnavailableError(f"This protocol is restricted, expecting header '{_SECRET_PREFIX}{key}'")

    def _in_regions(self, work: Callable[[bytes, Regions], bytes]) -> Behaviour:
        return lambda message, _context: work(message, self._regions)

    def _performing(self, rpc: Rpc) -> Behaviour:
        def perform(message: bytes, context: Context) -> bytes:
            call = rpc.decode(message)
            while True:
                try:
                    return rpc.encode(self._engine.perform(call))
                except LoadingError:
                    if not isinstance(call, ModelMetadata | ModelConfig):
                        raise
                    self._engine.wait_for(call.model, call.version, _seconds_left(context))

        return perform

    # -- Inference --------------------------------------------------------------------------------------------------

    def _infer(self, message: bytes, context: Context) -> bytes:
        if self._draining:
            raise UnavailableError(SHUTDOWN_TEXT)
        request = read_infer(message)
        served = self._engine.wait_for(request.model, request.version, _seconds_left(context))
        if served.decoupled:
            raise UnsupportedError(DECOUPLED_TEXT)
        if self._engine.traces.on:
            served = self._engine.traces.over(served, Arrival("GRPC", _carrier(context.invocation_metadata())))
        metadata = forwarded(self._pattern, context.invocation_metadata()) if self._pattern else None
        call = request.decode(metadata, self._regions)
        try:
            response = self._answer(served, call.form, call.data, context)
        except RetiredError:
            return self._infer(message, context)
        return encode_infer(served.name, str(served.version), call.form, response, call.places)

    def _answer(self, served: Any, form: InferForm, data: list[Data], context: Context) -> Response:
        """Hand the request in and wait for its one answer, the client's deadline or its departure."""
        answers: SimpleQueue[Outcome] = SimpleQueue()
        left_s = _seconds_left(context)
        ticket = self._engine.submit(
            served,
            form,
            data,
            lambda _ticket, outcome: answers.put(outcome),
            timeout_ns=0 if left_s is None else max(int(left_s * 1e9), 1),
        )

        def leave() -> None:
            # grpcio calls this at the end of every RPC; after the answer it changes nothing.
            ticket.cancel()
            answers.put(CancelledError("the client cancelled the request"))

        if not context.add_callback(leave):
            leave()
        try:
            outcome = answers.get(timeout=_seconds_left(context))
        except Empty:
            leave()
            raise DeadlinePassedError("the request's deadline passed before its answer was there") from None
        if isinstance(outcome, RemoraError):
            # The requests of a batch may have failed with one and the same object.
            raise error_of(outcome.code, outcome.message)
        if not isinstance(outcome, Response):
            raise UnsupportedError(DECOUPLED_TEXT)  # refused before it was submitted
        return outcome

    def _stream(self, messages: Iterator[bytes], context: Context) -> Iterator[bytes]:
        self._check_secret("ModelStreamInfer", context)
        if len(self._streams) >= self._options.streams:
            raise UnavailableError(f"{len(self._streams)} streams are open, and more are not served: try again later")
        metadata = context.invocation_metadata()
        parameters = forwarded(self._pattern, metadata) if self._pattern else None
        stream = InferStream(
            self._engine,
            parameters,
            strict=is_strict(metadata),
            hang_up=context.cancel,
            regions=self._regions,
            arrival=Arrival("GRPC", _carrier(metadata)),
        )
        self._streams.add(stream)
        try:
            if self._draining:  # looked at when `drain` can already see the stream
                raise UnavailableError(SHUTDOWN_TEXT)
            if context.add_callback(stream.leave):
                self._reading.submit(stream.read, messages)
                yield from stream.answers()
        finally:
            stream.leave()
            self._streams.discard(stream)


def _carrier(metadata: Iterable[tuple[str, str | bytes]]) -> Callable[[bytes], bytes | None]:
    """The metadata of a call by its keys, as traces look for their context."""

    def get(name: bytes) -> bytes | None:
        wanted = name.decode()
        value = next((value for key, value in metadata if key == wanted), None)
        return value.encode("latin-1", "replace") if isinstance(value, str) else value

    return get


_FOREVER_S = 365 * 86_400.0


def _seconds_left(context: Context) -> float | None:
    """Until the client's deadline; None when there is none, which grpcio spells as one in the far future."""
    left = context.time_remaining()
    return None if left is None or left > _FOREVER_S else float(left)


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
    }
    if options.max_connection_age_ms:
        chosen["grpc.max_connection_age_ms"] = options.max_connection_age_ms
    if options.max_connection_age_grace_ms:
        chosen["grpc.max_connection_age_grace_ms"] = options.max_connection_age_grace_ms
    return list(chosen.items())


def _credentials(options: GrpcOptions) -> Any:
    def read(option: str, path: str) -> bytes:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"--grpc-{option}: '{path}' cannot be read ({error.strerror}); TLS needs it") from error

    pair = (read("server-key", options.server_key), read("server-cert", options.server_cert))
    if not options.use_ssl_mutual:
        return grpc.ssl_server_credentials([pair])
    return grpc.ssl_server_credentials([pair], read("root-cert", options.root_cert), require_client_auth=True)
