"""File of a storage as a seekable stream of Python, read in ranges."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from remora.storage import Storage, StoredObject

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_RANGE_BYTES = 8 << 20


class _Ranges(io.RawIOBase):
    """Unbuffered stream over one object."""

    def __init__(self, storage: Storage, item: StoredObject) -> None:
        super().__init__()
        self._storage = storage
        self._item = item
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._item.size}[whence]
        self._position = max(origin + offset, 0)
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._position + len(view), self._item.size)
        if end <= self._position:
            return 0
        piece = self._storage.read(self._item, self._position, end)
        view[: len(piece)] = piece
        self._position = end
        return len(piece)


def open_stored(storage: Storage, item: StoredObject) -> io.BufferedReader:
    """Return a buffered stream over one object, which fails if the object is replaced meanwhile.

    Reading raises RemoraError.
    """
    return io.BufferedReader(_Ranges(storage, item), _RANGE_BYTES)
