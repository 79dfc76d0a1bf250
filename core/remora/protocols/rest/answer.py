"""HTTP answers and refusals, with the table from error codes to HTTP statuses [H10]."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from remora.errors import RemoraError
from remora.messages import Buffer
from remora.protocols.http1 import BadRequest, response_head
from remora.protocols.json.printer import quoted

Headers = tuple[tuple[bytes, bytes], ...]

PLAIN: tuple[bytes, bytes] = (b"Content-Type", b"text/plain")
JSON: tuple[bytes, bytes] = (b"Content-Type", b"application/json")
BEARER: tuple[bytes, bytes] = (b"WWW-Authenticate", b'Bearer realm="remora"')
METRICS: tuple[bytes, bytes] = (b"Content-Type", b"text/plain; charset=utf-8")
"""Header of the text of Prometheus."""

INTERNAL = "internal error: see the server's log"
"""Text of an internal failure, whose details clients must not see."""
_JOIN_BYTES = 8_192
"""Longest body that is copied behind its head."""
_KEPT = (b"Connection", b"keep-alive")  # clients of HTTP/1.0 that ask for it expect this header (RFC 9112 C.2.2)
STATUS_OF = {"INTERNAL": 500, "PERMISSION_DENIED": 403, "NOT_FOUND": 404, "UNAVAILABLE": 503, "UNSUPPORTED": 501}
"""HTTP status by error code; 400 for all others."""


class Wire:
    """Cache cell for the serialized fixed part of an answer.

    The transport stores status line, headers and first piece of the body there.
    """

    __slots__ = ("start",)

    def __init__(self, start: bytes = b"") -> None:
        self.start = start


class HttpAnswer(NamedTuple):
    """Complete HTTP answer.

    The server adds Content-Length, the total length of ``body``'s pieces in bytes. Answers that share a ``wire`` have
    the same status, headers and first piece, and the same total length.
    """

    status: int
    headers: Headers
    body: list[Buffer]
    wire: Wire | None = None


def body_length(parts: list[Buffer]) -> int:
    """Return the total number of bytes in the pieces of a body."""
    return sum([part.nbytes if isinstance(part, memoryview) else len(part) for part in parts])


def fixed_part(answer: HttpAnswer) -> bytes:
    """Return the bytes that all answers with this wire form share."""
    head = response_head(answer.status, answer.headers, body_length(answer.body), keep_alive=True)
    return head + bytes(answer.body[0])


def whole_answer(answer: HttpAnswer, method: str | None, keep_alive: bool, *, http10: bool) -> list[Buffer]:
    """Return an answer over HTTP/1 in pieces.

    One to HEAD has the length of the body without the body (RFC 9110 9.3.2).
    """
    headers = (*answer.headers, _KEPT) if keep_alive and http10 else answer.headers
    size = body_length(answer.body)
    start = response_head(answer.status, headers, size, keep_alive=keep_alive)
    if method == "HEAD":
        return [start]
    return [b"".join((start, *answer.body))] if size <= _JOIN_BYTES else [start, *answer.body]


new_answer: Callable[[tuple[int, Headers, list[Buffer], Wire | None]], HttpAnswer] = partial(tuple.__new__, HttpAnswer)
"""Makes an answer of its fields, without the Python frame of the class."""


class Refusal(Exception):  # noqa: N818 - it is an answer, not a failure
    """HTTP refusal before the engine sees the request (wrong path, method, encoding, header)."""

    def __init__(
        self, status: int, message: str, *, plain: bool = True, headers: Headers = (), action: str = ""
    ) -> None:
        super().__init__(message)
        self.action = action
        self.status = status
        self.message = message
        self.plain = plain
        self.headers = headers

    @property
    def answer(self) -> HttpAnswer:
        """Answer for the client."""
        return failure(self.status, self.message, plain=self.plain, headers=self.headers)


def failure(status: int, message: str, *, plain: bool, headers: Headers = ()) -> HttpAnswer:
    """Return ``{"error": message}``, as text/plain or application/json [H11]."""
    return HttpAnswer(status, (PLAIN if plain else JSON, *headers), [b'{"error":%b}' % quoted(message)])


def refusal_of(error: BadRequest, headers: Headers = ()) -> HttpAnswer:
    """Return the answer to bytes that are not a request."""
    return failure(error.status, error.text, plain=error.plain, headers=headers)


def encode_error(error: RemoraError, *, plain: bool) -> HttpAnswer:
    """Return the answer for an engine's error.

    Errors raised by the model are always text/plain [H11].
    """
    return _answer(error, 0, plain=plain or error.from_model)


def encode_json_error(error: RemoraError, status: int = 0) -> HttpAnswer:
    """Return the answer for an engine's error as JSON, errors of the model included.

    A ``status`` other than 0 replaces the error's own.
    """
    return _answer(error, status, plain=False)


def _answer(error: RemoraError, status: int, *, plain: bool) -> HttpAnswer:
    # whole seconds, because Retry-After has no smaller unit
    headers = ((b"Retry-After", b"%d" % error.retry_after_s),) if error.retry_after_s else ()
    return failure(status or STATUS_OF.get(error.code, 400), error.message, plain=plain, headers=headers)
