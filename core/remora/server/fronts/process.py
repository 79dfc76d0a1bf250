"""Front process, which takes over connections, decodes requests and encodes responses.

The engine's process passes it the options and the ports as JSON, and accepted connections, over a socket; everything
else crosses the channel. A front that finds the engine's process gone ends.

Invariant: no signal ends a front, because the engine's process drains it.
"""

from __future__ import annotations

import array
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from remora.options import ServerOptions
from remora.protocols.cross_site import host_names
from remora.protocols.rest.infer import InferCodec
from remora.protocols.rest.request import RequestLimits
from remora.protocols.restriction import Restrictions
from remora.server.connections import Connections
from remora.server.fronts import codec
from remora.server.fronts.channel import Ends, LoopChannel
from remora.server.fronts.client import EngineClient
from remora.server.fronts.codec import Kind, Message
from remora.server.fronts.services import CallService, InferService, RelayService
from remora.server.host_routes import HostRoute
from remora.server.http.exchange import Service
from remora.server.http.http1_listener import Listener
from remora.server.http.http1_listener_state import Handover
from remora.server.http.http2 import ALPN, Http2Listener, OpenRequest
from remora.server.http.http2_requests import Requests
from remora.server.http.large_bodies import SLOW_BYTES
from remora.server.http.port_services import port_service
from remora.server.listening import Port
from remora.server.option_checks import (
    compile_pattern,
    export_log,
    front_count,
    grpc_restrictions,
    logs_requests,
    open_key_check,
)
from remora.server.shutdown import until_lost
from remora.system import logs
from remora.system.cpus import usable_cpus
from remora.system.tuning import Tuning, apply, freeze

if TYPE_CHECKING:
    from remora.server.access_log import AccessLog
    from remora.server.key_check import KeyCheck
    from remora.server.tls import PortTls

_log = logging.getLogger("remora.server")

CONTROL_BYTES = 1 << 17
"""Longest message of the control socket."""
READY = b"R"
_COUNT_S = 0.1
_LAST_WORDS_S = 1.0
"""Time to send the last answers after the engine's process has ended, and then the last log records."""


