"""Server process: open the ports, load the models, serve until a signal, shut down.

Only this module and `cli` use signals and the standard streams of the process.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from remora.engine import Engine
from remora.errors import RemoraError
from remora.options import ServerOptions
from remora.protocols.cross_site import host_names
from remora.protocols.http2 import frames
from remora.protocols.rest.infer import InferCodec
from remora.protocols.rest.request import RequestLimits
from remora.protocols.restriction import Restrictions
from remora.server.early_port import EarlyPort
from remora.server.host import ExtraPort, Host, ServerContext, ServiceFactory, v2_alone
from remora.server.http.asgi import answer_in_thread
from remora.server.http.http1 import Connection, Handover, Listener, Service
from remora.server.http.rest import MetricsService, RestService, at
from remora.server.listening import Port, bind
from remora.server.loop import LoopMailbox
from remora.server.shutdown import MARGIN_S, exit_now, force_exit, force_exit_after, in_own_thread, on_signals
from remora.system.install_advice import install_command
from remora.system.machine import process_age_s
from remora.system.tuning import Tuning, freeze, give_back
from remora.tensors.shared_memory import DISABLED, Regions, SharedMemory

if TYPE_CHECKING:
    from remora.server.grpc.grpcio_transport import GrpcServer
    from remora.server.grpc.listener import OwnGrpc
    from remora.server.http.http2 import Http2Connection, Http2Listener

_log = logging.getLogger("remora.server")

_SWEEP_S = 5.0
_LOOK_S = 0.01
_STALL_LIMIT_S = 120.0
"""How long a request may take to arrive; also the timeout for the first request of a connection."""
_CLOSED_AT_ONCE = 8
"""Idle connections to close at a time when file descriptors run out."""


class StartError(Exception):
    """Error that prevents the server from starting; its text is for the operator."""


class Ports(NamedTuple):
    """Port numbers of a running server, 0 for disabled ports; ``doors`` is in the order of `Server.doors`."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0
    doors: tuple[int, ...] = ()


