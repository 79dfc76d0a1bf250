"""Printing JSON text as RapidJSON prints it; the law: bytes that a client of Triton would have got [H15].

Floats are `json_floats`'. Strings are bytes: what is not UTF-8 goes out as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np
import orjson

from remora.messages import Array, Parameter
from remora.tensors.float_text import number

_SPECIAL = re.compile(rb'[\x00-\x1f"\\]')
_ESCAPED = {
    bytes([code]): {8: b"\\b", 9: b"\\t", 10: b"\\n", 12: b"\\f", 13: b"\\r", 34: b'\\"', 92: b"\\\\"}.get(
        code, b"\\u%04X" % code
    )
    for code in (*range(32), 34, 92)
}


def raw(text: str) -> bytes:
    """UTF-8, with the bytes that came in as surrogate escapes as they were, and "?" for what nothing can write."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def quoted(text: str | bytes) -> bytes:
    """A JSON string."""
    octets = raw(text) if isinstance(text, str) else text
    if _SPECIAL.search(octets) is None:
        return b'"%b"' % octets
    return b'"%b"' % _SPECIAL.sub(lambda found: _ESCAPED[found.group()], octets)


def parameter(value: Parameter) -> bytes:
    """A response parameter [H24]."""
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, int):
        return b"%d" % value
    if isinstance(value, float):
        return number(value)
    return quoted(value)


def parameters(values: Mapping[str, Parameter]) -> bytes:
    """An object of parameters."""
    return b"{%b}" % b",".join(quoted(key) + b":" + parameter(value) for key, value in values.items())


def strings(values: Iterable[bytes | str]) -> bytes:
    """An array of strings."""
    return b"[%b]" % b",".join(map(quoted, values))


def numbers(array: Array) -> bytes:
    """A flat array of the values of a bool, integer or float array of any shape. FP32 prints as the double it is."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind != "f":
        return orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY)
    flat = flat.astype(np.float64, copy=False)
    text = orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY)
    size = np.abs(flat)
    # Where orjson and RapidJSON write the same number in another way: it prints 1e+16 and 9e-6, and null for NaN.
    # The bounds are wider than needed; `number` gets every one of these right.
    odd = ~(size < 9e15) | ((size > 9e-7) & (size < 1.1e-5))
    if not odd.any():
        return text
    tokens = text[1:-1].split(b",")
    for index in np.flatnonzero(odd).tolist():
        tokens[index] = number(float(flat[index]))
    return b"[%b]" % b",".join(tokens)
