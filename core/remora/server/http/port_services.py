"""Services of a port: its metrics, and those in front of another service.

The latter check the Host header and the API key, and add CORS headers (Fetch) and request ids.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import partial
from typing import TYPE_CHECKING

from remora.messages import Buffer
from remora.protocols.cross_site import SharedOrigins, is_loopback, refuse_host
from remora.protocols.http1 import Head, HeadNote
from remora.protocols.rest.answer import METRICS, PLAIN, Headers, HttpAnswer, failure
from remora.protocols.rest.routes import SCRAPE_PATH
from remora.server.host_routes import HostRoute, RouteTable, routes_of
from remora.server.http.exchange import (
    Answerer,
    Cancellable,
    Exchange,
    ForwardingExchange,
    Service,
    binder_of,
    body_reader_of,
    respond,
)
from remora.server.http.request_ids import ID_NAME, IdentifyingExchange, RequestIds, valid_id
from remora.server.http.route_groups import row_of

if TYPE_CHECKING:
    from remora.protocols.forwarding import TrustedProxies
    from remora.server.http.rest import RestService
    from remora.server.key_check import KeyCheck


def port_service(
    address: str,
    service: Service,
    allowed_hosts: Container[str],
    keys: KeyCheck | None = None,
    origins: tuple[str, ...] = (),
) -> Service:
    """Return the service for a port at ``address``.

    On loopback it checks the Host header first, then the API key with ``keys``. Its answers are shared with pages of
    ``origins``, and those of OpenAI's routes have a request id, unless the platform has the path. Raises ValueError for
    text that is not an origin.
    """
    routes = routes_of(service)
    if keys is not None:
        service = keys.over(service)
    if origins:
        service = SharingService(service, SharedOrigins(origins))
    return IdentifyingService(_LoopbackService(service, allowed_hosts) if is_loopback(address) else service, routes)


_CACHEABLE = ("GET", "HEAD")
_INERT = (
    (b"Content-Security-Policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"X-Content-Type-Options", b"nosniff"),
)
"""Headers of the answer to a foreign page, so that a browser neither runs, frames nor reinterprets it."""


class _LoopbackService:
    """Service of a loopback port, protected against DNS rebinding.

    It refuses requests whose Host header names another host.
    """

    def __init__(self, service: Service, allowed_hosts: Container[str]) -> None:
        self._bind = binder_of(service)
        self._reads_body = body_reader_of(service)
        self._allowed = allowed_hosts
        self._answerers = HeadNote[Answerer]()

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        answer = self._answerers.get(head) or self._answerers.put(head, self.bind(head))
        return answer(body, exchange)

    def bind(self, head: Head) -> Answerer:
        reason = refuse_host(head.get, self._allowed)
        if reason:
            return partial(respond, failure(403, reason, plain=True, headers=_INERT))
        return self._bind(head)

    def reads_body(self, head: Head) -> bool:
        return not refuse_host(head.get, self._allowed) and self._reads_body(head)


class SchemeService:
    """Service that notes on heads by which scheme the client reaches this server, for the URLs of pages.

    Args:
        service: the service of the port.
        scheme: scheme of the port.
        proxies: proxies that may speak another scheme with the client; None without any.
    """

    def __init__(self, service: Service, scheme: str, proxies: TrustedProxies | None) -> None:
        self._bind = binder_of(service)
        self.reads_body = body_reader_of(service)
        """See `HeadReadingService`."""
        self._scheme = scheme
        self._proxies = proxies

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request; see `Service.handle`."""
        return self.bind(head)(body, exchange)

    def bind(self, head: Head) -> Answerer:
        """See `BindingService.bind`."""
        head.scheme = self._scheme
        proxies, answer = self._proxies, self._bind(head)
        if proxies is None or not (head.get(b"x-forwarded-proto") or head.get(b"forwarded")):
            return answer

        def answer_proxied(body: Buffer, exchange: Exchange) -> Cancellable | None:
            scheme = proxies.scheme_of(exchange.peer, head.headers)
            if not scheme or scheme == head.scheme:
                return answer(body, exchange)
            seen = head.to(head.path)
            seen.scheme = scheme
            return self._bind(seen)(body, exchange)

        return answer_proxied


