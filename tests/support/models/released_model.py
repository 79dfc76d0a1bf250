"""Real server of a model with a release, and the requests of its tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.servers.hosting import ask
from support.servers.live_server import free_port, process, until

INPUT: dict[str, Any] = {"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [1]}


@contextmanager
def release_server(repository: Path, environment: dict[str, str], *flags: str) -> Iterator[int]:
    """Run a server and yield its port once it is ready."""
    port = free_port()
    with process(repository, port, environment, *flags) as server:
        until(port, "/readyz", server)
        yield port


def release(port: int, action: str = "", name: str = "m", **members: Any) -> dict[str, Any]:
    """Take an action on the release of a model, if one is given, and return its status."""
    body = {"action": action, **members} if action else None
    return _document(port, "POST" if action else "GET", f"/v2/models/{name}/release", body)


def infer(
    port: int, name: str = "m", value: int = 1, headers: dict[str, str] | None = None, **members: Any
) -> tuple[int, str]:
    """Return the output of a request with one number, and the version that answered."""
    body = {"inputs": [{**INPUT, "data": [value]}], **members}
    document = _document(port, "POST", f"/v2/models/{name}/infer", body, headers)
    return int(document["outputs"][0]["data"][0]), str(document["model_version"])


def _document(
    port: int, method: str, path: str, body: dict[str, Any] | None, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    reply = ask(port, method, path, body, headers or {})
    assert reply.status == 200, reply.body
    document: dict[str, Any] = json.loads(reply.body)
    return document
