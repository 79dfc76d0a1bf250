"""Unbuffered file in memory that counts the bytes that are read."""

from __future__ import annotations

import io
from typing import Any


class CountedReads(io.RawIOBase):
    def __init__(self, content: bytes) -> None:
        super().__init__()
        self._file = io.BytesIO(content)
        self.count = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self.count += count
        return count
