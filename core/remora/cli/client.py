"""Two doors to one V2 protocol: a running server, and the engine in this process; the law: callers see no difference.

A door takes a method, a path and a body and gives an answer. What is asked and what answers mean is the callers' part.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from remora.cli.output import UsageError, one_line
from remora.errors import MalformedError, NotFoundError, RemoraError, UnavailableError

if TYPE_CHECKING:
    from remora.engine import Engine
    from remora.messages import Buffer
    from remora.protocols.rest.answer import Headers, HttpAnswer
    from remora.server.http.exchange import Exchange, Flow

_HEADER_LENGTH = "Inference-Header-Content-Length"
_NO_HEADERS: Mapping[str, str] = {}
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
_PATH_SAFE = re.compile(r"[!-~]+")
_SHOWN = 300


class ApiAnswer(NamedTuple):
    """What came back. ``header_length`` is how many bytes of ``body`` are JSON, None for all of them."""

    status: int
    header_length: int | None
    body: bytes


class ApiClient(Protocol):
    """A way to something that speaks V2."""

    name: str

    def exchange(self, method: str, path: str, body: bytes = b"", header_length: int | None = None) -> ApiAnswer:
        """Ask and wait. Raises RemoraError when no answer comes; a refusal is an answer."""

    def close(self) -> None:
        """Hang up."""


class HttpDoor:
    """A server at a URL, over one connection that is kept between requests.

    Args:
        url: ``http://HOST[:PORT][/PREFIX]`` or https. Without a scheme it is http.
        timeout_s: how long to wait for a connection, and for each answer.
        headers: sent with each request.

    Raises UsageError for a URL of another form.
    """

    def __init__(self, url: str, timeout_s: float, headers: Mapping[str, str] = _NO_HEADERS) -> None:
        self._headers = {name: value.encode() for name, value in headers.items()}
        self._timeout_s = timeout_s
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"--url {url}: {error}") from error
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise UsageError(f"--url {url}: expected http://HOST:PORT")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.name = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._prefix = parts.path.rstrip("/")
        self._connection = kind(host, port, timeout=timeout_s)

    def exchange(self, method: str, path: str, body: bytes = b"", header_length: int | None = None) -> ApiAnswer:
        headers: dict[str, str | bytes] = dict(self._headers)
        headers["content-type"] = "application/json" if header_length is None else "application/octet-stream"
        if header_length is not None:
            headers[_HEADER_LENGTH] = str(header_length)
        try:
            self._connection.request(method, self._prefix + path, body if method == "POST" else None, headers)
            response = self._connection.getresponse()
            received = response.read()
        except TimeoutError as error:
            self._connection.close()
            raise UnavailableError(
                f"no answer from {self.name} within {self._timeout_s:g} s; --timeout gives it more"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            why = one_line(getattr(error, "strerror", None) or error) or type(error).__name__
            raise UnavailableError(
                f"cannot talk to {self.name}: {why}. Start one with 'remora serve PATH', or name another with --url"
            ) from error
        return ApiAnswer(response.status, _as_length(response.headers.get(_HEADER_LENGTH)), received)

    def close(self) -> None:
        self._connection.close()


def _at_once(work: Callable[[], HttpAnswer], exchange: Exchange, *, lasts: bool = False) -> None:
    exchange.respond(work())


class EngineDoor:
    """A started engine in this process, asked just as a server asks it. The engine stays the caller's.

    Args:
        engine: started.
        timeout_s: how long to wait for each answer.
    """

    name = "the engine"

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        from remora.protocols.rest.infer import InferCodec
        from remora.server.http.rest import RestService

        self._timeout_s = timeout_s
        self._service = RestService(engine, InferCodec(), None, _at_once)

    def exchange(self, method: str, path: str, body: bytes = b"", header_length: int | None = None) -> ApiAnswer:
        from remora.protocols.http1 import Head

        headers = () if header_length is None else ((_HEADER_LENGTH.encode(), b"%d" % header_length),)
        waiting = _Waiting()
        ticket = self._service.handle(Head(method, path, headers), body, waiting)
        try:
            answer = waiting.answer.result(self._timeout_s)
        except TimeoutError as error:
            if ticket is not None:
                ticket.cancel()
            raise UnavailableError(f"no answer within {self._timeout_s:g} s; --timeout gives it more") from error
        lengths = [value.decode() for key, value in answer.headers if key.decode() == _HEADER_LENGTH]
        return ApiAnswer(answer.status, _as_length(lengths[0] if lengths else None), b"".join(answer.body))

    def close(self) -> None:
        """Nothing to hang up."""


class _Waiting:
    """An exchange whose whole answer is waited for, pieces and all."""

    receiving_since = 0.0  # not observed here
    flow: Flow | None = None

    def __init__(self) -> None:
        self.answer: Future[HttpAnswer] = Future()
        self._begun: HttpAnswer | None = None

    def respond(self, answer: HttpAnswer) -> None:
        self.answer.set_result(answer)

    def begin(self, status: int, headers: Headers) -> None:
        from remora.protocols.rest.answer import HttpAnswer

        self._begun = HttpAnswer(status, headers, [])

    def send(self, piece: Buffer) -> None:
        if self._begun is not None:
            self._begun.body.append(piece)

    def finish(self) -> None:
        if self._begun is not None:
            self.answer.set_result(self._begun)


def _as_length(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


# -- headers ----------------------------------------------------------------------------------------------------------


def server_of(options: argparse.Namespace) -> HttpDoor:
    """The server that the arguments of a command name. Raises UsageError, OSError for a header's file."""
    return HttpDoor(options.url, options.timeout, headers_of(options))


