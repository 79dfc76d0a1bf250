"""Front processes of a server, from their start and restart to the drain at shutdown.

The engine's process listens and passes each accepted connection to the front with the fewest. So a few long
connections, such as gRPC channels, spread evenly, and the end of a front loses no connection that waits in a queue of
the kernel.

Invariant: a front that ends takes only its own connections along.
"""

from __future__ import annotations

import array
import asyncio
import json
import logging
import os
import resource
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from remora.backends.worker.polling import poll_limit_ns
from remora.engine import Engine
from remora.options import ServerOptions
from remora.protocols.http2.frames import Fields
from remora.protocols.http2.stream import Opener
from remora.server.connections import Connections, PortSpec
from remora.server.early_port import EarlyPort
from remora.server.fronts import codec
from remora.server.fronts.channel import ARENA_BYTES, LoopChannel, create
from remora.server.fronts.codec import Kind, Message
from remora.server.fronts.link import FrontLink
from remora.server.fronts.process import CONTROL_BYTES, READY
from remora.server.http.exchange import Service
from remora.server.http.http1_listener import Listener
from remora.server.http.http2 import Http2Listener
from remora.server.listening import Port
from remora.server.loop import LoopMailbox
from remora.server.option_checks import StartError
from remora.statistics import HeldLoad
from remora.system import logs
from remora.system.cpus import usable_cpus

if TYPE_CHECKING:
    from remora.server.host_routes import HostRoute
    from remora.server.tls import PortTls

_log = logging.getLogger("remora.server")

