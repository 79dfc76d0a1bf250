"""HTTP/1.1 request heads, chunked bodies and response heads as bytes and data.

Heads are parsed by llhttp (through httptools) in strict mode. A bounded memo returns a head that repeats byte for byte,
which makes keep-alive clients cheap. No socket, no clock.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import httptools

from remora.messages import Buffer

if TYPE_CHECKING:
    from remora.protocols.api_keys import Caller

HEAD_LIMIT = 65_536
"""Longest request head, in bytes."""
MAX_CHUNKS = 65_536
"""Largest number of non-empty chunks in a body, as in Triton's newer releases."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Interim response (RFC 9110 15.2.1)."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"
"""Opening of a client with prior knowledge of HTTP/2 (RFC 9113 3.4), which is not an HTTP/1 head."""
_METHOD = re.compile(rb"[A-Z]+(?= )")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00-\x08\x0a-\x1f\x7f]*")
_AUTHORITY = r"(?i:https?)://[^/?]*"
_MEMO_LIMIT = 512
_MEMO_HEAD_LIMIT = 2_048
_MOST_NOTES = 4
"""Notes of one head, because those of services that have ended must not pile up."""
_REASONS = {status.value: status.phrase for status in HTTPStatus} | {405: "Not Allowed"}  # Triton's phrase [H03]


T = TypeVar("T")


class BadRequest(Exception):  # noqa: N818 - it is an answer, not a failure
    """Invalid HTTP request. The connection closes after the answer."""

    def __init__(self, status: int, text: str, *, plain: bool = True) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.plain = plain
        """True if Triton labels the answer text/plain, false for application/json."""


class Head:
    """Head of one request.

    ``path`` is the path as received, still percent-encoded and without the query.
    """

    __slots__ = (
        "caller",
        "chunked",
        "content_length",
        "expects_continue",
        "get",
        "headers",
        "host",
        "http10",
        "keep_alive",
        "method",
        "notes",
        "path",
        "query",
        "repeats",
        "root",
        "scheme",
        "unread",
    )

    def __init__(
        self,
        method: str,
        target: str,
        headers: tuple[tuple[bytes, bytes], ...],
        keep_alive: bool = True,
        *,
        http10: bool = False,
    ) -> None:
        self.method = method
        self.path, _, self.query = target.partition("?")
        self.headers = headers
        self.keep_alive = keep_alive
        self.http10 = http10
        # In one pass, because many clients send a head only once, with a trace's id; reversed, so that the first stays.
        found = {name.lower(): value for name, value in reversed(headers)}
        self.get: Callable[[bytes], bytes | None] = found.get
        """Returns the value of a header by its lower-case name, the first of several."""
        self.repeats = len(found) < len(headers)
        """True if some header occurs more than once."""
        self.host = found.get(b"host", b"")
        self.content_length = int(found.get(b"content-length") or 0)
        self.chunked = found.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
        self.expects_continue = found.get(b"expect", b"").lower() == b"100-continue"
        self.notes: dict[object, object] | None = None
        """Contents of `HeadNote`."""
        self.scheme = "http"
        """Scheme of the URL by which the client reaches this server."""
        self.root = ""
        """Path below which another application mounts this server, "" for none."""
        self.caller: Caller | None = None
        """Holder of the request's API key; None without one."""
        self.unread = False
        """True if the body was not read, so that only a refusal or a route without a body may answer."""

    def to(self, path: str, *, method: str = "", headers: tuple[tuple[bytes, bytes], ...] | None = None) -> Head:
        """Return this request with another path.

        The path is taken literally: a name in it may contain characters that would otherwise end it.
        """
        kept = self.headers if headers is None else headers
        other = Head(method or self.method, "", kept, self.keep_alive, http10=self.http10)
        other.path, other.query, other.caller, other.scheme = path, self.query, self.caller, self.scheme
        other.root, other.unread = self.root, self.unread
        return other

    def without_body(self) -> Head:
        """Return this request as one whose body was not read."""
        other = self.to(self.path)
        other.unread = True
        return other


class HeadNote(Generic[T]):
    """Note that one service attaches to heads, such as the route, because a head may repeat."""

    __slots__ = ()

    def get(self, head: Head) -> T | None:
        """Return the note of a head, None without one."""
        return None if head.notes is None else cast("T | None", head.notes.get(self))

    def put(self, head: Head, note: T) -> T:
        """Attach the note to a head and return it."""
        if head.notes is None or len(head.notes) >= _MOST_NOTES:
            head.notes = {}
        head.notes[self] = note
        return note


