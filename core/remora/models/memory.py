"""Lets a load begin when its memory is there; the law: loads under way count as if their memory were taken, and once.

`residency` decides. Two limits hold: the memory of the process's cgroup or machine, and the budget for models that the
operator may have set. Where models are loaded on demand, idle ones go to make room.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from remora.errors import UnavailableError
from remora.models.residency import LoadCost, Resident, Space, refusal, room_for

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
