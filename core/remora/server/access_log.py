"""Access log: a line for each answered request, written in another thread, and ids of requests.

The event loop collects what the lines contain and prints some of them together, and a thread that wakes at most once in
20 ms writes them. A crash loses the lines of that time. When standard error is slower than the requests, lines beyond a
bound are dropped, and a warning reports their number.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from random import random
from types import EllipsisType
from typing import TYPE_CHECKING

from remora.messages import Buffer, Ticket
from remora.options import ServerOptions
from remora.protocols.grpc.framing import GOOD
from remora.protocols.http1 import Head
from remora.protocols.http2.frames import Fields
from remora.protocols.http2.stream import Opener, Receiver, Stream
from remora.protocols.rest.answer import INTERNAL, Headers, HttpAnswer, body_length
from remora.server.access_lines import (
    LOGGER,
    Entry,
    JsonLines,
    RequestLine,
    Run,
    TextLines,
    is_failure,
    line_of_call,
    line_of_entry,
    line_of_head,
)
from remora.server.http.exchange import (
    Answerer,
    Cancellable,
    Exchange,
    ForwardingExchange,
    Service,
    binder_of,
    body_reader_of,
)
from remora.server.http.request_ids import ID_HEADER, RequestIds, id_among, with_id
from remora.server.option_checks import access_share, open_proxies
from remora.system import logs
from remora.system.clock import Clock, SystemClock

if TYPE_CHECKING:
    from remora.protocols.forwarding import ClientOf
    from remora.server.key_check import KeyCheck

_log = logging.getLogger(LOGGER)

_WINDOW_S = 0.02
"""Longest time that a line waits in the loop. A wake-up of the thread costs as much as many lines."""
_PRINTED_AT_ONCE = 32
"""Requests whose lines are printed together, few enough for their data to stay in the processor's cache."""
_MOST_COLLECTED = 4_096
"""Lines that wake the thread before that, to bound what it writes at once."""
MOST_WAITING = 32_768
"""Lines that may wait to be written."""
_NOTICE_NS = 60_000_000_000
_CANCELLED = 1
_STATUS_NAME = b"\x0bgrpc-status"
"""Name of the status in a packed header block, with its length."""
Printer = JsonLines | TextLines


def open_access_log(options: ServerOptions, keys: KeyCheck | None = None) -> AccessLog:
    """Return the access log that the options select, in the loop's thread.

    ``keys`` names the API keys of requests. Raises ValueError.
    """
    share = access_share(options.access_log)
    writer = None if share < 0.0 else AccessWriter(asyncio.get_running_loop(), logs.OURS.write, SystemClock())
    key_of, proxies = _no_key if keys is None else keys.name_of, open_proxies(options)
    client_of = None if proxies is None else proxies.client_of
    return AccessLog(writer, share, makes_ids=options.request_ids, key_of=key_of, client_of=client_of)


def _no_key(_headers: Fields) -> str:
    return ""


class _Window:
    """Format and difference of the clocks that hold until the lines are passed on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._printers: dict[str, Printer] = {
            "json": JsonLines(),
            "default": TextLines(),
            "ISO8601": TextLines(iso8601=True),
        }
        self.begin()

    def begin(self) -> None:
        """Take the present format and difference of the clocks."""
        self.printer = self._printers[logs.OURS.change({}).log_format]
        self.offset_ns = self._clock.wall_ms() * 1_000_000 - self._clock.monotonic_ns()


class _Batch:
    """Printed lines that are not yet passed to the thread, and the entries of those to export."""

    def __init__(self) -> None:
        self.count = 0
        self.lines: list[str] = []
        self.exported: list[tuple[list[Entry], int]] = []


class _Output:
    """Destinations of the lines, for the writer's thread."""

    def __init__(self, write: Callable[[str], object], now_ns: Callable[[], int]) -> None:
        self._write = write
        self._now_ns = now_ns
        self.export = logs.OURS.export
        self._export_failed = False
        self._reported = 0
        self._quiet_until_ns = 0

    def write(self, batch: _Batch) -> bool:
        """Write and export a batch. Return False if its lines cannot be written."""
        try:
            self._write("".join(batch.lines))
            written = True
        except Exception:  # standard error is closed or full; the requests must go on
            written = False
        for entries, offset_ns in batch.exported:
            self._pass_to_export(entries, offset_ns)
        return written

    def _pass_to_export(self, entries: list[Entry], offset_ns: int) -> None:
        """Export the lines of entries; a line that fails must not end the thread."""
        for entry in entries:
            try:
                if self.export is not None:
                    self.export(line_of_entry(entry, offset_ns))
            except Exception:
                if not self._export_failed:
                    self._export_failed = True
                    _log.exception("a line of the access log cannot be exported; further failures are not logged")

    def report(self, dropped: int, *, last: bool = False) -> None:
        """Log the number of dropped lines, at most once a minute until the last time."""
        now_ns = self._now_ns()
        if dropped == self._reported or (now_ns < self._quiet_until_ns and not last):
            return
        _log.warning("%d requests are missing in the access log, because writing it fails or is too slow", dropped)
        self._reported, self._quiet_until_ns = dropped, now_ns + _NOTICE_NS


