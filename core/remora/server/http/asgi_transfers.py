"""Bodies and answers in messages of ASGI, of which the long ones are counted and time out.

An application sees requests and no connections, so that each request has an account. A host holds back what the
application does not receive, and lets it wait while the client does not read.

Invariant: a request holds no bytes after `Transfer.close`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping
from functools import partial
from math import inf
from typing import Any, TypeVar

from remora.messages import Buffer
from remora.options import ServerOptions
from remora.protocols.http1 import BadRequest, Head, too_large
from remora.protocols.rest.answer import Headers, HttpAnswer, body_length, refusal_of
from remora.server.http.held_bytes import (
    FREE_BYTES,
    UNREAD_S,
    CapacityWait,
    HeldBytes,
    out_of_memory,
    overloaded,
    retry_later,
    too_slow,
)
from remora.server.http.http1_state import STALL_LIMIT_S, SWEEP_S, Due, Progress, Timeouts
from remora.statistics import ServerLoad

_log = logging.getLogger("remora.http")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CLOSE: Headers = ((b"Connection", b"close"),)
_PIECE_BYTES = 262_144
"""Bytes of an answer in a message; the host accepts the next one when the client has read most of them."""
T = TypeVar("T")


class Transfers:
    """Requests with long bodies and answers in one event loop. Use it in the loop's thread.

    Args:
        loop: the event loop.
        options: limits of a body and of held bytes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, options: ServerOptions) -> None:
        self.loop = loop
        self.max_body_bytes = options.http_max_input_size
        self.max_short = min(FREE_BYTES, self.max_body_bytes)
        """Longest body that needs no transfer."""
        self.held = HeldBytes(options.max_held_bytes, options.max_connection_bytes)
        """Bytes of all requests."""
        self._open: dict[Transfer, None] = {}
        self._timed_out: Counter[str] = Counter()
        self._is_sweeping = False

    def open(self) -> Transfer:
        """Return the transfer of a request."""
        transfer = Transfer(self)
        self._open[transfer] = None
        if not self._is_sweeping:
            self._is_sweeping = True
            self.loop.call_later(SWEEP_S, self._sweep)
        return transfer

    def remove(self, transfer: Transfer) -> None:
        """Forget a transfer that has ended."""
        self._open.pop(transfer, None)

    def load(self) -> ServerLoad:
        """Return the held bytes and the timeouts for the metrics."""
        return ServerLoad({}, held=self.held.load(), closed=dict(self._timed_out))

    def _sweep(self) -> None:
        """Time out transfers, every few seconds while there are any."""
        now = self.loop.time()
        for transfer in self._open:
            due = transfer.sweep(now)
            if due is not Due.NOTHING:
                self._timed_out[due.value] += 1
        self._is_sweeping = bool(self._open)
        if self._is_sweeping:
            self.loop.call_later(SWEEP_S, self._sweep)


class OverdueError(Exception):
    """Timeout of a transfer; ``due`` is the reason."""

    def __init__(self, due: Due) -> None:
        super().__init__(due.value)
        self.due = due


