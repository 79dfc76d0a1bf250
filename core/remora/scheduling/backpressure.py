"""Limit on the number and bytes of queued items, enforced by blocking the producer."""

from __future__ import annotations

import threading


class Backpressure:
    """Blocking limit on the number and bytes of queued items. Thread-safe.

    An item is always admitted when nothing is queued, whatever its size. The lock is reentrant, because destructors may
    call `give`.

    Args:
        items: maximum number of queued items.
        size: maximum number of queued bytes.
    """

    def __init__(self, items: int, size: int) -> None:
        self._most = (items, size)
        self._items = 0
        self._size = 0
        self._closed = False
        self._changed = threading.Condition(threading.RLock())

    def take(self, size: int = 0, stall_s: float | None = None) -> bool:
        """Wait for room and take it.

        Returns False if nothing was given back for ``stall_s`` seconds, or after `close`.
        """
        with self._changed:
            while not self._closed and (self._items >= self._most[0] or self._size >= self._most[1]):
                if not self._changed.wait(stall_s):
                    return False
            self._items += 1
            self._size += size
            return not self._closed

    def add(self, size: int = 0) -> None:
        """Take room without waiting, for items that must not block."""
        with self._changed:
            self._items += 1
            self._size += size

    def give(self, size: int = 0) -> None:
        """Give back the room of one item of that size."""
        with self._changed:
            self._items -= 1
            self._size -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiters and let later calls return at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
