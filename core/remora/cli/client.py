"""V2 REST clients of the commands, over HTTP or to an engine in this process.

Invariant: both clients return the same answers. Callers build the requests and decode the answers. `choose_server` sets
the server of a command: that of its URL, of a profile in the user's TOML file, or the default.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import SplitResult, urlsplit

from remora.cli.output import UsageError, one_line
from remora.errors import MalformedError, NotFoundError, RemoraError, UnavailableError
from remora.system.http_client import Connection, NoAnswerError, NoAnswerInTimeError, NotHttpError
from remora.system.json_text import read_json

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
_SETTINGS = "\x04\x00\x00\x00\x00\x00"
"""Head of the frame with which a server of HTTP/2 begins: SETTINGS, no flags, stream 0."""
_UNKNOWN_MODEL = re.compile(r"Request for unknown model: '([^']+)' is not found")
_PROFILE_MEMBERS = ("url", "api_key", "headers")
_NO_SECRETS = "expected @FILE or @env:VARIABLE, because the file of profiles holds no secrets"


class ApiAnswer(NamedTuple):
    """Response to a request.

    ``header_length`` is the length of the JSON in ``body``, None for all of it.
    """

    status: int
    header_length: int | None
    body: bytes


class ApiClient(Protocol):
    """Client of the V2 REST protocol."""

    name: str

    def exchange(self, method: str, path: str, body: bytes = b"", header_length: int | None = None) -> ApiAnswer:
        """Send a request and return its answer, error statuses included.

        Raises RemoraError without an answer.
        """

    def close(self) -> None:
        """Close the connection."""


def split_url(url: str) -> SplitResult:
    """Return the parts of a server's URL, http without a scheme.

    Raises UsageError, which does not repeat the URL, because its user, password or query may be secret.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        valid = False
    if not valid or parts.username is not None or parts.query or parts.fragment:
        raise UsageError("--url: expected http://HOST:PORT without user and query; --header sends credentials")
    return parts


class HttpClient:
    """Client of a server, over one persistent connection.

    Args:
        url: ``http://HOST[:PORT][/PREFIX]`` or https; http without a scheme.
        timeout_s: timeout of connecting and of each answer.
        headers: sent with each request.

    Raises UsageError for an invalid URL.
    """

    def __init__(self, url: str, timeout_s: float, headers: Mapping[str, str] = _NO_HEADERS) -> None:
        self._headers = {name: value.encode() for name, value in headers.items()}
        self._timeout_s = timeout_s
        parts = split_url(url)
        self.name = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._prefix = parts.path.rstrip("/")
        self._connection = Connection(str(parts.hostname), parts.port, timeout_s, tls=parts.scheme == "https")

    def exchange(self, method: str, path: str, body: bytes = b"", header_length: int | None = None) -> ApiAnswer:
        headers: dict[str, str | bytes] = dict(self._headers)
        headers["content-type"] = "application/json" if header_length is None else "application/octet-stream"
        if header_length is not None:
            headers[_HEADER_LENGTH] = str(header_length)
        try:
            self._connection.send(method, self._prefix + path, body if method == "POST" else None, headers)
            response = self._connection.receive()
            received = response.read()
        except NoAnswerInTimeError as error:
            raise UnavailableError(
                f"no answer from {self.name} within {self._timeout_s:g} s; raise --timeout"
            ) from error
        except NoAnswerError as error:
            if isinstance(error, NotHttpError) and _SETTINGS in error.line:
                raise UnavailableError(
                    f"{self.name} is a port for gRPC: pass the one for HTTP, usually 8000"
                ) from error
            raise UnavailableError(
                f"cannot connect to {self.name}: {one_line(error)}. "
                "Start a server with 'remora serve PATH', or pass its --url"
            ) from error
        return ApiAnswer(response.status, _parse_length(response.headers.get(_HEADER_LENGTH.lower())), received)

    def close(self) -> None:
        self._connection.close()


def _respond_now(work: Callable[[], HttpAnswer], exchange: Exchange, *, lasts: bool = False) -> None:
    exchange.respond(work())


