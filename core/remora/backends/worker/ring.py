"""Ring buffer of byte records in memory that two processes share.

The memory holds three words on separate cache lines, then the records:

    0    tail   bytes ever written      (the writer's)
    64   head   bytes ever read         (the reader's)
    128  state  AWAKE, WAITING, AWAY or LOOP  (the reader's): the thread that the writer must wake
    256  data   records: the length in a word, the bytes, padding to the next word

A record becomes visible when ``tail`` moves past it, its room becomes free when ``head`` does. Words are read and
written whole, by the machine's own 8-byte moves. This module neither waits nor wakes threads.

Invariant: one writer, one reader, and data of the other end is validated before use.
"""

from __future__ import annotations

from collections.abc import Callable

from remora.messages import Buffer

AWAKE = 0
"""The reader checks the ring without being woken."""
WAITING = 1
"""The front thread sleeps until an answer arrives."""
AWAY = 2
"""No front thread waits; the writer must wake the background thread."""
LOOP = 3
"""An event loop waits for an answer; the writer must wake the loop."""

_TAIL, _HEAD, _STATE = 0, 8, 16
_WORDS = 32
HEADER_BYTES = 8 * _WORDS
_WORD = 8


class RingError(Exception):
    """Invalid ring state, written by the other end."""


class Ring:
    """Writer's or reader's end of a ring, depending on the called methods.

    Args:
        memory: the whole ring, zeroed before its first use; its length is HEADER_BYTES plus a power of two.
        fence: prevents a write before it from becoming visible after a write that follows it.
    """

    def __init__(self, memory: memoryview, fence: Callable[[], None]) -> None:
        self._words = memory[:HEADER_BYTES].cast("Q")
        self._data = memory[HEADER_BYTES:].cast("B")
        self._lengths = memory[HEADER_BYTES:].cast("Q")
        self._capacity = len(self._data)
        if self._capacity & (self._capacity - 1) or self._capacity < 2 * _WORD:
            raise ValueError(f"a ring holds a power of two of bytes, not {self._capacity}")
        self._mask = self._capacity - 1
        self._fence = fence

    @property
    def longest(self) -> int:
        """Largest record in bytes, a quarter of the ring, so that one record never fills it."""
        return self._capacity // 4

    def put(self, record: Buffer) -> bool:
        """Write a record, or return False if there is no room. Only the writer calls.

        Raises:
            ValueError: the record is larger than ``longest``.
            RingError: the reader's position is ahead of the writer's.
        """
        size = len(record)
        if size > self.longest:
            raise ValueError(f"a record of {size} bytes is longer than the {self.longest} that this ring takes")
        need = _WORD + (size + _WORD - 1 & -_WORD)
        tail = self._words[_TAIL]
        used = tail - self._words[_HEAD]
        if not 0 <= used <= self._capacity:
            raise RingError(f"the reader's mark is {used} bytes behind the writer's in a ring of {self._capacity}")
        if need > self._capacity - used:
            return False
        at = tail & self._mask
        self._lengths[at >> 3] = size
        at = at + _WORD & self._mask
        first = self._capacity - at
        if size <= first:
            self._data[at : at + size] = record
        else:
            self._data[at:] = record[:first]
            self._data[: size - first] = record[first:]
        self._fence()
        self._words[_TAIL] = tail + need
        self._fence()  # before the writer checks whether the reader sleeps
        return True

    def take(self) -> bytearray | None:
        """Return the next record, or None. Only the reader calls. Raises RingError."""
        head = self._words[_HEAD]
        used = self._words[_TAIL] - head
        if used == 0:
            return None
        self._fence()
        at = head & self._mask
        size = self._lengths[at >> 3]
        need = _WORD + (size + _WORD - 1 & -_WORD)
        if not need <= used <= self._capacity:
            raise RingError(f"a record of {size} bytes in {used} written bytes of a ring of {self._capacity}")
        at = at + _WORD & self._mask
        first = self._capacity - at
        if size <= first:
            record = bytearray(self._data[at : at + size])
        else:
            record = bytearray(self._data[at:])
            record += self._data[: size - first]
        self._fence()
        self._words[_HEAD] = head + need
        return record

    @property
    def empty(self) -> bool:
        """True if all records have been read."""
        return self._words[_TAIL] == self._words[_HEAD]

    @property
    def unread(self) -> int | None:
        """Position of the first record that has not been read, or None. Any thread may ask."""
        head = self._words[_HEAD]
        return None if self._words[_TAIL] == head else head

    @property
    def state(self) -> int:
        """Thread to wake after a ``put``."""
        return self._words[_STATE]

    @state.setter
    def state(self, state: int) -> None:
        """Set the thread to wake. The reader checks the ring once more afterwards, before it sleeps."""
        self._words[_STATE] = state
        self._fence()

    def close(self) -> None:
        """Release the memory."""
        for view in (self._words, self._data, self._lengths):
            view.release()
