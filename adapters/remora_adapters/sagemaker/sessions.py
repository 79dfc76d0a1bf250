"""Conversion of SageMaker's session headers to sequences.

The functions are pure. A client opens a session with ``NEW_SESSION``; the container names it, and the platform routes
all requests of that name to the same instance, where they are a sequence of that id. A request that ends its sequence
(parameter ``sequence_end``) closes the session.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import orjson

from remora.messages import Buffer
from remora.protocols.rest.answer import Headers

NEW = b"NEW_SESSION"
_OPENED = b"X-Amzn-SageMaker-New-Session-Id"
_CLOSED = b"X-Amzn-SageMaker-Closed-Session-Id"
_ID = re.compile(r"[A-Za-z0-9](?:-*[A-Za-z0-9])*")
_ID_LIMIT = 128
"""Limit of a sequence's id."""


class Session(NamedTuple):
    """Session of a request, with ``opens`` True for its first."""

    id: str
    opens: bool


def session_of(value: bytes | None, new_id: str) -> Session | None:
    """Return the session of a request, or None without a header.

    ``new_id`` is the id of a session to open. Raises ValueError for an id that the platform would refuse.
    """
    if value is None:
        return None
    if value == NEW:
        return Session(new_id, opens=True)
    text = value.decode("latin-1")
    if len(text) > _ID_LIMIT or not _ID.fullmatch(text):
        raise ValueError(f"the session id must be at most {_ID_LIMIT} letters, digits and inner hyphens")
    return Session(text, opens=False)


def as_sequence(body: Buffer, json_length: int, session: Session) -> tuple[bytes, int, bool]:
    """Return the V2 body with the session as its sequence, its JSON length, and True if it ends.

    Sequence parameters in the body take precedence. A body that is not JSON is returned unchanged, because the V2
    decoder refuses it.
    """
    view = memoryview(body)
    try:
        request: Any = orjson.loads(view[:json_length])
    except orjson.JSONDecodeError:
        return bytes(view), json_length, False
    if not isinstance(request, dict) or not isinstance(request.get("parameters", {}), dict):
        return bytes(view), json_length, False
    own = request.get("parameters", {})
    started = {"sequence_id": session.id, "sequence_start": session.opens}
    request["parameters"] = {**started, **own}
    header = orjson.dumps(request)
    return header + bytes(view[json_length:]), len(header), own.get("sequence_end") is True


def headers_of(session: Session, *, ends: bool, now_s: float, idle_s: int) -> Headers:
    """Return the headers that open or close a session with the idle timeout ``idle_s``."""
    found: list[tuple[bytes, bytes]] = []
    if session.opens:
        until = datetime.fromtimestamp(now_s, UTC) + timedelta(seconds=idle_s)
        found.append((_OPENED, f"{session.id}; Expires={until:%Y-%m-%dT%H:%M:%SZ}".encode()))
    if ends:
        found.append((_CLOSED, session.id.encode()))
    return tuple(found)