class Server:
    """HTTP, gRPC and metrics servers of one engine on one event loop.

    Args:
        engine: the engine, not started; `start` starts it and `stop` stops it.
        options: addresses, ports and limits.
        front: creates the service of the HTTP port.
        doors: extra ports of the host.
        early: the HTTP port, if it is already open.
    """

    def __init__(
        self,
        engine: Engine,
        options: ServerOptions,
        front: ServiceFactory = v2_alone,
        doors: tuple[ExtraPort, ...] = (),
        early: EarlyPort | None = None,
    ) -> None:
        self.engine = engine
        self.options = options
        self.doors = doors
        self.ports = Ports()
        self.end = 0.0
        """Loop time at which the exit timeout expires."""
        self._front = front
        self._early = early
        self._listeners: list[Listener | Http2Listener] = []
        self._ports: list[Port] = []
        self._grpc: GrpcServer | None = None
        self._grpc_opening: asyncio.Future[int] | None = None
        self._grpc_is_there: Callable[[], None] = lambda: None
        self._own: OwnGrpc | None = None
        self._regions: Regions = DISABLED
        self._allowed_hosts: frozenset[str] = frozenset()
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, loading: Future[Engine] | None = None) -> None:
        """Open the ports, load the models and return when they are ready.

        ``loading`` is the future of a load that is already running. Raises StartError or RemoraError; the caller then
        stops the server.
        """
        loop = asyncio.get_running_loop()
        options = self.options
        self._check_ports()
        self._allowed_hosts = host_names(options.allowed_host)
        restricted = Restrictions(_grpc_restrictions(options), "--grpc-restricted-protocol")
        mailbox, later = LoopMailbox(loop), answer_in_thread(loop)
        if options.allow_client_shm:
            self._regions = SharedMemory(most=options.max_client_shm_regions)
        rest = RestService(
            self.engine,
            InferCodec(
                RequestLimits(options.http_max_input_size, options.http_max_json_depth),
                forward_pattern=_pattern(options.http_header_forward_pattern, "--http-header-forward-pattern"),
                regions=self._regions,
            ),
            mailbox,
            later,
            max_input_bytes=options.http_max_input_size,
            serves_metrics=options.allow_metrics,
            malformed=int(options.client_errors),
            restrictions=Restrictions(options.http_restricted_api, "--http-restricted-api"),
            allowed_hosts=self._allowed_hosts,
        )
        inside = ServerContext(self.engine, rest, mailbox, later, options)
        if options.allow_grpc:  # set before the ports open, so that no probe sees "ready" too early
            self._grpc_is_there = self.engine.hold_readiness("gRPC is being opened")
        if options.grpc_transport == "own" and (options.allow_grpc or options.grpc_on_http_port):
            self._own = self._own_grpc(inside, restricted)
        self.engine.measure_connections(self._count_connections)
        await self._open_ports(inside, mailbox)
        self.engine.ledger.mark("ports")
        self._sweep()
        if options.allow_grpc and options.grpc_transport == "grpcio":
            await asyncio.gather(self._load(loading), self._open_grpcio())
            self.engine.ledger.mark("gRPC")
        else:
            await self._load(loading)

    async def _load(self, loading: Future[Engine] | None) -> None:
        loop = asyncio.get_running_loop()
        await (asyncio.wrap_future(loading) if loading else loop.run_in_executor(None, self.engine.start))
        self.engine.ledger.mark("models")

    async def _open_grpcio(self) -> None:
        """Open gRPC on grpcio in another thread, because its import would block the event loop for too long."""
        self._grpc_opening = asyncio.get_running_loop().run_in_executor(None, self._start_grpcio)
        port = await asyncio.shield(self._grpc_opening)
        self.ports = self.ports._replace(grpc=port)
        self._grpc_is_there()

    async def _open_ports(self, inside: ServerContext, mailbox: LoopMailbox) -> None:
        """Open all ports except grpcio's. Their services must answer while models are still being loaded."""
        options, http, metrics = self.options, 0, 0
        if options.allow_http:
            front = at(options.http_address, self._front(inside), self._allowed_hosts)
            http2 = self._takes_http2(front) if options.grpc_on_http_port else None
            http = await self._listen(front, options.http_address, options.http_port, "HTTP", http2)
        doors = [await self._open_door(door, inside) for door in self.doors]
        grpc = 0
        if self._own is not None and options.allow_grpc:
            grpc = await self._own.listen()
            self._ports += self._own.ports
        if options.grpc_transport == "own":
            self._grpc_is_there()
        self._listeners += self._own.listeners if self._own is not None else ()
        if len(self._listeners) == 1:  # with several, a request may arrive at another one in the same loop turn
            mailbox.alone = self._listeners[0].is_alone
        if options.allow_metrics:
            address = options.metrics_address or options.http_address
            service = at(address, MetricsService(inside.rest), self._allowed_hosts)
            metrics = await self._listen(service, address, options.metrics_port, "metrics")
        self.ports = Ports(http, grpc, metrics, tuple(doors))

    async def _open_door(self, door: ExtraPort, inside: ServerContext) -> int:
        service = at(door.address, door.front(inside), self._allowed_hosts)
        return await self._listen(service, door.address, door.port, door.what)

    def _takes_http2(self, service: Service) -> Handover:
        """Return the handover for HTTP/2 connections on the HTTP port."""
        return self._own.beside(service) if self._own is not None else _refuse_http2

    def _own_grpc(self, inside: ServerContext, restricted: Restrictions) -> OwnGrpc | None:
        try:
            from remora.server.grpc.listener import OwnGrpc
        except ImportError as error:
            _log.warning("gRPC is off: %s. Install it with: %s", error, install_command("grpc"))
            return None
        return OwnGrpc(inside, restricted, self._regions, self.make_room)

    def _check_ports(self) -> None:
        options = self.options
        if options.allow_grpc:
            _check_tls(options)
        if options.grpc_on_http_port and (options.grpc_use_ssl or options.grpc_use_ssl_mutual):
            raise StartError("--grpc-on-http-port: that port has no TLS, which --grpc-use-ssl asks for; leave one out")
        if options.grpc_on_http_port and not options.allow_http:
            raise StartError("--grpc-on-http-port: with --allow-http=false there is no such port; leave one out")
        if options.grpc_on_http_port and options.grpc_transport == "grpcio":
            raise StartError("--grpc-on-http-port: grpcio needs a separate port, --grpc-transport=own does not")
        used: dict[int, str] = {}
        for on, port, what in (
            (options.allow_http, options.http_port, "HTTP"),
            (options.allow_grpc, options.grpc_port, "gRPC"),
            (options.allow_metrics, options.metrics_port, "metrics"),
            *((True, door.port, door.what) for door in self.doors),
        ):
            if on and port and port in used:
                raise StartError(
                    f"The server cannot listen to {used[port]} requests and {what} requests at the same address and "
                    f"port {options.http_address}:{port}"
                )
            if on:
                used[port] = what

    async def _listen(self, service: Service, address: str, port: int, what: str, http2: Handover | None = None) -> int:
        listener = Listener(
            service,
            max_body_bytes=self.options.http_max_input_size,
            max_chunks=self.options.http_max_chunks,
            http2=http2,
        )
        waiting: list[socket.socket] = []
        try:
            if what == "HTTP" and self._early is not None:
                listening, waiting = self._early.take()
                sockets = [listening]
            else:
                # A metrics port is not shared, because each scrape would reach a random process and its counts only.
                shared = self.options.reuse_http_port and what != "metrics"
                sockets = await bind(address, port, reuse_port=shared)
        except OSError as error:
            flag = {"HTTP": "--http-port", "metrics": "--metrics-port"}.get(what)
            remedy = f"; is another server there? Choose another {flag}" if flag else ""
            if what == "metrics" and self.options.reuse_http_port:
                remedy += ": each process that shares the HTTP port needs its own, or --allow-metrics=false"
            raise StartError(
                f"cannot listen for {what} on {address}:{port}: {error.strerror or error}{remedy}"
            ) from error
        self._listeners.append(listener)
        accepting = Port(sockets, listener.connection, self.make_room)
        self._ports.append(accepting)
        for each in waiting:
            accepting.adopt(each)
        return accepting.number

    def _start_grpcio(self) -> int:
        try:
            from remora.server.grpc.grpcio_transport import GrpcServer
        except ImportError as error:
            _log.warning("gRPC is off: %s. Install it with: %s", error, install_command("grpcio"))
            return 0
        server = GrpcServer(self.engine, self.options, self._regions)
        port = server.start()
        self._grpc = server
        return port

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            listener.sweep(loop.time(), _STALL_LIMIT_S, self.options.idle_connection_secs or inf)
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep)

    def make_room(self) -> bool:
        """Close the longest idle connections, because descriptors have run out; return False if there are none."""
        idle = [connection for listener in self._listeners for connection in listener.connections if connection.is_idle]
        for connection in sorted(idle, key=lambda connection: connection.idle_since)[:_CLOSED_AT_ONCE]:
            connection.abort()
        return bool(idle)

    def _close_idle(self) -> int:
        """Close connections without a request; return the number of those that remain or are being opened."""
        opening = sum(port.opening for port in self._ports)
        return sum(listener.close_idle() for listener in self._listeners) + opening

    def _count_connections(self) -> dict[str, int]:
        counts = {"http1": 0, "http2": 0}
        for listener in self._listeners:
            counts[listener.protocol] += len(listener.connections)
        return counts

    async def stop(self, *, drain: bool = False, announce: bool = True) -> bool:
        """Stop accepting, finish the requests in flight and close.

        Returns False if the exit timeout expired first.

        With ``announce``, log the requests in flight every second. With ``drain``, first report "not ready" and keep
        serving for the lame-duck time, and until open sequences have ended.
        """
        loop = asyncio.get_running_loop()
        if drain:
            await self._lame_duck()
        end = self.end = loop.time() + self.engine.options.exit_timeout_secs
        countdown = loop.create_task(self._count_down(end)) if announce else None
        while drain and self.engine.open_sequences and loop.time() < end:
            await asyncio.sleep(_LOOK_S)
        for port in self._ports:
            port.close()
        if self._own is not None:
            self._own.end()
        if self._grpc_opening is not None:
            await asyncio.wait((self._grpc_opening,), timeout=max(end - loop.time(), 0.0))
        done = True
        if self._grpc is not None:
            done = await in_own_thread(self._grpc.stop, max(end - loop.time(), 0.0))
        while self._close_idle() and loop.time() < end:
            await asyncio.sleep(_LOOK_S)
        left = max(end - loop.time(), 0.0)
        stopping = in_own_thread(self.engine.stop, left)
        await asyncio.wait((stopping,), timeout=left + _LOOK_S)  # a model may hang while it is being closed
        done = stopping.done() and stopping.result() and done
        if countdown is not None:
            countdown.cancel()
        for listener in self._listeners:
            connections: list[Connection | Http2Connection] = [*listener.connections]
            for connection in connections:
                done = done and not connection.owes_an_answer
                connection.abort()
        if self._own is not None:
            self._own.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        return done

    async def _lame_duck(self) -> None:
        """Report "not ready" and keep serving while traffic moves away; answers carry ``Connection: close``."""
        self.engine.begin_drain()
        for listener in self._listeners:
            listener.closing = True
        if self.options.lame_duck_secs:
            _log.info("not ready from now on, serving for %d s more", self.options.lame_duck_secs)
            await asyncio.sleep(self.options.lame_duck_secs)

    async def _count_down(self, end: float) -> None:
        """Log the requests in flight every second, in Triton's words [V03]."""
        loop = asyncio.get_running_loop()
        _log.info("Waiting for in-flight requests to complete.")
        while True:
            left = max(round(end - loop.time()), 0)
            busy = [(model, model.in_flight) for model in self.engine.models() if model.in_flight]
            _log.info("Timeout %d: Found %d model versions that have in-flight inferences", left, len(busy))
            for model, count in busy:
                _log.info("Model '%s' (version %d) has %d in-flight inferences", model.name, model.version, count)
            await asyncio.sleep(1)


