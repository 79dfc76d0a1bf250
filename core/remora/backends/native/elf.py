"""Is a shared library all there? Pure but for reading its head; the law: what is cut short never reaches the loader.

The system's loader maps a library by what its headers promise. Where the file ends before that, touching the memory
kills the process, so the promise is compared with the file first. Other formats than ELF are the loader's business.
"""

from __future__ import annotations

import struct
from pathlib import Path

_MAGIC = b"\x7fELF"
_LOADED = 1  # PT_LOAD
_HEAD = {1: struct.Struct("16x2xHIIIIIHHH"), 2: struct.Struct("16x2xHIQQQIHHH")}
_SEGMENT_BYTES = {1: 32, 2: 56}
MAX_SEGMENTS = 1024


def why_not_whole(path: Path) -> str:
    """Why a file cannot be a whole shared library, "" when nothing speaks against it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(64)
        if not head.startswith(_MAGIC):
            return "" if head[:4] in (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe") else "it is no shared library"
        bits, order = (head[4], head[5]) if len(head) > 5 else (0, 0)
        if bits not in _HEAD or order != 1:
            return "it is no shared library of this machine's kind"
        layout = _HEAD[bits]
        if len(head) < layout.size:
            return f"it is cut short: {size} bytes do not hold its header"
        _, _, _, begin, _, _, _, entry, count = layout.unpack(head[: layout.size])
        if entry != _SEGMENT_BYTES[bits] or not 0 < count <= MAX_SEGMENTS:
            return "its header makes no sense"
        if begin + entry * count > size:
            return f"it is cut short: {size} bytes do not hold its table of segments"
        file.seek(begin)
        table = file.read(entry * count)
    return _why_not_mappable(table, bits, entry, size)


def _why_not_mappable(table: bytes, bits: int, entry: int, size: int) -> str:
    for at in range(0, len(table), entry):
        if bits == 2:
            kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", table, at)
        else:
            kind, offset, _, _, length = struct.unpack_from("<IIIII", table, at)
        if kind == _LOADED and offset + length > size:
            return f"it is cut short: a segment ends at byte {offset + length}, the file at {size}"
    return ""
