"""Interface between services, which produce answers, and the connections that send them."""

from __future__ import annotations

import logging
from asyncio import BaseTransport
from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import Headers, HttpAnswer
from remora.tracing.arrival import Arrival

_log = logging.getLogger("remora.http")

STREAM_BACKLOG = 16_777_216
"""Unread bytes of a stream at which a client is dropped if its sender cannot be blocked."""
VERSION_HEADER = b"X-Model-Version"
"""Header of an answer while a release divides the requests to a model among versions."""
_TLS_QUIET_S = 60.0
_IPV4_MAPPED = "::ffff:"
"""Beginning of a client's IPv4 address on a socket of IPv6."""
SILENCE_S = 2.0
"""How long a partially received request may stay without data during shutdown."""


class Versioned(Protocol):
    """A model, as far as its version goes."""

    @property
    def version_text(self) -> str:
        """The version that answers."""

    @property
    def is_divided(self) -> bool:
        """True if another version might have answered."""


class Flow(Protocol):
    """Flow control of an answer sent in pieces. Use it in the exchange's thread."""

    @property
    def unsent(self) -> int:
        """Number of bytes that wait for a slow client; 0 if the client keeps up."""

    def when_sent(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` once, when all bytes are sent or the client has disconnected.

        A later call replaces it.
        """

    def give_up(self, reason: str) -> None:
        """Cancel the request and end the exchange.

        ``reason`` is a verb phrase about the client, for the log.
        """


class Exchange(Protocol):
    """One request on a connection and its answer.

    Answer it once: with `respond`, or with `begin`, any number of `send`, and `finish`. Call the methods in the
    exchange's thread, and never after the end, because the connection may then be answering its next request. They do
    not raise, and have no effect after the client has disconnected.
    """

    @property
    def receiving_since(self) -> float:
        """Loop time in seconds at the first bytes of a request that arrived in pieces; else 0."""

    @property
    def peer(self) -> str:
        """Address of the client, or of the last proxy before this server; "" if it is unknown."""

    @property
    def flow(self) -> Flow | None:
        """Flow control of an answer in pieces; None if the client's reading cannot be observed."""

    def respond(self, answer: HttpAnswer) -> None:
        """Send the whole answer."""

    def begin(self, status: int, headers: Headers) -> None:
        """Begin an answer whose body comes in pieces."""

    def send(self, piece: Buffer) -> None:
        """Send the next piece of the body at once. An empty piece has no effect."""

    def finish(self) -> None:
        """End the body."""


class ForwardingExchange:
    """Exchange that forwards to another exchange; subclasses override the methods that differ."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @property
    def receiving_since(self) -> float:
        return self._exchange.receiving_since

    @property
    def peer(self) -> str:
        return self._exchange.peer

    @property
    def flow(self) -> Flow | None:
        return self._exchange.flow

    def respond(self, answer: HttpAnswer) -> None:
        self._exchange.respond(answer)

    def begin(self, status: int, headers: Headers) -> None:
        self._exchange.begin(status, headers)

    def send(self, piece: Buffer) -> None:
        self._exchange.send(piece)

    def finish(self) -> None:
        self._exchange.finish()


class VersionExchange(ForwardingExchange):
    """Exchange that names the model version in a header of the answer.

    Args:
        exchange: receives the answer.
        model: its ``version_text`` is read when the answer begins.
    """

    __slots__ = ("_model",)

    def __init__(self, exchange: Exchange, model: Versioned) -> None:
        super().__init__(exchange._exchange if isinstance(exchange, VersionExchange) else exchange)
        self._model = model

    def respond(self, answer: HttpAnswer) -> None:
        self._exchange.respond(HttpAnswer(answer.status, self._with_version(answer.headers), answer.body))

    def begin(self, status: int, headers: Headers) -> None:
        self._exchange.begin(status, self._with_version(headers))

    def _with_version(self, headers: Headers) -> Headers:
        return (*headers, (VERSION_HEADER, self._model.version_text.encode()))


def name_version(model: Versioned, head: Head, exchange: Exchange, *rest: object) -> tuple[object, ...]:
    """Return the arguments for a request whose answer may name the version.

    It does if another version might have answered. A model whose release only copies requests to a shadow has one
    version that answers. See ``FrontEnd.routed``.
    """
    if not model.is_divided:
        return (head, exchange, *rest)
    return (head, VersionExchange(exchange, model), *rest)


class Cancellable(Protocol):
    """Unanswered request: a ticket, or a request that waits for its model."""

    def cancel(self) -> None:
        """Cancel the request, which is still answered. Call it in the exchange's thread."""


class Service(Protocol):
    """Handler of the requests on a port."""

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None: ...


Answerer = Callable[[Buffer, Exchange], Cancellable | None]
"""Answers requests with one head; see `Service.handle`."""


@runtime_checkable
class BindingService(Service, Protocol):
    """Service that decides once for all requests with the same head."""

    def bind(self, head: Head) -> Answerer:
        """Return what `handle` does with this head.

        Depends on the head alone, because the result is memoized.
        """


@runtime_checkable
class HeadReadingService(Service, Protocol):
    """Service that answers some requests by their heads alone."""

    def reads_body(self, head: Head) -> bool:
        """Return False if a request with this head is answered without its body.

        The connection asks when a head is complete and its body is not. If it is False, the service is bound to
        `Head.without_body`, because a decision made before may be another one.
        """


def respond(answer: HttpAnswer, _body: Buffer, exchange: Exchange) -> None:
    """Answer any request with the same answer."""
    exchange.respond(answer)


def body_reader_of(service: Service) -> Callable[[Head], bool]:
    """Return `HeadReadingService.reads_body` of a service, which is True for all other services."""
    return service.reads_body if isinstance(service, HeadReadingService) else _reads_body


def _reads_body(_head: Head) -> bool:
    return True


def binder_of(service: Service) -> Callable[[Head], Answerer]:
    """Return what binds heads to a service: `BindingService.bind`, or `Service.handle`.

    Call it once for a service, because the check of its type costs more than binding a head.
    """
    if not isinstance(service, BindingService):
        return partial(partial, service.handle)
    bind_head = service.bind

    def bind_or_handle(head: Head) -> Answerer:
        try:
            return bind_head(head)
        except Exception:  # reported by `handle`, with the request that it fails
            _log.debug("binding failed", exc_info=True)
            return partial(service.handle, head)

    return bind_or_handle


class Bound:
    """Head with the function that answers its requests."""

    __slots__ = ("answer", "head", "length", "persists")

    def __init__(self, head: Head, answer: Answerer, max_body_bytes: int) -> None:
        self.head = head
        self.answer = answer
        self.length = head.content_length
        """Length of a body that is accepted and not chunked, else -1."""
        if head.chunked or self.length > max_body_bytes:
            self.length = -1
        self.persists = head.keep_alive and not head.http10
        """True if the connection stays open after an answer that has no ``Connection`` header."""


def arrival_of(head: Head, exchange: Exchange, *_: object) -> Arrival:
    """Return how a request arrived, for its trace."""
    return Arrival("HTTP", head.get, int(exchange.receiving_since * 1e9))


def peer_of(transport: BaseTransport) -> str:
    """Return the address of a connection's client, "" for a Unix socket.

    A client of IPv4 has the same address on a socket of both families.
    """
    peer = transport.get_extra_info("peername")
    return str(peer[0]).removeprefix(_IPV4_MAPPED) if isinstance(peer, tuple) else ""


class TlsNotice:
    """Log of clients that speak TLS on a plain port, at most once a minute."""

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol
        self._quiet_until = 0.0

    def log(self, transport: BaseTransport, now: float) -> None:
        """Log such a client."""
        if now >= self._quiet_until:
            self._quiet_until = now + _TLS_QUIET_S
            here, peer = transport.get_extra_info("sockname") or ("?", 0), peer_of(transport) or "?"
            _log.warning("a client from %s spoke TLS on port %s, which speaks plain %s", peer, here[1], self._protocol)
