"""What fits into memory, and what must go for it: numbers in, keys or a refusal out; pure.

The rule: a load's peak is ``factor`` times the bytes of its files. The factor begins at 2 (a runtime holds the file and
what it makes of it) and follows what loads of some size were measured to take.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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