_BOOT = (
    "import json, sys; arguments, sys.path[:] = map(json.loads, sys.argv[1:3]); "
    "from remora.server.fronts.process import main; main(arguments)"
)
_START_S = 60.0
"""How long a front may take to start."""
_POLL_S = 0.01
_LOG_S = 1.0
"""Interval at which a change of the log settings reaches the fronts."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
"""Pauses before a front that has ended is started again: the first, and the longest after repeated failures."""
_STEADY_S = 10.0
"""A front that ran for this long did not fail at its start."""
_KEPT_FDS = 64
"""Descriptors of a front that are not for connections."""
_HELD_S = 0.05
"""Interval at which idle connections are closed while others wait for a front."""
_HELD = 64
"""Accepted connections that wait for a front before a port accepts no more."""


class PortOrder(NamedTuple):
    """What a front must know about a port.

    ``infers`` is True if the front may decode inferences of V2 there, ``http2`` if the port accepts gRPC beside HTTP,
    ``shares`` if pages of other origins may read its answers. ``routes`` are those of the port's platform.
    """

    address: str
    grpc: bool
    infers: bool
    http2: bool
    tls: bool
    shares: bool
    most_bytes: int
    routes: Sequence[HostRoute]


class _ServedPort:
    """A port with its services in this process; see `link.ServedPort`."""

    def __init__(self, order: PortOrder, listener: Listener | Http2Listener) -> None:
        self.order = order
        self.service: Service | None = listener.service if isinstance(listener, Listener) else None
        self.open_call: Callable[[Fields], Opener] | None = (
            None if isinstance(listener, Listener) else listener.open_call
        )


class _HandOffPort(Port):
    """Port whose connections other processes serve.

    It follows the certificate too, and logs a renewal for all of these processes.
    """

    def __init__(
        self, sockets: list[socket.socket], hand: Callable[[socket.socket], None], tls: PortTls | None
    ) -> None:
        self._hand = hand
        super().__init__(sockets, asyncio.Protocol, lambda: False, tls)

    def adopt(self, connection: socket.socket) -> None:
        """Pass an accepted connection on."""
        self._hand(connection)


class _FrontProcess:
    """A running front process."""

    def __init__(self, fronts: Fronts, number: int) -> None:
        self._fronts = fronts
        self.number = number
        loop = self._loop = asyncio.get_running_loop()
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.handed = 0
        self.answers: dict[int, int] = {}  # by status
        self.closed: dict[str, int] = {}  # by reason
        self.held: HeldLoad | None = None
        self.counts = [0, 0, 0, 0]  # taken over, being opened, HTTP/1, HTTP/2
        self.started_at = loop.time()
        self.link = FrontLink(fronts.engine, fronts.served, fronts.mailbox, self._take)
        self._control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (self._control, remote):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * CONTROL_BYTES)
        ends, remote_ends = create(fronts.arena_bytes)
        arguments = {"control": remote.fileno(), "ends": list(remote_ends), "poll_ns": fronts.poll_ns}
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", _BOOT, json.dumps(arguments), json.dumps(sys.path),
                 f"remora front {number}"],
                stdin=subprocess.DEVNULL,
                pass_fds=(remote.fileno(), *remote_ends),
                start_new_session=True,
            )  # fmt: skip
        except OSError:
            self._control.close()
            for fd in ends:
                os.close(fd)
            raise
        finally:
            remote.close()
            for fd in remote_ends:
                os.close(fd)
        self.channel = LoopChannel(ends, self.link.receive, self._break, serves=True, poll_ns=fronts.poll_ns)
        self.link.use(self.channel)
        self._control.setblocking(False)
        loop.add_reader(self._control.fileno(), self._read_control)
        self._order(b"O", fronts.set_up())
        for port in fronts.served:
            self.open_port(port.order)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def load(self) -> int:
        """Connections, those on their way among them."""
        return self.handed - self.counts[0] + sum(self.counts[1:])

    def open_port(self, order: PortOrder) -> None:
        """Have the front serve one more port."""
        self._order(b"P", order._asdict())

    def _order(self, kind: bytes, order: object) -> None:
        with suppress(BrokenPipeError, ConnectionError):
            self._control.send(kind + json.dumps(order).encode())

    def hand(self, port: int, connection: socket.socket) -> bool:
        """Pass a connection to the front; return False if it takes none at present."""
        fds = array.array("i", [connection.fileno()])
        try:
            self._control.sendmsg([b"C%c" % port], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        except OSError:
            return False
        self.handed += 1
        return True

    def _read_control(self) -> None:
        try:
            data = self._control.recv(64)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data == READY:
            self.ready.set()
            self._fronts.front_is_ready()
        elif not data:
            self._lose()

    def _take(self, message: Message) -> None:
        if message.kind == Kind.COUNTS:
            self.counts = [int(each) for each in codec.from_json(message.parts[0])]
            self._fronts.counts_changed()
        elif message.kind == Kind.LOAD:
            answers, held, closed = codec.from_json(message.parts[0])
            self.answers, self.held, self.closed = dict(answers), HeldLoad(*held), dict(closed)
        else:
            raise codec.CodecError(f"a message of kind {message.kind} from a front")

    def _break(self, error: Exception) -> None:
        _log.error("front %d sends what cannot be read, and is ended: %s", self.number, error, exc_info=error)
        self._lose()

    def _lose(self) -> None:
        """Cancel the front's requests, because it has ended or must end."""
        if self.ended.is_set():
            return
        self._loop.remove_reader(self._control.fileno())
        self.channel.close()
        self._control.close()
        self.link.lost()
        self.ended.set()
        reaping = self._loop.run_in_executor(None, self._reap)
        reaping.add_done_callback(lambda done: self._fronts.front_has_ended(self, done.result()))

    def _reap(self) -> int:
        """Return the exit code; a process that does not end is killed."""
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(1.0)
        self._popen.kill()
        return self._popen.wait()

    def kill(self) -> None:
        self._popen.kill()


