"""Calls of command-line programs (kubectl, helm, docker) and of HTTP services."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from remora.api.system import Limits, NoAnswerError, fetch
from remora.system.json_text import read_json
from remora.system.url_secrets import without_secrets
from remora_deploy.deploy.plan import Call, CallError, Kind, RefusedError

_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"exceeded quota|quota", "quota"),
    (r"AlreadyExists|already exists", "exists"),
    (r"Conflict|object has been modified|another operation .* is in progress", "busy"),
    (
        r"connection refused|dial tcp|Unable to connect|i/o timeout|no such host|Cannot connect to the Docker",
        "unreachable",
    ),
    (r"NotFound|not found|No such|the server doesn't have a resource type", "missing"),
    (r"Forbidden|forbidden|Unauthorized|cannot (?:get|list|create|patch|delete)|denied|must be logged in", "denied"),
)
_TIMEOUT_S = 900.0
_LIMITS = Limits(60.0)
_MOST_CHARACTERS = 800


def command(program: str, words: Sequence[str], text: str = "", name: str = "") -> Call:
    """Return the call of a program with its standard input; ``name`` is for messages."""
    operation = next((word for word in words if not word.startswith("-")), "")
    arguments: dict[str, Any] = {"words": list(words)}
    if text:
        arguments["input"] = text
    if name:
        arguments["name"] = name
    return Call(program, operation, arguments)


def http(method: str, url: Any, body: bytes = b"", headers: Mapping[str, Any] | None = None) -> Call:
    """Return the call of an HTTP service."""
    return Call("http", method, {"url": url, "headers": dict(headers or {}), "body": body})


class Programs:
    """Runs programs and HTTP requests. Answers are parsed if they are JSON. Raises CallError."""

    def __init__(self, *programs: str) -> None:
        for program in programs:
            if shutil.which(program) is None:
                raise RefusedError(f"needs the program {program}, which is not installed or not in PATH")

    def login(self, host: str) -> tuple[str, str] | None:
        """Return None: the logins of docker are used."""
        return None

    def environ(self) -> Mapping[str, str]:
        """Return the process's own environment."""
        import os

        return dict(os.environ)

    def close(self) -> None:
        """Do nothing: a program has no connection to close."""

    def __call__(self, call: Call) -> Any:
        """Make a call (see `Connection`)."""
        words = [call.target, *map(str, call.arguments["words"])]
        try:
            done = subprocess.run(
                words, input=call.arguments.get("input", ""), capture_output=True, text=True, timeout=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise CallError("failed", f"{call} did not end within {_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise CallError("failed", f"{call}: {error}") from error
        if done.returncode:
            raise error_of(done.stderr or done.stdout, done.returncode)
        return _parsed(done.stdout)


def error_of(text: str, code: int) -> CallError:
    """Convert the standard error of a program."""
    shown = " ".join(text.split())[-_MOST_CHARACTERS:] or f"exit status {code}"
    kind: Kind = next((kind for pattern, kind in _KINDS if re.search(pattern, text)), "failed")
    return CallError(kind, shown, str(code))


def _parsed(text: str) -> Any:
    if text.lstrip()[:1] not in ("{", "["):
        return text
    try:
        return read_json(text)
    except ValueError:
        return text


def request(call: Call) -> dict[str, Any]:
    """Make an HTTP request. Raises CallError for a status that is not 2xx."""
    arguments = call.arguments
    url = str(arguments["url"])
    if not url.startswith(("http://", "https://")):
        raise CallError("invalid", f"{url!r} is not the URL of a service")
    body = arguments.get("body") or None
    headers = {"Content-Type": "application/json", **arguments.get("headers", {})}
    try:
        answer = fetch(url, _LIMITS, method=call.operation, body=body, headers=headers, redirects=True)
    except NoAnswerError as error:
        raise CallError("unreachable", f"{without_secrets(url)} cannot be reached: {error}") from error
    if answer.is_success:
        return {"status": answer.status, "body": answer.body}
    kinds: dict[int, Kind] = {401: "denied", 403: "denied", 404: "missing", 409: "exists", 429: "busy", 503: "busy"}
    shown = f"{answer.status}: {' '.join(answer.body.decode('utf-8', 'replace').split())[:_MOST_CHARACTERS]}"
    raise CallError(kinds.get(answer.status, "failed"), shown, str(answer.status))


def body_of(answer: Any) -> bytes:
    """Return the body of an answer of `request`, or the text of a program as bytes."""
    if isinstance(answer, Mapping) and isinstance(answer.get("body"), bytes):
        return bytes(answer["body"])
    return answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
