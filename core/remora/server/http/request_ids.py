"""Header ``X-Request-Id`` of answers, with the client's own value or a new one."""

from __future__ import annotations

import os
from functools import partial
from itertools import count

from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import Headers, HttpAnswer
from remora.protocols.rest.routes import OPENAI_PATHS
from remora.server.http.exchange import (
    Answerer,
    Cancellable,
    Exchange,
    ForwardingExchange,
    Service,
    binder_of,
    body_reader_of,
)

ID_HEADER = b"X-Request-Id"
_ID_NAME = ID_HEADER.lower()
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
    return next((value.decode("latin-1") for name, value in headers if name.lower() == _ID_NAME), "")


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
        self._id = (ID_HEADER, request_id.encode())

    def respond(self, answer: HttpAnswer) -> None:
        if not id_among(answer.headers):
            answer = answer._replace(headers=(*answer.headers, self._id), wire=None)
        self._exchange.respond(answer)

    def begin(self, status: int, headers: Headers) -> None:
        self._exchange.begin(status, headers if id_among(headers) else (*headers, self._id))


class IdentifyingService:
    """Service whose answers on OpenAI's paths have an id, refusals and streams included.

    OpenAI's clients show it with their errors. On other paths ``--request-ids`` adds it.
    """

    def __init__(self, service: Service) -> None:
        self._bind = binder_of(service)
        self.reads_body = body_reader_of(service)
        """See `HeadReadingService`."""
        self._ids = RequestIds()

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request; see `Service.handle`."""
        return self.bind(head)(body, exchange)

    def bind(self, head: Head) -> Answerer:
        """See `BindingService.bind`."""
        answer = self._bind(head)
        if not head.path.startswith(OPENAI_PATHS):
            return answer
        return partial(_identify, answer, valid_id(head.get(_ID_NAME)), self._ids)


def _identify(
    answer: Answerer, client_id: str, ids: RequestIds, body: Buffer, exchange: Exchange
) -> Cancellable | None:
    return answer(body, IdentifyingExchange(exchange, client_id or ids.new()))