def _refuse_http2(transport: asyncio.Transport, _received: bytes) -> None:
    """Close an HTTP/2 connection with HTTP_1_1_REQUIRED (RFC 9113 section 7)."""
    text = b"gRPC is off, its package is not installed: use HTTP/1.1"
    transport.write(frames.settings() + frames.goaway(0, frames.HTTP_1_1_REQUIRED, text))
    transport.close()


def _check_tls(options: ServerOptions) -> None:
    """Raise StartError if a file name for gRPC's TLS is missing."""
    mutual = options.grpc_use_ssl_mutual
    if not (options.grpc_use_ssl or mutual):
        return
    files = {"--grpc-server-cert": options.grpc_server_cert, "--grpc-server-key": options.grpc_server_key}
    if mutual:
        files["--grpc-root-cert"] = options.grpc_root_cert
    missing = [flag for flag, path in files.items() if not path]
    if missing:
        raise StartError(f"--grpc-use-ssl{'-mutual' if mutual else ''} needs {' and '.join(missing)}")


def serve(engine: Engine, loading: Future[Engine], host: Host, settings: Tuning, early: EarlyPort | None = None) -> int:
    """Run a server until SIGTERM or SIGINT and return the exit code (0 after a clean shutdown, else 1)."""
    return _run(_serve(engine, loading, host, settings, early))


