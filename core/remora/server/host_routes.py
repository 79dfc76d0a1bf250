"""Routes of platforms, each with the action of V2 whose permission it needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from remora.protocols.http1 import Head

if TYPE_CHECKING:
    from remora.server.http.exchange import Service


class HostRoute(NamedTuple):
    """Route of a platform that needs the permission of an action of V2, such as "infer".

    A part ``*`` of the path stands for any name that is not empty. ``redirect`` is the header, if any, in which a
    client names the path of V2 that it means instead.
    """

    method: str
    path: str
    action: str
    redirect: str = ""

    def target_of(self, head: Head) -> str | None:
        """Return the path of V2 that the redirect header of a request names, None without it."""
        target = head.get(self.redirect.encode()) if self.redirect else None
        return None if target is None else f"/{target.decode('latin-1').lstrip('/')}".partition("?")[0]


class RouteTable:
    """Routes of a platform by method and path."""

    __slots__ = ("_exact", "_patterns")

    def __init__(self, routes: Iterable[HostRoute] = ()) -> None:
        self._exact: dict[tuple[str, str], HostRoute] = {}
        self._patterns: dict[str, list[tuple[list[str], HostRoute]]] = {}
        for row in routes:
            if "*" in row.path:
                self._patterns.setdefault(row.method, []).append((row.path.split("/"), row))
            else:
                self._exact[row.method, row.path] = row

    def find(self, method: str, path: str) -> HostRoute | None:
        """Return the route of a request, None if the platform has none."""
        found = self._exact.get((method, path))
        if found is not None or method not in self._patterns:
            return found
        names = path.split("/")
        for parts, row in self._patterns[method]:
            if len(parts) == len(names) and all(
                part == name or (part == "*" and name) for part, name in zip(parts, names, strict=True)
            ):
                return row
        return None

    def has_path(self, path: str) -> bool:
        """Return True if the platform has a route with this path for any method."""
        methods = {method for method, _ in self._exact} | self._patterns.keys()
        return any(self.find(method, path) is not None for method in methods)


@runtime_checkable
class RoutedService(Protocol):
    """Service with routes of its platform, which `remora.server.key_check` checks when a head is complete."""

    @property
    def routes(self) -> tuple[HostRoute, ...]:
        """Routes beside those of V2, OpenAI and KServe V1, except probes."""


def routes_of(service: Service) -> tuple[HostRoute, ...]:
    """Return the routes of a platform's service, none of other services."""
    return service.routes if isinstance(service, RoutedService) else ()
