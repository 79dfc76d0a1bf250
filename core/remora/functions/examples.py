"""Example values of type hints, for generated requests and pages.

Invariant: an example is a value that the hint's reader accepts. A hint without one, such as that of a text with a
pattern, has no example.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import inspect
import struct
import types
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, is_typeddict

from remora.functions.hints import ArraySpec
from remora.functions.json_values import json_text, members_of, reader_of, unwrapped

_TEXT = "text"
_SCALARS: Mapping[Any, Any] = {int: 1, float: 0.5, bool: True, str: _TEXT, Any: _TEXT, object: _TEXT, type(None): None}
_FORMATS = {
    "date-time": "2024-01-31T12:00:00Z",
    "date": "2024-01-31",
    "time": "12:00:00Z",
    "duration": "P1D",
    "uuid": "123e4567-e89b-42d3-a456-426614174000",
    "email": "name@example.com",
    "uri": "https://example.com/",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
}
_DEEPEST = 20
_SIDE = 64
"""Pixels of the example image's sides."""


class NoExampleError(ValueError):
    """Hint for which no example can be made."""


def json_example(hint: Any) -> Any:
    """Return a JSON value that the reader of a hint accepts. Raises NoExampleError."""
    try:
        value = _of(hint, 0)
        reader_of(hint)(json_text(value))
    except NoExampleError:
        raise
    except Exception as error:  # a class of the user checks its values, or has no schema
        raise NoExampleError(str(error)) from error
    return value


def hint_text(hint: Any) -> str:
    """Return a hint as a programmer writes it, "" for none."""
    if hint in (Any, inspect.Parameter.empty):
        return ""
    spec = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, ArraySpec)), None)
    if spec is not None:
        return f"Array[{', '.join(map(str, (spec.dtype, *spec.shape)))}]"
    return inspect.formatannotation(hint).replace("typing.", "").rpartition("\n")[2]


def image_example() -> str:
    """Return a grey PNG as base64."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\x80" * 3 * _SIDE) * _SIDE)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return base64.b64encode(png).decode()


def _of(hint: Any, depth: int) -> Any:
    """Return an example of a hint that `json_values` knows."""
    if depth > _DEEPEST:
        raise NoExampleError("the type contains itself")
    hint = unwrapped(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _of(next((each for each in arguments if each is not type(None)), arguments[0]), depth + 1)
    if origin is Literal:
        return arguments[0]
    if (origin or hint) in (list, Sequence, Iterable):
        return [_of(arguments[0] if arguments else Any, depth + 1)]
    if (origin or hint) is tuple:
        return [_of(each, depth + 1) for each in arguments if each is not Ellipsis]
    if (origin or hint) in (dict, Mapping):
        return _object(arguments, depth)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(iter(hint)).value
    return _of_class(hint, depth)


def _object(arguments: tuple[Any, ...], depth: int) -> dict[str, Any]:
    """Return an example of a dict: an empty one if any member is allowed."""
    if not arguments or unwrapped(arguments[1]) in (Any, object):
        return {}
    key = unwrapped(arguments[0])
    return {str(1 if key is int else "name" if key in _SCALARS else _of(key, depth + 1)): _of(arguments[1], depth + 1)}


def _of_class(hint: Any, depth: int) -> Any:
    """Return an example of a class with fields, with the required ones alone."""
    if hasattr(hint, "model_json_schema"):
        schema = hint.model_json_schema()
        return _of_schema(schema, schema.get("$defs", {}), 0)
    if hasattr(hint, "__pydantic_validator__"):
        from pydantic import TypeAdapter  # installed, because the class is one of pydantic

        schema = TypeAdapter(hint).json_schema()
        return _of_schema(schema, schema.get("$defs", {}), 0)
    if not (dataclasses.is_dataclass(hint) or is_typeddict(hint)):
        raise NoExampleError(f"{hint} has no fields")
    return {each.name: _of(each.hint, depth + 1) for each in members_of(hint) if each.required}


# -- JSON schemas -----------------------------------------------------------------------------------------------------


def _of_schema(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> Any:
    """Return a value that fits a JSON schema of pydantic."""
    if depth > _DEEPEST:
        raise NoExampleError("the type contains itself")
    if "$ref" in schema:
        return _of_schema(definitions[schema["$ref"].rpartition("/")[2]], definitions, depth + 1)
    if schema.get("examples"):
        return schema["examples"][0]
    for name, choose in _CHOICES.items():
        if name in schema:
            found = choose(schema[name])
            return _of_schema(found, definitions, depth + 1) if name in _SCHEMAS else found
    kind = schema.get("type", "string")
    if kind == "object":
        return _schema_object(schema, definitions, depth)
    if kind == "array":
        if "prefixItems" in schema:
            return [_of_schema(each, definitions, depth + 1) for each in schema["prefixItems"]]
        count = max(schema.get("minItems", 0), min(schema.get("maxItems", 1), 1))
        return [_of_schema(schema.get("items", {}), definitions, depth + 1)] * count
    if kind in ("integer", "number"):
        return _schema_number(schema, whole=kind == "integer")
    return {"boolean": True, "null": None}[kind] if kind in ("boolean", "null") else _schema_text(schema)


_SCHEMAS = ("anyOf", "oneOf", "allOf")
_CHOICES: Mapping[str, Callable[[Any], Any]] = {
    "const": lambda value: value,
    "enum": lambda values: values[0],
    **{name: lambda schemas: next((each for each in schemas if each.get("type") != "null"), {}) for name in _SCHEMAS},
}
"""How a schema's keyword gives a value, or for `_SCHEMAS` the schema of one."""


def _schema_object(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> dict[str, Any]:
    properties, more = schema.get("properties", {}), schema.get("additionalProperties")
    value = {name: _of_schema(properties[name], definitions, depth + 1) for name in schema.get("required", ())}
    if not properties and isinstance(more, dict) and more:
        value["name"] = _of_schema(more, definitions, depth + 1)
    return value


def _schema_number(schema: Mapping[str, Any], *, whole: bool) -> float | int:
    step = schema.get("multipleOf", 1)
    least = max(schema.get("minimum", -1e308), schema.get("exclusiveMinimum", -1e308))
    most = min(schema.get("maximum", 1e308), schema.get("exclusiveMaximum", 1e308))
    for value in (step, least, least + step, (least + most) / 2, most, most - step, 0):
        if abs(value) < 1e300 and _fits(schema, value) and (not whole or value == int(value)):
            return int(value) if whole else value
    raise NoExampleError("no number within the limits was found")


def _fits(schema: Mapping[str, Any], value: float) -> bool:
    return (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        and ("multipleOf" not in schema or value % schema["multipleOf"] == 0)
    )


def _schema_text(schema: Mapping[str, Any]) -> str:
    text = _FORMATS.get(schema.get("format", ""), _TEXT)
    return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength", len(text) + 1000)]
