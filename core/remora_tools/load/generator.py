"""Process that sends requests by a plan and reports each window.

It runs as `python -m remora_tools.load.generator`. The plan comes as a line of JSON on stdin, a line with the start
time follows, and the end of stdin ends the process. SIGINT is ignored, because the command handles it. Each window is a
line of JSON on stdout. The loop waits in `select`, because its timeout has microseconds; those of epoll and of event
loops have milliseconds.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TextIO

from remora_tools.deciders.arrivals import arrivals
from remora_tools.load import GRPC_STREAM, HTTP, MOST_WAITING, Answer, Codec, Plan, Results, plan_from_json
from remora_tools.load.grpc_codec import GrpcCodec
from remora_tools.load.http_codec import HttpCodec, reason_in

SEQUENCE_ID = 1_000_000_000_000_000_000
"""Sequence id in a message, which is replaced by that of the sequence, with as many digits or bytes."""
_SEEDS = 1 << 22
_VARINT_BYTES = 9
_RECEIVE_BYTES = 1 << 18
_LONGEST_WAIT_S = 0.1
_EXPIRY_NS = 50_000_000
"""Time between two searches for requests that are out of time."""


class _Connection:
    """Socket with a request in flight, or idle."""

    def __init__(self, plan: Plan, number: int, codec: Callable[[], Codec]) -> None:
        self._plan = plan
        self._make_codec = codec
        self.number = number
        self.position = 0
        """Number of requests that were sent."""
        self.due_ns = self.sent_ns = 0
        self.busy = False
        self.watched = False
        """True while the generator waits until the socket accepts more."""
        self.socket: socket.socket | None = None
        self.codec: Codec = codec()
        self._out = memoryview(b"")

    def connect(self) -> None:
        """Open the connection and block until it is there. Raises OSError."""
        plan = self._plan
        opened: socket.socket = socket.create_connection((plan.host, plan.port), timeout=plan.timeout_s)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if plan.tls:
            context = ssl.create_default_context()
            context.set_alpn_protocols(["http/1.1" if plan.protocol == HTTP else "h2"])
            opened = context.wrap_socket(opened, server_hostname=plan.host)
        opened.setblocking(False)
        self.socket, self.codec = opened, self._make_codec()
        self._send(self.codec.opening())

    def begin(self, message: bytes, due_ns: int, now_ns: int) -> None:
        """Send a request. Raises OSError."""
        if self.socket is None:
            self.connect()
        self.busy, self.due_ns, self.sent_ns = True, due_ns, now_ns
        self.position += 1
        self._send(self.codec.request(message))

    def _send(self, data: bytes) -> None:
        self._out = memoryview(bytes(self._out) + data) if self._out else memoryview(data)
        self.flush()

    def flush(self) -> None:
        """Write what the socket accepts. Raises OSError."""
        while self._out and self.socket is not None:
            try:
                self._out = self._out[self.socket.send(self._out) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                return

    @property
    def writing(self) -> bool:
        """True while the socket has not accepted everything."""
        return len(self._out) > 0

    def receive(self, now_ns: int) -> Answer | None:
        """Read what has arrived. Raises OSError, ValueError."""
        assert self.socket is not None
        while True:
            try:
                data = self.socket.recv(_RECEIVE_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError):
                return None
            if not data:
                answer = self.codec.end()
                if answer is None:
                    raise ConnectionResetError("the server closed the connection")
                return answer
            answer = self.codec.feed(data, now_ns)
            reply = self.codec.outgoing()
            if reply:
                self._send(reply)
            if answer is not None:
                return answer

    def close(self) -> None:
        """Close the socket; the next request opens another one."""
        if self.socket is not None:
            self.socket.close()
        self.socket, self.busy, self.watched, self._out = None, False, False, memoryview(b"")


class Generator:
    """Sender of requests until ``stop_fd`` is readable, with the results of each window.

    In a closed loop each connection sends its next request after the answer. In an open loop requests are due by a
    schedule; a request that finds all connections busy waits, and its latency counts from the time it was due, so that
    a slow server cannot hide latency by slowing the generator (coordinated omission).
    """

    def __init__(self, plan: Plan, report: Callable[[Results], None], stop_fd: int) -> None:
        self._plan = plan
        self._report = report
        self._stopped = False
        self._poll = select.epoll()
        self._poll.register(stop_fd, select.EPOLLIN)
        self._connections = [_Connection(plan, number, lambda: _codec(plan)) for number in range(plan.connections)]
        self._by_fd: dict[int, _Connection] = {}
        self._idle = deque(self._connections)
        self._due: deque[int] = deque()
        self._results = Results()
        self._sent = 0
        self._expiry_ns = 0

    def connect(self) -> None:
        """Open all connections. Raises OSError."""
        for connection in self._connections:
            self._open(connection)

    def _open(self, connection: _Connection) -> None:
        connection.connect()
        assert connection.socket is not None
        self._by_fd[connection.socket.fileno()] = connection
        self._poll.register(connection.socket.fileno(), select.EPOLLIN)

    def run(self, begin_ns: int) -> None:
        """Send from the time ``begin_ns`` of the monotonic clock on."""
        schedule = self._schedule(begin_ns)
        due_ns = next(schedule, None)
        window_ns, cpu_ns = begin_ns, time.process_time_ns()
        while not self._stopped:
            now_ns = time.monotonic_ns()
            while due_ns is not None and due_ns <= now_ns and len(self._due) < MOST_WAITING:
                self._due.append(due_ns)
                due_ns = next(schedule, None)
            self._send_due(now_ns, begin_ns)
            if now_ns - window_ns >= self._plan.window_ns:
                used_ns = time.process_time_ns()
                self._end_window((now_ns - window_ns) / 1e9, (used_ns - cpu_ns) / (now_ns - window_ns))
                window_ns, cpu_ns = now_ns, used_ns
            self._wait(wake_ns(now_ns, begin_ns, window_ns + self._plan.window_ns, due_ns, len(self._due)))
        for connection in self._connections:
            connection.close()
        self._poll.close()

    def _schedule(self, begin_ns: int) -> Iterator[int]:
        plan = self._plan
        if not plan.rate_per_s:
            return iter(())
        times = arrivals(plan.rate_per_s, plan.shape, plan.seed, part=plan.part, parts=plan.parts)
        return (begin_ns + offset for offset in times)

    def _send_due(self, now_ns: int, begin_ns: int) -> None:
        if now_ns < begin_ns:
            return
        open_loop = self._plan.rate_per_s > 0
        while self._idle and (self._due or not open_loop):
            connection = self._idle.popleft()
            due_ns = self._due.popleft() if open_loop else now_ns
            message = self._message(connection)
            try:
                if connection.socket is None:
                    self._open(connection)
                connection.begin(message, due_ns, now_ns)
                self._watch_writing(connection)
            except OSError as error:
                self._fail(connection, error)
                if not open_loop:
                    return  # other connections first, so that a dead server does not stop the windows

    def _message(self, connection: _Connection) -> bytes:
        plan = self._plan
        if not plan.sequence:
            self._sent += 1
            return plan.messages[self._sent % len(plan.messages)]
        return message_of(plan, connection.number, connection.position)

    def _watch_writing(self, connection: _Connection) -> None:
        if connection.watched == connection.writing:
            return  # the usual case, without a system call
        assert connection.socket is not None
        connection.watched = connection.writing
        wanted = select.EPOLLIN | (select.EPOLLOUT if connection.writing else 0)
        self._poll.modify(connection.socket.fileno(), wanted)

    def _wait(self, until_ns: int) -> None:
        now_ns = time.monotonic_ns()
        wait_s = min(max(until_ns - now_ns, 0) / 1e9, _LONGEST_WAIT_S)
        select.select([self._poll], [], [], wait_s)
        for fd, events in self._poll.poll(0):
            connection = self._by_fd.get(fd)
            if connection is None:
                self._stopped = True
                return
            try:
                if events & select.EPOLLOUT:
                    connection.flush()
                now_ns = time.monotonic_ns()
                answer = connection.receive(now_ns)
                self._watch_writing(connection)
            except (OSError, ValueError) as error:
                self._fail(connection, error)
                continue
            if answer is not None and connection.busy:
                self._record(connection, answer, now_ns)
        if now_ns >= self._expiry_ns:
            self._expiry_ns = now_ns + _EXPIRY_NS
            self._expire(now_ns)

    def _expire(self, now_ns: int) -> None:
        limit_ns = now_ns - int(self._plan.timeout_s * 1e9)
        for connection in self._connections:
            if connection.busy and connection.sent_ns < limit_ns:
                self._fail(connection, TimeoutError("timeout"))

    def _record(self, connection: _Connection, answer: Answer, now_ns: int) -> None:
        results = self._results
        if answer.failure:
            if answer.failure not in results.failures and (reason := reason_in(answer.body)):
                results.details[answer.failure] = reason
            results.failures[answer.failure] = results.failures.get(answer.failure, 0) + 1
            self._end_sequence(connection)
        else:
            results.latency.record(now_ns - connection.due_ns)
            results.service.record(now_ns - connection.sent_ns)
            if answer.events_ns:
                results.first.record(answer.events_ns[0] - connection.sent_ns)
                for before, after in zip(answer.events_ns, answer.events_ns[1:], strict=False):
                    results.between.record(after - before)
                results.tokens += answer.tokens
        connection.busy = False
        self._idle.append(connection)
        if answer.closes:
            self._forget(connection)

    def _fail(self, connection: _Connection, error: Exception) -> None:
        if connection.busy or connection.socket is None:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self._results.failures[reason] = self._results.failures.get(reason, 0) + 1
            self._end_sequence(connection)
            self._idle.append(connection)
        self._forget(connection)

    def _end_sequence(self, connection: _Connection) -> None:
        """Go on with another sequence, because the rest of this one would fail too."""
        if self._plan.sequence:
            connection.position += -connection.position % self._plan.sequence

    def _forget(self, connection: _Connection) -> None:
        if connection.socket is not None:
            self._by_fd.pop(connection.socket.fileno(), None)
            with suppress(OSError):
                self._poll.unregister(connection.socket.fileno())
        connection.close()

    def _end_window(self, seconds: float, cpu: float) -> None:
        self._results.seconds, self._results.cpu, self._results.waiting = seconds, cpu, len(self._due)
        self._report(self._results)
        self._results = Results()


def wake_ns(now_ns: int, begin_ns: int, window_end_ns: int, due_ns: int | None, waiting: int) -> int:
    """Return the time at which there is work without an answer.

    Args:
        due_ns: next request of the schedule, None for a closed loop.
        waiting: requests that wait for a connection.
    """
    if now_ns < begin_ns:
        return begin_ns
    if due_ns is None or waiting >= MOST_WAITING:  # until an answer makes room
        return window_end_ns
    return min(window_end_ns, due_ns)


def message_of(plan: Plan, connection: int, position: int) -> bytes:
    """Return the request at a position of a connection with sequences."""
    round_, place = divmod(position, plan.sequence)
    message = plan.messages[2 if place == plan.sequence - 1 else 1 if place else 0]
    id_ = SEQUENCE_ID + (round_ * plan.parts + plan.part) * 1_000_000 + connection + (plan.seed % _SEEDS << 40)
    return message.replace(_id_bytes(plan, SEQUENCE_ID), _id_bytes(plan, id_), 1)


def _id_bytes(plan: Plan, id_: int) -> bytes:
    """Return a sequence id as in a message: digits in JSON, a varint in a protobuf.

    All ids from `SEQUENCE_ID` to the largest of 64 bits have as many bytes.
    """
    if plan.protocol == HTTP:
        return str(id_).encode()
    last = _VARINT_BYTES - 1
    return bytes(id_ >> 7 * place & 127 | (128 if place < last else 0) for place in range(_VARINT_BYTES))


def _codec(plan: Plan) -> Codec:
    if plan.protocol == HTTP:
        return HttpCodec()
    streams = plan.protocol == GRPC_STREAM
    return GrpcCodec(f"{plan.host}:{plan.port}", plan.metadata, tls=plan.tls, streams=streams)


def main(source: TextIO = sys.stdin, target: TextIO = sys.stdout) -> int:
    """Run the process. Prints ``ready``, then the windows, or one line ``{"error": TEXT}``."""
    plan = plan_from_json(json.loads(source.readline()))

    def report(results: Results) -> None:
        print(json.dumps(results.to_json()), file=target, flush=True)

    generator = Generator(plan, report, source.fileno())
    try:
        generator.connect()
    except OSError as error:
        reason = getattr(error, "strerror", None) or str(error)
        print(json.dumps({"error": f"cannot connect to {plan.host}:{plan.port}: {reason}"}), file=target, flush=True)
        return 1
    print("ready", file=target, flush=True)
    generator.run(int(source.readline()))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(BrokenPipeError):
        sys.exit(main())
