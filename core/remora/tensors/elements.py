"""Elements of BYTES tensors, each with a length prefix of four bytes on the wire [B02].

Long tensors are read and written in steps, between which other threads may run: a call for millions of elements would
keep the interpreter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from remora.messages import Array

STEP = 16_384
"""Elements of a step."""
_LENGTH = struct.Struct("<I")
PREFIX_BYTES = _LENGTH.size
read_length = _LENGTH.unpack_from
"""Returns the length, in a tuple, of the element whose prefix is at an offset."""


def array_of(steps: Iterable[Sequence[bytes]], most: int) -> Array:
    """Return a flat array of the elements in ``steps``, at most ``most`` of them."""
    array, at = np.empty(most, object), 0
    for step in steps:
        array[at : at + len(step)] = step
        at += len(step)
    return array[:at]


def steps_of(elements: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield the elements in steps."""
    for at in range(0, len(elements), STEP):
        yield elements[at : at + STEP]


def array_steps(array: Array) -> Iterator[list[Any]]:
    """Yield the elements of an array of any shape, in row-major order, in steps."""
    flat = array.reshape(-1)
    for at in range(0, flat.size, STEP):
        yield flat[at : at + STEP].tolist()


def packed(steps: Iterable[Sequence[bytes]]) -> bytes:
    """Return the elements in ``steps`` as on the wire."""
    return b"".join(map(_packed, steps))


def _packed(elements: Sequence[bytes]) -> bytes:
    pieces: list[bytes] = []
    for element in elements:
        pieces += (_LENGTH.pack(len(element)), element)
    return b"".join(pieces)