class SharingService:
    """Service whose answers carry CORS headers for pages of ``origins``.

    It answers preflights itself: a browser sends them without the page's headers, and so without its key.
    """

    def __init__(self, service: Service, origins: SharedOrigins) -> None:
        self._bind = binder_of(service)
        self.reads_body = body_reader_of(service)
        """See `HeadReadingService`."""
        self._origins = origins

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request; see `Service.handle`."""
        return self.bind(head)(body, exchange)

    def bind(self, head: Head) -> Answerer:
        """See `BindingService.bind`."""
        headers = self._origins.headers(head.get)
        if not headers:
            vary = self._origins.vary if head.method in _CACHEABLE else ()
            return partial(_share, vary, self._bind(head)) if vary else self._bind(head)
        preflight = self._origins.preflight(head.method, head.get)
        if preflight:
            return partial(respond, HttpAnswer(204, (*headers, *preflight), []))
        return partial(_share, headers, self._bind(head))


class IdentifyingService:
    """Service whose answers on the paths of some groups have an id.

    Refusals and streams have one, too: OpenAI's clients show it with errors. On other paths ``--request-ids`` adds it.

    Args:
        service: the service behind it.
        routes: routes of the platform, whose contract says which ids their answers have: Azure ML's ``/score`` is also
            one of vLLM's paths.
    """

    def __init__(self, service: Service, routes: Iterable[HostRoute] = ()) -> None:
        self._routes = RouteTable(routes)
        self._handle = service.handle
        self._bind = binder_of(service)
        self.reads_body = body_reader_of(service)
        """See `HeadReadingService`."""
        self._ids = RequestIds()

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request; see `Service.handle`."""
        if self._names_requests(head.path):
            exchange = IdentifyingExchange(exchange, valid_id(head.get(ID_NAME)) or self._ids.new())
        return self._handle(head, body, exchange)

    def bind(self, head: Head) -> Answerer:
        """See `BindingService.bind`."""
        answer = self._bind(head)
        if not self._names_requests(head.path):
            return answer
        return partial(_identify, answer, valid_id(head.get(ID_NAME)), self._ids)

    def _names_requests(self, path: str) -> bool:
        row = row_of(path)
        return row is not None and row.names_requests and not self._routes.has_path(path)


class MetricsService:
    """Service of the metrics port, which has only ``/metrics`` [P01]."""

    def __init__(self, rest: RestService) -> None:
        self._rest = rest

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> None:
        if head.method != "GET":
            refused = b'{"error":"Method Not Allowed"}'
            exchange.respond(HttpAnswer(405, (PLAIN,), [refused]))
        elif head.path in (SCRAPE_PATH, f"{SCRAPE_PATH}/"):
            exchange.respond(self._rest.access.denied("metrics", head) or self._rest.metrics())
        else:
            exchange.respond(HttpAnswer(200, (METRICS,), []))


class OnePortService:
    """V2 service that also serves the metrics at ``/metrics``."""

    def __init__(self, rest: RestService) -> None:
        self._rest = rest
        self.open_paths = rest.open_paths
        """See `remora.server.key_check.OpenService`."""

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request, now or later; see `RestService.handle`."""
        return self.bind(head)(body, exchange)

    def bind(self, head: Head) -> Answerer:
        """See `BindingService.bind`."""
        if head.path == SCRAPE_PATH and head.method in _CACHEABLE:
            return partial(self._scrape, head)
        return self._rest.bind(head)

    def _scrape(self, head: Head, _body: Buffer, exchange: Exchange) -> None:
        exchange.respond(self._rest.access.locked("metrics", head) or self._rest.metrics())


def _identify(
    answer: Answerer, client_id: str, ids: RequestIds, body: Buffer, exchange: Exchange
) -> Cancellable | None:
    return answer(body, IdentifyingExchange(exchange, client_id or ids.new()))


def _share(headers: Headers, answer: Answerer, body: Buffer, exchange: Exchange) -> Cancellable | None:
    return answer(body, _SharingExchange(exchange, headers))


class _SharingExchange(ForwardingExchange):
    """Exchange that adds headers to the answer."""

    __slots__ = ("_headers",)

    def __init__(self, exchange: Exchange, headers: Headers) -> None:
        super().__init__(exchange)
        self._headers = headers

    def respond(self, answer: HttpAnswer) -> None:
        self._exchange.respond(answer._replace(headers=(*answer.headers, *self._headers), wire=None))

    def begin(self, status: int, headers: Headers) -> None:
        self._exchange.begin(status, (*headers, *self._headers))
