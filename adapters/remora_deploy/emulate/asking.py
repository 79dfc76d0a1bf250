"""HTTP requests with timings, which return failures as data instead of raising."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from remora.api.system import Connection, NoAnswerError, NoAnswerInTimeError


class Address(NamedTuple):
    """Host and port of a server."""

    host: str
    port: int


class HttpReply(NamedTuple):
    """Response to a request.

    ``status`` 0 means no response, with the reason in ``trouble``. Header names are in lower case. Times are seconds
    since the start of the request: until connected, until the head of the response, until its end. ``pieces`` are the
    chunks as they were read.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    connect_s: float = 0.0
    head_s: float = 0.0
    total_s: float = 0.0
    pieces: tuple[tuple[float, bytes], ...] = ()
    trouble: str = ""

    @property
    def shown(self) -> str:
        """The response in a few words."""
        if not self.status:
            return f"no answer ({self.trouble})"
        text = self.body[:120].decode("utf-8", "replace")
        return f"{self.status} after {self.total_s:.2f} s{f' with {text!r}' if text else ''}"


class Line:
    """Persistent connection on which each `send` is followed by its `answer`."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._connection = Connection(*address, timeout_s)
        self._timeout_s = timeout_s
        self._begin = 0.0
        self._connect_s = 0.0
        self._trouble = ""

    def send(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole request, connecting first if necessary."""
        self._begin = time.monotonic()
        self._trouble = ""
        try:
            self._connection.connect()
            self._connect_s = self._elapsed_s()
            self._connection.send(method, path, body, headers or {})
        except NoAnswerError as error:
            self._trouble = str(error)

    def answer(self, enough: Callable[[bytes], bool] = lambda _: False) -> HttpReply:
        """Return the response to the last request.

        It is incomplete if ``enough`` of its body has arrived before its end.
        """
        if self._trouble:
            return HttpReply(0, {}, b"", total_s=self._elapsed_s(), trouble=self._trouble)
        try:
            response = self._connection.receive()
            head_s = self._elapsed_s()
            pieces: list[tuple[float, bytes]] = []
            for piece in response.pieces():
                pieces.append((self._elapsed_s(), piece))
                if enough(b"".join(each for _, each in pieces)):
                    response.close()
                    break
                if self._elapsed_s() > self._timeout_s:
                    response.close()
                    raise NoAnswerInTimeError(f"incomplete after {self._timeout_s:g} s")
            whole = b"".join(piece for _, piece in pieces)
            total_s = self._elapsed_s()
            return HttpReply(response.status, response.headers, whole, self._connect_s, head_s, total_s, tuple(pieces))
        except NoAnswerError as error:
            return HttpReply(0, {}, b"", total_s=self._elapsed_s(), trouble=str(error))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begin


def ask(
    address: Address,
    method: str,
    path: str,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> HttpReply:
    """Send one request on a new connection.

    ``timeout_s`` limits each wait and the whole."""
    line = Line(address, timeout_s)
    line.send(method, path, body, headers)
    answer = line.answer()
    line.close()
    return answer
