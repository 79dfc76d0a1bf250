"""A queue of byte records in memory that two processes share; the law: one writer, one reader, and what the other end
wrote is checked before it is believed.

The memory holds three words on cache lines of their own, then the records:

    0    tail   bytes ever written      (the writer's)
    64   head   bytes ever read         (the reader's)
    128  state  AWAKE, WAITING, AWAY or LOOP  (the reader's): whom a writer has to wake
    256  data   records: the length in a word, the bytes, padding to the next word

A record becomes visible when ``tail`` moves past it, its room becomes free when ``head`` does. Words are read and
written whole, by the machine's own 8-byte moves. Neither waiting nor waking happens here.
"""

from __future__ import annotations

from collections.abc import Callable

from remora.messages import Buffer

AWAKE = 0
"""The reader looks at the ring by itself."""
WAITING = 1
"""The thread that waits for an answer sleeps."""
AWAY = 2
"""No thread waits for an answer; the background thread has to be woken."""
LOOP = 3
"""An event loop waits for an answer, among other things."""

_TAIL, _HEAD, _STATE = 0, 8, 16
_WORDS = 32
HEADER_BYTES = 8 * _WORDS
_WORD = 8


class RingError(Exception):
    """What the other end left in the ring makes no sense: it writes where it must not."""


class Ring:
    """One end of a ring; which end is decided by the methods that are called.

    Args:
        memory: the whole ring, zeroed before its first use; its length is HEADER_BYTES plus a power of two.
        fence: lets no write that comes before it become visible after one that follows it.
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
        """The longest record that is taken, in bytes: a quarter of the ring, so that one record never fills it."""
        return self._capacity // 4

    def put(self, record: Buffer) -> bool:
        """Write a record; False when there is no room for it now. Only the writer calls.

        Raises:
            ValueError: a record longer than ``longest``.
            RingError: the reader claims to have read what was never written.
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
        self._fence()  # before the writer looks whether the reader sleeps
        return True

    def take(self) -> bytearray | None:
        """The next record, None when there is none. Only the reader calls. Raises RingError."""
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
        """Is there nothing to read?"""
        return self._words[_TAIL] == self._words[_HEAD]

    @property
    def state(self) -> int:
        """Whom to wake after a ``put``."""
        return self._words[_STATE]

    @state.setter
    def state(self, state: int) -> None:
        """Say who sleeps. The reader looks at the ring once more afterwards, before it sleeps."""
        self._words[_STATE] = state
        self._fence()

    def close(self) -> None:
        """Let go of the memory."""
        for view in (self._words, self._data, self._lengths):
            view.release()
