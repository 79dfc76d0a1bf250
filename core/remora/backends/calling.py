"""Calls from one model's code to other models of the same engine.

Backends receive a ``ModelCaller``. The engine implements it; a backend whose models run in another process forwards
calls to it. A call is plain data, and its origin travels with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from remora.messages import Array, InferForm, Outcome, Request


class ModelCall(NamedTuple):
    """A request to a model, made by a model.

    ``data`` holds an array for each of the form's inputs, of the dtype that DTYPES assigns to its datatype (BYTES as
    objects of ``bytes``). The callee sees the same memory, so it must be read-only or must not change. ``decoupled``:
    any number of answers, each a Streamed; otherwise there is exactly one answer. ``trace`` is the id of the traced
    request that caused the call, 0 for none.
    """

    model: str
    version: int
    form: InferForm
    data: Sequence[Array]
    decoupled: bool = False
    trace: int = 0


class Busy:
    """Instance that an execution keeps busy until ``over`` is True."""

    __slots__ = ("instance", "over")

    def __init__(self, instance: object) -> None:
        self.instance = instance
        self.over = False


@dataclass(frozen=True, slots=True)
class Origin:
    """Where calls come from, and what waits for their answers.

    ``requests`` are the requests of the calling execution: if all of them are cancelled, their calls are cancelled too
    [L05]. ``busy`` is the instance of the execution. ``loading`` are the models whose load continues only after the
    call is answered: a call that only those models could answer is refused, because it would wait forever [L04].
    """

    requests: tuple[Request, ...] = ()
    busy: Busy | None = None
    loading: frozenset[str] = frozenset()

    @property
    def holder(self) -> object | None:
        """Instance that stays busy until the call is answered, or None if the execution is over."""
        return None if self.busy is None or self.busy.over else self.busy.instance

    @property
    def blocking_instances(self) -> frozenset[object]:
        """All instances that stay busy until the call is answered.

        These are the holder and the instances that wait for its requests.
        """
        own: frozenset[object] = frozenset() if self.holder is None else frozenset((self.holder,))
        return own.union(*(request.blocking_instances for request in self.requests))

    def end(self) -> None:
        """Mark the execution as returned, so that its instance counts as free.

        Calls that the model started may continue.
        """
        if self.busy is not None:
            self.busy.over = True


NOWHERE = Origin()
"""Origin of calls from a thread that no execution waits for."""

_origin: ContextVar[Origin] = ContextVar("remora_call_origin", default=NOWHERE)


def current_origin() -> Origin:
    """Return the origin of the running code.

    Threads that a model starts itself have the origin NOWHERE.
    """
    return _origin.get()


def executing(requests: Sequence[Request], instance: object = None) -> Origin:
    """Return the origin of calls made while ``instance`` runs ``requests``.

    Pass None as ``instance`` for code that continues after the instance is free again.
    """
    return Origin(tuple(requests), None if instance is None else Busy(instance))


def opening(model: str) -> Origin:
    """Return the origin of calls made while ``model`` loads, itself perhaps loaded by a model."""
    origin = current_origin()
    return replace(origin, loading=origin.loading | {model})


@contextmanager
def calling_from(origin: Origin) -> Iterator[None]:
    """Run code whose calls come from ``origin``."""
    token = _origin.set(origin)
    try:
        yield
    finally:
        _origin.reset(token)


class ModelCaller(Protocol):
    """The engine's interface for models. Thread-safe."""

    def submit(self, call: ModelCall, reply: Callable[[Outcome], None], origin: Origin) -> Callable[[], None]:
        """Submit a call and return a function that cancels it.

        The answers arrive through ``reply``, on any thread, possibly before this returns. ``reply`` must not raise or
        wait. The returned function may be called at any time. Raises RemoraError if the call is refused; ``reply`` is
        then never called.
        """

    def load(self, model: str, parameters: Mapping[str, str | bytes], origin: Origin) -> None:
        """Load or reload a model and wait until it is loaded [L06, M09]. Raises RemoraError."""

    def unload(self, model: str, *, unload_dependents: bool) -> None:
        """Take a model out of service [L06, M12]. Raises RemoraError."""

    def is_ready(self, model: str, version: int) -> bool:
        """Return True if requests to this version (-1 for any version) are accepted."""
