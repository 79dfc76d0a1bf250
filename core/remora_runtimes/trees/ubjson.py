"""Reader of UBJSON as XGBoost writes it, into plain values and arrays.

Every length is checked before reading. Features of other writers, such as containers without a count or lengths of
another type, are refused. Pure.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from remora.errors import InternalError

_NUMBERS = {b"i": ">i1", b"U": ">u1", b"I": ">i2", b"l": ">i4", b"L": ">i8", b"d": ">f4", b"D": ">f8"}
_CONSTANTS = {b"T": True, b"F": False, b"Z": None}
_MAX_DEPTH = 32


def read_ubjson(data: bytes) -> Any:
    """Parse ``data``, with arrays of one number type as numpy arrays.

    Raises InternalError for invalid data.
    """
    reader = _Reader(data)
    value = reader.value(reader.take(1), 0)
    if reader.at != len(data):
        raise InternalError(f"the UBJSON document ends at byte {reader.at} of {len(data)}")
    return value


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self._data) - self.at:
            raise InternalError(f"the UBJSON document wants {count} bytes at byte {self.at} of {len(self._data)}")
        self.at += count
        return self._data[self.at - count : self.at]

    def value(self, marker: bytes, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise InternalError(f"the UBJSON document is nested deeper than {_MAX_DEPTH}")
        if marker == b"{":
            return self._object(depth)
        if marker == b"[":
            return self._array(depth)
        if marker == b"S":
            return self._text()
        if marker in _CONSTANTS:
            return _CONSTANTS[marker]
        dtype = self._dtype(marker)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def _object(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while (first := self.take(1)) != b"}":
            self.at -= len(first)
            key = self._text()
            if key in members:
                raise InternalError(f"the UBJSON document has the key '{key[:20]}' twice")
            members[key] = self.value(self.take(1), depth + 1)
        return members

    def _array(self, depth: int) -> Any:
        marker = self.take(1)
        if marker == b"$":
            dtype = self._dtype(self.take(1))
            self._expect(b"#")
            return np.frombuffer(self.take(self._length() * dtype.itemsize), dtype)
        if marker == b"#":
            return [self.value(self.take(1), depth + 1) for _ in range(self._length())]
        values = []
        while marker != b"]":
            values.append(self.value(marker, depth + 1))
            marker = self.take(1)
        return values

    def _dtype(self, marker: bytes) -> np.dtype[Any]:
        if marker not in _NUMBERS:
            raise InternalError(f"the UBJSON document has the type {marker!r} at byte {self.at}")
        return np.dtype(_NUMBERS[marker])

    def _text(self) -> str:
        return self.take(self._length()).decode("utf-8", "replace")

    def _length(self) -> int:
        self._expect(b"L")
        length: int = struct.unpack(">q", self.take(8))[0]
        return length

    def _expect(self, marker: bytes) -> None:
        actual = self.take(1)
        if actual != marker:
            raise InternalError(f"the UBJSON document has {actual!r} for {marker!r} at byte {self.at}")
