"""Interface between the server and platform adapters: options, services and extra ports.

An adapter is a module with a function ``host(environ) -> Host``. It reads only the given variables and the directories
that they name, and starts nothing: `remora.cli` applies the command-line flags over the host's options, and
`remora.server.main` opens the ports. The host's factories create the services of the ports from a `ServerContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from remora import plugins
from remora.errors import ConfigError, UnsupportedError
from remora.options import EngineOptions, ServerOptions

if TYPE_CHECKING:  # a host is created before the server's modules are imported
    from remora.engine import Engine
    from remora.messages import Mailbox
    from remora.server.access_log import AccessLog
    from remora.server.http.exchange import Service
    from remora.server.http.held_bytes import HeldBytes
    from remora.server.http.rest import Later, RestService
    from remora.server.key_check import KeyCheck

_EXTRA = {"allow_sagemaker": "sagemaker"}
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


def v2_alone(context: ServerContext) -> Service:
    """Return the V2 service, for hosts without custom routes."""
    return context.rest


def all_on_one_port(context: ServerContext) -> Service:
    """Return a V2 service that includes the metrics, for hosts that expose a single port."""
    from remora.server.http.port_services import OnePortService

    return OnePortService(context.rest)


_ENGINE, _SERVER = EngineOptions(), ServerOptions()


@dataclass(frozen=True, slots=True)
class Host:
    """Configuration of the server for a platform.

    ``engine`` and ``server`` are the options, which flags override; ``front`` creates the service of the HTTP port, and
    ``extra_ports`` are extra ports.
    """

    engine: EngineOptions = _ENGINE
    server: ServerOptions = _SERVER
    front: ServiceFactory = v2_alone
    extra_ports: tuple[ExtraPort, ...] = ()


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
    unknown platform and for one that cannot be loaded.
    """
    target = plugins.HOSTS.get(name)
    if target is not None:
        return cast(Adapter, _load_adapter(f"--host-platform={name}", target))
    try:
        found = plugins.find_installed("hosts", name)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if found is None:
        raise ValueError(f"there is no host platform '{name}': give one of {', '.join(plugins.HOSTS)}")
    return cast(Adapter, found)


def optional_ports(options: ServerOptions, environ: Mapping[str, str]) -> tuple[ExtraPort, ...]:
    """Return the platform ports that options enable in addition to V2's [N01].

    tritonserver has the same ports. Raises ValueError for invalid settings.
    """
    return tuple(
        _load_adapter(f"--{option.replace('_', '-')}", plugins.HOSTS[name]).extra_port(options, environ)
        for option, name in _EXTRA.items()
        if getattr(options, option)
    )


def _load_adapter(flag: str, target: str) -> Any:
    try:
        return plugins.load_for(flag, target)
    except UnsupportedError as error:
        raise ValueError(str(error)) from error
