"""HTTP/1.1 as bytes and data: request heads, chunked bodies, response heads; no socket, no clock.

Heads are parsed by llhttp (through httptools), strictly: what it refuses is refused. A head that comes again, byte for
byte, comes out of a bounded memo, which is what makes keep-alive clients cheap.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from http import HTTPStatus

import httptools

from remora.messages import Buffer

HEAD_LIMIT = 65_536
"""A request head may not be longer, in bytes."""
MAX_CHUNKS = 65_536
"""How many chunks that hold something a body may come in, as in Triton's newer releases."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"
"""What a client says first that knows, without asking, that HTTP/2 is spoken (RFC 9113 3.4): no head of ours."""
_METHOD = re.compile(rb"[A-Z]+(?= )")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00-\x08\x0a-\x1f\x7f]*")
_AUTHORITY = re.compile(r"https?://[^/?]*", re.IGNORECASE)
_MEMO_LIMIT = 512
_MEMO_HEAD_LIMIT = 2_048
_REASONS = {status.value: status.phrase for status in HTTPStatus} | {405: "Not Allowed"}  # Triton's phrase [H03]


class BadRequest(Exception):  # noqa: N818 - it is an answer, not a failure
    """Bytes that are no HTTP request this server accepts; the connection ends after the answer."""

    def __init__(self, status: int, text: str, *, plain: bool = True) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.plain = plain
        """True if Triton labels the answer text/plain, false for application/json."""


