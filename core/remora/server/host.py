"""How a platform plugs into the server: its settings as options, its routes as services on ports; all of it data.

An adapter is a module with a function ``host(environ) -> Host``. It reads nothing but the variables it is given and
the folders they name, and starts nothing: `remora.cli` lays the command line's flags over the host's options, and
`remora.server.main` opens the ports. What answers on them is a service made of what is `ServerContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from remora.options import EngineOptions, ServerOptions

if TYPE_CHECKING:  # a host is made before the server's modules are imported
    from remora.engine import Engine
    from remora.messages import Mailbox
    from remora.server.http.http1 import Service
    from remora.server.http.rest import Later, RestService

PLATFORMS = (
    "azureml",
    "cloud_run",
    "container",
    "knative",
    "kserve",
    "sagemaker",
    "vertex",
)
"""The platforms that have an adapter here: modules of ``remora_adapters``."""
_GROUP = "remora.hosts"
_BESIDE = {"allow_sagemaker": "sagemaker"}
"""The options that open a platform's port beside V2's, and the adapter that has it."""


class ServerContext(NamedTuple):
    """What a platform's service is made of: it answers its own routes and hands on what is V2.

    ``rest`` answers V2; ``mailbox`` is where the loop takes inference answers; ``later`` runs what would block the loop
    and answers the exchange with its result. All are to be used in the loop's thread.
    """

    engine: Engine
    rest: RestService
    mailbox: Mailbox
    later: Later
    options: ServerOptions


ServiceFactory = Callable[[ServerContext], "Service"]
"""Makes the service of a port, in the loop's thread, before the models are loaded: it must answer probes meanwhile."""


@dataclass(frozen=True, slots=True)
class ExtraPort:
    """A port besides V2's: what it is called in messages, where it listens, who answers there."""

    what: str
    address: str
    port: int
    front: ServiceFactory


def v2_alone(inside: ServerContext) -> Service:
    """The front of a host that has no routes of its own."""
    return inside.rest


def all_on_one_port(inside: ServerContext) -> Service:
    """The front of a host that lets one port through: the metrics are there as well."""
    from remora.server.http.rest import OnePortService

    return OnePortService(inside.rest)


_ENGINE, _SERVER = EngineOptions(), ServerOptions()


@dataclass(frozen=True, slots=True)
class Host:
    """What a platform asks of a server.

    ``engine`` and ``server`` are the options that hold unless a flag says otherwise, ``front`` makes what answers on
    the HTTP port, and ``doors`` are further ports.
    """

    engine: EngineOptions = _ENGINE
    server: ServerOptions = _SERVER
    front: ServiceFactory = v2_alone
    doors: tuple[ExtraPort, ...] = ()


class Adapter(Protocol):
    """A platform's module."""

    def host(self, environ: Mapping[str, str]) -> Host:
        """What the platform asks, from its environment.

        Raises ValueError for settings that cannot be used, OSError for folders that they name and nobody can read.
        """


def port_of(environ: Mapping[str, str], variable: str, default: int) -> int:
    """The port that a variable names. Raises ValueError for what is none."""
    text = environ.get(variable, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65_536):
        raise ValueError(f"{variable}={text}: expected a port")
    return int(text)


def models_of(environ: Mapping[str, str], directories: Sequence[str]) -> tuple[str, ...]:
    """What ``REMORA_MODEL_REPOSITORY`` names, else the first of the directories that is there."""
    named = environ.get("REMORA_MODEL_REPOSITORY")
    return (named,) if named else tuple(place for place in directories if Path(place).is_dir())[:1]


def find_adapter(name: str) -> Adapter:
    """The adapter of a platform: one of ours, or one that an installed package offers in the group ``remora.hosts``.

    Raises ValueError when there is none.
    """
    if name in PLATFORMS:
        return cast(Adapter, import_module(f"remora_adapters.{name}"))
    from importlib.metadata import entry_points  # 40 ms: only for a platform that is not ours

    for entry in entry_points(group=_GROUP):
        if entry.name == name:
            return cast(Adapter, entry.load())
    raise ValueError(f"there is no host platform '{name}': give one of {', '.join(PLATFORMS)}")


def extra_ports(options: ServerOptions, environ: Mapping[str, str]) -> tuple[ExtraPort, ...]:
    """The platforms' ports that options ask for beside V2's, as tritonserver has them [N01].

    Raises ValueError for settings that cannot be used.
    """
    wanted = [name for option, name in _BESIDE.items() if getattr(options, option)]
    doors: list[ExtraPort] = [import_module(f"remora_adapters.{name}").beside(options, environ) for name in wanted]
    return tuple(doors)
