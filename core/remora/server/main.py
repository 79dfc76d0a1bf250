"""Server process: open the ports, load the models, serve until a signal, shut down.

Only this module and `cli` use signals and the standard streams of the process.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from remora.engine import Engine
from remora.errors import RemoraError
from remora.options import ServerOptions
from remora.protocols.cross_site import host_names
from remora.protocols.rest.infer import InferCodec
from remora.protocols.rest.request import RequestLimits
from remora.protocols.restriction import Restrictions
from remora.server.connections import Connections, PortSpec
from remora.server.early_port import EarlyPort
from remora.server.grpc.opening import GrpcTransport, open_grpc
from remora.server.host import ExtraPort, Host, ServerContext, ServiceFactory, all_on_one_port, v2_alone
from remora.server.host_routes import routes_of
from remora.server.http.asgi import answer_in_thread
from remora.server.http.exchange import Service
from remora.server.http.large_bodies import LargeBodies
from remora.server.http.port_services import MetricsService, SchemeService, port_service
from remora.server.http.rest import RestService
from remora.server.loop import Lateness, LoopMailbox
from remora.server.option_checks import (
    StartError,
    check_ports,
    compile_pattern,
    front_count,
    grpc_restrictions,
    logs_requests,
    open_key_check,
    open_proxies,
)
from remora.server.shutdown import (
    LAST_RECORDS_S,
    MARGIN_S,
    Drainable,
    EngineDrain,
    exit_now,
    force_exit,
    force_exit_after,
    log_in_flight,
    on_signals,
    shut_down,
    until_lost,
    until_sequences_end,
)
from remora.system import logs
from remora.system.cpus import usable_cpus
from remora.system.machine import process_age_s
from remora.system.tuning import Tuning, freeze, give_back
from remora.system.url_secrets import hide_secrets
from remora.tensors.shared_memory import DISABLED, Regions, SharedMemory

if TYPE_CHECKING:
    from remora.server.access_log import AccessLog
    from remora.server.fronts.supervisor import Fronts
    from remora.server.key_check import KeyCheck

_log = logging.getLogger("remora.server")


class Ports(NamedTuple):
    """Port numbers of a running server, 0 for disabled ports.

    ``extra`` is in the order of `Server.extra_ports`. ``grpc_on_http`` is True if the HTTP port accepts gRPC.
    """

    http: int = 0
    grpc: int = 0
    metrics: int = 0
    extra: tuple[int, ...] = ()
    grpc_on_http: bool = False


class Server:
    """HTTP, gRPC and metrics servers of one engine on one event loop.

    Args:
        engine: the engine, not started; `start` starts it and `stop` stops it.
        options: addresses, ports and limits.
        front: creates the service of the HTTP port.
        extra_ports: extra ports of the host.
        early: the HTTP port, if it is already open.
    """

    def __init__(
        self,
        engine: Engine,
        options: ServerOptions,
        front: ServiceFactory = v2_alone,
        extra_ports: tuple[ExtraPort, ...] = (),
        early: EarlyPort | None = None,
    ) -> None:
        self.engine = engine
        self.options = options
        self.extra_ports = extra_ports
        self.ports = Ports()
        self.end = 0.0
        """Loop time at which the exit timeout expires."""
        self._front = front
        self._access: AccessLog | None = None
        self._lateness: Lateness | None = None
        self._fronts = _fronts(options, front, early)
        self._connections = self._fronts or Connections(options, early)
        self._parts: list[Drainable] = [self._connections, EngineDrain(engine)]
        """All parts in the order in which they drain."""

    async def start(self, loading: Future[Engine] | None = None) -> None:
        """Open the ports, load the models and return when they are ready.

        ``loading`` is the future of a load that is already running. Raises StartError or RemoraError; the caller then
        stops the server.
        """
        options, engine = self.options, self.engine
        check_ports(options, self.extra_ports)
        grpc_opened = _nothing
        if options.allow_grpc:  # set before the ports open, so that no probe sees "ready" too early
            grpc_opened = engine.hold_readiness("gRPC is being opened")
        mailbox = LoopMailbox(asyncio.get_running_loop())
        keys = open_key_check(options, asyncio.get_running_loop().time)
        if logs_requests(options) and self._fronts is None:  # front processes log the requests of their connections
            from remora.server.access_log import open_access_log  # imported here because it is usually off

            self._access = open_access_log(options, keys)
        regions = SharedMemory(most=options.max_client_shm_regions) if options.allow_client_shm else DISABLED
        if keys is not None:
            keys.follow()
            engine.measure_denials(keys.denied)
            engine.traces.key_of = keys.name_by
        context = self._context(mailbox, regions, keys)
        restricted = Restrictions(grpc_restrictions(options), "--grpc-restricted-protocol")
        grpc = open_grpc(context, restricted, regions, self._connections.accept)
        self._parts.insert(0, grpc)
        engine.measure_connections(self._connections.count)
        if options.allow_metrics:
            lateness = self._lateness = Lateness(asyncio.get_running_loop())
            engine.measure_load(lambda: self._connections.load(lateness.histogram()))
        if self._fronts is not None:
            await self._fronts.start(engine, mailbox)
            engine.ledger.mark("front processes")
        await self._open_ports(context, mailbox, grpc)
        engine.ledger.mark("ports")
        self._connections.sweep()
        if grpc.starts_late:
            await asyncio.gather(self._load(loading), self._start_grpc(grpc, grpc_opened))
            engine.ledger.mark("gRPC")
        else:
            grpc_opened()
            await self._load(loading)

    def _context(self, mailbox: LoopMailbox, regions: Regions, keys: KeyCheck | None) -> ServerContext:
        """Return the parts from which the services of all ports are built."""
        options, later = self.options, answer_in_thread(asyncio.get_running_loop())
        rest = RestService(
            self.engine,
            InferCodec(
                RequestLimits(options.http_max_input_size, options.http_max_json_depth),
                forward_pattern=compile_pattern(options.http_header_forward_pattern, "--http-header-forward-pattern"),
                regions=regions,
                withholds=None if keys is None else keys.withholds,
            ),
            mailbox,
            later,
            options,
            restrictions=Restrictions(options.http_restricted_api, "--http-restricted-api"),
            allowed_hosts=host_names(options.allowed_host),
            deny=None if keys is None else keys.deny_action,
            large=LargeBodies(asyncio.get_running_loop(), self._connections.held),
        )
        return ServerContext(self.engine, rest, mailbox, later, options, self._access, keys, self._connections.held)

    async def _open_ports(self, context: ServerContext, mailbox: LoopMailbox, grpc: GrpcTransport) -> None:
        """Open all ports except grpcio's.

        Their services must answer while models are still being loaded.
        """
        options, connections, hosts = self.options, self._connections, host_names(self.options.allowed_host)
        origins = options.cors_origin if self._fronts is None else ()  # front processes share their answers
        http_port, metrics_port = 0, 0
        if options.allow_http:
            platform = self._front(context)
            front = port_service(options.http_address, platform, hosts, context.keys, origins)
            proxies = open_proxies(options)
            if options.http_server_cert or proxies is not None:
                front = SchemeService(front, "https" if options.http_server_cert else "http", proxies)
            front = self._logged(front)
            http2 = grpc.share_port(front) if options.grpc_on_http_port else None
            spec = PortSpec("HTTP", options.http_address, options.http_port, routes_of(platform))
            http_port = await connections.listen(front, spec, http2)
        extra_ports = []
        for extra in self.extra_ports:
            platform = extra.front(context)
            service = self._logged(port_service(extra.address, platform, hosts, context.keys, origins))
            spec = PortSpec(extra.what, extra.address, extra.port, routes_of(platform))
            extra_ports.append(await connections.listen(service, spec))
        grpc_port = await grpc.listen()
        connections.add(grpc.listeners, grpc.ports)
        mailbox.alone = connections.is_alone
        if options.allow_metrics:
            address = options.metrics_address or options.http_address
            service = self._logged(port_service(address, MetricsService(context.rest), hosts, context.keys))
            metrics_port = await connections.listen(service, PortSpec("metrics", address, options.metrics_port))
        self.ports = Ports(http_port, grpc_port, metrics_port, tuple(extra_ports), grpc.on_http_port)

    def _logged(self, service: Service) -> Service:
        return service if self._access is None else self._access.over(service)

    async def _load(self, loading: Future[Engine] | None) -> None:
        loop = asyncio.get_running_loop()
        await (asyncio.wrap_future(loading) if loading else loop.run_in_executor(None, self.engine.start))
        self.engine.ledger.mark("models")

    async def _start_grpc(self, grpc: GrpcTransport, opened: Callable[[], None]) -> None:
        self.ports = self.ports._replace(grpc=await grpc.start())
        self._connections.add(grpc.listeners, grpc.ports)
        opened()

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
        countdown = loop.create_task(log_in_flight(self.engine, end)) if announce else None
        if drain:
            await until_sequences_end(self.engine, end)
        done = await shut_down(self._parts, end)
        if self._lateness is not None:
            self._lateness.stop()
        if self._access is not None:
            await until_lost()
            self._access.close()
        if countdown is not None:
            countdown.cancel()
        return done

    async def _lame_duck(self) -> None:
        """Report "not ready" and keep serving while traffic moves away."""
        for part in self._parts:
            part.announce()
        if self.options.lame_duck_secs:
            _log.info("not ready from now on, serving for %d s more", self.options.lame_duck_secs)
            await asyncio.sleep(self.options.lame_duck_secs)


def _fronts(options: ServerOptions, front: ServiceFactory, early: EarlyPort | None) -> Fronts | None:
    """Return the front processes that the options ask for, or None. Raises ValueError."""
    count = front_count(options.frontends, usable_cpus())
    if not count:
        return None
    from remora.server.fronts.supervisor import Fronts  # imported here because few servers have fronts

    # A platform's own service may treat V2's routes in its own way, so it sees all requests.
    return Fronts(options, count, early, infers_on_http=front in (v2_alone, all_on_one_port))


def _nothing() -> None:
    """Do nothing."""


def serve(engine: Engine, loading: Future[Engine], host: Host, settings: Tuning, early: EarlyPort | None = None) -> int:
    """Run a server until SIGTERM or SIGINT and return the exit code.

    It is 0 after a clean shutdown, else 1.
    """
    return run_loop(_serve(engine, loading, host, settings, early))


async def _serve(engine: Engine, loading: Future[Engine], host: Host, settings: Tuning, early: EarlyPort | None) -> int:
    loop = asyncio.get_running_loop()
    server = Server(engine, host.server, host.front, host.extra_ports, early)
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
    _announce(server, age_s)
    await loop.run_in_executor(None, _clean_up)
    await stopping
    if not await server.stop(drain=True):
        force_exit()
    force_exit_after(server.end - loop.time())
    _log.info("All models are stopped, unloading models")
    logs.OURS.end_export(LAST_RECORDS_S)
    return 0


def _clean_up() -> None:
    """Give back memory, and remove the folders of processes that were killed, now that this delays no answer."""
    give_back()
    try:
        from remora.system.temporary_folders import remove_left_behind

        remove_left_behind()
    except OSError as error:  # such as a lack of descriptors, which must not end a server that serves
        _log.warning("folders of processes that were killed cannot be removed: %s", error)


def _ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop a server.

    SIGHUP is one only if it is not ignored, as it is under nohup.
    """
    ending = (signal.SIGTERM, signal.SIGINT)
    return ending if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*ending, signal.SIGHUP)


