"""Memory that two processes share: a ring and an arena for each direction.

Each side writes into its own ring and allocates in its own arena; it reads the ring and the arena of the other side.
"""

from __future__ import annotations

import mmap
import os
import threading
from bisect import bisect_left, insort
from collections.abc import Callable

from remora.backends.worker.ring import Ring

ALIGNMENT = 64
"""Offsets are multiples of a cache line, which also suits every dtype and vector unit."""


class ArenaError(Exception):
    """Released memory that is not in use, an error of the other end."""


class Arena:
    """First-fit allocator of byte ranges that merges free neighbours. Not thread-safe.

    Args:
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (offset, length), ascending, never adjacent
        self._used: dict[int, int] = {}
        self._high = 0

    @property
    def used_bytes(self) -> int:
        """Number of bytes in use."""
        return sum(self._used.values())

    @staticmethod
    def taken_by(length: int) -> int:
        """Return the bytes that an allocation of ``length`` takes."""
        return max(length + ALIGNMENT - 1 & -ALIGNMENT, ALIGNMENT)

    def allocate(self, length: int) -> int | None:
        """Return the offset of ``length`` free bytes, or None if no range is large enough."""
        need = self.taken_by(length)
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
        """Free an allocation. Raises ArenaError if the offset is not in use."""
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
        """Return the unused but touched memory beyond the first ``keep`` bytes, or None.

        The result, (offset, length), can be released to the system and counts as untouched from then on. It starts
        after the last allocation in use.
        """
        start = max([keep, *(offset + length for offset, length in self._used.items())])
        if self._high <= start:
            return None
        length, self._high = self._high - start, start
        return start, length


def memory_fence() -> Callable[[], None]:
    """Return a full memory barrier for one user.

    Releasing and acquiring a lock orders memory accesses on every machine that Python runs on.
    """
    lock = threading.Lock()
    lock.acquire()

    def fence() -> None:
        lock.release()
        lock.acquire()

    return fence


class ChannelMemory:
    """Rings and arenas of one side of a channel.

    Args:
        memory: descriptor of the memory; the mapping outlives it.
        ring_bytes: size of each of the two rings, which precede the two arenas.
        serves: True for the side that writes into the first ring and arena.
    """

    def __init__(self, memory: int, ring_bytes: int, *, serves: bool) -> None:
        size = os.fstat(memory).st_size
        arena_bytes = size // 2 - ring_bytes
        self._mapped = mmap.mmap(memory, size)
        whole = memoryview(self._mapped)
        rings = (whole[:ring_bytes], whole[ring_bytes : 2 * ring_bytes])
        starts = (2 * ring_bytes, 2 * ring_bytes + arena_bytes)
        mine = 0 if serves else 1
        self.out_ring, self.in_ring = Ring(rings[mine], memory_fence()), Ring(rings[1 - mine], memory_fence())
        self.arena = Arena(arena_bytes)
        """Allocations in this side's arena."""
        self.out_arena = whole[starts[mine] :][:arena_bytes]
        self.in_arena = whole[starts[1 - mine] :][:arena_bytes]
        self._out_start = starts[mine]

    def release_surplus(self, keep: int) -> None:
        """Release unused memory of this side's arena beyond its first ``keep`` bytes."""
        surplus = self.arena.surplus(keep)
        if surplus is not None and hasattr(mmap, "MADV_REMOVE"):
            start = self._out_start + surplus[0] + mmap.PAGESIZE - 1 & -mmap.PAGESIZE
            length = (self._out_start + sum(surplus) & -mmap.PAGESIZE) - start
            if length > 0:
                self._mapped.madvise(mmap.MADV_REMOVE, start, length)