class Head:
    """The head of one request. ``path`` is as it came, percent signs included, without the query."""

    __slots__ = (
        "chunked",
        "content_length",
        "expects_continue",
        "headers",
        "http10",
        "keep_alive",
        "method",
        "note",
        "path",
        "query",
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
        self.content_length = int(self.get(b"content-length") or 0)
        self.chunked = (self.get(b"transfer-encoding") or b"").lower().endswith(b"chunked")
        self.expects_continue = (self.get(b"expect") or b"").lower() == b"100-continue"
        self.note: object = None
        """What the service wants to remember about this head, such as its route."""

    def get(self, name: bytes) -> bytes | None:
        """The value of a header by its lower-case name; the first one where there are several."""
        for key, value in self.headers:
            if key.lower() == name:
                return value
        return None

    def to(self, path: str, *, method: str = "", headers: tuple[tuple[bytes, bytes], ...] | None = None) -> Head:
        """This request as one to another path. That is taken to the letter: a name in it may hold what would end it."""
        kept = self.headers if headers is None else headers
        other = Head(method or self.method, "", kept, self.keep_alive, http10=self.http10)
        other.path, other.query = path, self.query
        return other


class _Collector:
    """What llhttp calls back."""

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


class HeadParser:
    """Parses heads, remembering those it has seen. One for a server; not thread-safe."""

    def __init__(self) -> None:
        self._memo: dict[bytes, Head] = {}
        self.known = self._memo.get
        """A head by its exact bytes, if it came before; None otherwise."""

    def parse(self, block: bytes) -> Head:
        """The head in ``block``, which ends with its empty line. Raises BadRequest."""
        head = self._memo.get(block)
        if head is None:
            head = _parse(block)
            if len(block) <= _MEMO_HEAD_LIMIT:
                if len(self._memo) >= _MEMO_LIMIT:
                    self._memo.clear()
                self._memo[block] = head
        return head


def _parse(block: bytes) -> Head:
    line = block.lstrip(b"\r\n").partition(b"\r\n")[0]
    if not line.endswith((b" HTTP/1.1", b" HTTP/1.0")):  # llhttp knows others, and protocols that are not HTTP
        raise BadRequest(505 if b" HTTP/" in line else 400, "not a request of HTTP/1.1 or HTTP/1.0")
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
        raise BadRequest(400, "the request target holds bytes beyond ASCII: percent-encode them") from error
    target = _origin_form(target)
    keep_alive, http10 = _keep_alive(line, collector.headers), line.endswith(b"1.0")
    hosts = names.count(b"host")
    if hosts > 1 or not (hosts or http10):  # RFC 9112 3.2
        raise BadRequest(400, "the request names no host" if not hosts else "the request names more than one host")
    head = Head(method, target, tuple(collector.headers), keep_alive, http10=http10)
    encoding = head.get(b"transfer-encoding")
    if encoding is not None and encoding.strip().lower() != b"chunked":
        raise BadRequest(501, f"transfer encoding {encoding!r} is not supported: send chunked or a length")
    if encoding is not None and http10:
        raise BadRequest(400, "HTTP/1.0 has no transfer encodings: the length of the body is not known")
    return head


def _read(block: bytes, line: bytes) -> tuple[str, _Collector]:
    """The method of a head, and the rest of it. Raises HttpParserError."""
    collector = _Collector()
    parser = httptools.HttpRequestParser(collector)
    try:
        parser.feed_data(block)
    except httptools.HttpParserUpgrade:
        pass  # an upgrade is offered, never taken: the request is answered as it stands (RFC 9110 7.8)
    except httptools.HttpParserInvalidMethodError:
        found = _METHOD.match(line)
        if found is None or collector.url:
            raise
        # llhttp knows its list of methods. That nobody takes another one is for the path's route to say [H03].
        _, collector = _read(block.replace(found.group(), b"POST", 1), b"")
        return found.group().decode(), collector
    return parser.get_method().decode(), collector


def _origin_form(target: str) -> str:
    """A request target without the scheme and authority that proxies are asked with (RFC 9112 3.2.2)."""
    authority = _AUTHORITY.match(target)
    if authority is None:
        return target
    path = target[authority.end() :]
    return path if path.startswith("/") else f"/{path}"


def _keep_alive(line: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the connection outlives the request (RFC 9112 9.3). llhttp forgets this when a request has no body."""
    options = b",".join(value for name, value in headers if name.lower() == b"connection").lower()
    tokens = [token.strip(b" \t") for token in options.split(b",")]
    return b"close" not in tokens if line.endswith(b"1.1") else b"keep-alive" in tokens and b"close" not in tokens


class ChunkDecoder:
    """Takes a chunked body apart (RFC 9112 7.1). Feed it bytes until `done`; `body` is then whole.

    Raises BadRequest for what is no chunked body, and when the body of the request ``head`` would pass ``limit`` bytes,
    before it is kept, or has more than ``max_chunks`` chunks that hold something, 0 for any number.
    """

    _LINE_LIMIT = 4_096

    def __init__(self, limit: int, head: Head, max_chunks: int = MAX_CHUNKS) -> None:
        self._limit = limit
        self._head = head
        self._chunks_left = max_chunks if max_chunks > 0 else sys.maxsize
        self._max_chunks = max_chunks
        self._body = bytearray()  # one piece: many small chunks must not cost more than their bytes
        self._left = 0
        self._state = self._size_line
        self._line = b""
        self.done = False

    @property
    def body(self) -> Buffer:
        """What has been taken in so far."""
        return self._body

    def feed(self, data: Buffer) -> int:
        """Take bytes in; returns how many were taken: fewer than given only when the body ended before them."""
        view, at = memoryview(data), 0
        while at < len(view) and not self.done:
            at = self._state(view, at)
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
                raise BadRequest(400, "a chunk has no valid size")
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
            raise BadRequest(400, "a line of the chunked body's trailer is no header")
        return at


def head_too_long() -> BadRequest:
    """The refusal of a head beyond HEAD_LIMIT."""
    return BadRequest(431, f"the request head is longer than {HEAD_LIMIT} bytes")


def too_large(size: int, limit: int, head: Head) -> BadRequest:
    """The refusal of a body beyond the limit, in the words that Triton has for JSON where it is all JSON [H28]."""
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
    """Status line and headers of a response with a body of ``length`` bytes."""
    return _head(status, headers, b"Content-Length: %d" % length, keep_alive)


def stream_head(status: int, headers: Iterable[tuple[bytes, bytes]], *, chunked: bool, keep_alive: bool) -> bytes:
    """Status line and headers of a response whose length is not known: chunked, or ended by closing the connection."""
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
"""What ends a chunked body."""


def chunk(piece: Buffer) -> bytes:
    """A piece of a chunked body. It must not be empty: an empty chunk ends the body."""
    return b"".join((b"%x\r\n" % memoryview(piece).nbytes, piece, b"\r\n"))
