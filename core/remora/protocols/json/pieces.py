"""Reader of long JSON text in pieces, between which other threads may run.

orjson keeps the interpreter for the length of a call. Here elements of long arrays and members of long objects are cut
out of the text and read by short calls; what remains is a short text with a mark in the place of each piece. Values and
errors are those of orjson, but for the line of an error in a text beyond `_EXACT_BYTES`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from remora.errors import InvalidArgumentError
from remora.protocols.json.long_lists import extend, release

STEP_BYTES = 131_072
"""Text that one call reads; text of more than twice that is cut."""
MAX_MEMBERS = 262_144
"""Members of one object in a text that is cut. A larger table would keep other threads waiting each time it grows."""
_EXACT_BYTES = 1 << 20
"""Size up to which invalid text is read again by one call, for the line and column of its error."""
_DEEPEST = 1_000
"""Nesting up to which text is cut; orjson's own limit is 1,024 levels, and a piece begins a new count."""
_LEAST_PART = 16
"""A piece has at least this part of a step."""


class _Piece(NamedTuple):
    """Elements of an array, or members of an object, by their place in the text."""

    begin: int
    end: int
    of_object: bool

    def read(self, text: memoryview) -> Any:
        """Return the elements or the members. Raises orjson.JSONDecodeError."""
        return orjson.loads((b"{%b}" if self.of_object else b"[%b]") % text[self.begin : self.end])


def loads(text: bytes | bytearray | memoryview) -> Any:
    """Return the value of a JSON document.

    Raises orjson.JSONDecodeError, and InvalidArgumentError for an object of more than MAX_MEMBERS members.
    """
    if len(text) <= 2 * STEP_BYTES:
        return orjson.loads(text)
    view = memoryview(text)
    cuts = list(_pieces(view))
    if not cuts:
        return orjson.loads(text)
    try:
        try:
            return _read(view, cuts)
        except _RepeatedNameError:
            return _read(view, cuts, repeated=True)
    except orjson.JSONDecodeError:
        if len(text) > _EXACT_BYTES:
            raise
    return orjson.loads(text)  # because the error of the whole text has the right line


class _RepeatedNameError(Exception):
    """Raised when a name is in two parts of an object.

    orjson has kept the place of the first, but the last one counts.
    """


def _read(view: memoryview, cuts: list[_Piece], *, repeated: bool = False) -> Any:
    """Return the value of a document by its pieces and the text between them.

    Raises orjson.JSONDecodeError, InvalidArgumentError, and _RepeatedNameError unless ``repeated``.
    """
    mark = os.urandom(16).hex()  # no text of a client can hold it
    rest, at = bytearray(), 0
    places: list[tuple[int, int]] = []
    for number, piece in enumerate(cuts):
        places.append((len(rest), at))
        rest += view[at : piece.begin]
        rest += b'"%b%d"%b' % (mark.encode(), number, b":0" if piece.of_object else b"")
        at = piece.end
    places.append((len(rest), at))
    rest += view[at:]
    pieces: list[Any] = []
    document: Any = None
    try:
        for piece in cuts:
            try:
                pieces.append(piece.read(view))
            except orjson.JSONDecodeError as error:
                raise _error_at(error.msg, piece.begin + error.pos - 1) from None
        rest_bytes = bytes(rest)
        shorter = len(rest) < len(view) // 2
        try:
            document = loads(rest_bytes) if shorter else orjson.loads(rest_bytes)
        except orjson.JSONDecodeError as error:
            begin, offset = max(place for place in places if place[0] <= error.pos)
            raise _error_at(error.msg, offset + error.pos - begin) from None
        if repeated:
            rejoin = partial(_joined, mark=mark, pieces=pieces)
            document = json.loads(rest_bytes, object_pairs_hook=rejoin, parse_int=_int)
        _put_back(document, mark, pieces)
    except Exception:
        release([document, *pieces])  # not all at once, when the error is freed
        raise
    return document


def _error_at(message: str, position: int) -> orjson.JSONDecodeError:
    return orjson.JSONDecodeError(message, "", max(position, 0))


def _int(digits: str) -> int | float:
    """Return a number as orjson reads it."""
    value = int(digits) if len(digits) <= 20 else 1 << 64
    return value if -(2**63) <= value < 2**64 else float(digits)


def _pieces(view: memoryview) -> Iterator[_Piece]:
    """Yield what can be cut out of the text.

    In valid text a byte is inside of a string after an odd number of quotation marks without a backslash. A piece lies
    between two commas of one array or object.
    """
    octets = np.frombuffer(view, np.uint8)
    depth, in_string, begin = 0, 0, 0
    while begin < len(octets):
        end = min(begin + STEP_BYTES, len(octets))
        block = octets[begin:end]
        if (block == _BACKSLASH).any():
            plain = block.tobytes()
            if (len(plain) - len(plain.rstrip(b"\\"))) % 2:  # a block ends with a whole escape
                end = min(end + 1, len(octets))
                plain = octets[begin:end].tobytes()
            block = np.frombuffer(plain.replace(b"\\\\", b"__").replace(b'\\"', b"__"), np.uint8)
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
        for found in _longest(block, depths, outside):
            yield found._replace(begin=begin + found.begin, end=begin + found.end)
        begin = end


