"""Interface between the server and platform adapters: options, services and extra ports.

An adapter is a module with a function ``host(environ) -> Host``. It reads only the given variables and the directories
that they name, and starts nothing: `remora.cli` applies the command-line flags over the host's options, and
`remora.server.main` opens the ports. The host's factories create the services of the ports from a `ServerContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

from remora.options import EngineOptions, ServerOptions

if TYPE_CHECKING:  # a host is created before the server's modules are imported
    from remora.engine import Engine
    from remora.messages import Mailbox
    from remora.protocols.http1 import Head
    from remora.server.access_log import AccessLog
    from remora.server.http.exchange import Service
    from remora.server.http.held_bytes import HeldBytes
    from remora.server.http.rest import Later, RestService
    from remora.server.key_check import KeyCheck

PLATFORMS = (
    "azureml",
    "cloud_run",
    "container",
    "knative",
    "kserve",
    "sagemaker",
    "vertex",
)
"""Platforms with a built-in adapter: modules of ``remora_adapters``."""
_GROUP = "remora.hosts"
_BESIDE = {"allow_sagemaker": "sagemaker"}
"""Options that open a platform's port in addition to V2's, and their adapters."""


class ServerContext(NamedTuple):
    """Parts of the server from which a platform's service is built.

    ``rest`` answers V2 requests; ``mailbox`` delivers inference answers to the loop; ``later`` runs work that would
    block the loop and answers the exchange with its result; ``access_log`` logs requests and ``keys`` checks
    API keys, if the options ask for it; ``held`` counts the bytes of all connections. Use all of them in the loop's
    thread.
    """

    engine: Engine
    rest: RestService
    mailbox: Mailbox
    later: Later
    options: ServerOptions
    access_log: AccessLog | None = None
    keys: KeyCheck | None = None
    held: HeldBytes | None = None


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


@runtime_checkable
class RoutedService(Protocol):
    """Service with routes of its platform, which `remora.server.key_check` checks when a head is complete."""

    @property
    def routes(self) -> tuple[HostRoute, ...]:
        """Routes beside those of V2, OpenAI and KServe V1, except probes."""


def routes_of(service: Service) -> tuple[HostRoute, ...]:
    """Return the routes of a platform's service, none of other services."""
    return service.routes if isinstance(service, RoutedService) else ()


ServiceFactory = Callable[[ServerContext], "Service"]
"""Creates the service of a port, in the loop's thread. The service must answer probes before the models are loaded."""


@dataclass(frozen=True, slots=True)
class ExtraPort:
    """Port in addition to V2's.

    It has a name for messages (``what``), an address and the factory of its service.
    """

    what: str
    address: str
    port: int
    front: ServiceFactory


def v2_alone(inside: ServerContext) -> Service:
    """Return the V2 service, for hosts without custom routes."""
    return inside.rest


def all_on_one_port(inside: ServerContext) -> Service:
    """Return a V2 service that includes the metrics, for hosts that expose a single port."""
    from remora.server.http.port_services import OnePortService

    return OnePortService(inside.rest)


_ENGINE, _SERVER = EngineOptions(), ServerOptions()


@dataclass(frozen=True, slots=True)
class Host:
    """Configuration of the server for a platform.

    ``engine`` and ``server`` are the options, which flags override; ``front`` creates the service of the HTTP port, and
    ``doors`` are extra ports.
    """

    engine: EngineOptions = _ENGINE
    server: ServerOptions = _SERVER
    front: ServiceFactory = v2_alone
    doors: tuple[ExtraPort, ...] = ()


class Adapter(Protocol):
    """Module of a platform."""

    def host(self, environ: Mapping[str, str]) -> Host:
        """Return the platform's configuration from its environment variables.

        Raises ValueError for invalid settings, OSError for directories that cannot be read.
        """


def port_of(environ: Mapping[str, str], variable: str, default: int) -> int:
    """Return the port number in a variable. Raises ValueError if it is not a port."""
    text = environ.get(variable, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65_536):
        raise ValueError(f"{variable}={text}: expected a port")
    return int(text)


def models_of(environ: Mapping[str, str], directories: Sequence[str]) -> tuple[str, ...]:
    """Return the path in ``REMORA_MODEL_REPOSITORY``, else the first existing directory."""
    named = environ.get("REMORA_MODEL_REPOSITORY")
    return (named,) if named else tuple(place for place in directories if Path(place).is_dir())[:1]


def find_adapter(name: str) -> Adapter:
    """Return the adapter of a platform.

    It is built in or an entry point of an installed package in the group ``remora.hosts``. Raises ValueError for an
    unknown platform.
    """
    if name in PLATFORMS:
        return cast(Adapter, import_module(f"remora_adapters.{name}"))
    from importlib.metadata import entry_points  # takes 40 ms, so only for external adapters

    for entry in entry_points(group=_GROUP):
        if entry.name == name:
            return cast(Adapter, entry.load())
    raise ValueError(f"there is no host platform '{name}': give one of {', '.join(PLATFORMS)}")


def extra_ports(options: ServerOptions, environ: Mapping[str, str]) -> tuple[ExtraPort, ...]:
    """Return the platform ports that options enable in addition to V2's [N01].

    tritonserver has the same ports. Raises ValueError for invalid settings.
    """
    wanted = [name for option, name in _BESIDE.items() if getattr(options, option)]
    doors: list[ExtraPort] = [import_module(f"remora_adapters.{name}").beside(options, environ) for name in wanted]
    return tuple(doors)