class Fronts(Connections):
    """Front processes of a server, in the place of the server's connections.

    Use it in the loop's thread.

    Args:
        options: addresses and limits.
        count: number of processes, at least one.
        infers_on_http: True if the fronts may decode inferences of V2 on the HTTP port.
        early: the HTTP port, if it is already open.
    """

    def __init__(
        self, options: ServerOptions, count: int, early: EarlyPort | None = None, *, infers_on_http: bool = True
    ) -> None:
        super().__init__(options, early)
        self.poll_ns = poll_limit_ns(options.frontend_poll_us * 1000, usable_cpus())
        self.arena_bytes = max(ARENA_BYTES, 4 * options.http_max_input_size)
        self.served: list[_ServedPort] = []
        self.engine: Engine
        self.mailbox: LoopMailbox
        self._alone = False  # one connection of HTTP/1 is open, so that no other request can arrive meanwhile
        self._number = count
        self._infers_on_http = infers_on_http
        self._fronts: list[_FrontProcess] = []
        self._held: deque[tuple[int, socket.socket]] = deque()
        self._full = False
        self._past_answers: Counter[int] = Counter()  # of fronts that have ended
        self._past_closed: Counter[str] = Counter()
        self._past_refusals: Counter[str] = Counter()
        self._looking: asyncio.TimerHandle | None = None
        self._stopping = False
        self._announced = False
        self._pauses = dict.fromkeys(range(count), _FIRST_PAUSE_S)
        self._opened: list[_HandOffPort] = []
        self._log = logs.OURS.change({})

    # -- start ------------------------------------------------------------------------------------------------------

    async def start(self, engine: Engine, mailbox: LoopMailbox) -> None:
        """Start the processes and return when they are ready. Raises StartError."""
        if not hasattr(os, "memfd_create") or not hasattr(os, "eventfd"):
            raise StartError("--frontends needs memfd_create and eventfd, which this system lacks; leave it out")
        self.engine, self.mailbox = engine, mailbox
        mailbox.alone = self._is_alone
        try:
            self._fronts = [_FrontProcess(self, number) for number in range(self._number)]
        except OSError as error:
            raise StartError(f"--frontends={self._number}: a front process cannot be started: {error}") from error
        for front in self._fronts:
            waits = [asyncio.ensure_future(event.wait()) for event in (front.ready, front.ended)]
            await asyncio.wait(waits, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
            for each in waits:
                each.cancel()
            if not front.ready.is_set():
                raise StartError(
                    f"--frontends={self._number}: front process {front.number} did not start; its messages are above"
                )
        self._follow_log()

    def set_up(self) -> object:
        """Return what a front must know before its ports."""
        return {"options": codec.plain_options(self._options), "log": self._log._asdict()}

    def _follow_log(self) -> None:
        """Pass changed log settings on, now and every second."""
        log = logs.OURS.change({})
        if log != self._log:
            self._log = log
            changes = {name: value for name, value in log._asdict().items() if name != "log_file"}
            self._send_all(Kind.LOG, [codec.to_json(changes)])
        if not self._stopping:
            asyncio.get_running_loop().call_later(_LOG_S, self._follow_log)

    def _send_all(self, kind: Kind, parts: list[codec.Part] | None = None) -> None:
        for front in self._fronts:
            if not front.ended.is_set():
                front.channel.send(kind, 0, parts or ())

    # -- ports ------------------------------------------------------------------------------------------------------

    def accept(
        self,
        sockets: list[socket.socket],
        listener: Listener | Http2Listener,
        spec: PortSpec,
        tls: PortTls | None = None,
    ) -> Port:
        """Return a port on listening sockets whose connections the fronts serve."""
        over_http = isinstance(listener, Listener)
        order = PortOrder(
            address=str(sockets[0].getsockname()[0]),
            grpc=not over_http,
            infers=over_http and self._infers_on_http and spec.what == "HTTP",
            http2=isinstance(listener, Listener) and listener.http2 is not None,
            tls=tls is not None,
            shares=spec.what != "metrics",
            most_bytes=self._options.message_bytes,
            routes=spec.routes,
        )
        number = len(self.served)
        self.served.append(_ServedPort(order, listener))
        for front in self._fronts:
            if not front.ended.is_set():
                front.open_port(order)
        opened = _HandOffPort(sockets, lambda connection: self._hand(number, connection), tls)
        self._opened.append(opened)
        return opened

    def add(self, listeners: Sequence[Listener | Http2Listener], ports: Sequence[Port], *, infers: bool = True) -> None:
        """See `Connections.add`."""
        super().add(listeners, ports, infers=infers)
        for listener in listeners:
            if isinstance(listener, Http2Listener) and listener.open_request is not None:  # gRPC on the HTTP port
                self.served[0].open_call = listener.open_call

    def is_alone(self) -> bool:
        """Return False, because requests arrive from several processes."""
        return False

    def _hand(self, port: int, connection: socket.socket) -> None:
        self._held.append((port, connection))
        self.hand_held()

    def hand_held(self) -> None:
        """Pass accepted connections on, each to the front with the fewest.

        Those without a front wait.
        """
        while self._held:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _KEPT_FDS
            able = [front for front in self._fronts if front.ready.is_set() and not front.ended.is_set()]
            able = sorted((front for front in able if front.load < most), key=lambda front: front.load)
            port, connection = self._held[0]
            if not any(front.hand(port, connection) for front in able):
                break
            self._held.popleft()
            connection.close()
            self._alone = False  # until the front reports its connections
        full = len(self._held) >= _HELD
        if full != self._full:
            self._full = full
            for port_opened in self._opened:
                port_opened.hold() if full else port_opened.go_on()
        if self._held and self._looking is None:
            self._send_all(Kind.MAKE_ROOM)
            self._looking = asyncio.get_running_loop().call_later(_HELD_S, self._look_at_held)

    def counts_changed(self) -> None:
        """Take note of connections that have opened or closed."""
        fronts = [front for front in self._fronts if not front.ended.is_set()]
        self._alone = sum(front.load for front in fronts) == 1 and not any(front.counts[3] for front in fronts)
        self.hand_held()

    def _is_alone(self) -> bool:
        return self._alone

    def _look_at_held(self) -> None:
        self._looking = None
        self.hand_held()

    # -- processes that start and end ---------------------------------------------------------------------------------

    def front_is_ready(self) -> None:
        """Give a front that has started its first connections."""
        if self._announced:
            self._send_all(Kind.ANNOUNCE)
        self.hand_held()

    def front_has_ended(self, front: _FrontProcess, code: int) -> None:
        """Start a front again after a pause, unless the server is stopping."""
        self._past_answers.update(front.answers)
        self._past_closed.update(front.closed)
        self._past_refusals.update(front.held.refused if front.held is not None else {})
        front.answers, front.closed, front.held = {}, {}, None
        if self._stopping:
            return
        loop = asyncio.get_running_loop()
        lived_s = loop.time() - front.started_at
        pause_s = _FIRST_PAUSE_S if lived_s > _STEADY_S else self._pauses[front.number]
        self._pauses[front.number] = min(2 * pause_s, _LONGEST_PAUSE_S)
        _log.error(
            "front process %d (pid %d) ended with code %d and is started again in %g s; its connections are lost",
            front.number,
            front.pid,
            code,
            pause_s,
        )
        loop.call_later(pause_s, self._restart, front)

    def _restart(self, front: _FrontProcess) -> None:
        if self._stopping:
            return
        try:
            self._fronts[self._fronts.index(front)] = _FrontProcess(self, front.number)
        except OSError as error:
            _log.error("front process %d cannot be started: %s", front.number, error)
            asyncio.get_running_loop().call_later(_LONGEST_PAUSE_S, self._restart, front)

    @property
    def pids(self) -> list[int]:
        """Numbers of the running processes."""
        return [front.pid for front in self._fronts if not front.ended.is_set()]

    # -- as the server's connections ----------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Do nothing, because each front closes its connections that time out."""

    def make_room(self) -> bool:
        """Have the fronts close idle connections; return False, because that takes a moment."""
        self._send_all(Kind.MAKE_ROOM)
        return False

    def count(self) -> dict[str, int]:
        """Return the number of open connections per protocol, over all fronts."""
        fronts = [front.counts for front in self._fronts if not front.ended.is_set()]
        return {"http1": sum(each[2] for each in fronts), "http2": sum(each[3] for each in fronts)}

    def answers(self) -> dict[int, int]:
        """See `Connections.answers`; answers of fronts that have ended are included."""
        counts = Counter(self._past_answers)
        for front in self._fronts:
            counts.update(front.answers)
        return dict(counts)

    def closed(self) -> dict[str, int]:
        """See `Connections.closed`; those of fronts that have ended are included."""
        counts = Counter(self._past_closed)
        for front in self._fronts:
            counts.update(front.closed)
        return dict(counts)

    def held_load(self) -> HeldLoad:
        """See `Connections.held_load`."""
        held = [front.held for front in self._fronts if front.held is not None]
        refused = Counter(self._past_refusals)
        for each in held:
            refused.update(each.refused)
        return HeldLoad(
            sum(each.requests for each in held), sum(each.answers for each in held), self.held.most, dict(refused)
        )

    def announce(self) -> None:
        """See `Drainable.announce`."""
        self._announced = True
        self._send_all(Kind.ANNOUNCE)

    def stop_accepting(self) -> None:
        super().stop_accepting()
        self._stopping = True

    async def drain(self, end: float) -> bool:
        loop = asyncio.get_running_loop()
        self.hand_held()
        self._send_all(Kind.DRAIN)
        while not all(front.ended.is_set() for front in self._fronts) and loop.time() < end:
            await asyncio.sleep(_POLL_S)
        return True

    def close(self) -> bool:
        answered = not self._held and not any(front.link.open for front in self._fronts)
        for _, connection in self._held:
            connection.close()
        for front in self._fronts:
            if not front.ended.is_set():
                front.channel.send(Kind.CLOSE)
                front.channel.flush()
        return answered
