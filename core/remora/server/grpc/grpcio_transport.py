"""Transport of V2 over gRPC on the grpcio library, as a reference and fallback.

It passes bytes between grpcio and `rpcs`, which answers on both transports. Long calls run in a large thread pool,
short calls in a small one, and each stream uses two threads. Only `--grpc-transport=grpcio` imports this module, and no
other module imports grpc.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from remora.errors import RemoraError, UnavailableError
from remora.messages import Mailbox, Request, Streamed
from remora.options import ServerOptions
from remora.protocols.grpc.infer import MAX_MESSAGE_BYTES, SERVICE
from remora.protocols.grpc.status import open_forward
from remora.protocols.rest.answer import Headers
from remora.protocols.restriction import Restrictions
from remora.scheduling.backpressure import Backpressure
from remora.scheduling.delivery import run_replies
from remora.scheduling.running import Answers
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
from remora.server.grpc.stream import InferStream
from remora.server.held_mailbox import AHEAD
from remora.server.option_checks import grpc_restrictions
from remora.server.tls import read
from remora.tensors.shared_memory import DISABLED, Regions

if TYPE_CHECKING:
    from remora.server.key_check import KeyCheck
    from remora.server.key_limits import Usage

_log = logging.getLogger("remora.grpc")

STALL_S = 30.0
"""How long a client that reads nothing may block a model."""
_UNREAD = 16
"""Messages of a stream that are read ahead of its thread."""
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
        """Return a unary handler on bytes that maps errors to statuses.

        ``pool`` replaces the server's threads.
        """

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
        """Return a streaming handler on bytes that maps errors to statuses.

        Threads of ``pool`` write its answers.
        """

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
        keys: checks API keys; None without keys.

    Raises ConfigError if the pattern of forwarded metadata is not a regular expression.
    """

    def __init__(
        self,
        engine: EngineCalls,
        options: ServerOptions,
        regions: Regions = DISABLED,
        streams: int = MAX_STREAMS,
        keys: KeyCheck | None = None,
    ) -> None:
        self._options = options
        self._keys = keys
        restricted = Restrictions(grpc_restrictions(options), "--grpc-restricted-protocol")
        forward = open_forward(options.grpc_header_forward_pattern, None if keys is None else keys.withholds)
        self._rpcs = Rpcs(engine, restricted, streams, forward, regions)
        if keys is not None:
            self._rpcs.check_content = keys.check_content
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
        guards = () if self._keys is None else (_KeyInterceptor(self._keys),)
        server = grpc.server(self._working, interceptors=guards, options=_channel_options(self._options))
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
            handlers[service] = {
                REFLECTION_METHOD: self._calls.streaming(
                    lambda messages, _context: map(reflection.answer, messages), self._working
                )
            }
        return [grpc.method_handlers_generic_handler(service, rpcs) for service, rpcs in handlers.items()]

    def _stream(self, messages: Iterator[bytes], context: CallContext) -> Iterator[bytes]:
        call = _StreamThreads(context, self._reading.submit, self._working.submit)
        stream = self._rpcs.open_stream(context, call)
        try:
            if context.add_callback(partial(call.post, call.leave)):
                yield from call.answers(stream, messages)
        finally:
            stream.leave()


