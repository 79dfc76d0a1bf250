"""Reader of the metadata in a GGUF file's header. Pure.

Numbers and texts are returned; arrays only if they are short enough for a header, others as their length. Sizes come
from the file and are checked against its content, so that a damaged file is refused instead of read.
"""

from __future__ import annotations

import struct
from typing import Any

_MAGIC = b"GGUF"
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MAX_PAIRS = 4096
_MAX_TEXT = 1 << 24
_KEPT_ITEMS = 1 << 20
"""Numbers of all arrays that are returned."""
_MAX_TEXTS = 1 << 22
"""Texts of all arrays; the largest vocabularies have a quarter of a million, and their merges twice as many."""
CONTROL_TOKEN = 3
"""Value in ``tokenizer.ggml.token_type`` for special tokens."""


class GgufError(ValueError):
    """The bytes are not the header of a GGUF file."""


class _Reader:
    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0
        self._kept = self._texts = 0

    def number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{code}", self.take(size))[0]

    def text(self) -> str:
        size = self.number("Q")
        if size > _MAX_TEXT:
            raise GgufError(f"a text of {size} bytes")
        return bytes(self.take(size)).decode("utf-8", "replace")

    def take(self, size: int) -> memoryview:
        if size > len(self._content) - self._at:
            raise GgufError("the header is cut off")
        part = self._content[self._at : self._at + size]
        self._at += size
        return part

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise GgufError(f"a value of the unknown type {kind}")
        item, count = self.number("I"), self.number("Q")
        if item in _NUMBERS:
            packed = self.take(count * struct.calcsize(f"<{_NUMBERS[item]}"))
            if self._kept + count > _KEPT_ITEMS:
                return count
            self._kept += count
            return list(struct.unpack(f"<{count}{_NUMBERS[item]}", packed))
        if item != _TEXT:
            raise GgufError(f"an array of the type {item}")
        self._texts += count
        if self._texts > _MAX_TEXTS:
            raise GgufError(f"arrays of {self._texts} texts")
        for _ in range(count):
            self.take(self.number("Q"))
        return count


def read_metadata(content: memoryview) -> dict[str, Any]:
    """Return the metadata of a GGUF file, of which ``content`` is the beginning or all.

    Raises:
        GgufError: it is not a GGUF file of version 2 or 3, or the header is cut off.
    """
    reader = _Reader(content)
    if bytes(reader.take(4)) != _MAGIC:
        raise GgufError("it does not begin with GGUF")
    version = reader.number("I")
    if version not in (2, 3):
        raise GgufError(f"version {version}; 2 and 3 are known")
    reader.number("Q")  # number of tensors
    pairs = reader.number("Q")
    if pairs > _MAX_PAIRS:
        raise GgufError(f"{pairs} entries of metadata")
    found = {}
    for _ in range(pairs):
        key = reader.text()
        found[key] = reader.value(reader.number("I"))
    return found
