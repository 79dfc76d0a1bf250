"""How much may wait for a slow reader; the law: memory is bounded by making the writer wait."""

from __future__ import annotations

import threading


class Backpressure:
    """Counts things that wait, and their bytes. One thing is always let in, whatever its size. Thread-safe.

    The lock is reentrant: destructors may give back.

    Args:
        items: how many may wait.
        size: how many bytes of them may wait.
    """

    def __init__(self, items: int, size: int) -> None:
        self._most = (items, size)
        self._items = 0
        self._size = 0
        self._closed = False
        self._changed = threading.Condition(threading.RLock())

    def take(self, size: int = 0, stall_s: float | None = None) -> bool:
        """Wait for room and take it; False when none was given back for ``stall_s`` seconds, or it was closed."""
        with self._changed:
            while not self._closed and (self._items >= self._most[0] or self._size >= self._most[1]):
                if not self._changed.wait(stall_s):
                    return False
            self._items += 1
            self._size += size
            return not self._closed

    def add(self, size: int = 0) -> None:
        """Take without asking: for what must not wait."""
        with self._changed:
            self._items += 1
            self._size += size

    def give(self, size: int = 0) -> None:
        """One thing of that size has gone."""
        with self._changed:
            self._items -= 1
            self._size -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