_OPENING = np.frombuffer(b"[{", np.uint8)
_CLOSING = np.frombuffer(b"]}", np.uint8)
_BACKSLASH = ord("\\")


def _longest(
    block: npt.NDArray[np.uint8], depths: npt.NDArray[np.int32], outside: npt.NDArray[np.bool_] | None
) -> list[_Piece]:
    """Return the pieces of the lowest level at which they are half of a block."""
    commas = block == ord(",")
    if outside is not None:
        commas &= outside
    places = np.flatnonzero(commas)
    if len(places) < 2:
        return []
    at_level = depths[places]
    lowest = int(depths.min())
    for level in range(lowest, lowest + _LEVELS):
        mine = places[at_level == level]
        if len(mine) < 2:
            continue
        # Commas belong to one container if the text between them is not below its level.
        container = np.cumsum(depths < level, dtype=np.int32)[mine]
        first = np.flatnonzero(np.diff(container, prepend=-1))
        last = np.append(first[1:], len(mine)) - 1
        spans = [(int(mine[a]) + 1, int(mine[b])) for a, b in zip(first, last, strict=True)]
        spans = [(a, b) for a, b in spans if b - a >= len(block) // _LEAST_PART]
        if sum(b - a for a, b in spans) >= len(block) // 2:
            return [_piece(block, depths, outside, level, a, b) for a, b in spans]
    return []


_LEVELS = 8
"""Levels of one block at which pieces are looked for."""


def _piece(
    block: npt.NDArray[np.uint8], depths: npt.NDArray[np.int32], outside: npt.NDArray[np.bool_] | None, level: int,
    begin: int, end: int,
) -> _Piece:  # fmt: skip
    colons = (block[begin:end] == ord(":")) & (depths[begin:end] == level)
    if outside is not None:
        colons &= outside[begin:end]
    return _Piece(begin, end, bool(colons.any()))


def _piece_of(value: Any, mark: str, pieces: list[Any]) -> Any:
    return pieces[int(value[len(mark) :])] if isinstance(value, str) and value.startswith(mark) else None


def _joined(pairs: list[tuple[str, Any]], mark: str, pieces: list[Any]) -> dict[str, Any]:
    """Return an object of members and pieces; the last of equal names counts.

    Raises InvalidArgumentError.
    """
    found = [_piece_of(name, mark, pieces) for name, _ in pairs]
    _check_members(found)
    members: dict[str, Any] = {}
    for (name, value), piece in zip(pairs, found, strict=True):
        members.update({name: value} if piece is None else piece)
    return members


def _put_back(document: Any, mark: str, pieces: list[Any]) -> None:
    """Replace the marks in a document by the contents of their pieces, which become empty.

    A piece is freed at once, because freeing all of them together would keep other threads waiting. Raises
    _RepeatedNameError and InvalidArgumentError.
    """
    containers = [document]
    while containers:
        container = containers.pop()
        if isinstance(container, list):
            containers += [value for value in container if isinstance(value, (list, dict))]
            found = [_piece_of(value, mark, pieces) for value in container]
            if any(piece is not None for piece in found):
                values = container[:]
                container.clear()
                extend(container, _elements(values, found), _count(found))
        elif isinstance(container, dict):
            containers += [value for value in container.values() if isinstance(value, (list, dict))]
            found = [_piece_of(name, mark, pieces) for name in container]
            if any(piece is not None for piece in found):
                count = _check_members(found)
                members = list(container.items())
                container.clear()
                for (name, value), part in zip(members, found, strict=True):
                    container.update({name: value} if part is None else part)
                    if part is not None:
                        part.clear()
                if len(container) != count:
                    raise _RepeatedNameError


def _elements(values: list[Any], found: list[Any]) -> Iterator[Sequence[Any]]:
    """Yield the values, or the piece that one stands for."""
    for value, piece in zip(values, found, strict=True):
        if piece is None:
            yield (value,)
        else:
            yield piece
            piece.clear()


def _count(found: list[Any]) -> int:
    return sum(1 if piece is None else len(piece) for piece in found)


def _check_members(found: list[Any]) -> int:
    """Return the number of members of an object. Raises InvalidArgumentError."""
    count = _count(found)
    if count > MAX_MEMBERS:
        raise InvalidArgumentError(
            f"an object in the JSON has {count} members, at most {MAX_MEMBERS} are read: send an array or binary data"
        )
    return count
