"""One HTTP request and all that a platform would notice about its answer; the law: it fails as data, not by raising."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from typing import NamedTuple


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


class HttpReply(NamedTuple):
    """What came back. ``status`` is 0 when nothing did, and ``trouble`` then says why.

    Header names are in lower case. Times are seconds since the request began: until the connection stood, until the
    head of the answer was there, until its end. ``pieces`` are the chunks as they were read.
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
        """The answer in a few words."""
        if not self.status:
            return f"no answer ({self.trouble})"
        text = self.body[:120].decode("utf-8", "replace")
        return f"{self.status} after {self.total_s:.2f} s{f' with {text!r}' if text else ''}"


class Line:
    """A connection that is kept: `send` a request, then read its `answer`; any number of times, one after the other."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._connection = http.client.HTTPConnection(*address, timeout=timeout_s)
        self._timeout_s = timeout_s
        self._begin = 0.0
        self._connect_s = 0.0
        self._trouble = ""

    def send(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole request; connects first when there is no connection."""
        self._begin = time.monotonic()
        self._trouble = ""
        try:
            if self._connection.sock is None:
                self._connection.connect()
            self._connect_s = self._spent()
            self._connection.request(method, path, body, dict(headers or {}))
        except (OSError, http.client.HTTPException) as error:
            self._trouble = _words(error)

    def answer(self) -> HttpReply:
        """The answer to what was sent."""
        if self._trouble:
            return HttpReply(0, {}, b"", total_s=self._spent(), trouble=self._trouble)
        try:
            response = self._connection.getresponse()
            head_s = self._spent()
            pieces = []
            while piece := response.read1(65_536):
                pieces.append((self._spent(), piece))
                if self._spent() > self._timeout_s:
                    raise TimeoutError(f"not at its end after {self._timeout_s:g} s")
            response.close()  # read1 does not see the end of a body with a length, and the next request waits for it
            headers = {name.lower(): value for name, value in response.getheaders()}
            whole = b"".join(piece for _, piece in pieces)
            return HttpReply(response.status, headers, whole, self._connect_s, head_s, self._spent(), tuple(pieces))
        except (OSError, http.client.HTTPException) as error:
            return HttpReply(0, {}, b"", total_s=self._spent(), trouble=_words(error))

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _spent(self) -> float:
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
    """Send one request on a connection of its own. ``timeout_s`` is for any single wait and for the whole."""
    line = Line(address, timeout_s)
    line.send(method, path, body, headers)
    answer = line.answer()
    line.close()
    return answer


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
