"""Where a Python model lives: its names and its way to other models; the law: a model's code asks here for all that
depends on whether it runs in a thread of the server or in a process of its own.

The host travels in a context variable, so that models side by side in one process each find their own. Threads that a
model starts by itself begin without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol


class Caller(Protocol):
    """How a model's requests reach other models (spec L01)."""

    def infer(self, request: Any, *, decoupled: bool) -> Any:
        """An ``InferenceResponse``, or an iterator of them when ``decoupled``. Failures are error responses."""

    async def infer_async(self, request: Any, *, decoupled: bool) -> Any:
        """The same for coroutines."""


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """What surrounds one instance of a model. ``caller`` is None where calls of other models are not offered."""

    model_name: str
    model_version: int
    model_dir: str
    caller: Caller | None = None


_host: ContextVar[Host | None] = ContextVar("remora_model_host", default=None)


def current_host() -> Host | None:
    """The host of the model whose code is running, None outside of one."""
    return _host.get()


@contextmanager
def hosted(host: Host) -> Iterator[None]:
    """Run a model's code as a guest of ``host``."""
    token = _host.set(host)
    try:
        yield
    finally:
        _host.reset(token)
