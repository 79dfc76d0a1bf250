"""Header ``X-Request-Id`` of answers, with the client's own value or a new one."""

from __future__ import annotations

import os
from itertools import count

from remora.protocols.rest.answer import Headers, HttpAnswer, Wire, fixed_part
from remora.server.http.exchange import Exchange, ForwardingExchange

ID_HEADER = b"X-Request-Id"
ID_NAME = ID_HEADER.lower()
MOST_ID = 128
"""Most characters of an id."""


def valid_id(value: bytes | None) -> str:
    """Return a client's id: printable ASCII without spaces, not too long; else ""."""
    if value is None or not 0 < len(value) <= MOST_ID:
        return ""
    text = value.decode("latin-1")
    return text if text.isascii() and text.isprintable() and " " not in text else ""


def id_among(headers: Headers) -> str:
    """Return the id that an answer has already, "" for none."""
    return next((value.decode("latin-1") for name, value in headers if name.lower() == ID_NAME), "")


def with_id(answer: HttpAnswer, request_id: bytes) -> HttpAnswer:
    """Return an answer with an id, its serialized form included."""
    wire = answer.wire
    if wire is not None:
        wire.start = wire.start or fixed_part(answer)
        wire = Wire(wire.start.replace(b"\r\n", b"\r\n%b: %b\r\n" % (ID_HEADER, request_id), 1))
    return answer._replace(headers=(*answer.headers, (ID_HEADER, request_id)), wire=wire)


class RequestIds:
    """Series of new ids. Use it in one thread."""

    def __init__(self) -> None:
        self._series = os.urandom(8).hex()
        self._numbers = count(1)

    def new(self) -> str:
        """Return a new id."""
        return f"{self._series}{next(self._numbers):016x}"


class IdentifyingExchange(ForwardingExchange):
    """Exchange whose answer has an id, if it does not have one already."""

    __slots__ = ("_id",)

    def __init__(self, exchange: Exchange, request_id: str) -> None:
        super().__init__(exchange)
        self._id = request_id.encode()

    def respond(self, answer: HttpAnswer) -> None:
        self._exchange.respond(answer if id_among(answer.headers) else with_id(answer, self._id))

    def begin(self, status: int, headers: Headers) -> None:
        self._exchange.begin(status, headers if id_among(headers) else (*headers, (ID_HEADER, self._id)))