class EngineClient:
    """Client of an engine in this process, through the server's REST service.

    Args:
        engine: a started engine, which the caller stops.
        timeout_s: timeout of each answer.
    """

    name = "the engine"

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        from remora.protocols.rest.infer import InferCodec
        from remora.server.http.rest import RestService

        self._timeout_s = timeout_s
        self._service = RestService(engine, InferCodec(), None, _respond_now)

    def exchange(self, method: str, path: str, body: bytes = b"", header_length: int | None = None) -> ApiAnswer:
        from remora.protocols.http1 import Head

        headers = () if header_length is None else ((_HEADER_LENGTH.encode(), b"%d" % header_length),)
        waiting = _BlockingExchange()
        ticket = self._service.handle(Head(method, path, headers), body, waiting)
        try:
            answer = waiting.answer.result(self._timeout_s)
        except TimeoutError as error:
            if ticket is not None:
                ticket.cancel()
            raise UnavailableError(f"no answer within {self._timeout_s:g} s; raise --timeout") from error
        lengths = [value.decode() for key, value in answer.headers if key.decode() == _HEADER_LENGTH]
        return ApiAnswer(answer.status, _parse_length(lengths[0] if lengths else None), b"".join(answer.body))

    def close(self) -> None:
        """Do nothing, because there is no connection."""


class _BlockingExchange:
    """Exchange that collects the whole answer, streamed pieces included."""

    receiving_since = 0.0  # not observed here
    peer = ""
    flow: Flow | None = None

    def __init__(self) -> None:
        self.answer: Future[HttpAnswer] = Future()
        self._streamed: HttpAnswer | None = None

    def respond(self, answer: HttpAnswer) -> None:
        self.answer.set_result(answer)

    def begin(self, status: int, headers: Headers) -> None:
        from remora.protocols.rest.answer import HttpAnswer

        self._streamed = HttpAnswer(status, headers, [])

    def send(self, piece: Buffer) -> None:
        if self._streamed is not None:
            self._streamed.body.append(piece)

    def finish(self) -> None:
        if self._streamed is not None:
            self.answer.set_result(self._streamed)