class AccessWriter:
    """Queue of entries, and the thread that writes their lines and starts with the first.

    Lines are printed in the loop, because each handover of the interpreter to another thread costs more than a line.

    Args:
        loop: the event loop whose thread calls `put` and `close`.
        write: writes whole lines; it may block.
        clock: relates the entries' times to wall-clock time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, write: Callable[[str], object], clock: Clock) -> None:
        self.dropped = 0
        """Lines that did not fit or could not be written."""
        self.now_ns = clock.monotonic_ns
        self._loop = loop
        self._window = _Window(clock)
        self._output = _Output(write, clock.monotonic_ns)
        self._entries: list[Entry] = []
        self._batch = _Batch()
        self._timer: asyncio.TimerHandle | None = None
        self._queue: SimpleQueue[_Batch | None] = SimpleQueue()
        self._passed = 0  # lines passed to the thread; only the loop changes it
        self._written = 0  # only the thread changes it
        self._thread: threading.Thread | None = None

    def put(self, entry: Entry) -> None:
        """Queue the line of an entry."""
        entries = self._entries
        entries.append(entry)
        if self._timer is None:
            self._window.begin()
            self._timer = self._loop.call_later(_WINDOW_S, self.pass_on)
        if len(entries) >= _PRINTED_AT_ONCE:
            self._print()

    def close(self, timeout_s: float) -> None:
        """Write the queued lines within the timeout."""
        self.pass_on()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _print(self) -> None:
        """Print the entries, or drop them if too many lines wait for the thread."""
        entries, self._entries = self._entries, []
        if self.waiting > MOST_WAITING:
            self.dropped += len(entries)
            return
        window, batch = self._window, self._batch
        batch.lines.append("".join(window.printer.lines(entries, window.offset_ns)))  # the lines' memory is used again
        if self._output.export is not None:
            batch.exported.append((entries, window.offset_ns))
        batch.count += len(entries)
        if batch.count >= _MOST_COLLECTED:
            self.pass_on()

    def pass_on(self) -> None:
        """Pass all lines to the thread; the next entry begins another window."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._entries:
            self._print()
        if self._batch.count:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="remora access log", daemon=True)
                self._thread.start()
            self._passed += self._batch.count
            self._queue.put(self._batch)
            self._batch = _Batch()

    @property
    def waiting(self) -> int:
        """Number of printed lines that are not written."""
        return self._batch.count + self._passed - self._written

    def _serve(self) -> None:
        while (batch := self._queue.get()) is not None:
            if not self._output.write(batch):
                self.dropped += batch.count
            self._written += batch.count
            self._output.report(self.dropped)
        self._output.report(self.dropped, last=True)


