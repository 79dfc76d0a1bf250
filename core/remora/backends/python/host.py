"""Where a Python model lives: its names and its way to other models; the law: a model's code asks here for all that
depends on whether it runs in a thread of the server or in a process of its own.

The host travels in a context variable, so that models side by side in one process each find their own. Threads that a
model starts by itself begin without one: there the module whose code is running tells.
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
    """How a model's requests reach other models [L01]."""

    def infer(self, request: Any, *, decoupled: bool) -> Any:
        """An ``InferenceResponse``, or an iterator of them when ``decoupled``. Failures are error responses."""

    async def infer_async(self, request: Any, *, decoupled: bool) -> Any:
        """The same for coroutines."""

    def load_model(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:
        """Load a model; ``config`` is JSON text, "" for what is written [L06]."""

    def unload_model(self, name: str, *, unload_dependents: bool) -> None:
        """Take a model out of service."""

    def is_model_ready(self, name: str, version: str) -> bool:
        """Would a request be taken? An empty version is any."""


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """What surrounds one instance of a model; ``model_dir`` is its version's folder.

    ``caller`` is None where calls of other models are not offered.
    """

    model_name: str
    model_version: int
    model_dir: str
    caller: Caller | None = None
    instance_name: str = ""


_host: ContextVar[Host | None] = ContextVar("remora_model_host", default=None)


_homes: dict[str, Host] = {}
"""The host of each package that is one load of one model. Modules are the interpreter's, so that this is as well."""


def settle(package: str, host: Host) -> None:
    """Code of ``package`` belongs to ``host`` from now on."""
    _homes[package] = host


def leave(package: str) -> None:
    """Forget it."""
    _homes.pop(package, None)


def current_host() -> Host | None:
    """The host of the model whose code is running, None outside of one."""
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
    """Run a model's code as a guest of ``host``. ``origin`` is where its calls come from, which ends here;
    None changes nothing."""
    token = _host.set(host)
    try:
        with calling_from(origin if origin is not None else current_origin()):
            yield
    finally:
        if origin is not None:
            origin.end()
        _host.reset(token)
