"""HTTP client of the server, its hosts and its commands, over the standard library.

`fetch` makes a single request, through the proxies of the environment. `Connection` keeps one connection to a server,
without proxies, for requests whose answers are read in pieces. Both return error statuses as answers and raise
`NoAnswerError` otherwise.

Invariants: only http:// and https:// are opened. No error repeats a user, password or query of a URL. A redirect never
leads from TLS to plain HTTP, and no header but Accept follows it to another server.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from remora._version import __version__
from remora.system.clock import SystemClock
from remora.system.url_secrets import hide_secrets

if TYPE_CHECKING:
    import ssl

_PIECE = 65_536
_NO_HEADERS: Mapping[str, str] = {}
_FOLLOWED = ("GET", "HEAD")
"""Methods whose redirects may be followed: others would become a GET, or repeat what they change."""


class NoAnswerError(ConnectionError):
    """Failure of a request without a whole answer, with the reason in one line without secrets."""


class NoAnswerInTimeError(NoAnswerError):
    """Answer that takes longer than its limit."""


class AnswerTooLongError(NoAnswerError):
    """Answer with more bytes than its limit."""


class NotHttpError(NoAnswerError):
    """Bytes that are not an answer of HTTP/1; ``line`` is their first line."""

    def __init__(self, line: str) -> None:
        super().__init__(f"the answer is not HTTP/1: {' '.join(line[:80].split())!r}")
        self.line = line


class Limits(NamedTuple):
    """Limits of a request.

    ``wait_s`` is the timeout of connecting and of each wait for bytes, ``whole_s`` that of the whole answer, and
    ``most_bytes`` limits the body. The body of an error status is cut there.
    """

    wait_s: float
    most_bytes: int = 64 << 20
    whole_s: float = float("inf")


class Answer(NamedTuple):
    """Answer to a request. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        """True for a status 2xx."""
        return 200 <= self.status < 300


