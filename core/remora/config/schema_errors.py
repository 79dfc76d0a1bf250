"""Schema errors of configuration texts, with key path, line and closest valid key.

Readers raise ``SchemaError``; `reading` adds the file and converts it to a ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

Path = tuple[str | int, ...]
"""Keys and list indices from the root of a configuration, e.g. ``("input", 0, "dims")``."""

MAX_DEPTH = 32
"""Maximum nesting of a configuration text; the schema itself has 8 levels."""


class SchemaError(Exception):
    """A mismatch with the schema at ``path``. ``line`` counts from 1, 0 if unknown."""

    def __init__(self, path: Path, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.path = path
        self.reason = reason
        self.line = line

    def __str__(self) -> str:
        where = key_path(self.path)
        return f"{where}: {self.reason}" if where else self.reason


def key_path(path: Path) -> str:
    """Return the path in the usual notation: ``input[0].dims[2]``."""
    parts = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return "".join(parts).removeprefix(".")


def nearest_line(lines: dict[Path, int], path: Path) -> int:
    """Return the line of ``path`` or of its closest ancestor with one, or 0 without any."""
    return next((lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in lines), 0)


def unknown_key(owner: Descriptor, key: str) -> str:
    """Return the error for an unknown ``key``, with the closest key of ``owner``."""
    return f"{owner.name} has no such key{_suggestion(key, owner.fields_by_name)}"


def unknown_value(kind: EnumDescriptor, value: object) -> str:
    """Return the error for an unknown ``value``, with the closest value of the enum."""
    named = _suggestion(str(value).upper(), kind.values_by_name)
    return f"'{value}' is not a {kind.name}{named or '; it is one of ' + ', '.join(kind.values_by_name)}"


def schema_of(message: Message) -> Descriptor:
    """Return the message's descriptor, typed for every implementation of protobuf."""
    return cast(Descriptor, message.DESCRIPTOR)


def map_fields(field: FieldDescriptor) -> tuple[FieldDescriptor, FieldDescriptor]:
    """Return the fields of a map's keys and values."""
    entry = cast(Descriptor, field.message_type).fields_by_name
    return entry["key"], entry["value"]


def is_repeated(field: FieldDescriptor) -> bool:
    """Return True for lists and maps."""
    # `label` warns in new releases of protobuf and `is_repeated` is missing in old ones; the default works in all.
    return isinstance(field.default_value, list)


def is_map(field: FieldDescriptor) -> bool:
    """Return True for maps, which protobuf implements as repeated entries of key and value."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _suggestion(word: str, known: Iterable[str]) -> str:
    import difflib  # imported here because only an error needs it

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
