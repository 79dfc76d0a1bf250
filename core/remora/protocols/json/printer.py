"""Printer of JSON text as RapidJSON prints it, byte for byte [H15].

`remora.tensors.float_text` prints floats. Strings are bytes: bytes that are not UTF-8 are printed unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import orjson

from remora.messages import Array, Parameter
from remora.tensors.float_text import number

_SPECIAL = re.compile(rb'[\x00-\x1f"\\]')
_STEP = 32_768
"""Numbers that one call of orjson prints, because it keeps other threads waiting."""
_LONG_TEXT = 1 << 20
"""Bytes of a text that one search for special characters reads."""
_TEXT = 8
"""Characters of a text that take as long to print as a number."""
_SCALARS = {int, float, bool, type(None)}
_ESCAPED = {
    bytes([code]): {8: b"\\b", 9: b"\\t", 10: b"\\n", 12: b"\\f", 13: b"\\r", 34: b'\\"', 92: b"\\\\"}.get(
        code, b"\\u%04X" % code
    )
    for code in (*range(32), 34, 92)
}


def raw(text: str) -> bytes:
    """Return the text as UTF-8.

    Surrogate escapes become the bytes they stood for, other surrogates "?".
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def quoted(text: str | bytes) -> bytes:
    """Return a JSON string."""
    octets = raw(text) if isinstance(text, str) else text
    if len(octets) > _LONG_TEXT:
        return b'"%b"' % b"".join(
            [quoted(octets[at : at + _LONG_TEXT])[1:-1] for at in range(0, len(octets), _LONG_TEXT)]
        )
    if _SPECIAL.search(octets) is None:
        return b'"%b"' % octets
    return b'"%b"' % _SPECIAL.sub(lambda found: _ESCAPED[found.group()], octets)


def parameter(value: Parameter) -> bytes:
    """Return a response parameter as JSON [H24]."""
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, int):
        return b"%d" % value
    if isinstance(value, float):
        return number(value)
    return quoted(value)


def parameters(values: Mapping[str, Parameter]) -> bytes:
    """Return an object of parameters."""
    return b"{%b}" % b",".join(quoted(key) + b":" + parameter(value) for key, value in values.items())


def string_pieces(values: Sequence[bytes | str]) -> list[bytes]:
    """Return an array of strings in pieces, between which other threads may run."""
    if len(values) <= _STEP:
        return [b"[%b]" % b",".join(map(quoted, values))]
    pieces = [b",".join(map(quoted, values[at : at + _STEP])) for at in range(0, len(values), _STEP)]
    return _bracketed(pieces)


def _bracketed(pieces: list[bytes]) -> list[bytes]:
    """Return the pieces of an array whose elements are in ``pieces``."""
    return [b"[", pieces[0], *[part for piece in pieces[1:] for part in (b",", piece)], b"]"]


def dumps(value: Any) -> bytes:
    """Return JSON as orjson prints it, with arrays of numpy.

    Other threads may run between the steps.
    """
    if _weight((value,)) <= _STEP:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    if isinstance(value, dict):
        names, values = list(value), list(value.values())
        return b"{%b}" % b",".join([_members(names[part], values[part]) for part in _steps(values)])
    if isinstance(value, np.ndarray):
        rows = max(1, _STEP * len(value) // value.size)
        if rows == 1 and value.ndim > 1:
            return b"[%b]" % b",".join([dumps(row) for row in value])
        return b"[%b]" % b",".join([_elements(value[at : at + rows]) for at in range(0, len(value), rows)])
    if isinstance(value, list | tuple):
        return b"[%b]" % b",".join([_elements(value[part]) for part in _steps(value)])
    return orjson.dumps(value)  # a long text


def _elements(values: Any) -> bytes:
    """Return the text of consecutive elements of an array."""
    if len(values) == 1 and not isinstance(values, np.ndarray):
        return dumps(values[0])
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _members(names: list[str], values: list[Any]) -> bytes:
    """Return the text of consecutive members of an object."""
    if len(values) == 1:
        return orjson.dumps({names[0]: 0})[1:-2] + dumps(values[0])  # raises for a name that is not text
    return orjson.dumps(dict(zip(names, values, strict=True)), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _steps(values: Sequence[Any]) -> Iterator[slice]:
    """Yield slices that weigh at most _STEP; a heavier value is alone."""
    begin, count = 0, _STEP
    while begin < len(values):
        part = values[begin : begin + count]
        weight = _weight(part)
        if weight > _STEP and len(part) > 1:
            count = len(part) // 2
            continue
        yield slice(begin, begin + len(part))
        begin += len(part)
        count = min(2 * count, max(1, count * _STEP // weight))


def _weight(values: Sequence[Any]) -> int:
    """Return about how many numbers take as long to print as these values.

    Counting ends above _STEP. No bytecode runs for each value, because there may be millions.
    """
    weight = 0
    while values and weight <= _STEP:
        weight += len(values)
        kinds = set(map(type, values))
        inner: list[Any] = []
        for kind in kinds - _SCALARS:
            same: Any = values if len(kinds) == 1 else [value for value in values if type(value) is kind]
            if issubclass(kind, np.ndarray):
                weight += sum([array.size for array in same])
            elif issubclass(kind, str):
                weight += sum(map(len, same)) // _TEXT
            elif issubclass(kind, list | tuple | dict):
                if weight + sum(map(len, same)) > _STEP:
                    return _STEP + 1
                inner += chain.from_iterable(map(kind.values, same) if issubclass(kind, dict) else same)
        values = inner
    return weight


def number_pieces(array: Array) -> list[bytes]:
    """Return the pieces of a flat array with the values of a bool, integer or float array.

    Other threads may run between the pieces. FP32 is printed as the equal double.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    if len(flat) <= _STEP:
        return [_printed(flat)]
    return _bracketed([_printed(flat[at : at + _STEP])[1:-1] for at in range(0, len(flat), _STEP)])


def _printed(flat: Array) -> bytes:
    if flat.dtype.kind != "f":
        return orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY)
    flat = flat.astype(np.float64, copy=False)
    text = orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY)
    size = np.abs(flat)
    # orjson and RapidJSON write these numbers differently: RapidJSON prints 1e+16 and 9e-6, and orjson null for NaN.
    # The bounds are wider than needed; `number` prints every one of these correctly.
    odd = ~(size < 9e15) | ((size > 9e-7) & (size < 1.1e-5))
    if not odd.any():
        return text
    tokens = text[1:-1].split(b",")
    for index in np.flatnonzero(odd).tolist():
        tokens[index] = number(float(flat[index]))
    return b"[%b]" % b",".join(tokens)