class Front:
    """Connections of one front process and their services. Create it in the loop's thread.

    Args:
        control: socket to the engine's process; the front closes it.
        ends: descriptors of the channel.
        ready: called when the front is ready for connections.
        poll_ns: see `LoopChannel`.
    """

    def __init__(
        self, control: socket.socket, ends: Ends, ready: Callable[[], object] = lambda: None, poll_ns: int = 0
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = control
        self._client = EngineClient()
        self._channel = LoopChannel(ends, self._client.receive, self._break, serves=False, poll_ns=poll_ns)
        self._client.use(self._channel)
        self._client.control = self._obey
        self._client.before_relay = self._report
        self._client.is_alone = self._is_alone
        self._options = ServerOptions()
        self._access: AccessLog | None = None
        self._connections = Connections(self._options)
        self._listeners: list[Listener | Http2Listener] = []
        self._ports: list[Port] = []
        self._calls: list[CallService] = []
        self._codec = InferCodec()
        self._keys: KeyCheck | None = None
        self._adopted = 0
        self._reported: list[int] = []
        self._reported_load: Sequence[object] = ()
        self._failed = False
        self._ready = ready
        self._counting: asyncio.TimerHandle | None = None
        self.ended = asyncio.Event()

    def start(self) -> None:
        """Take orders from now on."""
        self._loop.add_reader(self._control.fileno(), self._read_control)
        self._count()

    # -- orders over the socket -------------------------------------------------------------------------------------

    def _read_control(self) -> None:
        while True:
            try:
                data, ancillary, _flags, _address = self._control.recvmsg(CONTROL_BYTES, socket.CMSG_SPACE(4))
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(self._control.fileno())
                self._loop.create_task(self._end_alone())
                return
            fds = array.array("i")
            for _level, _kind, content in ancillary:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
            self._take_order(data, list(fds))

    def _take_order(self, data: bytes, fds: list[int]) -> None:
        if data[:1] == b"C":
            self._adopted += 1
            for fd in fds:  # none if this process has no room for more descriptors
                os.set_inheritable(fd, False)
                self._ports[data[1]].adopt(socket.socket(fileno=fd))
        elif data[:1] == b"P":
            self._open_port(json.loads(data[1:]))
        else:
            self._set_up(json.loads(data[1:]))

    def _set_up(self, order: dict[str, Any]) -> None:
        options = self._options = codec.read_options(order["options"])
        logs.OURS.set_up(logs.LogSettings(**order["log"]))
        export_log(options.log_export)
        self._keys = open_key_check(options, self._loop.time)
        if self._keys is not None:
            self._keys.log_no_changes()  # the engine's process logs them
            self._keys.follow()
        if logs_requests(options):
            from remora.server.access_log import open_access_log  # imported here because it is usually off

            self._access = open_access_log(options, self._keys)
        self._connections = Connections(options, processes=front_count(options.frontends, usable_cpus()))
        self._connections.sweep()
        self._codec = InferCodec(
            RequestLimits(options.http_max_input_size, options.http_max_json_depth, slow_bytes=SLOW_BYTES),
            forward_pattern=compile_pattern(options.http_header_forward_pattern, "--http-header-forward-pattern"),
            withholds=None if self._keys is None else self._keys.withholds,
        )
        self._ready()
        self._control.send(READY)

    def _open_port(self, port: dict[str, Any]) -> None:
        """Serve the connections of a port; see `supervisor.PortOrder`."""
        options, number = self._options, len(self._ports)
        listener: Listener | Http2Listener
        if port["grpc"]:
            listener = Http2Listener(
                self._open_calls(number, port["most_bytes"]), None, self._terms(), self._connections.held
            )
            listeners: list[Listener | Http2Listener] = [listener]
        else:
            service = self._http_service(number, [HostRoute(*row) for row in port["routes"]], infers=port["infers"])
            origins = options.cors_origin if port["shares"] else ()
            service = port_service(port["address"], service, host_names(options.allowed_host), origins=origins)
            service = service if self._access is None else self._access.over(service)
            http2, listeners = self._http2(number, service) if port["http2"] else (None, [])
            listener = Listener(
                service,
                max_body_bytes=options.http_max_input_size,
                max_chunks=options.http_max_chunks,
                http2=http2,
                held=self._connections.held,
            )
            listeners = [listener, *listeners]
        tls = self._tls(grpc=port["grpc"], http2=port["http2"]) if port["tls"] else None
        opened = Port([], listener.connection, self._connections.make_room, tls)
        self._ports.append(opened)
        self._connections.add(listeners, [opened], infers=port["shares"])  # a port of metrics shares no answers
        self._listeners += listeners

    def _is_alone(self) -> bool:
        """Return True if there is one connection and it has one request."""
        used = [listener for listener in self._listeners if listener.connections]
        return len(used) == 1 and used[0].is_alone()

    def _http_service(self, number: int, routes: Sequence[HostRoute], *, infers: bool) -> Service:
        options = self._options
        if not infers:
            return RelayService(self._client, number, self._keys, routes)
        restrictions = Restrictions(options.http_restricted_api, "--http-restricted-api")
        limit, malformed = options.http_max_input_size, int(options.client_errors)
        return InferService(self._client, number, self._codec, restrictions, limit, malformed, self._keys)

    def _http2(self, number: int, service: Service) -> tuple[Handover, list[Listener | Http2Listener]]:
        limit = self._options.http_max_input_size
        requests = Requests(service, limit)
        listener = Http2Listener(self._open_calls(number, limit), requests.open, self._terms(), self._connections.held)
        listener.answers = requests.answers
        return listener.take, [listener]

    def _open_calls(self, number: int, most_bytes: int) -> OpenRequest:
        open_call = self._call_service(number, most_bytes).open
        return open_call if self._access is None else self._access.over_calls(open_call)

    def _call_service(self, number: int, most_bytes: int) -> CallService:
        options = self._options
        service = CallService(
            self._client,
            number,
            Restrictions(grpc_restrictions(options), "--grpc-restricted-protocol"),
            min(most_bytes, self._channel.most_bytes),
            pattern=options.grpc_header_forward_pattern,
            compression=options.grpc_infer_response_compression_level,
            keys=self._keys,
        )
        self._calls.append(service)
        return service

    def _terms(self) -> Any:
        from remora.server.grpc.listener import terms_of  # imported here, because it needs the package of gRPC

        return terms_of(self._options)

    def _tls(self, *, grpc: bool, http2: bool) -> PortTls:
        from remora.server.tls import PortTls, grpc_files, http_files  # imported here, because few ports have TLS

        files = grpc_files(self._options) if grpc else http_files(self._options)
        assert files is not None  # because the engine's process has read them
        tls = PortTls(files, (ALPN,) if grpc else (ALPN, "http/1.1") if http2 else ("http/1.1",))
        tls.log_no_changes()  # the engine's process logs them
        return tls

    # -- orders over the channel ------------------------------------------------------------------------------------

    def _obey(self, message: Message) -> None:
        if message.kind == Kind.ANNOUNCE:
            self._connections.announce()
        elif message.kind == Kind.DRAIN:
            self._loop.create_task(self._drain())
        elif message.kind == Kind.MAKE_ROOM:
            self._connections.make_room()
        elif message.kind == Kind.LOG:
            logs.OURS.change(codec.from_json(message.parts[0]))
        elif message.kind == Kind.CLOSE:
            self._end()

    async def _drain(self) -> None:
        """Close the connections as they become idle, then end."""
        self._read_control()  # which may have connections that were handed over before the order to drain
        for service in self._calls:
            service.draining = True
        await self._connections.drain(float("inf"))
        self._report()
        self._end()

    def _break(self, error: Exception) -> None:
        _log.error("a front cannot read what its engine sends: %s", error, exc_info=error)
        self._failed = True
        self._end()

    async def _end_alone(self) -> None:
        """End because the engine's process has ended, after the answers that it has sent."""
        if not self.ended.is_set():
            _log.error("the engine's process has ended: this front ends, too")
            self._failed = True
            await asyncio.wait((self._loop.create_task(self._connections.drain(self._loop.time() + _LAST_WORDS_S)),))
            self._end()

    def _end(self) -> None:
        if self.ended.is_set():
            return
        self.ended.set()
        self._connections.close()
        for service in self._calls:
            service.close()
        if self._counting is not None:
            self._counting.cancel()
        self._channel.flush()
        self._channel.close()
        self._loop.remove_reader(self._control.fileno())

    async def wait(self) -> int:
        """Wait for the end, write the last lines and return the exit code, 0 after a clean end."""
        await self.ended.wait()
        await until_lost()
        if self._access is not None:
            self._access.close()
        self._control.close()  # the engine's process soon kills a front that has closed it
        logs.OURS.end_export(_LAST_WORDS_S)
        return 1 if self._failed else 0

    # -- counts -----------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        self._report()
        self._report_load()
        self._counting = self._loop.call_later(_COUNT_S, self._count)

    def _report(self) -> None:
        """Send the numbers of connections if they have changed."""
        counts = self._connections.count()
        opening = sum(port.opening for port in self._ports)
        found = [self._adopted, opening, counts["http1"], counts["http2"]]
        if found != self._reported:
            self._reported = found
            self._channel.send(Kind.COUNTS, 0, [codec.to_json(found)])

    def _report_load(self) -> None:
        """Send answers, held bytes and closed connections if they have changed."""
        connections = self._connections
        load: Sequence[object] = [sorted(connections.answers().items()), connections.held_load(), connections.closed()]
        if load != self._reported_load:
            self._reported_load = load
            self._channel.send(Kind.LOAD, 0, [codec.to_json(load)])


async def _run(control: socket.socket, ends: Ends, poll_ns: int) -> int:
    front = Front(control, ends, lambda: freeze(Tuning()), poll_ns)
    front.start()
    return await front.wait()


def main(arguments: dict[str, Any]) -> None:
    """Run a front until the engine's process ends it; ``arguments`` has the descriptors."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    apply(Tuning(), {})
    sys.argv = [sys.argv[-1]]
    ends = Ends(*arguments["ends"])
    for fd in ends:
        os.set_inheritable(fd, False)
    control = socket.socket(fileno=arguments["control"])
    control.set_inheritable(False)
    control.setblocking(False)
    try:
        import uvloop
    except ImportError:  # not available on this platform
        code = asyncio.run(_run(control, ends, arguments["poll_ns"]))
    else:
        code = uvloop.run(_run(control, ends, arguments["poll_ns"]))
    sys.stderr.flush()
    os._exit(code)
