"""Check that a shared library is not truncated.

The system's loader maps the segments that a library's headers describe. If the file ends before that, touching the
memory kills the process, so the headers are compared with the file first. Formats other than ELF are left to the
loader. Only the file's head is read.
"""

from __future__ import annotations

import struct
from pathlib import Path

_MAGIC = b"\x7fELF"
_LOADED = 1  # PT_LOAD
_HEAD = {1: struct.Struct("16x2xHIIIIIHHH"), 2: struct.Struct("16x2xHIQQQIHHH")}
_SEGMENT_BYTES = {1: 32, 2: 56}
MAX_SEGMENTS = 1024


def why_incomplete(path: Path) -> str:
    """Return why a file cannot be a complete shared library, or ""."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(64)
        if not head.startswith(_MAGIC):
            return "" if head[:4] in (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe") else "it is not a shared library"
        bits, order = (head[4], head[5]) if len(head) > 5 else (0, 0)
        if bits not in _HEAD or order != 1:
            return "it is not a shared library for this machine"
        layout = _HEAD[bits]
        if len(head) < layout.size:
            return f"it is truncated: {size} bytes do not hold its header"
        _, _, _, begin, _, _, _, entry, count = layout.unpack(head[: layout.size])
        if entry != _SEGMENT_BYTES[bits] or not 0 < count <= MAX_SEGMENTS:
            return "its header is invalid"
        if begin + entry * count > size:
            return f"it is truncated: {size} bytes do not hold its table of segments"
        file.seek(begin)
        table = file.read(entry * count)
    return _why_unmappable(table, bits, entry, size)


def _why_unmappable(table: bytes, bits: int, entry: int, size: int) -> str:
    for at in range(0, len(table), entry):
        if bits == 2:
            kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", table, at)
        else:
            kind, offset, _, _, length = struct.unpack_from("<IIIII", table, at)
        if kind == _LOADED and offset + length > size:
            return f"it is truncated: a segment ends at byte {offset + length}, the file at {size}"
    return ""
