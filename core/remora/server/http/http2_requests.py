"""HTTP requests on the streams of an HTTP/2 connection, answered by the service of HTTP/1.1."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from remora.messages import Buffer
from remora.protocols.http1 import BadRequest, Head, too_large
from remora.protocols.http2.frames import CANCEL, INTERNAL_ERROR, PROTOCOL_ERROR, Fields, pack
from remora.protocols.http2.stream import Opener, Stream
from remora.protocols.http2.validation import declared_length
from remora.protocols.rest.answer import INTERNAL, Headers, HttpAnswer, body_length, failure, refusal_of
from remora.server.http.exchange import STREAM_BACKLOG, Answerer, Cancellable, Service, binder_of, body_reader_of
from remora.server.http.held_bytes import FREE_BYTES, overloaded
from remora.system.clock import SystemClock

_log = logging.getLogger("remora.http")

_ENDS_IN_HTTP_2 = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"proxy-connection"))
"""Fields of answers that HTTP/2 does not have."""


class Requests:
    """Opens requests for ``service``, with bodies of at most ``max_body_bytes``.

    ``now`` returns monotonic time in nanoseconds.
    """

    def __init__(
        self, service: Service, max_body_bytes: int, now: Callable[[], int] = SystemClock.monotonic_ns
    ) -> None:
        self._bind = binder_of(service)
        self.now = now
        self._reads_body = body_reader_of(service)
        self.max_body_bytes = max_body_bytes
        self.answers: defaultdict[int, int] = defaultdict(int)
        """Answers by status."""

    def open(self, fields: Fields) -> Opener:
        """Return how a request with these fields is opened.

        Requests with the same fields share their head.
        """
        head = _head_of(fields)
        answer = None if head is None else self._bind(head)
        return partial(self._open, head, answer, declared_length(fields))

    def _open(self, head: Head | None, answer: Answerer | None, length: int, link: Stream) -> _Request:
        if head is None or answer is None or link.ended or self._reads_body(head):
            return _Request(head, answer, self, length, link)
        head = head.without_body()
        request = _Request(head, self._bind(head), self, length, link)
        request.complete(b"")
        return request


class _Request:
    """Stream that is an HTTP exchange."""

    __slots__ = (
        "_answer",
        "_answers",
        "_begun",
        "_body",
        "_head",
        "_held",
        "_length",
        "_limit",
        "_link",
        "_now",
        "_open",
        "_resume",
        "_size",
        "_ticket",
        "_unsent",
        "_whole",
    )

    receiving_since = 0.0  # not observed here

    def __init__(
        self, head: Head | None, answer: Answerer | None, requests: Requests, length: int, link: Stream
    ) -> None:
        self._link = link
        self._answer = answer
        self._limit = requests.max_body_bytes
        self._answers = requests.answers
        self._now = requests.now
        self._length = length  # as declared, -1 if it is not
        self._body: list[bytes] = []
        self._size = 0
        self._held = 0  # bytes of the request that are counted
        self._ticket: Cancellable | None = None
        self._open = True
        self._begun = False
        self._unsent = 0
        self._resume: Callable[[], None] | None = None  # called when the client has read what was sent
        self._whole = False  # the request is complete and passed to the service
        self._head = head

    def received(self, data: bytes, ended: bool) -> None:
        if not self._open or self._whole:
            return
        self._size += len(data)
        contradicts = self._length >= 0 and (self._size > self._length or (ended and self._size < self._length))
        if self._head is None or self._answer is None or contradicts:
            self._end()
            self._link.reset(PROTOCOL_ERROR)
            return
        if data:
            self._link.consumed(len(data))
        if self._size > self._limit:  # many clients read the answer only after the whole body is sent
            self._body = []
            if ended or self._size > 2 * self._limit:
                self._refuse(too_large(self._size, self._limit, self._head))
            return
        if data:
            self._body.append(data)
        if self._size > FREE_BYTES and not self._hold(self._size - self._held):
            return
        if not ended:
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self.complete(body)

    def complete(self, body: bytes) -> None:
        """Pass the request to the service; what the client still sends is ignored."""
        self._body, self._whole = [], True
        begin_ns = self._now()
        try:
            ticket = self._answer(body, self)  # type: ignore[misc]  # called with an answer only
            self._link.spend(self._now() - begin_ns)
        except Exception:
            _log.exception("%s %s", self._head.method, self._head.path)  # type: ignore[union-attr]
            if self._begun:
                self._link.reset(INTERNAL_ERROR)
            else:
                self.respond(failure(500, INTERNAL, plain=True))
            return
        if self._open:
            self._ticket = ticket

    def _hold(self, size: int) -> bool:
        """Count bytes of the request, or refuse it."""
        if self._link.hold(size):
            self._held += size
            return True
        self.respond(overloaded())
        return False

    def _end(self) -> None:
        """Mark the exchange as ended and drop what is left of its request."""
        self._open = False
        self._body = []
        if self._held:
            self._link.hold(-self._held)
            self._held = 0

    def _refuse(self, error: BadRequest) -> None:
        self.respond(refusal_of(error))

    def lost(self) -> None:
        self._end()
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.cancel()
        self._notify()

    def sent(self, size: int) -> None:
        self._unsent -= size
        if not self.unsent:
            self._notify()

    @property
    def peer(self) -> str:
        """See `exchange.Exchange`."""
        return self._link.peer

    @property
    def flow(self) -> _Request:
        """See `exchange.Flow`."""
        return self

    @property
    def unsent(self) -> int:
        return self._unsent + self._link.backlog

    def when_sent(self, resume: Callable[[], None]) -> None:
        self._resume = resume

    def give_up(self, reason: str) -> None:
        _log.warning("a client %s: its request is cancelled", reason)
        self._link.reset(CANCEL)
        self.lost()

    def _notify(self) -> None:
        resume, self._resume = self._resume, None
        if resume is not None:
            resume()

    def stalls(self) -> bool:
        return self._open and not self._whole

    def respond(self, answer: HttpAnswer) -> None:
        if not self._open:
            return
        self._end()
        self._ticket = None
        size = body_length(answer.body)
        if size > FREE_BYTES and not self._link.has_room(size):
            answer = overloaded()
        self._answers[answer.status] += 1
        data = b"".join(answer.body)
        block = _block(answer.status, answer.headers, (b"content-length", b"%d" % len(data)))
        if not data or (self._head is not None and self._head.method == "HEAD"):
            self._link.headers(block, end=True)
        else:
            self._link.respond(block, data)

    def begin(self, status: int, headers: Headers) -> None:
        if self._open:
            self._begun = True
            self._answers[status] += 1
            self._link.headers(_block(status, headers))

    def send(self, piece: Buffer) -> None:
        if not self._open or not self._begun or not len(piece):
            return
        data = bytes(piece)
        if self._unsent > STREAM_BACKLOG:
            self.give_up(f"left {STREAM_BACKLOG} bytes of its stream unread")
            return
        self._unsent += self._link.data(data)

    def finish(self) -> None:
        if self._open and self._begun:
            self._end()
            self._ticket = None
            self._link.data(b"", end=True)


def _head_of(fields: Fields) -> Head | None:
    """Return the fields as an HTTP/1.1 head, or None if they form no request."""
    pseudo = {name: value for name, value in fields if name[:1] == b":"}
    try:
        method, target = pseudo[b":method"].decode("ascii"), pseudo[b":path"].decode("ascii")
    except (KeyError, UnicodeDecodeError):
        return None
    if not target.startswith("/"):
        return None
    kept = tuple(pair for pair in fields if pair[0][:1] != b":" and pair[0] != b"content-length")
    return Head(method, target, ((b"host", pseudo.get(b":authority", b"")), *kept))


def _block(status: int, headers: Headers, *more: tuple[bytes, bytes]) -> bytes:
    named = tuple((name.lower(), value) for name, value in headers if name.lower() not in _ENDS_IN_HTTP_2)
    return pack(((b":status", b"%d" % status), *named, *more))