class _Collector:
    """Callbacks of llhttp that collect the parts of a head."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self.complete = True


class HeadParser(Generic[T]):
    """Parser of heads with a memo of their meaning. One per port, not thread-safe.

    Args:
        read: returns the meaning of a head. It depends on the head alone and does not raise.
    """

    def __init__(self, read: Callable[[Head], T]) -> None:
        self._read = read
        self._memo: dict[bytes, T] = {}
        self.known: Callable[[bytes], T | None] = self._memo.get
        """Returns the meaning of exactly these bytes if they were parsed before, else None."""

    def parse(self, block: bytes) -> T:
        """Return the meaning of the head in ``block``, which ends with its empty line.

        Raises BadRequest.
        """
        meaning = self._memo.get(block)
        if meaning is None:
            meaning = self._read(_parse(block))
            if len(block) <= _MEMO_HEAD_LIMIT:
                if len(self._memo) >= _MEMO_LIMIT:
                    self._memo.clear()
                self._memo[block] = meaning
        return meaning


def _parse(block: bytes) -> Head:
    line = block.lstrip(b"\r\n").partition(b"\r\n")[0]
    # llhttp accepts other versions, and protocols that are not HTTP
    if not line.endswith((b" HTTP/1.1", b" HTTP/1.0")):
        raise BadRequest(505 if b" HTTP/" in line else 400, "not an HTTP/1.1 or HTTP/1.0 request")
    try:
        method, collector = _read(block, line)
    except httptools.HttpParserError as error:
        raise BadRequest(400, f"not a valid HTTP request: {error}") from error
    if not collector.complete or not collector.url:
        raise BadRequest(400, "not a valid HTTP request: the head is incomplete")
    names = [name.lower() for name, _ in collector.headers]
    if names.count(b"content-length") > 1 or (b"content-length" in names and b"transfer-encoding" in names):
        raise BadRequest(400, "the length of the body is given twice")
    try:
        target = collector.url.decode("ascii")
    except UnicodeDecodeError as error:
        raise BadRequest(400, "the request target contains bytes beyond ASCII: percent-encode them") from error
    target = _origin_form(target)
    keep_alive, http10 = _keep_alive(line, collector.headers), line.endswith(b"1.0")
    hosts = names.count(b"host")
    if hosts > 1 or not (hosts or http10):  # RFC 9112 3.2
        raise BadRequest(400, "the request has no Host header" if not hosts else "the request has several Host headers")
    head = Head(method, target, tuple(collector.headers), keep_alive, http10=http10)
    encoding = head.get(b"transfer-encoding")
    if encoding is not None and encoding.strip().lower() != b"chunked":
        raise BadRequest(501, f"transfer encoding {encoding!r} is not supported: send chunked or a length")
    if encoding is not None and http10:
        raise BadRequest(400, "HTTP/1.0 has no transfer encodings: send Content-Length")
    return head


def _read(block: bytes, line: bytes) -> tuple[str, _Collector]:
    """Return the method of a head and its other parts. Raises HttpParserError."""
    collector = _Collector()
    parser = httptools.HttpRequestParser(collector)
    try:
        parser.feed_data(block)
    except httptools.HttpParserUpgrade:
        pass  # upgrades are never accepted: the request is answered as plain HTTP/1.1 (RFC 9110 7.8)
    except httptools.HttpParserInvalidMethodError:
        match = _METHOD.match(line)
        if match is None or collector.url:
            raise
        # llhttp accepts only its list of methods. Parse another one as POST, so that the route of the path refuses it
        # [H03].
        _, collector = _read(block.replace(match.group(), b"POST", 1), b"")
        return match.group().decode(), collector
    return parser.get_method().decode(), collector


def _origin_form(target: str) -> str:
    """Return a request target without the scheme and authority (RFC 9112 3.2.2)."""
    authority = re.match(_AUTHORITY, target)
    if authority is None:
        return target
    path = target[authority.end() :]
    return path if path.startswith("/") else f"/{path}"


def _keep_alive(line: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return True if the connection outlives the request (RFC 9112 9.3).

    Computed here because llhttp drops it when a request has no body.
    """
    options = b",".join(value for name, value in headers if name.lower() == b"connection").lower()
    tokens = [token.strip(b" \t") for token in options.split(b",")]
    return b"close" not in tokens if line.endswith(b"1.1") else b"keep-alive" in tokens and b"close" not in tokens