class AccessLog:
    """Selection of the requests that are logged, and their ids. Use it in the loop's thread.

    Args:
        writer: writes the entries; None to log nothing.
        share: share of the successful requests to log; failed ones are always logged.
        makes_ids: True to answer HTTP requests with their ``X-Request-Id`` or a new one.
        key_of: returns the name of the API key of a request from its headers, "" without one.
        client_of: finds the clients behind trusted proxies.
    """

    def __init__(
        self,
        writer: AccessWriter | None,
        share: float,
        *,
        makes_ids: bool = False,
        key_of: Callable[[Fields], str] = _no_key,
        client_of: ClientOf | None = None,
    ) -> None:
        self._client_of = client_of
        self.now_ns = SystemClock.monotonic_ns if writer is None else writer.now_ns
        self.makes_ids = makes_ids
        self.share = share
        self._write = writer.put if writer is not None else None
        self._writer = writer
        self._key_of = key_of
        self.new_id = RequestIds().new
        """Returns a new request id."""

    def over(self, service: Service) -> Service:
        """Return the service with a log of its requests."""
        return _LoggedService(self, service)

    def over_calls(self, open_call: Callable[[Fields], Opener]) -> Callable[[Fields], Opener]:
        """Return how gRPC calls are opened, with a log of them."""
        if self._writer is None:
            return open_call

        def open_logged(fields: Fields) -> Opener:
            line = self._behind_proxies(line_of_call(fields, self._key_of(fields)), fields)
            return partial(_LoggedCall, self, line, open_call(fields))

        return open_logged

    def line(self, head: Head) -> RequestLine:
        """Return the fixed part of the lines of requests with this head."""
        return self._behind_proxies(line_of_head(head, self._key_of(head.headers)), head.headers)

    def _behind_proxies(self, line: RequestLine, headers: Fields) -> RequestLine:
        client_of = self._client_of
        if client_of is not None:
            line.client_of = lambda peer: client_of(peer, headers)
        return line

    def put(
        self, line: RequestLine, begin_ns: int, status: int, size: int, peer: str, request_id: str, pending: object
    ) -> None:
        """Log a request that is answered now, if its status or the share selects it."""
        share = self.share
        if share != 1.0 and (share < 0.0 or not (is_failure(line, status) or random() < share)):
            return
        run: Run | None = None
        ticket = pending
        while type(ticket) is not Ticket and ticket is not None:
            ticket = getattr(ticket, "ticket", None)  # of a request that waited for its turn, or for several threads
        if ticket is not None and ticket.start_ns:
            request, context = ticket.request, ticket.context
            try:  # the contexts of all front ends but OpenAI's have the model there
                model, version = context[1].name, context[1].version_text  # type: ignore[index]
            except (TypeError, LookupError, AttributeError):
                model = version = ""
            queue_ns = ticket.start_ns - ticket.arrival_ns
            run = (model, version, request.rows, ticket.batch_rows, queue_ns, ticket.spent_ns, request.form.id)
        end_ns = self.now_ns()
        if line.client_of is not None:
            peer = line.client_of(peer)
        if self._write is not None:
            self._write((line, status, end_ns, end_ns - begin_ns, size, peer, request_id, run))

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what is queued within the timeout."""
        if self._writer is not None:
            self._writer.close(timeout_s)


class _LoggedService:
    """Service whose requests are logged."""

    def __init__(self, log: AccessLog, service: Service) -> None:
        self._log = log
        self._bind = binder_of(service)
        self.reads_body = body_reader_of(service)
        """See `HeadReadingService`."""

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request; see `Service.handle`."""
        return self.bind(head)(body, exchange)

    def bind(self, head: Head) -> Answerer:
        return partial(_answer, self._log, self._log.line(head), self._bind(head))


def _answer(
    log: AccessLog, line: RequestLine, answer: Answerer, body: Buffer, exchange: Exchange
) -> Cancellable | None:
    logged = _LoggedExchange(log, line, exchange)
    try:
        pending = answer(body, logged)
    except Exception:
        logged.record(500, len(INTERNAL), None)  # the connection answers so
        raise
    if logged.pending is None:  # answered before the service returned
        logged.record(*logged.reply, pending)
    else:
        logged.pending = pending
    return pending


