"""Everything on one port, for hosts that let only one through: V2, its health, and the metrics where scrapers look."""

from __future__ import annotations

from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.server.host import ServerContext
from remora.server.http.exchange import Cancellable, Exchange

METRICS = "/metrics"


class OnePortService:
    """V2, and the metrics at ``/metrics`` as well."""

    def __init__(self, inside: ServerContext) -> None:
        self._rest = inside.rest

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request, now or later."""
        if head.path == METRICS and head.method in ("GET", "HEAD"):
            exchange.respond(self._rest.locked("metrics", head) or self._rest.metrics())
            return None
        return self._rest.handle(head, body, exchange)
