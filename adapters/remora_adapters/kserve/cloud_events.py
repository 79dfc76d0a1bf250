"""CloudEvents 1.0 encoding of V1 requests and answers, binary and structured.

The functions are pure. An event is answered by an event, with KServe's type and source.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from remora.errors import InvalidArgumentError
from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import Headers, HttpAnswer

_STRUCTURED = b"application/cloudevents+json"
_NEEDED = ("id", "source", "specversion", "type")
_TYPE = "io.kserve.inference.response"


class Event(NamedTuple):
    """Request sent as an event.

    ``binary`` is True if the attributes were in the headers and False if they were in the body.
    """

    data: Buffer
    binary: bool


def read_event(head: Head, body: Buffer) -> Event | None:
    """Return a request's event, or None. Raises InvalidArgumentError for a malformed event."""
    if all(head.get(f"ce-{name}".encode()) for name in _NEEDED):  # with fewer KServe takes it for a plain request
        return Event(body, True)
    if not (head.get(b"content-type") or b"").lower().startswith(_STRUCTURED):
        return None
    try:
        event = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"Cloud Event Exceptions: {error}") from error
    if not isinstance(event, dict) or any(not isinstance(event.get(name), str) for name in _NEEDED):
        raise InvalidArgumentError(f"Cloud Event Exceptions: expected an object with {', '.join(_NEEDED)} and data")
    return Event(orjson.dumps(event.get("data")), False)


def answer_event(event: Event, model: str, answer: HttpAnswer, id: str, time: str) -> HttpAnswer:
    """Return the answer as an event of the same form, and errors unchanged.

    ``time`` is RFC 3339.
    """
    if answer.status != 200:
        return answer
    attributes = {"specversion": "1.0", "id": id, "source": f"io.kserve.inference.{model}", "type": _TYPE, "time": time}
    if event.binary:
        headers: Headers = tuple((f"ce-{name}".encode(), value.encode()) for name, value in attributes.items())
        return HttpAnswer(200, (*answer.headers, *headers), answer.body)
    body: dict[str, Any] = {**attributes, "data": orjson.Fragment(b"".join(answer.body))}
    return HttpAnswer(200, ((b"Content-Type", _STRUCTURED),), [orjson.dumps(body)])