class _LoggedExchange(ForwardingExchange):
    """Exchange that logs its answer.

    ``pending`` is ``...`` until the service returns, or None from an answer before that; then it is what the service
    returned. ``reply`` is the status and the size of that answer, or of a stream so far.
    """

    __slots__ = ("_begin_ns", "_id", "_line", "_log", "pending", "reply")

    reply: tuple[int, int]

    def __init__(self, log: AccessLog, line: RequestLine, exchange: Exchange) -> None:
        self._exchange = exchange
        self._log = log
        self._line = line
        self._id = line.id or (log.new_id() if log.makes_ids else "")
        self.pending: Cancellable | EllipsisType | None = ...
        self._begin_ns = log.now_ns()

    def respond(self, answer: HttpAnswer) -> None:
        if self._log.makes_ids:
            known = id_among(answer.headers)
            self._id = known or self._id
            answer = answer if known else with_id(answer, self._id.encode())
        self._exchange.respond(answer)
        pending, self.pending, body = self.pending, None, answer.body  # a ticket refers to this exchange
        if len(body) == 2 and type(body[0]) is type(body[1]) is bytes:
            size = len(body[0]) + len(body[1])  # the usual case
        else:
            size = body_length(body)
        if pending is ...:
            self.reply = (answer.status, size)
        else:
            self._log.put(self._line, self._begin_ns, answer.status, size, self._exchange.peer, self._id, pending)

    def begin(self, status: int, headers: Headers) -> None:
        self.reply = (status, 0)
        if self._log.makes_ids:
            known = id_among(headers)
            self._id = known or self._id
            headers = headers if known else (*headers, (ID_HEADER, self._id.encode()))
        self._exchange.begin(status, headers)

    def send(self, piece: Buffer) -> None:
        status, size = self.reply
        self.reply = (status, size + len(piece))
        self._exchange.send(piece)

    def finish(self) -> None:
        self._exchange.finish()
        pending = self.pending
        if pending is ...:
            self.pending = None
        else:
            self.record(*self.reply, pending)

    def record(self, status: int, size: int, pending: Cancellable | None) -> None:
        """Log the answer."""
        self.pending = None  # a ticket refers to this exchange
        self._log.put(self._line, self._begin_ns, status, size, self._exchange.peer, self._id, pending)


class _LoggedCall(Stream):
    """Stream of a gRPC call and its receiver, between the connection and the call.

    It logs the call's end.
    """

    __slots__ = ("_begin_ns", "_call", "_inner", "_line", "_log", "_size")

    def __init__(self, log: AccessLog, line: RequestLine, opener: Opener, inner: Stream) -> None:
        self._log = log
        self._line = line
        self._inner = inner
        self._size = 0
        self._begin_ns = log.now_ns()
        self._call: Receiver | None = None
        self._call = opener(self)

    # -- for the connection ----------------------------------------------------------------------------------------

    def received(self, data: bytes, ended: bool) -> None:
        if self._call is not None:
            self._call.received(data, ended)

    def lost(self) -> None:
        call = self._call
        if call is not None:
            self._end(_CANCELLED)
            call.lost()

    def sent(self, size: int) -> None:
        if self._call is not None:
            self._call.sent(size)

    def stalls(self) -> bool:
        return self._call is not None and self._call.stalls()

    # -- for the call ----------------------------------------------------------------------------------------------

    @property
    def connection(self) -> object:
        return self._inner.connection

    @property
    def backlog(self) -> int:
        return self._inner.backlog

    @property
    def peer(self) -> str:
        return self._inner.peer

    def hold(self, size: int) -> bool:
        return self._inner.hold(size)

    def has_room(self, size: int) -> bool:
        return self._inner.has_room(size)

    def respond(self, head: bytes, data: bytes | memoryview, trailers: bytes = b"") -> None:
        inner, line, call = self._inner, self._line, self._call
        inner.respond(head, data, trailers)
        self._call = None  # the call refers to this stream
        status, size = 0 if trailers is GOOD else _status_in(trailers), self._size + len(data)
        self._log.put(line, self._begin_ns, status, size, inner.peer, line.id, getattr(call, "ticket", None))

    def headers(self, block: bytes, *, end: bool = False) -> None:
        self._inner.headers(block, end=end)
        if end:
            self._end(_status_in(block))

    def data(self, data: bytes | memoryview, *, end: bool = False) -> int:
        self._size += len(data)
        return self._inner.data(data, end=end)

    def consumed(self, size: int) -> None:
        self._inner.consumed(size)

    def spend(self, time_ns: int) -> None:
        self._inner.spend(time_ns)

    def reset(self, code: int) -> None:
        self._inner.reset(code)
        self._end(_CANCELLED)

    def _end(self, status: int) -> None:
        call, self._call = self._call, None  # the call refers to this stream
        ticket = getattr(call, "ticket", None)
        self._log.put(self._line, self._begin_ns, status, self._size, self._inner.peer, self._line.id, ticket)


def _status_in(block: bytes) -> int:
    """Return gRPC's status in trailers made by `pack`; 2 (UNKNOWN) without one."""
    at = block.find(_STATUS_NAME)
    value = block[at + len(_STATUS_NAME) + 1 :] if at >= 0 else b""
    digits = value[: block[at + len(_STATUS_NAME)]] if value else b""
    return int(digits) if digits.isdigit() else 2
