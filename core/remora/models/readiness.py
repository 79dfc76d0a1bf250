"""Readiness of the engine for traffic, and the reasons against it [V01]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import NamedTuple

from remora.errors import RemoraError
from remora.models.placement import idle_gpu_reason
from remora.models.table import ModelTable
from remora.options import EngineOptions


class Readiness(NamedTuple):
    """Readiness for traffic. ``waits_for`` lists the reasons why the engine is not ready.

    ``live`` is False if only a restart of the process helps.
    """

    ready: bool
    started: bool
    draining: bool
    waits_for: tuple[str, ...]
    live: bool = True


class ReadinessState:
    """Startup, shutdown and health of the models, as far as readiness depends on them.

    Thread-safe.

    Args:
        options: the conditions of readiness.
        table: the models and their state.
        gpu_count: number of GPUs that models may use.
        unseen: returns why repositories were never read.
    """

    def __init__(
        self,
        options: EngineOptions,
        table: ModelTable,
        gpu_count: int,
        unseen: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        self._options = options
        self._table = table
        self._gpu_count = gpu_count
        self._unseen = unseen
        self._holds: list[str] = []
        self.started = False
        """True once the models of the startup have been loaded or have failed."""
        self.start: Future[None] = Future()
        """Completes with the startup."""
        self.draining = False
        self.stopping = False

    def is_live(self) -> bool:
        """Return True unless some model needs a restart of the process."""
        return not self._table.fatal()

    def is_ready(self) -> bool:
        """Return True if the engine accepts traffic [V01].

        It must be started, not draining, and its table healthy.
        """
        away = self.draining or self.stopping or self._holds or not self.is_live() or self.idle_gpu() or self._unseen()
        return self.started and not away and (not self._options.strict_readiness or self._table.is_fine())

    def now(self) -> Readiness:
        """Return the readiness and the reasons against it."""
        reasons = [] if self.started else ["the models of the start are being loaded"]
        reasons += self._holds
        reasons += self._unseen()
        fatal = self._table.fatal()
        reasons += [fatal] if fatal else []
        idle_gpu = self.idle_gpu()
        reasons += [idle_gpu] if idle_gpu else []
        reasons += ["the server is draining"] if self.draining or self.stopping else []
        reasons += self._table.troubles() if self._options.strict_readiness or not self.started else []
        return Readiness(self.is_ready(), self.started and not self._holds, self.draining, tuple(reasons), not fatal)

    def idle_gpu(self) -> str:
        """Return why the required GPU is idle, or "" if it is used or not required."""
        if not self._options.require_gpu or not self.started:
            return ""
        kinds = {
            model.name: [place.kind for place in model.places] for model in self._table.ready_models() if model.places
        }
        return idle_gpu_reason(self._gpu_count, kinds)

    def hold(self, reason: str) -> Callable[[], None]:
        """Make the engine not ready for ``reason`` until the returned function is called.

        Any thread may call that function, once.
        """
        self._holds.append(reason)
        return lambda: self._holds.remove(reason)


def resolve_future(ready: Future[None], error: RemoraError | None = None) -> None:
    """Complete a load's future, unless it is done already.

    A stop does not wait for loads, so it may have completed the future.
    """
    with suppress(InvalidStateError):
        if error is None:
            ready.set_result(None)
        else:
            ready.set_exception(error)