class ChunkDecoder:
    """Incremental decoder of a chunked body (RFC 9112 7.1).

    Feed bytes until `done`, then read `body`. Raises BadRequest for bytes that are not a chunked body, if the body of
    the request ``head`` would exceed ``limit`` bytes (before those are stored), or if it has more than ``max_chunks``
    non-empty chunks (0: any number).
    """

    _LINE_LIMIT = 4_096
    _MOST_STEPS = 6_144
    """Steps of one call; a chunk has three."""

    def __init__(self, limit: int, head: Head, max_chunks: int = MAX_CHUNKS) -> None:
        self._limit = limit
        self._head = head
        self._chunks_left = max_chunks if max_chunks > 0 else sys.maxsize
        self._max_chunks = max_chunks
        self._body = bytearray()  # one buffer, so that many small chunks cost no more than their bytes
        self._left = 0
        self._state = self._size_line
        self._line = b""
        self.done = False

    @property
    def body(self) -> Buffer:
        """Body bytes decoded so far."""
        return self._body

    def feed(self, data: Buffer) -> int:
        """Consume bytes and return their number.

        It is smaller than the number given if the body ended before the rest, or after some thousand small chunks, so
        that the caller can do other work between.
        """
        view, at, steps = memoryview(data), 0, 0
        while at < len(view) and not self.done and steps < self._MOST_STEPS:
            at = self._state(view, at)
            steps += 1
        return at

    def _take_line(self, view: memoryview, at: int) -> tuple[int, bytes | None]:
        piece = bytes(view[at : at + self._LINE_LIMIT])
        end = piece.find(b"\n")
        if end < 0:
            self._line += piece
            if len(self._line) > self._LINE_LIMIT:
                raise BadRequest(400, "a line of the chunked body is too long")
            return at + len(piece), None
        line = self._line + piece[: end + 1]
        self._line = b""
        if not line.endswith(b"\r\n"):
            raise BadRequest(400, "a line of the chunked body does not end with CR LF")
        return at + end + 1, line[:-2]

    def _size_line(self, view: memoryview, at: int) -> int:
        at, line = self._take_line(view, at)
        if line is not None:
            digits, _, extension = line.partition(b";")
            if _CONTROL.search(extension):
                raise BadRequest(400, "a chunk has an extension with a control character")
            digits = digits.rstrip(b" \t")
            if not digits or digits.strip(b"0123456789abcdefABCDEF") or len(digits) > 16:
                raise BadRequest(400, "a chunk has an invalid size")
            self._left = int(digits, 16)
            size = len(self._body) + self._left
            if size > self._limit:
                raise too_large(size, self._limit, self._head)
            self._chunks_left -= self._left > 0
            if self._chunks_left < 0:
                raise BadRequest(
                    400,
                    f"Chunked request body exceeds maximum of {self._max_chunks} non-empty chunks. "
                    "Send fewer or larger HTTP chunks.",
                    plain=False,
                )
            self._state = self._data if self._left else self._trailer
        return at

    def _data(self, view: memoryview, at: int) -> int:
        piece = view[at : at + self._left]
        self._body += piece
        self._left -= len(piece)
        if not self._left:
            self._state = self._data_end
        return at + len(piece)

    def _data_end(self, view: memoryview, at: int) -> int:
        at, line = self._take_line(view, at)
        if line is not None:
            if line:
                raise BadRequest(400, "a chunk is longer than its size")
            self._state = self._size_line
        return at

    def _trailer(self, view: memoryview, at: int) -> int:
        at, line = self._take_line(view, at)
        if line == b"":
            self.done = True
        elif line is not None and not _FIELD.fullmatch(line):
            raise BadRequest(400, "a line of the chunked body's trailer is not a header")
        return at


def head_too_long() -> BadRequest:
    """Return the refusal of a head beyond HEAD_LIMIT."""
    return BadRequest(431, f"the request head is longer than {HEAD_LIMIT} bytes")


def too_large(size: int, limit: int, head: Head) -> BadRequest:
    """Return the refusal of a body beyond the limit.

    An all-JSON body gets Triton's text for JSON [H28].
    """
    if head.get(b"inference-header-content-length") is None:
        return BadRequest(
            400,
            f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes. "
            "Use --http-max-input-size to increase the limit.",
            plain=False,
        )
    return BadRequest(
        400,
        f"request body of {size} bytes exceeds the maximum allowed value of {limit} bytes. "
        "Use --http-max-input-size to increase the limit.",
    )


def response_head(
    status: int, headers: Iterable[tuple[bytes, bytes]], length: int, *, keep_alive: bool = True
) -> bytes:
    """Return the status line and headers of a response with a body of ``length`` bytes."""
    return _head(status, headers, b"Content-Length: %d" % length, keep_alive)


def stream_head(status: int, headers: Iterable[tuple[bytes, bytes]], *, chunked: bool, keep_alive: bool) -> bytes:
    """Return the status line and headers of a response of unknown length.

    Its body is chunked, or ended by closing the connection.
    """
    framing = b"Transfer-Encoding: chunked" if chunked else b""
    return _head(status, headers, framing, keep_alive and chunked)


def _head(status: int, headers: Iterable[tuple[bytes, bytes]], framing: bytes, keep_alive: bool) -> bytes:
    lines = [b"HTTP/1.1 %d %b" % (status, _REASONS.get(status, "Unknown").encode())]
    lines += [b"%b: %b" % pair for pair in headers]
    if framing:
        lines.append(framing)
    if not keep_alive:
        lines.append(b"Connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n"


LAST_CHUNK = b"0\r\n\r\n"
"""End of a chunked body."""


def chunk(piece: Buffer) -> bytes:
    """Return a piece of a chunked body.

    The piece must not be empty because an empty chunk ends the body.
    """
    return b"".join((b"%x\r\n" % memoryview(piece).nbytes, piece, b"\r\n"))