class Transfer:
    """Bytes that one request holds.

    It holds its body until it is answered, then what is unsent of its answer. A stream holds both.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._account = transfers.held.account()
        self._timeouts = Timeouts()
        self._due = Due.NOTHING
        self._deadline: asyncio.Timeout | None = None  # of the coroutine that waits for the host
        self._receiving_since = 0.0
        self._received = self._expected = 0

    def close(self) -> None:
        """Give back all bytes; later calls have no effect."""
        self._account.close()
        self._transfers.remove(self)

    def set_unread(self, size: int) -> None:
        """Set the bytes of the answer that wait for the client; a short rest is not counted."""
        counted = size if size > FREE_BYTES else 0
        if counted < self._account.answers:
            self._timeouts.note_read()
        self._account.set_answers(counted)

    async def in_time(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, which waits for the host.

        Raises OverdueError if a sweep has ended it.
        """
        self._due = Due.NOTHING
        try:
            async with asyncio.timeout(None) as self._deadline:
                return await work
        except TimeoutError:
            if self._due is Due.NOTHING:
                raise
            raise OverdueError(self._due) from None
        finally:
            self._deadline = None

    def sweep(self, now: float) -> Due:
        """Time the transfer out if that is due, and return the reason."""
        if self._deadline is None or self._due is not Due.NOTHING:
            return Due.NOTHING
        seen = Progress(1, False, self._receiving_since, self._received, self._expected, self._account.answers)
        self._due = self._timeouts.due(now, STALL_LIMIT_S, inf, seen, self._transfers.held.is_awaited)
        if self._due is not Due.NOTHING:
            self._deadline.reschedule(-inf)
        return self._due

    # -- the body ---------------------------------------------------------------------------------------------------

    async def receive(self, receive: Receive, head: Head, message: Message | None) -> Buffer | HttpAnswer | None:
        """Return the whole body, a refusal, or None if the client has disconnected.

        ``message`` is the first message, if it has been received.
        """
        length = head.content_length
        try:
            if length > FREE_BYTES:
                await self._take(length)
            self._receiving_since, self._expected = self._transfers.loop.time(), length
            return await self.in_time(self._collect(receive, head, message))
        except BadRequest as error:
            return refusal_of(error, retry_later(error) or CLOSE)
        except OverdueError as overdue:
            slow = BadRequest(408, f"the request body has not arrived within {STALL_LIMIT_S:g} s")
            return refusal_of(too_slow() if overdue.due is Due.REFUSE else slow, CLOSE)
        except MemoryError:
            return refusal_of(out_of_memory(head), CLOSE)
        finally:
            self._receiving_since = 0.0

    async def _collect(self, receive: Receive, head: Head, message: Message | None) -> Buffer | None:
        """Return the whole body. Raises BadRequest."""
        limit, body = self._transfers.max_body_bytes, bytearray()
        while True:
            if message is None:
                message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            self._received += len(piece)
            if self._received > limit:
                raise too_large(self._received, limit, head)
            if self._received > max(FREE_BYTES, self._account.requests):
                await self._take(self._received - self._account.requests)
            if not (body or more):
                return piece
            body += piece
            if not more:
                return bytes(body) if len(body) <= FREE_BYTES else body  # because memos are for bytes
            message = None

    async def _take(self, size: int) -> None:
        """Count ``size`` more bytes of the body, after a wait if necessary. Raises BadRequest."""
        if self._account.take(size):
            return
        granted: asyncio.Future[BadRequest | None] = self._transfers.loop.create_future()
        settle = partial(_settle, granted)
        wait = CapacityWait(self._transfers.held, self._account, size, partial(settle, None), settle)
        try:
            refusal = await granted
        finally:
            wait.end()
        if refusal is not None:
            raise refusal

    # -- the answer -------------------------------------------------------------------------------------------------

    async def send(self, answer: HttpAnswer, send: Send) -> None:
        """Send a whole answer in pieces.

        A client that reads nothing for a time gets no more of it.
        """
        self._account.set_requests(0)
        size = body_length(answer.body)
        if not self._account.has_room(size):
            await send_at_once(overloaded(), send, with_body=True)
            return
        try:
            await self.in_time(self._send_pieces(answer, size, send))
        except OverdueError:
            _log.warning("a client has read nothing of its answer for %g s: the rest is dropped", UNREAD_S)

    async def _send_pieces(self, answer: HttpAnswer, size: int, send: Send) -> None:
        self.set_unread(size)
        await send(start_of(answer.status, answer.headers, size))
        for piece in _pieces(answer.body):
            size -= len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": size > 0})
            self.set_unread(size)
            await asyncio.sleep(0)  # other requests have their turn even if the host takes all at once


def _settle(granted: asyncio.Future[BadRequest | None], refusal: BadRequest | None) -> None:
    """End a wait for memory with or without it."""
    if not granted.done():
        granted.set_result(refusal)


def _pieces(parts: list[Buffer]) -> Iterator[bytes]:
    """Yield the parts of an answer as pieces of `_PIECE_BYTES` and a last one."""
    slices: list[memoryview] = []
    room = _PIECE_BYTES
    for part in parts:
        rest = memoryview(part)
        rest = rest.cast("B") if rest.nbytes else memoryview(b"")
        while len(rest):
            slices.append(rest[:room])
            room -= len(slices[-1])
            rest = rest[len(slices[-1]) :]
            if not room:
                yield b"".join(slices)
                slices, room = [], _PIECE_BYTES
    if slices:
        yield b"".join(slices)


async def send_at_once(answer: HttpAnswer, send: Send, *, with_body: bool) -> None:
    """Send a short answer; without its body it is the answer to HEAD."""
    body = b"".join(answer.body)
    await send(start_of(answer.status, answer.headers, len(body)))
    await send({"type": "http.response.body", "body": body if with_body else b""})


def start_of(status: int, headers: Headers, length: int = -1) -> Message:
    """Return the message that begins an answer, of a known length unless it is negative."""
    named = [(name.lower(), value) for name, value in headers]
    if length >= 0:
        named.append((b"content-length", b"%d" % length))
    return {"type": "http.response.start", "status": status, "headers": named}