async def _serve(engine: Engine, loading: Future[Engine], host: Host, settings: Tuning, early: EarlyPort | None) -> int:
    loop = asyncio.get_running_loop()
    server = Server(engine, host.server, host.front, host.doors, early)
    stop_requested = asyncio.Event()

    def stop() -> None:
        seconds = host.server.lame_duck_secs + engine.options.exit_timeout_secs
        force_exit_after(seconds + MARGIN_S)  # the margin leaves time to answer waiting requests at the timeout
        loop.call_soon_threadsafe(stop_requested.set)

    on_signals(_ending_signals(), stop)
    starting, stopping = loop.create_task(server.start(loading)), loop.create_task(stop_requested.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        _log.info("told to stop before the models were loaded")
        starting.cancel()
        exit_now(0 if await server.stop() else 1)
    try:
        await starting
    except (StartError, RemoraError, ValueError) as error:
        _log.error("cannot start: %s", _reason(engine, error))
        await server.stop(announce=False)
        exit_now(1)
    age_s = process_age_s()
    engine.ledger.ready()
    freeze(settings)
    print(ready_table(server, age_s), file=sys.stderr, flush=True)
    await loop.run_in_executor(None, give_back)
    await stopping
    if not await server.stop(drain=True):
        force_exit()
    force_exit_after(server.end - loop.time())
    _log.info("All models are stopped, unloading models")
    return 0


def _ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop a server: SIGHUP only if it is not ignored, as it is under nohup."""
    ending = (signal.SIGTERM, signal.SIGINT)
    return ending if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*ending, signal.SIGHUP)


def _reason(engine: Engine, error: Exception) -> str:
    """Return why startup failed; the reasons of models that failed to load are already in the log."""
    failed = engine.start_failures
    if not isinstance(error, RemoraError) or not failed:
        return str(error)
    names = ", ".join(f"'{name}'" for name in sorted(failed))
    return f"{names} could not be loaded; --exit-on-error=false serves the models that can be"


def ready_table(server: Server, age_s: float) -> str:
    """Return a table of the ready models with their load times and the addresses of the server."""
    rows = [("model", "version", "backend", "load")]
    rows += [
        (model.name, model.version_text, model.config.backend or model.platform, f"{model.load_ns / 1e6:.0f} ms")
        for model in server.engine.models()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    ports, options = server.ports, server.options
    places = [
        f"{what} {address}:{port}"
        for what, address, port in (
            ("HTTP and gRPC" if options.grpc_on_http_port else "HTTP", options.http_address, ports.http),
            ("gRPC", options.grpc_address or options.http_address, ports.grpc),
            ("metrics", options.metrics_address or options.http_address, ports.metrics),
            *((door.what, door.address, port) for door, port in zip(server.doors, ports.doors, strict=True)),
        )
        if port
    ]
    lines.append(f"READY after {age_s:.2f} s: {', '.join(places)}")
    return "\n".join(lines)


def _run(main: asyncio.Future[int] | object) -> int:
    try:
        import uvloop
    except ImportError:  # not available on this platform; asyncio's loop works too, but is slower
        return asyncio.run(main)  # type: ignore[arg-type]
    return int(uvloop.run(main))  # type: ignore[arg-type]


def _grpc_restrictions(options: ServerOptions) -> tuple[str, ...]:
    """Return gRPC's restrictions; on a shared port they default to those of HTTP."""
    shared = options.http_restricted_api if options.grpc_on_http_port else ()
    return options.grpc_restricted_protocol or shared


def _pattern(text: str, flag: str) -> re.Pattern[str] | None:
    """Compile a pattern from the command line, case-insensitive [H25]. Raises StartError."""
    if not text:
        return None
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise StartError(f"{flag}={text}: not a regular expression: {error}") from error
