"""Calls of control planes over REST with bearer tokens, for Google Cloud and Azure."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from remora.api.system import Limits, NoAnswerError, fetch
from remora.system.json_text import read_json
from remora_deploy.deploy.plan import Call, CallError, Kind

LIMITS = Limits(120.0)
_MOST_CHARACTERS = 800
_STATUS: dict[int, Kind] = {401: "denied", 403: "denied", 404: "missing", 409: "exists", 429: "quota"}
_LOCAL = re.compile(r"(localhost|127\.0\.0\.1)(:\d+)?")

Token = Callable[[str], str]
"""Returns a bearer token; the argument is the audience of an identity token, or "" for an access token."""


def rest(method: str, host: str, path: str, body: Any = None, name: str = "", **query: str) -> Call:
    """Return a call of a control plane."""
    arguments: dict[str, Any] = {"method": method, "path": path}
    if query:
        arguments["query"] = query
    if body is not None:
        arguments["body"] = body
    if name:
        arguments["name"] = name
    operation = path.rstrip("/").rpartition("/")[2]
    return Call(host, f"{method} {operation}", arguments)


class RestCalls:
    """Makes calls with a bearer token. ``roots`` replaces the URL of a host."""

    def __init__(
        self, token: Token, registry: Callable[[str], tuple[str, str] | None], roots: Mapping[str, str] | None = None
    ) -> None:
        self._token = token
        self._registry = registry
        self._roots = roots or {}

    def login(self, host: str) -> tuple[str, str] | None:
        """Return the login of a registry of the platform."""
        return self._registry(host)

    def environ(self) -> Mapping[str, str]:
        """Return the process's own environment, which names the credentials."""
        return dict(os.environ)

    def close(self) -> None:
        """Do nothing: each call has a separate connection."""

    def __call__(self, call: Call) -> Any:
        """Make a call (see `Connection`).

        The answer is parsed JSON, of a list with all its pages, or bytes for a ``raw`` call.
        """
        found = page = self._ask(call)
        while (following := _following(call, page)) is not None:
            call, page = following, self._ask(following)
            found |= {key: [*found.get(key, ()), *value] for key, value in page.items() if isinstance(value, list)}
        return found

    def _ask(self, call: Call) -> Any:
        arguments = call.arguments
        of_service = call.target == "service"
        root = str(arguments["url"]).rstrip("/") if of_service else f"https://{call.target}"
        root = self._roots.get(root.removeprefix("https://"), root)
        parts = urlsplit(root)
        if parts.scheme != "https" and not _LOCAL.fullmatch(parts.netloc):
            raise CallError("invalid", f"{root!r} has no TLS, and a token must not be sent there")
        query = f"?{urlencode(arguments['query'])}" if arguments.get("query") else ""
        body = arguments.get("body")
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **arguments.get("headers", {})}
        audience = arguments.get("audience", str(arguments["url"]) if of_service else "")
        headers["Authorization"] = f"Bearer {arguments.get('key') or self._token(audience)}"
        url = f"{root}{arguments['path']}{query}"
        try:
            answer = fetch(
                url, LIMITS, method=arguments.get("method", "POST"), body=data, headers=headers, redirects=True
            )
        except NoAnswerError as error:
            raise CallError("unreachable", f"{call.target} cannot be reached: {error}") from error
        if not answer.is_success:
            raise _error_of(answer.status, answer.body)
        text = answer.body
        if of_service or arguments.get("raw"):
            return {"body": text}
        try:
            return read_json(text) if text.strip() else {}
        except ValueError as error:
            raise CallError("failed", f"{call.target} answers no JSON") from error


def _following(call: Call, page: Any) -> Call | None:
    """Return the read of a list's next page, None after the last.

    Of a link only the query counts, so that the token goes to no other host.
    """
    arguments = call.arguments
    if arguments.get("method") != "GET" or not isinstance(page, dict):
        return None
    before = arguments.get("query", {})
    query = before
    if page.get("nextPageToken"):
        query = {**before, "pageToken": str(page["nextPageToken"])}
    elif page.get("nextLink"):
        query = dict(parse_qsl(urlsplit(str(page["nextLink"])).query))
    return call._replace(arguments={**arguments, "query": query}) if query != before else None


def _error_of(status: int, body: bytes) -> CallError:
    """Convert an error of Google's or Azure's form, or any other body."""
    text = body.decode("utf-8", "replace")
    code = str(status)
    try:
        found = read_json(text).get("error", {})
        code = str(found.get("status") or found.get("code") or status)
        text = str(found.get("message") or text)
    except (ValueError, AttributeError):
        pass
    kind = _STATUS.get(status, "unreachable" if status in (500, 502, 503, 504) else "failed")
    if re.search(r"quota|RESOURCE_EXHAUSTED|OutOfCapacity|QuotaExceeded", f"{code} {text}", re.IGNORECASE):
        kind = "quota"
    return CallError(kind, f"{' '.join(text.split())[:_MOST_CHARACTERS]}", code)


def service_call(url: Any, path: str, body: bytes, **more: Any) -> Call:
    """Return an inference request to a service. Without a ``key`` it gets an identity token."""
    return Call("service", f"POST {path}", {"url": url, "path": path, "body": body, **more})