class _StreamThreads:
    """Stream's call on two threads of grpcio: one reads the messages, the other owns the stream and writes its answers.

    It implements `stream.StreamCall`.
    """

    paused = 0

    def __init__(
        self,
        context: CallContext,
        reading: Callable[[Callable[[], None]], object],
        waiting: Callable[[Callable[[], None]], object],
    ) -> None:
        self._context = context
        self._reading = reading
        self._waiting = waiting  # other threads, because each open stream keeps one that reads
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._read = Backpressure(_UNREAD, MAX_MESSAGE_BYTES)
        self._out: deque[bytes] = deque()
        self._ended = False
        self._error: RemoraError | None = None
        self.mailbox: Mailbox = _QueueMailbox(self._work)

    def answers(self, stream: InferStream, messages: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the answers to the messages. Raises the RemoraError with which the stream ends."""
        self._reading(lambda: self._read_all(stream, messages))
        try:
            while not self._ended:
                self._work.get()()
                while self._out:
                    yield self._out.popleft()
        finally:
            self._read.close()
        if self._error is not None:
            raise self._error

    def _read_all(self, stream: InferStream, messages: Iterator[bytes]) -> None:
        try:
            for message in messages:
                # A credit of 1 byte more, because an empty message takes room too.
                if not self._read.take(len(message) + 1):
                    return
                self._work.put(partial(stream.receive, message, len(message) + 1))
        except Exception:  # grpcio raises one when the client has disconnected
            _log.debug("gRPC: reading a stream ended early", exc_info=True)
        finally:
            self._work.put(stream.half_close)

    def leave(self) -> None:
        """End the stream without a status, because the call has ended."""
        self._ended = True

    def hold(self) -> _HeldAnswers:
        return _HeldAnswers(self._work, self._context.cancel)

    def send(self, message: bytes) -> None:
        self._out.append(message)

    def end(self, error: RemoraError | None) -> None:
        self._ended, self._error = True, error

    def consumed(self, size: int) -> None:
        self._read.give(size)

    def when_sent(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` at once, because answers wait in the thread's generator."""
        resume()

    def post(self, work: Callable[..., object], *arguments: Any) -> None:
        self._work.put(partial(work, *arguments))

    def wait(self, work: Callable[[], object], then: Callable[[Exception | None], None]) -> None:
        def waited() -> None:
            try:
                work()
            except Exception as error:
                self.post(then, error)
            else:
                self.post(then, None)

        self._waiting(waited)


class _QueueMailbox:
    """Mailbox of the thread that owns a stream."""

    watcher = None

    def __init__(self, work: SimpleQueue[Callable[[], object]]) -> None:
        self._work = work

    def post(self, deliveries: Answers) -> None:
        self._work.put(partial(run_replies, deliveries))

    def defer(self, _work: Callable[[], None]) -> bool:
        """Return False, because batches run in the threads of instances."""
        return False


class _HeldAnswers(_QueueMailbox):
    """Mailbox that blocks a decoupled model while too many answers wait; see `stream.Hold`.

    A client that reads nothing for STALL_S is dropped.
    """

    def __init__(self, work: SimpleQueue[Callable[[], object]], hang_up: Callable[[], object]) -> None:
        super().__init__(work)
        self._room = Backpressure(AHEAD, MAX_MESSAGE_BYTES)
        self._hang_up = hang_up

    def post(self, deliveries: Answers) -> None:
        """See ``Mailbox.post``."""
        for ticket, outcome in deliveries:
            if isinstance(outcome, Streamed) and not outcome.final and not self._room.take(stall_s=STALL_S):
                if not ticket.request.cancelled:
                    _log.warning("gRPC: a client has read no answers for %g s; its stream is ended", STALL_S)
                    ticket.cancel()
                    self._hang_up()
                return
        super().post(deliveries)

    def release_with(self, request: Request) -> None:
        request.when_cancelled(self._room.close)

    def sent(self) -> None:
        self._room.give()

    def end(self) -> None:
        """Do nothing, because no answer follows."""


class _KeyInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Interceptor that refuses calls without a valid API key, or whose key does not permit them."""

    def __init__(self, keys: KeyCheck) -> None:
        self._keys = keys

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Return the handler of a call; see `grpc.ServerInterceptor`."""
        headers = tuple(
            (name.encode(), value.encode() if isinstance(value, str) else value)
            for name, value in details.invocation_metadata
        )
        if not self._keys.permits_call(details.method, headers):
            return self._refuse(details.method, headers)
        usage, handler = self._keys.usage_of(self._keys.caller(headers)), continuation(details)
        return handler if usage is None or handler is None else _counted(handler, usage)

    def _refuse(self, path: str, headers: Headers) -> Any:
        def refuse(_messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
            denial = self._keys.deny_call(path, headers, _address(context.peer()))
            context.abort(_CODES[denial.status], denial.text)
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)  # for unary calls too: it reads no message first


def _counted(handler: Any, usage: Usage) -> Any:
    """Return a handler that counts the calls of a limited key."""

    def begin(context: Any) -> None:
        denial = usage.begin()
        if denial is not None:
            context.abort(_CODES[denial.status], denial.text)
        elif not context.add_callback(usage.end):
            usage.end()

    def unary(message: bytes, context: Any) -> Any:
        begin(context)
        return handler.unary_unary(message, context)

    def streaming(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        begin(context)
        yield from handler.stream_stream(messages, context)

    kind, serve = ("unary_unary", unary) if handler.unary_unary else ("stream_stream", streaming)
    return handler._replace(**{kind: wraps(getattr(handler, kind))(serve)})  # with its thread pool


def _address(peer: str) -> str:
    """Return the address in grpcio's ``ipv4:ADDRESS:PORT`` or ``ipv6:[ADDRESS]:PORT``, percent-encoded there."""
    return peer.partition(":")[2].rpartition(":")[0].strip("[]").replace("%5B", "").replace("%5D", "")


def _channel_options(options: ServerOptions) -> list[tuple[str, int]]:
    chosen = {
        "grpc.max_receive_message_length": min(options.message_bytes, MAX_MESSAGE_BYTES),  # an int in C
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
    pair = (read("grpc-server-key", options.grpc_server_key), read("grpc-server-cert", options.grpc_server_cert))
    if not options.grpc_use_ssl_mutual:
        return grpc.ssl_server_credentials([pair])
    return grpc.ssl_server_credentials([pair], read("grpc-root-cert", options.grpc_root_cert), require_client_auth=True)
