"""Context of the running Python model (its names, its caller of other models).

Everything that depends on whether a model runs in a server thread or in a worker process is reached through its host.
The host travels in a context variable, so that models in one process each find their own. Threads that a model starts
have no such variable; for them the module of the calling code determines the host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from remora.backends.calling import Origin, calling_from, current_origin


class Caller(Protocol):
    """Calls of other models for a model's code [L01]."""

    def infer(self, request: Any, *, decoupled: bool) -> Any:
        """Return an ``InferenceResponse``, or an iterator of them if ``decoupled``.

        Failures are error responses.
        """

    async def infer_async(self, request: Any, *, decoupled: bool) -> Any:
        """Return the same as ``infer`` in a coroutine."""

    def load_model(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:
        """Load a model [L06].

        ``config`` is JSON text, "" for the configuration on disk.
        """

    def unload_model(self, name: str, *, unload_dependents: bool) -> None:
        """Take a model out of service."""

    def is_model_ready(self, name: str, version: str) -> bool:
        """Return True if a request would be accepted. An empty version means any version."""


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """Context of one instance of a model.

    ``model_dir`` is the directory of its version. Without calls of other models, ``caller`` has the value None.
    """

    model_name: str
    model_version: int
    model_dir: str
    caller: Caller | None = None
    instance_name: str = ""


_host: ContextVar[Host | None] = ContextVar("remora_model_host", default=None)


_homes: dict[str, Host] = {}
"""Host of each package (one load of one model). Global, because modules belong to the interpreter."""


def settle(package: str, host: Host) -> None:
    """Register ``host`` for the code of ``package``."""
    _homes[package] = host


def leave(package: str) -> None:
    """Remove the registration of ``package``."""
    _homes.pop(package, None)


def current_host() -> Host | None:
    """Return the host of the running model, or None outside of a model."""
    return _host.get() or _host_of_callers()


def _host_of_callers() -> Host | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _homes:
        host = _homes.get(str(frame.f_globals.get("__name__", "")).partition(".")[0])
        if host is not None:
            return host
        frame = frame.f_back
    return None


@contextmanager
def hosted(host: Host, origin: Origin | None = None) -> Iterator[None]:
    """Run a model's code with ``host`` as its context.

    ``origin`` is the origin of its calls and is ended on exit; None keeps the current origin.
    """
    token = _host.set(host)
    try:
        with calling_from(origin if origin is not None else current_origin()):
            yield
    finally:
        if origin is not None:
            origin.end()
        _host.reset(token)