def _reason(engine: Engine, error: Exception) -> str:
    """Return why startup failed.

    The reasons of models that failed to load are already in the log.
    """
    failed = engine.start_failures
    if not isinstance(error, RemoraError) or not failed:
        return hide_secrets(str(error))
    names = ", ".join(f"'{name}'" for name in sorted(failed))
    return f"{names} could not be loaded; --exit-on-error=false serves the models that can be"


def _announce(server: Server, age_s: float) -> None:
    """Print the ready models and the addresses, as a table or as one JSON record."""
    if logs.OURS.is_json:
        columns, *models = ready_models(server)
        fields = {"models": [dict(zip(columns, model, strict=True)) for model in models]}
        _log.info("%s", ready_line(server, age_s), extra={"fields": fields})
    else:
        print(ready_table(server, age_s), file=sys.stderr, flush=True)


def ready_models(server: Server) -> list[tuple[str, str, str, str]]:
    """Return the name, version, backend and load time of each ready model, after the titles of these columns."""
    rows = [("model", "version", "backend", "load")]
    rows += [
        (
            model.name,
            model.version_text,
            model.config.backend or model.platform,
            f"{model.load_record.duration_ns / 1e6:.0f} ms",
        )
        for model in server.engine.models()
    ]
    return rows


def ready_table(server: Server, age_s: float) -> str:
    """Return a table of the ready models with their load times and the addresses of the server."""
    rows = ready_models(server)
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join((*lines, ready_line(server, age_s)))


def ready_line(server: Server, age_s: float) -> str:
    """Return the time of the start and the addresses of the server."""
    ports, options = server.ports, server.options
    http = "HTTPS" if options.http_server_cert else "HTTP"
    places = [
        f"{what} {address}:{port}"
        for what, address, port in (
            (f"{http} and gRPC" if ports.grpc_on_http else http, options.http_address, ports.http),
            ("gRPC", options.grpc_address or options.http_address, ports.grpc),
            ("metrics", options.metrics_address or options.http_address, ports.metrics),
            *((each.what, each.address, port) for each, port in zip(server.extra_ports, ports.extra, strict=True)),
        )
        if port
    ]
    line = f"READY after {age_s:.2f} s: {', '.join(places)}"
    if ports.http:
        host = "localhost" if options.http_address in ("", "0.0.0.0", "::") else options.http_address
        line += f"; try the models at {http.lower()}://{f'[{host}]' if ':' in host else host}:{ports.http}/"
    return line


def run_loop(main: asyncio.Future[int] | object) -> int:
    try:
        import uvloop
    except ImportError:  # not available on this platform; asyncio's loop works too, but is slower
        return asyncio.run(main)  # type: ignore[arg-type]
    return int(uvloop.run(main))  # type: ignore[arg-type]
