"""Inflation of compressed request bodies, bounded in size and in ratio.

Invariant: a body refused for its size or its ratio has not taken more memory than FREE_BYTES, or MOST_RATIO times the
bytes received.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

from remora.messages import Buffer

MOST_RATIO = 200
"""Largest allowed ratio of inflated to compressed bytes; deflate itself reaches 1,032."""
FREE_BYTES = 4 << 20
"""Inflated size up to which any ratio is allowed, because small tensors of zeros compress well."""
_SLICE_BYTES = 1 << 18
_PIECE_BYTES = 1 << 20


class OverLimitError(Exception):
    """The inflated message would be longer than ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"more than {limit} bytes")
        self.limit = limit


class OverRatioError(Exception):
    """The inflated message would be more than MOST_RATIO times as long as the compressed one."""


class Inflated(NamedTuple):
    """Inflated message.

    ``whole`` is False if its end is missing; ``surplus`` counts the bytes behind its end.
    """

    data: bytes
    whole: bool
    surplus: int


class _Step(NamedTuple):
    """Inflated bytes with the count of compressed bytes used so far.

    ``last`` is True if the message ends here.
    """

    data: bytes
    used: int
    last: bool


def inflate(packed: Buffer, wbits: int, limit: int) -> Inflated:
    """Inflate a message.

    Raises OverLimitError, OverRatioError, and zlib.error for bytes in another format.
    """
    view = memoryview(packed)
    most = max(FREE_BYTES, MOST_RATIO * view.nbytes)
    size, suspect = 0, False
    pieces: list[bytes] = []
    step = _Step(b"", 0, last=False)
    for step in _steps(view, wbits):
        size += len(step.data)
        if size > limit:
            raise OverLimitError(limit)
        if size > most:
            raise OverRatioError
        if not suspect and size > max(FREE_BYTES, MOST_RATIO * step.used):
            # Only the rest can lower this ratio, so the size is counted first and memory is taken afterwards.
            suspect = True
            pieces.clear()
        if not suspect:
            pieces.append(step.data)
    if suspect:
        pieces = [each.data for each in _steps(view, wbits)]
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return Inflated(data, step.last, view.nbytes - step.used if step.last else 0)


def _steps(view: memoryview, wbits: int) -> Iterator[_Step]:
    stream = zlib.decompressobj(wbits)
    for start in range(0, view.nbytes, _SLICE_BYTES):
        rest: Buffer = view[start : start + _SLICE_BYTES]
        stop = start + len(rest)
        full = True
        while full or rest:
            data = stream.decompress(rest, _PIECE_BYTES)
            rest, full = stream.unconsumed_tail, len(data) == _PIECE_BYTES
            yield _Step(data, stop - len(rest) - len(stream.unused_data), stream.eof)
            if stream.eof:
                return
