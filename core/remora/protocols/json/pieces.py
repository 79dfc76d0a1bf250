"""Reader of long JSON text in pieces, between which other threads may run.

orjson keeps the interpreter for the length of a call. Here elements of long arrays and members of long objects are cut
out of the text and read by short calls; what remains is a short text with a mark in the place of each piece. Values and
errors are those of orjson: text that cannot be cut is read by one call.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

STEP_BYTES = 131_072
"""Text that one call reads; text of more than twice that is cut."""
_DEEPEST = 1_000
"""Nesting up to which text is cut; orjson's own limit is 1,024 levels, and a piece begins a new count."""


class _Piece(NamedTuple):
    """Elements of an array, or members of an object, by their place in the text."""

    begin: int
    end: int
    of_object: bool

    def read(self, text: memoryview) -> Any:
        """Return the elements or the members. Raises orjson.JSONDecodeError."""
        return orjson.loads((b"{%b}" if self.of_object else b"[%b]") % text[self.begin : self.end])


def loads(text: bytes | bytearray | memoryview) -> Any:
    """Return the value of a JSON document. Raises orjson.JSONDecodeError."""
    if len(text) <= 2 * STEP_BYTES:
        return orjson.loads(text)
    view = memoryview(text)
    cuts = list(_pieces(view))
    if not cuts:
        return orjson.loads(text)
    mark = os.urandom(16).hex()  # no text of a client can hold it
    rest, at = bytearray(), 0
    for number, piece in enumerate(cuts):
        rest += view[at : piece.begin]
        rest += b'"%b%d"%b' % (mark.encode(), number, b":0" if piece.of_object else b"")
        at = piece.end
    rest += view[at:]
    try:
        document = orjson.loads(rest)
        if _put_back(document, mark, [piece.read(view) for piece in cuts]):
            return document
    except orjson.JSONDecodeError:  # the error of the whole text has the right place
        pass
    return orjson.loads(text)


def _pieces(view: memoryview) -> Iterator[_Piece]:
    """Yield what can be cut out of the text, at most one piece for each step.

    In valid text without escapes a byte is inside of a string after an odd number of quotation marks. A piece lies
    between two commas of one array or object.
    """
    octets = np.frombuffer(view, np.uint8)
    depth, in_string = 0, 0
    for begin in range(0, len(octets), STEP_BYTES):
        block = octets[begin : begin + STEP_BYTES]
        if (block == ord("\\")).any():
            return
        quotes = block == ord('"')
        levels = np.isin(block, _OPENING).astype(np.int8) - np.isin(block, _CLOSING).astype(np.int8)
        outside: npt.NDArray[np.bool_] | None = None
        if in_string or quotes.any():
            inside = (np.cumsum(quotes, dtype=np.int32) + in_string) % 2
            outside = inside == 0
            levels[~outside] = 0
            in_string = int(inside[-1])
        depths = np.cumsum(levels, dtype=np.int32) + depth
        depth = int(depths[-1])
        if depths.min() < 0 or depths.max() > _DEEPEST:
            return
        found = _longest(block, depths, outside)
        if found is not None:
            yield found._replace(begin=begin + found.begin, end=begin + found.end)


_OPENING = np.frombuffer(b"[{", np.uint8)
_CLOSING = np.frombuffer(b"]}", np.uint8)


def _longest(
    block: npt.NDArray[np.uint8], depths: npt.NDArray[np.int32], outside: npt.NDArray[np.bool_] | None
) -> _Piece | None:
    """Return the longest piece in a block, None without one of at least half of the block."""
    commas = block == ord(",")
    if outside is not None:
        commas &= outside
    places = np.flatnonzero(commas)
    if len(places) < 2:
        return None
    at_level = depths[places]
    lowest = int(depths.min())
    for level in range(lowest, lowest + 4):  # deeper arrays are no longer than half of the block
        mine = places[at_level == level]
        if len(mine) < 2:
            continue
        begin, end = int(mine[0]) + 1, int(mine[-1])
        within = depths[begin:end]
        if end - begin < len(block) // 2:
            continue
        if int(within.min()) < level:
            continue
        colons = (block[begin:end] == ord(":")) & (within == level)
        if outside is not None:
            colons &= outside[begin:end]
        return _Piece(begin, end, bool(colons.any()))
    return None


def _put_back(document: Any, mark: str, pieces: list[Any]) -> bool:
    """Replace the marks in a document by their contents; return False unless each is found."""

    def piece_of(value: Any) -> Any:
        return pieces[int(value[len(mark) :])] if isinstance(value, str) and value.startswith(mark) else None

    left = len(pieces)
    containers = [document]
    while containers:
        container = containers.pop()
        if isinstance(container, list):
            containers += [value for value in container if isinstance(value, (list, dict))]
            found = [index for index, value in enumerate(container) if piece_of(value) is not None]
            if found:
                whole: list[Any] = []
                at = 0
                for index in found:
                    whole += container[at:index]
                    whole += piece_of(container[index])
                    at = index + 1
                container[:] = whole + container[at:]
        elif isinstance(container, dict):
            containers += [value for value in container.values() if isinstance(value, (list, dict))]
            found = [name for name in container if piece_of(name) is not None]
            if found:
                members = dict(container)
                container.clear()
                for name, value in members.items():
                    container.update({name: value} if piece_of(name) is None else piece_of(name))
        else:
            found = []
        left -= len(found)
    return not left
