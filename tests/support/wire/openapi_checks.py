"""Comparison of a JSON value with a schema of an OpenAPI document, which must name every member."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}


def mismatches(value: Any, schema: dict[str, Any], document: dict[str, Any], at: str = "") -> Iterator[str]:
    """Yield the places at which a value departs from a schema. Objects may have no member that it does not name."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        found = [list(mismatches(value, each, document, at)) for each in schema["anyOf"]]
        yield from min(found, key=len)
        return
    if "enum" in schema:
        if value not in schema["enum"]:
            yield f"{at}: {value!r} is not among {schema['enum']}"
        return
    kind = schema.get("type")
    if kind in _TYPES and (not isinstance(value, _TYPES[kind]) or (kind != "boolean" and isinstance(value, bool))):
        yield f"{at}: {value!r} is not of the type {kind}"
    elif kind == "array":
        if not isinstance(value, list):
            yield f"{at}: {value!r} is not a list"
            return
        for place, each in enumerate(value):
            yield from mismatches(each, schema["items"], document, f"{at}[{place}]")
    elif kind == "object":
        if not isinstance(value, dict):
            yield f"{at}: {value!r} is not an object"
            return
        members = schema.get("properties", {})
        yield from (f"{at}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, each in value.items():
            inner = members.get(name, schema.get("additionalProperties"))
            if inner is None:
                yield f"{at}.{name} is not in the schema"
            else:
                yield from mismatches(each, inner, document, f"{at}.{name}")
