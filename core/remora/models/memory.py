"""Memory admission of model loads, and eviction of idle models loaded on demand.

Two limits apply: the memory of the process's cgroup or machine, and the operator's budget for models, if set.

Invariant: a load in progress counts as if its memory were in use, and only once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from remora.errors import UnavailableError

FIRST_FACTOR = 2.0
LEAST_FACTOR, MOST_FACTOR = 1.2, 4.0
LEARNS_FROM_BYTES = 8 << 20
"""Smaller files are not measured because noise would dominate."""
_MIB = 1 << 20


class LoadCost(NamedTuple):
    """Estimate of the memory that loads take."""

    factor: float = FIRST_FACTOR

    def estimate(self, file_bytes: int) -> int:
        """Return the estimated peak of a load, in bytes."""
        return int(self.factor * file_bytes)

    def learn(self, file_bytes: int, growth_bytes: int) -> LoadCost:
        """Return the estimate moved halfway towards a measured load, which must have run alone."""
        if file_bytes < LEARNS_FROM_BYTES or growth_bytes <= 0:
            return self
        measured = min(max(growth_bytes / file_bytes, LEAST_FACTOR), MOST_FACTOR)
        return LoadCost((self.factor + measured) / 2)


class Resident(NamedTuple):
    """A model in memory, including models that are evicted with it: size in bytes and last use."""

    key: str
    size: int
    last_used_ms: int
    busy: bool = False
    pinned: bool = False


class Space(NamedTuple):
    """Limit and use of memory in bytes. ``limit`` None means unlimited."""

    limit: int | None
    used: int

    @property
    def free(self) -> int | None:
        """The free bytes, never negative."""
        return None if self.limit is None else max(self.limit - self.used, 0)


def room_for(need: int, space: Space, residents: Iterable[Resident]) -> tuple[str, ...] | None:
    """Return the models to evict so that ``need`` bytes fit, least recently used first.

    Returns None if evicting all idle models is not enough; then none is evicted.
    """
    free = space.free
    if free is None or need <= free:
        return ()
    evicted: list[str] = []
    for resident in sorted(residents, key=lambda resident: resident.last_used_ms):
        if resident.busy or resident.pinned or not resident.size:
            continue
        evicted.append(resident.key)
        free += resident.size
        if need <= free:
            return tuple(evicted)
    return None


def refusal(file_bytes: int, cost: LoadCost, space: Space, what: str) -> str:
    """Return the error text of a refused load, with the numbers. ``what`` names the limit."""
    return (
        f"loading it takes about {_mib(cost.estimate(file_bytes))} ({cost.factor:.1f} times its {_mib(file_bytes)} of "
        f"files), but {_mib(space.free or 0)} of {what} ({_mib(space.limit or 0)}) are free: unload a model, or raise "
        "the limit"
    )


def _mib(count: int) -> str:
    return f"{count / _MIB:,.0f} MiB"


Evict = Callable[[str], None]


class MemoryGate:
    """Admission of loads by memory. Thread-safe.

    Args:
        machine: returns the limit and current use of the process's memory.
        budget: limit for all models together, in bytes; None for no limit.
        residents: returns the models in memory, for `room_for`.
        evict: unloads a model and returns when its memory is free; None disables eviction.
    """

    def __init__(
        self,
        machine: Callable[[], Space],
        budget: int | None,
        residents: Callable[[], Iterable[Resident]],
        evict: Evict | None = None,
    ) -> None:
        self._machine = machine
        self._budget = budget
        self._residents = residents
        self._evict = evict
        self._lock = threading.Lock()
        self._reserved = 0
        self._loads = 0
        self.cost = LoadCost()

    @contextmanager
    def load(self, file_bytes: int, spared: str = "") -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Reserve memory for the duration of one load.

        The model ``spared`` is not evicted for it.

        Raises UnavailableError, with the numbers, if there is no room. Yields a context manager for the end of a
        successful load: inside it the model becomes a resident and its reservation ends. It holds the lock, so that no
        other load counts the model twice or not at all.
        """
        with self._lock:
            need = self.cost.estimate(file_bytes)
            self._make_room(file_bytes, need, spared)
            self._reserved += need
            self._loads += 1
            before = self._machine().used if self._loads == 1 else None

        @contextmanager
        def settling() -> Iterator[None]:
            nonlocal need
            with self._lock:
                yield
                self._reserved -= need
                need = 0

        try:
            yield settling
        finally:
            with self._lock:
                if self._loads == 1 and before is not None:
                    self.cost = self.cost.learn(file_bytes, self._machine().used - before)
                self._reserved -= need
                self._loads -= 1

    def _make_room(self, file_bytes: int, need: int, spared: str) -> None:
        budget = Space(self._budget, self._reserved + sum(resident.size for resident in self._residents()))
        self._fit(file_bytes, need, budget, "the budget for models", spared)
        machine = self._machine()
        self._fit(file_bytes, need, machine._replace(used=machine.used + self._reserved), "the memory", spared)

    def _fit(self, file_bytes: int, need: int, space: Space, what: str, spared: str) -> None:
        residents = [each for each in self._residents() if each.key != spared] if self._evict is not None else ()
        evicted = room_for(need, space, residents)
        if evicted is None:
            raise UnavailableError(refusal(file_bytes, self.cost, space, what))
        for key in evicted:
            if self._evict is not None:
                self._evict(key)
