"""Typed access to parsed JSON, with Triton's errors for wrong types.

They are INTERNAL, as in Triton [H13]. Neither JSON's ``true`` nor ``2.0`` is an integer here, although Python counts
both equal to one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remora.errors import InvalidArgumentError, MalformedError
from remora.protocols.json.reader import MAX_DEPTH, JsonDepthError, JsonTextError, parse

NOT_BOOL = "attempt to access JSON non-boolean as boolean"
NOT_INT = "attempt to access JSON non-signed-integer as signed-integer"
NOT_UINT = "attempt to access JSON non-unsigned-integer as unsigned-integer"
NOT_NUMBER = "attempt to access JSON non-number as double"
NOT_TEXT = "attempt to access JSON non-string as string"
NOT_ARRAY = "attempt to access JSON non-array as array"
NOT_OBJECT = "attempt to get members for non-object"

Read = Callable[[bytes | memoryview, int | None], Any]
"""`parse` or `parse_members`."""


def document(text: bytes | memoryview, read: Read = parse, slow_bytes: int | None = None) -> Any:
    """Return the value of a request's JSON.

    Raises MalformedError, InvalidArgumentError if it nests too deep [H28], and SlowTextError as ``read`` does.
    """
    try:
        return read(text, slow_bytes)
    except JsonDepthError:
        raise too_deep(MAX_DEPTH) from None
    except JsonTextError as error:
        raise MalformedError(f"failed to parse the request JSON buffer: {error}") from None


def too_deep(limit: int) -> InvalidArgumentError:
    """Return the error for arrays nested deeper than ``limit`` [H28]."""
    return InvalidArgumentError(f"JSON nesting depth exceeds maximum allowed limit ({limit})")


def find(holder: Any, name: str) -> tuple[bool, Any]:
    """Return (True, member) if ``holder`` is an object with that member, else (False, None)."""
    if isinstance(holder, dict) and name in holder:
        return True, holder[name]
    return False, None


def member(holder: Any, name: str) -> Any:
    """Return a required member."""
    present, value = find(holder, name)
    if not present:
        raise MalformedError(f"Unable to parse '{name}': attempt to access non-existing object member '{name}'")
    return value


def array_member(holder: Any, name: str) -> list[Any]:
    """Return a required member that must be an array."""
    value = member(holder, name)
    if not isinstance(value, list):
        raise MalformedError(f"Unable to parse '{name}': {NOT_ARRAY}")
    return value


def text_member(holder: Any, name: str) -> str:
    """Return a required member that must be a string."""
    return as_text(member(holder, name), name)


def as_text(value: Any, name: str) -> str:
    """Return the value, which must be a string."""
    if not isinstance(value, str):
        raise MalformedError(f"Unable to parse '{name}': {NOT_TEXT}")
    return value


def as_bool(value: Any, name: str) -> bool:
    """Return the value, which must be a boolean."""
    if not isinstance(value, bool):
        raise MalformedError(f"Unable to parse '{name}': {NOT_BOOL}")
    return value


def is_uint(value: Any) -> bool:
    """Return True for an integer from 0 to 2**64-1.

    The reader makes floats of greater ones.
    """
    return type(value) is int and value >= 0


def as_uint(value: Any, name: str, *, verb: str = "parse") -> int:
    """Return the value, which must be an integer that is not negative."""
    if not is_uint(value):
        raise MalformedError(f"Unable to {verb} '{name}': {NOT_UINT}")
    return int(value)
