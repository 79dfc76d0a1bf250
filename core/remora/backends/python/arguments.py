"""Conversion of arguments of the Python API as Triton's C++ binding converts them. Pure.

Where text is meant the binding takes bytes (of a TYPE_STRING input, for example), and where an integer is meant it
takes numpy's scalars; what it refuses is refused here, too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")

MISSING: Any = object()
"""Default of an argument that must be passed although an earlier one has a default."""


def text(value: object, what: str) -> str:
    """Return text from a str, or from the UTF-8 of bytes.

    Raises TypeError for other types and UnicodeDecodeError for bytes that are not UTF-8.
    """
    if type(value) is str:
        return value
    if isinstance(value, str):  # numpy's str_
        return str(value)
    if isinstance(value, bytes | bytearray):
        return value.decode()
    raise _refusal(value, what, "str")


def integer(value: object, what: str, least: int, most: int) -> int:
    """Return an integer from any number but a float.

    Raises TypeError for other types and for values out of range.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        # numpy's float32 has __int__ and is not a float.
        if isinstance(value, float | str | bytes | bytearray) or not hasattr(type(value), "__int__"):
            raise _refusal(value, what, "int") from None
        try:
            number = int(value)  # type: ignore[call-overload]
        except ValueError:  # an array of text has __int__, too
            raise _refusal(value, what, "int") from None
    if not least <= number <= most:
        raise TypeError(f"{what} must be from {least} to {most}, not {number}")
    return number


def real(value: object, what: str) -> float:
    """Return a float from any number. Raises TypeError for other types."""
    if isinstance(value, str | bytes | bytearray) or not hasattr(type(value), "__float__"):
        raise _refusal(value, what, "float")
    return float(value)  # type: ignore[arg-type]


def sequence(value: object, what: str) -> list[Any]:
    """Return the items of a list, a tuple or another sequence.

    Raises TypeError for other iterables and for text.
    """
    if isinstance(value, list | tuple):
        return list(value)
    is_sequence = hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")
    if isinstance(value, str | bytes | bytearray | dict) or not is_sequence or not isinstance(value, Iterable):
        raise _refusal(value, what, "a list")
    return list(value)


def instance(value: object, kind: type[T], what: str) -> T:
    """Return the value. Raises TypeError if it is not an instance of ``kind``."""
    if not isinstance(value, kind):
        raise _refusal(value, what, kind.__name__)
    return value


def _refusal(value: object, what: str, expected: str) -> TypeError:
    if value is MISSING:
        return TypeError(f"{what} is missing")
    return TypeError(f"{what} must be {expected}, not {type(value).__name__}")
