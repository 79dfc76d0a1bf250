"""Plays a platform's side of its contract against a server, and says what the platform would have minded.

A platform is data: how it starts a container, how it probes it, and a table of checks. A check is a function of the
`Stage` that raises Failed when the platform would have been let down. Rules: a check says why it is there; it is sure
of what it says, so what depends on the machine's mood is measured generously; it leaves the server as it found it.

Knows no adapter and needs nothing but the standard library: it is a tool for anybody's container.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from remora_adapters.emulate.stage import Stage

PLATFORMS = (
    "azureml",
    "cloud-run",
    "knative",
    "kserve",
    "lambda",
    "sagemaker",
    "sagemaker-mme",
    "vertex",
)
"""What can be played: a module of this package each, with ``_`` for ``-``, that has a ``PLATFORM``."""
_MODULES = {"lambda": "aws_lambda"}
"""The modules whose names differ: Python keeps the word for itself."""


class Failed(Exception):  # noqa: N818 - it is a finding, not an error of ours
    """The platform would have been let down; the text says what was seen."""


class Skipped(Exception):  # noqa: N818 - it is a finding, not an error of ours
    """A check that has nothing to look at here; the text says what it would need."""


class Check(NamedTuple):
    """One promise of the contract.

    ``id`` names it for ``--only``; ``what`` must hold; ``why`` says what the platform does when it does not, and where
    that is written. ``run`` raises Failed or Skipped. ``early`` checks are about the start: they run even when the
    server never became ready.
    """

    id: str
    what: str
    why: str
    run: Callable[[Stage], None]
    early: bool = False


class Probe(NamedTuple):
    """How a platform asks whether a server is ready: it is when ``path`` is answered with ``status``, 0 for any.

    Times are in seconds: for one answer, between two questions, and from the start to the first good answer.
    """

    path: str
    timeout_s: float
    period_s: float
    within_s: float
    status: int = 200

    def passes(self, status: int) -> bool:
        """Whether that was a good answer; a status of 0 is none at all."""
        return status == self.status if self.status else status > 0


class Launch(NamedTuple):
    """How a platform starts a container: arguments after the entrypoint's own, variables, and the port it will call."""

    arguments: tuple[str, ...]
    environ: Mapping[str, str]
    port: int


@dataclass(frozen=True, slots=True)
class EmulateSettings:
    """What the user says: ``command`` starts the server, or ``url`` is one that runs already.

    ``body`` is an inference request that the server must answer well, of type ``content_type``; ``model`` is the folder
    that the platform would have put in its place. What the platform waits for may take ``patience`` times as long, for
    a machine that has other things to do. ``given`` holds what a single platform takes besides, by name.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    model: Path | None = None
    body: bytes = b""
    content_type: str = "application/json"
    environ: Mapping[str, str] = field(default_factory=dict)
    startup_s: float = 0.0
    patience: float = 1.0
    given: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Platform:
    """A platform as data. ``launch`` gets the settings, a free port and an empty folder for what is to be mounted.

    The last checks may end the process: ``grace_s`` is how long the platform waits between SIGTERM and SIGKILL.
    ``api`` plays what the platform's own clients talk to, on a loopback port, until the ``with`` is left.
    ``callee`` plays what the process itself calls, where the platform is asked instead of asking; it stands before the
    process starts, on the launch's port, answers the probe, and checks find it as the stage's ``callee``.
    """

    title: str
    launch: Callable[[EmulateSettings, int, Path], Launch]
    probe: Probe
    grace_s: float
    checks: tuple[Check, ...]
    api: Callable[[Stage, int], AbstractContextManager[object]] | None = None
    callee: Callable[[Launch], AbstractContextManager[object]] | None = None


def find_platform(name: str) -> Platform:
    """The platform of that name. Raises ValueError when there is none."""
    if name not in PLATFORMS:
        raise ValueError(f"there is no platform '{name}' to play: give one of {', '.join(PLATFORMS)}")
    found: Platform = import_module(f"{__name__}.{_MODULES.get(name, name.replace('-', '_'))}").PLATFORM
    return found
