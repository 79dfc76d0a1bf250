"""Answers and refusals in HTTP's terms; the law: the one table from error codes to HTTP statuses [H10] is here."""

from __future__ import annotations

from typing import NamedTuple

from remora.errors import RemoraError
from remora.messages import Buffer
from remora.protocols.http1 import BadRequest
from remora.protocols.json.printer import quoted

Headers = tuple[tuple[bytes, bytes], ...]

PLAIN: tuple[bytes, bytes] = (b"Content-Type", b"text/plain")
JSON: tuple[bytes, bytes] = (b"Content-Type", b"application/json")

INTERNAL = "internal error: see the server's log"
"""What a client is told of a failure of our own: nothing of it."""
STATUS_OF = {"INTERNAL": 500, "NOT_FOUND": 404, "UNAVAILABLE": 503, "UNSUPPORTED": 501}
"""Codes that are not listed are 400."""


class Wire:
    """Where a transport keeps the bytes it made of an answer's fixed part: status, headers and first piece of body."""

    __slots__ = ("start",)

    def __init__(self, start: bytes = b"") -> None:
        self.start = start


class HttpAnswer(NamedTuple):
    """A whole answer. The server adds Content-Length, the sum of the lengths of ``body``'s pieces in bytes.

    Answers that share a ``wire`` have the same status, headers and first piece, and the same length in all.
    """

    status: int
    headers: Headers
    body: list[Buffer]
    wire: Wire | None = None


class Refusal(Exception):  # noqa: N818 - it is an answer, not a failure
    """A request that HTTP itself refuses, before any engine is asked (wrong path, method, encoding, header)."""

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
        """What the client gets."""
        return failure(self.status, self.message, plain=self.plain, headers=self.headers)


def failure(status: int, message: str, *, plain: bool, headers: Headers = ()) -> HttpAnswer:
    """``{"error": message}``, as text/plain or application/json [H11]."""
    return HttpAnswer(status, (PLAIN if plain else JSON, *headers), [b'{"error":%b}' % quoted(message)])


def refusal_of(error: BadRequest, headers: Headers = ()) -> HttpAnswer:
    """The answer to bytes that are no request."""
    return failure(error.status, error.text, plain=error.plain, headers=headers)


def encode_error(error: RemoraError, *, plain: bool) -> HttpAnswer:
    """An engine's error. What came out of the model is text/plain anyway [H11]."""
    return _told(error, 0, plain=plain or error.from_model)


def encode_json_error(error: RemoraError, status: int = 0) -> HttpAnswer:
    """An engine's error as JSON, whatever it came out of; ``status`` stands in for its own where it is given."""
    return _told(error, status, plain=False)


def _told(error: RemoraError, status: int, *, plain: bool) -> HttpAnswer:
    # When to come again, where that is known: whole seconds, HTTP has no shorter time.
    headers = ((b"Retry-After", b"%d" % error.retry_after_s),) if error.retry_after_s else ()
    return failure(status or STATUS_OF.get(error.code, 400), error.message, plain=plain, headers=headers)