def headers_of(options: argparse.Namespace) -> dict[str, str]:
    """The headers of the environment and, over them, of the arguments. Raises UsageError, OSError."""
    return read_headers((*options.header_variable.splitlines(), *options.header))


def read_headers(words: Iterable[str]) -> dict[str, str]:
    """Headers out of ``NAME=VALUE`` and ``NAME=@FILE``, by their names in lower case; the last of a name counts.

    Raises UsageError, which never repeats a value, and OSError for a file that cannot be read.
    """
    headers = {}
    for word in filter(None, map(str.strip, words)):
        name, equals, value = word.partition("=")
        if not equals or not _TOKEN.fullmatch(name):
            raise UsageError("--header and REMORA_HEADERS: expected NAME=VALUE or NAME=@FILE")
        if value.startswith("@"):
            value = Path(value[1:]).read_text(encoding="utf-8").strip()
        if not _VALUE.fullmatch(value):
            raise UsageError(f"--header {name}: its value holds a line break or another control character")
        headers[name.lower()] = value
    return headers


# -- asking -----------------------------------------------------------------------------------------------------------


def model_path(name: str, version: int | None = None) -> str:
    """The path of a model. Raises NotFoundError for a name that no path can hold."""
    if not _PATH_SAFE.fullmatch(name) or any(mark in name for mark in "/?#"):
        raise NotFoundError(f"no model can be called '{name}': names are ASCII, without blanks and without / ? #")
    return f"/v2/models/{name}" + (f"/versions/{version}" if version is not None else "")


def ask(door: ApiClient, method: str, path: str, document: object = None) -> Any:
    """One management call: its JSON answer, None for an empty one.

    Raises RemoraError with the server's text for a refusal, MalformedError for an answer that is no JSON.
    """
    body = b"" if document is None else json.dumps(document).encode()
    answer = accepted(door, door.exchange(method, path, body))
    if not answer.body:
        return None
    try:
        return json.loads(answer.body)
    except ValueError as error:
        raise MalformedError(f"{door.name} answers {path} with something else than JSON: is it a V2 server?") from error


def accepted(door: ApiClient, answer: ApiAnswer) -> ApiAnswer:
    """The answer, when it is one of success. Raises RemoraError with the server's own text otherwise."""
    if 200 <= answer.status < 300:
        return answer
    text = answer.body[:_SHOWN].decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError):  # not a V2 error: its first words must do
        text = json.loads(answer.body)["error"]
    error = RemoraError(f"{door.name} refused ({answer.status}): {one_line(text) or 'it gives no reason'}")
    if answer.status in (401, 403):
        error.add_note("--header NAME=VALUE or the variable REMORA_HEADERS sends a header, such as a key")
    raise error
