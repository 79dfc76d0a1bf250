"""Filling of a protobuf message from a document of plain values, as read from JSON and YAML.

The message's descriptor is the only schema, and no value is dropped. Keys are proto names (or their camelCase twins, as
in protobuf's JSON); enums are names or numbers; 64-bit numbers may be text; ``null`` means unset. A map whose values
are messages with one text field, such as ``parameters``, may contain the text itself: ``{"threads": "4"}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from remora.config.schema_errors import (
    Path,
    SchemaError,
    is_map,
    is_repeated,
    map_fields,
    schema_of,
    unknown_key,
    unknown_value,
)

MAX_VALUES = 100_000
"""Maximum number of values of a document with its aliases expanded, which bounds the memory of a small file."""

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: "a 32-bit integer",
    FieldDescriptor.CPPTYPE_INT64: "a 64-bit integer",
    FieldDescriptor.CPPTYPE_UINT32: "an unsigned 32-bit integer",
    FieldDescriptor.CPPTYPE_UINT64: "an unsigned 64-bit integer",
}
_FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)


def fill(message: Message, document: object) -> None:
    """Copy all values of ``document`` into ``message``.

    Raises:
        SchemaError: the first value that does not match the schema, with its key path.
    """
    _Filling().message(message, document, ())


class _Filling:
    """One traversal of a document, with a count of its values."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = 0

    def message(self, target: Message, value: object, path: Path) -> None:
        schema = schema_of(target)
        if not isinstance(value, Mapping):
            raise SchemaError(path, f"expected the keys of a {schema.name}, got {_kind(value)}")
        assigned: dict[str, str] = {}
        for key, item in value.items():
            field = _field(schema, key)
            if field is None:
                raise SchemaError((*path, key), unknown_key(schema, key))
            if item is None:
                continue
            choice = field.containing_oneof
            slot = choice.name if choice is not None else field.name
            if slot in assigned:
                raise SchemaError((*path, key), f"'{assigned[slot]}' is given already, and only one of the two can be")
            assigned[slot] = key
            self.field(target, field, item, (*path, key))

    def field(self, target: Message, field: FieldDescriptor, value: object, path: Path) -> None:
        self._count(path)
        if is_map(field):
            self.entries(getattr(target, field.name), field, value, path)
        elif is_repeated(field):
            self.items(getattr(target, field.name), field, value, path)
        elif field.message_type is not None:
            inner = getattr(target, field.name)
            inner.SetInParent()
            self.message(inner, value, path)
        else:
            scalar = _scalar(field, value, path)
            try:
                setattr(target, field.name, scalar)
            except (TypeError, ValueError) as error:
                raise _unfit(field, value, path) from error

    def items(self, target: Any, field: FieldDescriptor, value: object, path: Path) -> None:
        if not isinstance(value, list):
            raise SchemaError(path, f"expected a list, got {_kind(value)}")
        for index, item in enumerate(value):
            where = (*path, index)
            self._count(where)
            if field.message_type is not None:
                self.message(target.add(), item, where)
                continue
            scalar = _scalar(field, item, where)
            try:
                target.append(scalar)
            except (TypeError, ValueError) as error:
                raise _unfit(field, item, where) from error

    def entries(self, target: Any, field: FieldDescriptor, value: object, path: Path) -> None:
        if not isinstance(value, Mapping):
            raise SchemaError(path, f"expected a map, got {_kind(value)}")
        keys, values = map_fields(field)
        for key, item in value.items():
            where = (*path, key)
            self._count(where)
            try:
                if values.message_type is None:
                    target[_scalar(keys, key, where)] = _scalar(values, item, where)
                    continue
                inner = target[_scalar(keys, key, where)]
            except (TypeError, ValueError) as error:
                raise SchemaError(where, f"neither key nor value may be like this: {error}") from error
            self.message(inner, _spelled_out(schema_of(inner), item), where)

    def _count(self, path: Path) -> None:
        self.values += 1
        if self.values > MAX_VALUES:
            raise SchemaError(path, f"the configuration holds more than {MAX_VALUES} values")


def _field(owner: Descriptor, key: str) -> FieldDescriptor | None:
    found: FieldDescriptor | None = owner.fields_by_name.get(key) or owner.fields_by_camelcase_name.get(key)
    return found


def _spelled_out(owner: Descriptor, value: object) -> object:
    """Return ``{"string_value": "4"}`` for ``"4"``, ``4`` or ``true``.

    Only a message with exactly one text field can be written in this short form.
    """
    only = owner.fields[0]
    if len(owner.fields) != 1 or only.cpp_type != FieldDescriptor.CPPTYPE_STRING or is_repeated(only):
        return value
    if isinstance(value, bool):
        return {only.name: "true" if value else "false"}
    return {only.name: str(value)} if isinstance(value, (str, int, float)) else value


def _scalar(field: FieldDescriptor, value: object, path: Path) -> bool | int | float | str:
    """Convert ``value`` to the field's type, without a range check."""
    if field.enum_type is not None:
        return _enum(field.enum_type, value, path)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if isinstance(value, bool):
            return value
    elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if isinstance(value, str):
            return value
    elif not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:
            return float(value) if field.cpp_type in _FLOATS else _integer(value)
        except (ValueError, OverflowError):
            pass
    raise _unfit(field, value, path)


def _integer(value: int | float | str) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(value)
    return int(value)


def _enum(known: EnumDescriptor, value: object, path: Path) -> int:
    if isinstance(value, str) and value.upper() in known.values_by_name:
        return int(known.values_by_name[value.upper()].number)
    if isinstance(value, int) and not isinstance(value, bool) and value in known.values_by_number:
        return value
    raise SchemaError(path, unknown_value(known, value))


def _unfit(field: FieldDescriptor, value: object, path: Path) -> SchemaError:
    if field.cpp_type in _INTEGERS:
        wanted = _INTEGERS[field.cpp_type]
    elif field.cpp_type in _FLOATS:
        wanted = "a number"
    else:
        wanted = "true or false" if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL else "text (quote it)"
    return SchemaError(path, f"expected {wanted}, got {_kind(value)}")


def _kind(value: object) -> str:
    """Describe a value briefly for an error message."""
    if isinstance(value, Mapping):
        return "a map"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