def is_http_url(url: str) -> bool:
    """Return True for a URL with http or https, a host and a valid port."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def fetch(
    url: str,
    limits: Limits,
    *,
    method: str = "",
    body: bytes | None = None,
    headers: Mapping[str, str] = _NO_HEADERS,
    redirects: bool = False,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """Make a request and return its answer, whatever its status.

    Args:
        url: the resource. A user with password is sent as Basic authorization (RFC 7617).
        limits: of the request.
        method: GET by default, POST with a body.
        body: sent with the request.
        headers: sent with the request; they override those that follow from the other arguments.
        redirects: True to follow those of GET and HEAD; otherwise the redirect is the answer.
        tls: the certificates, the system's by default.

    Raises:
        NoAnswerError: there is no whole answer, or the URL is not one of HTTP.
    """
    import urllib.error  # imported here, because commands that keep a connection do not need it
    import urllib.request

    if not is_http_url(url):
        raise NoAnswerError("expected a URL with http:// or https://, a host and no other port than a number")
    parts = urlsplit(url)
    user, at, place = parts.netloc.rpartition("@")
    known = {"User-Agent": f"remora/{__version__}", **({"Authorization": _basic(user)} if at else {})}
    given = {name.lower() for name in headers}
    sent = {name: value for name, value in known.items() if name.lower() not in given} | dict(headers)
    method = method or ("GET" if body is None else "POST")
    request = urllib.request.Request(parts._replace(netloc=place).geturl(), body, sent, method=method)
    opener = urllib.request.build_opener(_redirects(redirects), urllib.request.HTTPSHandler(context=tls))
    end_ns = SystemClock().monotonic_ns() + limits.whole_s * 1e9
    try:
        try:
            response = opener.open(request, timeout=limits.wait_s)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            return Answer(int(response.status), _lower(response.headers.items()), _read(response, limits, end_ns))
    except NoAnswerError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:
        inner = error.reason if isinstance(error, urllib.error.URLError) else error
        raise _no_answer(inner if isinstance(inner, Exception) else error, limits.wait_s) from None


def _basic(user: str) -> str:
    """Return the value of Authorization for the user with password of a URL."""
    import base64

    return f"Basic {base64.b64encode(unquote_to_bytes(user)).decode()}"


def _redirects(follows: bool) -> Any:
    import urllib.request

    class Redirects(urllib.request.HTTPRedirectHandler):
        """Follow a redirect, or leave it as the answer."""

        def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
            old, new = urlsplit(req.full_url), urlsplit(newurl)
            if not follows or req.get_method() not in _FOLLOWED:
                return None
            if not is_http_url(newurl) or "@" in new.netloc or (old.scheme == "https" and new.scheme != "https"):
                return None
            following = super().redirect_request(req, fp, code, msg, headers, newurl)
            if following is not None and _origin(old) != _origin(new):
                for name in [each for each in following.headers if each.lower() != "accept"]:
                    following.remove_header(name)
            return following

    return Redirects


def _origin(parts: SplitResult) -> tuple[str, str | None, int]:
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _read(response: Any, limits: Limits, end_ns: float) -> bytes:
    """Return the body of an answer, that of an error cut to the limit."""
    now_ns = SystemClock().monotonic_ns
    content = bytearray()
    while piece := response.read1(_PIECE):
        content += piece
        if len(content) > limits.most_bytes:
            if response.status >= 300:
                return bytes(content[: limits.most_bytes])
            raise AnswerTooLongError(f"the answer is longer than {limits.most_bytes} bytes")
        if now_ns() > end_ns:
            raise NoAnswerInTimeError(f"the answer takes longer than {limits.whole_s:g} s")
    return bytes(content)


def _lower(items: Any) -> dict[str, str]:
    return {str(name).lower(): str(value) for name, value in items}


def _no_answer(error: Exception, timeout_s: float) -> NoAnswerError:
    """Convert an error of the standard library, whose text may hold the URL."""
    if isinstance(error, TimeoutError) and not error.errno:
        return NoAnswerInTimeError(f"timed out after {timeout_s:g} s")
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        return NotHttpError(str(error))
    if isinstance(error, http.client.InvalidURL):  # its text is the URL
        return NoAnswerError("the URL has a space or a control character")
    if isinstance(error, http.client.IncompleteRead):
        return NoAnswerError("the connection was closed before the end of the answer")
    text = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
    return NoAnswerError(hide_secrets(" ".join(text.split())))


class Incoming:
    """Answer on a connection, whose body is read in pieces.

    Attributes:
        status: its status.
        headers: its headers, with names in lower case.
    """

    def __init__(self, connection: Connection, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = _lower(response.getheaders())
        self._connection = connection
        self._response = response

    def pieces(self) -> Iterator[bytes]:
        """Yield the body as it arrives. Raises NoAnswerError if the connection breaks."""
        with self._connection.failures():
            while piece := self._response.read1(_PIECE):
                yield piece
            self._response.close()  # read1 does not detect the end of a body with a length

    def read(self) -> bytes:
        """Return the rest of the body. Raises NoAnswerError."""
        with self._connection.failures():
            return self._response.read()

    def close(self) -> None:
        """Drop the rest of the body, and the connection with it."""
        self._response.close()


class Connection:
    """Persistent connection to a server, for one thread.

    The first request opens it, and the next one after a failure.

    Args:
        host: of the server.
        port: None is that of the scheme.
        timeout_s: of connecting and of each wait for bytes.
        tls: True for https.
    """

    def __init__(self, host: str, port: int | None, timeout_s: float, *, tls: bool = False) -> None:
        kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
        self._timeout_s = timeout_s
        self._inner = kind(host, port, timeout=timeout_s)

    def connect(self) -> None:
        """Connect, unless the connection is open. Raises NoAnswerError."""
        with self.failures():
            if self._inner.sock is None:
                self._inner.connect()

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str | bytes] = _NO_HEADERS,
    ) -> None:
        """Send a whole request. Raises NoAnswerError."""
        with self.failures():
            self._inner.request(method, path, body, dict(headers))

    def receive(self) -> Incoming:
        """Return the answer to the request as soon as its head is there. Raises NoAnswerError."""
        with self.failures():
            return Incoming(self, self._inner.getresponse())

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Convert the errors of the block, and close the connection after one."""
        try:
            yield
        except NoAnswerError:
            raise
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise _no_answer(error, self._timeout_s) from error

    def close(self) -> None:
        self._inner.close()
