"""How the code of one model reaches other models of the same engine (spec group L); the law: a call is plain data, and
where it comes from travels with it.

Backends are given a ``ModelCaller``. The engine implements it; a backend whose models live elsewhere forwards to it.
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

    ``data`` holds an array for each of the form's inputs, of the dtype that DTYPES gives for its datatype (BYTES as
    objects of ``bytes``). The callee sees the very memory, so that it must be read-only or stay as it is.
    ``decoupled``: the answers come as Streamed, any number of them; otherwise there is exactly one. ``trace`` is the id
    of the traced request that it is made for, 0 for none.
    """

    model: str
    version: int
    form: InferForm
    data: Sequence[Array]
    decoupled: bool = False
    trace: int = 0


class Busy:
    """An instance that an execution keeps busy, until that is ``over``."""

    __slots__ = ("instance", "over")

    def __init__(self, instance: object) -> None:
        self.instance = instance
        self.over = False


@dataclass(frozen=True, slots=True)
class Origin:
    """Where calls come from, and what waits for their answers.

    ``requests`` are those of the execution that calls: when all of them are cancelled, so are their calls [L05].
    ``busy`` is the instance of the execution. ``loading`` are the models whose load goes on only when the call is
    answered: a call that could only be answered by them is refused instead of waiting forever [L04].
    """

    requests: tuple[Request, ...] = ()
    busy: Busy | None = None
    loading: frozenset[str] = frozenset()

    @property
    def holder(self) -> object | None:
        """The instance that stays busy until a call made now is answered; None when the execution is over."""
        return None if self.busy is None or self.busy.over else self.busy.instance

    @property
    def held(self) -> frozenset[object]:
        """All instances that stay busy until then: the holder, and those that wait for its requests."""
        own: frozenset[object] = frozenset() if self.holder is None else frozenset((self.holder,))
        return own.union(*(request.held for request in self.requests))

    def end(self) -> None:
        """The execution has returned: what the model started goes on, and its instance is free."""
        if self.busy is not None:
            self.busy.over = True


NOWHERE = Origin()
"""Calls of a thread that nobody waits for."""

_origin: ContextVar[Origin] = ContextVar("remora_call_origin", default=NOWHERE)


def current_origin() -> Origin:
    """What the code that is running belongs to. Threads that a model starts by itself begin with NOWHERE."""
    return _origin.get()


def executing(requests: Sequence[Request], instance: object = None) -> Origin:
    """Calls made while ``instance`` runs ``requests``; None for code that goes on when the instance is free again."""
    return Origin(tuple(requests), None if instance is None else Busy(instance))


def opening(model: str) -> Origin:
    """Calls made while ``model`` is loaded, which may itself be what a model's code has asked for."""
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
    """The engine, as models see it. Thread-safe."""

    def submit(self, call: ModelCall, reply: Callable[[Outcome], None], origin: Origin) -> Callable[[], None]:
        """Hand a call in; its answers come through ``reply``, on any thread, maybe before this returns.

        ``reply`` must not raise nor wait. What is returned cancels the call; it may be called at any time.
        Raises RemoraError when the call is refused; then ``reply`` is never called.
        """

    def load(self, model: str, parameters: Mapping[str, str | bytes], origin: Origin) -> None:
        """Load or reload a model and wait until that is done [L06, M09]. Raises RemoraError."""

    def unload(self, model: str, *, unload_dependents: bool) -> None:
        """Take a model out of service [L06, M12]. Raises RemoraError."""

    def is_ready(self, model: str, version: int) -> bool:
        """Would a request to this version be taken? -1 stands for any version."""
