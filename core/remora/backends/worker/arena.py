"""Who uses which part of a stretch of shared memory: room for tensors; the law: numbers only, the memory is elsewhere.

The writer of an arena allocates, the reader sends back what it is done with. Memory that was never touched costs
nothing, so an arena is as large as it may ever become and stays small by preferring low offsets.
"""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT = 64
"""Offsets are multiples of a cache line, which also suits every dtype and vector unit."""


class ArenaError(Exception):
    """Something was given back that is not in use: the other end is confused."""


class Arena:
    """First fit, lowest offset first; neighbours that are free become one. Not thread-safe.

    Args:
        size: how many bytes there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (offset, length), ascending, never adjacent
        self._used: dict[int, int] = {}
        self._high = 0

    @property
    def used_bytes(self) -> int:
        """How much is in use."""
        return sum(self._used.values())

    def allocate(self, length: int) -> int | None:
        """The offset of ``length`` free bytes, None when there is no such stretch now."""
        need = max(length + ALIGNMENT - 1 & -ALIGNMENT, ALIGNMENT)
        for index, (offset, room) in enumerate(self._free):
            if room >= need:
                if room == need:
                    del self._free[index]
                else:
                    self._free[index] = (offset + need, room - need)
                self._used[offset] = need
                self._high = max(self._high, offset + need)
                return offset
        return None

    def free(self, offset: int) -> None:
        """Take back what ``allocate`` gave. Raises ArenaError when that is not in use."""
        length = self._used.pop(offset, None)
        if length is None:
            raise ArenaError(f"offset {offset} was given back but is not in use")
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            before = self._free.pop(index - 1)
            offset, length = before[0], before[1] + length
        insort(self._free, (offset, length))

    def surplus(self, keep: int) -> tuple[int, int] | None:
        """Touched memory that nobody uses, beyond the first ``keep`` bytes, as (offset, length): what can be handed
        back to the system. It counts as untouched from then on. None while something there is in use."""
        start = max([keep, *(offset + length for offset, length in self._used.items())])
        if self._high <= start:
            return None
        length, self._high = self._high - start, start
        return start, length
