"""Emulators that test a server against a platform's contract and report violations.

A platform is data: how it starts a container, how it probes it, and a table of checks. A check is a function of the
`Stage` that raises Failed on a violation. A check states its reason, has generous time limits because its verdict must
not depend on the machine's load, and leaves the server's state unchanged.

The package imports no adapter and only the standard library, so it can test any container.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

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
"""Supported platforms, each a module of this package (``_`` for ``-``) with a ``PLATFORM``."""
Stage = Any
"""`remora_deploy.emulate.stage.Stage`, which is made of a `Platform`."""
_MODULES = {"lambda": "aws_lambda"}
"""Modules with another name than their platform, because ``lambda`` is a keyword."""


class Failed(Exception):  # noqa: N818 - a finding, not an error of this program
    """Violation of the contract, with the observation in its text."""


class Skipped(Exception):  # noqa: N818 - a finding, not an error of this program
    """Check without a subject, with its requirement in the text."""


class Inapplicable(Skipped):
    """Check of another kind of server or model: no option could give it a subject."""


class Check(NamedTuple):
    """Check of one requirement of the contract.

    ``id`` is its name for ``--only``, ``what`` the requirement, and ``why`` the consequence of a violation on the
    platform. ``run`` raises Failed, Skipped or Inapplicable. ``early`` checks concern startup and run even if the
    server never became ready.
    """

    id: str
    what: str
    why: str
    run: Callable[[Stage], None]
    early: bool = False


class Probe(NamedTuple):
    """Readiness probe of a platform.

    It passes if ``path`` answers with ``status``, 0 for any. Times are in seconds: timeout of one answer, interval, and
    limit from startup to the first success.
    """

    path: str
    timeout_s: float
    period_s: float
    within_s: float
    status: int = 200

    def passes(self, status: int) -> bool:
        """Return True for a passing answer, where status 0 means no answer."""
        return status == self.status if self.status else status > 0


class Launch(NamedTuple):
    """Command line, environment and port with which a platform starts a container.

    ``arguments`` follow the entrypoint's own.
    """

    arguments: tuple[str, ...]
    environ: Mapping[str, str]
    port: int


@dataclass(frozen=True, slots=True)
class EmulateSettings:
    """Settings of the user.

    ``command`` starts the server, or ``url`` is that of a running one. ``body`` is a valid inference request of type
    ``content_type``; ``model`` is the folder that the platform would mount. ``patience`` scales the platform's timeouts
    for a slow machine. ``given`` holds the parameters of a single platform by name.
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


def _no_example(stage: Stage) -> bytes:
    return b""


@dataclass(frozen=True, slots=True)
class Platform:
    """Platform as data.

    ``launch`` gets the settings, a free port and an empty folder for mounts. The last checks may terminate the process;
    ``grace_s`` is the time between SIGTERM and SIGKILL. ``api`` serves the API of the platform's clients on a loopback
    port until its context ends. ``callee`` serves the API that the process calls, on platforms that are polled. It
    starts before the process on the launch's port, answers the probe, and is the stage's ``callee`` for checks.
    ``example`` is the request of a user who passed none, b"" if it is unknown.
    """

    title: str
    launch: Callable[[EmulateSettings, int, Path], Launch]
    probe: Probe
    grace_s: float
    checks: tuple[Check, ...]
    api: Callable[[Stage, int], AbstractContextManager[object]] | None = None
    callee: Callable[[Launch], AbstractContextManager[object]] | None = None
    example: Callable[[Stage], bytes] = _no_example


def find_platform(name: str) -> Platform:
    """Return the platform of that name. Raises ValueError for an unknown name."""
    if name not in PLATFORMS:
        raise ValueError(f"unknown platform '{name}': expected one of {', '.join(PLATFORMS)}")
    found: Platform = import_module(f"{__name__}.{_module_of(name)}").PLATFORM
    return found


def adapter_of(name: str) -> str:
    """Return the module of the adapter that serves a platform's folder of models."""
    return f"remora_adapters.{_module_of('sagemaker' if name == 'sagemaker-mme' else name)}"


def _module_of(name: str) -> str:
    return _MODULES.get(name, name.replace("-", "_"))
