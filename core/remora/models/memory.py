"""Lets a load begin when its memory is there; the law: loads under way count as if their memory were taken, and once.

`residency` decides. Two limits hold: the memory of the process's cgroup or machine, and the budget for models that the
operator may have set. Where models are loaded on demand, idle ones go to make room.
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
"""What smaller files take is mostly noise."""
_MIB = 1 << 20


class LoadCost(NamedTuple):
    """How much memory loads take."""

    factor: float = FIRST_FACTOR

    def estimate(self, file_bytes: int) -> int:
        """The peak of a load, in bytes."""
        return int(self.factor * file_bytes)

    def learn(self, file_bytes: int, growth_bytes: int) -> LoadCost:
        """With what a load that had the machine to itself was measured to take: half the way there."""
        if file_bytes < LEARNS_FROM_BYTES or growth_bytes <= 0:
            return self
        measured = min(max(growth_bytes / file_bytes, LEAST_FACTOR), MOST_FACTOR)
        return LoadCost((self.factor + measured) / 2)


class Resident(NamedTuple):
    """A model in memory, with whatever goes with it: its ``size`` in bytes, its last use, and whether it must stay."""

    key: str
    size: int
    last_used_ms: int
    busy: bool = False
    pinned: bool = False


class Space(NamedTuple):
    """Memory: how much there may be, how much is taken; no limit when ``limit`` is None. In bytes."""

    limit: int | None
    used: int

    @property
    def free(self) -> int | None:
        """What is left; never negative."""
        return None if self.limit is None else max(self.limit - self.used, 0)


def room_for(need: int, space: Space, residents: Iterable[Resident]) -> tuple[str, ...] | None:
    """The models to let go of so that ``need`` bytes fit, the least recently used idle ones first.

    None when it would not fit even then; nothing is let go of in vain.
    """
    free = space.free
    if free is None or need <= free:
        return ()
    going: list[str] = []
    for resident in sorted(residents, key=lambda resident: resident.last_used_ms):
        if resident.busy or resident.pinned or not resident.size:
            continue
        going.append(resident.key)
        free += resident.size
        if need <= free:
            return tuple(going)
    return None


def refusal(file_bytes: int, cost: LoadCost, space: Space, what: str) -> str:
    """Why a load is refused, with the numbers; ``what`` names the limit."""
    return (
        f"loading it takes about {_mib(cost.estimate(file_bytes))} ({cost.factor:.1f} times its {_mib(file_bytes)} of "
        f"files), but {_mib(space.free or 0)} of {what} ({_mib(space.limit or 0)}) are free: unload a model, or raise "
        "the limit"
    )


def _mib(count: int) -> str:
    return f"{count / _MIB:,.0f} MiB"


Evict = Callable[[str], None]


class MemoryGate:
    """Thread-safe.

    Args:
        machine: the limit of the process's memory, and what of it is taken now.
        budget: for all models together, in bytes; None for any.
        residents: what is in memory, for `room_for`.
        evict: lets go of a model and returns when its memory is free; None where models stay until they are unloaded.
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
        self._promised = 0
        self._loads = 0
        self.cost = LoadCost()

    @contextmanager
    def load(self, file_bytes: int) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """The time of one load. Raises UnavailableError, with the numbers, when there is no room for it.

        Gives what a load that went well ends with: inside that, it becomes one of the residents and is promised no
        longer. Nobody looks meanwhile, who would see it twice, or not at all.
        """
        with self._lock:
            need = self.cost.estimate(file_bytes)
            self._make_room(file_bytes, need)
            self._promised += need
            self._loads += 1
            before = self._machine().used if self._loads == 1 else None

        @contextmanager
        def settling() -> Iterator[None]:
            nonlocal need
            with self._lock:
                yield
                self._promised -= need
                need = 0

        try:
            yield settling
        finally:
            with self._lock:
                if self._loads == 1 and before is not None:
                    self.cost = self.cost.learn(file_bytes, self._machine().used - before)
                self._promised -= need
                self._loads -= 1

    def _make_room(self, file_bytes: int, need: int) -> None:
        budget = Space(self._budget, self._promised + sum(resident.size for resident in self._residents()))
        self._fit(file_bytes, need, budget, "the budget for models")
        machine = self._machine()
        self._fit(file_bytes, need, machine._replace(used=machine.used + self._promised), "the memory")

    def _fit(self, file_bytes: int, need: int, space: Space, what: str) -> None:
        residents = self._residents() if self._evict is not None else ()
        going = room_for(need, space, residents)
        if going is None:
            raise UnavailableError(refusal(file_bytes, self.cost, space, what))
        for key in going:
            if self._evict is not None:
                self._evict(key)
