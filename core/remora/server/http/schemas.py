"""JSON schemas of our own answers, made from the dataclasses that hold them: written once, there."""

from __future__ import annotations

from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


def schema_of(kind: Any) -> dict[str, Any]:
    """The schema of a type: plain values, dataclasses, unions, ``tuple[T, ...]`` and ``dict[str, T]``.

    Raises TypeError for any other type.
    """
    if kind in _KINDS:
        return {"type": _KINDS[kind]}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return {"anyOf": [schema_of(each) for each in arguments]}
    if origin is tuple:
        return {"type": "array", "items": schema_of(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    if not is_dataclass(kind):
        raise TypeError(f"there is no JSON schema for {kind}")
    properties = {name: schema_of(each) for name, each in get_type_hints(kind).items()}
    return {"type": "object", "required": list(properties), "properties": properties}
