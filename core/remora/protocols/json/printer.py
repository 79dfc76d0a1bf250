"""Printer of JSON text as RapidJSON prints it, byte for byte [H15].

`remora.tensors.float_text` prints floats. Strings are bytes: bytes that are not UTF-8 are printed unchanged.
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


def strings(values: Iterable[bytes | str]) -> bytes:
    """Return an array of strings."""
    return b"[%b]" % b",".join(map(quoted, values))


def numbers(array: Array) -> bytes:
    """Return a flat array of the values of a bool, integer or float array of any shape.

    FP32 is printed as the equal double.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
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