def _parse_length(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


# -- profiles ---------------------------------------------------------------------------------------------------------


def profiles_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the file of profiles, ``REMORA_PROFILES`` or in the user's settings."""
    named = environ.get("REMORA_PROFILES")
    if named:
        return Path(named)
    settings = environ.get("XDG_CONFIG_HOME")
    return (Path(settings) if settings else Path.home() / ".config") / "remora" / "profiles.toml"


def choose_server(options: argparse.Namespace, default_url: str, environ: Mapping[str, str] = os.environ) -> None:
    """Set the URL and the headers of a command by its profile, ``--url``, or the default.

    A profile replaces the variables ``REMORA_HEADERS`` and ``REMORA_API_KEY``, so that no server gets the secrets of
    another one. Raises UsageError, OSError.
    """
    if options.profile and options.url:
        raise UsageError("--profile has a URL: leave --url out, or --profile")
    local = bool(options.url) or getattr(options, "repository", None) is not None
    name = options.profile or ("" if local else environ.get("REMORA_PROFILE", ""))
    if name:
        path = profiles_path(environ)
        _apply_profile(options, path, name, _read_profile(path, name), environ)
    options.url = options.url or default_url


def _read_profile(path: Path, name: str) -> Mapping[str, Any]:
    """Return a profile of the file. Raises UsageError."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"--profile {name}: there is no file {path}; write [{name}] and url = ... into it") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    profile = document.get(name)
    if not isinstance(profile, dict):
        raise UsageError(f"--profile {name}: {path} has {', '.join(document) or 'no profiles'}")
    unknown = sorted(profile.keys() - set(_PROFILE_MEMBERS))
    if unknown:
        members = ", ".join(_PROFILE_MEMBERS)
        raise UsageError(f"{path}: profile '{name}' has the unknown member '{unknown[0]}': expected {members}")
    return profile


def _apply_profile(
    options: argparse.Namespace, path: Path, name: str, profile: Mapping[str, Any], environ: Mapping[str, str]
) -> None:
    place = f"{path}: profile '{name}'"
    url, headers = profile.get("url"), profile.get("headers", {})
    if not isinstance(url, str) or not url:
        raise UsageError(f"{place}: expected a URL as url")
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise UsageError(f"{place}: expected a table of texts as headers")
    lines = [f"{header}={_value_of(f'{place}: {header}', value, path, environ)}" for header, value in headers.items()]
    key = profile.get("api_key", "")
    if not isinstance(key, str) or (key and not key.startswith("@")):
        raise UsageError(f"{place}: api_key: {_NO_SECRETS}")
    options.url = url
    options.header_variable = "\n".join(lines)
    options.api_key_variable = _value_of(f"{place}: api_key", key, path, environ)


def _value_of(place: str, text: str, path: Path, environ: Mapping[str, str]) -> str:
    """Return a value, or what ``@env:VARIABLE`` and ``@FILE`` refer to.

    Raises UsageError, OSError.
    """
    if not text.startswith("@"):
        return text
    if not text.startswith("@env:"):
        return (path.parent / Path(text[1:]).expanduser()).read_text(encoding="utf-8").strip()
    secret = environ.get(text[len("@env:") :])
    if not secret:
        raise UsageError(f"{place}: the variable {text[len('@env:') :]} is not set")
    return secret


# -- headers ----------------------------------------------------------------------------------------------------------


def open_client(options: argparse.Namespace) -> HttpClient:
    """Return a client of the server that the arguments name.

    Raises UsageError, and OSError for a header's file.
    """
    return HttpClient(options.url, options.timeout, request_headers(options))


def request_headers(options: argparse.Namespace) -> dict[str, str]:
    """Return the headers of the environment, overridden by the arguments.

    Raises UsageError, OSError.
    """
    headers = read_headers((*options.header_variable.splitlines(), *options.header))
    if options.api_key_variable and not {"authorization", "x-api-key"} & headers.keys():
        headers |= read_headers((f"x-api-key={options.api_key_variable}",))
    return headers


def read_headers(words: Iterable[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE`` and ``NAME=@FILE`` to headers by lower-case name.

    The last of a name wins. Raises UsageError, which never repeats a value, and OSError for an unreadable file.
    """
    headers = {}
    for word in filter(None, map(str.strip, words)):
        name, equals, value = word.partition("=")
        if not equals or not _TOKEN.fullmatch(name):
            raise UsageError("--header and REMORA_HEADERS: expected NAME=VALUE or NAME=@FILE")
        if value.startswith("@"):
            value = Path(value[1:]).read_text(encoding="utf-8").strip()
        if not _VALUE.fullmatch(value):
            raise UsageError(f"--header {name}: the value contains a line break or control character")
        headers[name.lower()] = value
    return headers


# -- requests ---------------------------------------------------------------------------------------------------------


def model_path(name: str, version: int | None = None) -> str:
    """Return the path of a model. Raises NotFoundError for a name that no path can hold."""
    if not _PATH_SAFE.fullmatch(name) or any(mark in name for mark in "/?#"):
        raise NotFoundError(f"invalid model name '{name}': names are ASCII without spaces and / ? #")
    return f"/v2/models/{name}" + (f"/versions/{version}" if version is not None else "")


def call_json(client: ApiClient, method: str, path: str, document: object = None) -> Any:
    """Make a management call and return its JSON answer, None for an empty one.

    Raises RemoraError with the server's text for an error status, MalformedError for an answer that is not JSON.
    """
    body = b"" if document is None else json.dumps(document).encode()
    answer = raise_for_status(client, client.exchange(method, path, body))
    if not answer.body:
        return None
    try:
        return read_json(answer.body)
    except ValueError as error:
        raise MalformedError(f"{client.name} did not answer {path} with JSON: is it a V2 server?") from error


def raise_for_status(client: ApiClient, answer: ApiAnswer) -> ApiAnswer:
    """Return an answer of status 2xx. Raises RemoraError with the server's text otherwise."""
    if 200 <= answer.status < 300:
        return answer
    text = answer.body[:_SHOWN].decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError):  # not a V2 error: show the beginning of the body
        text = read_json(answer.body)["error"]
    unknown = _UNKNOWN_MODEL.search(str(text)) if answer.status in (400, 404) else None
    hint = _nearest_model(client, unknown[1]) if unknown is not None else ""
    error = RemoraError(f"{client.name} answered {answer.status}: {one_line(text) or 'no reason given'}{hint}")
    if answer.status in (401, 403):
        error.add_note("the variable REMORA_API_KEY holds the API key; --header NAME=VALUE sends any other header")
    raise error


def _nearest_model(client: ApiClient, name: str) -> str:
    """Return a hint with the name of the closest served model, or with all; "" without."""
    from difflib import get_close_matches  # imported here, because only an error needs it

    with suppress(RemoraError, ValueError, KeyError, TypeError):
        entries = read_json(client.exchange("POST", "/v2/repository/index", b'{"ready": true}').body)
        names = [str(entry["name"]) for entry in entries]
        close = get_close_matches(name, names, n=1)
        known = ", ".join(dict.fromkeys(names[:10]))
        return one_line(f"; did you mean '{close[0]}'?" if close else f"; there is {known}" if known else "")
    return ""
