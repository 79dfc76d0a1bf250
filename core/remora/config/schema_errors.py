"""Where a configuration text goes wrong: a key path, a line and the reason; the law: it always names the nearest key.

A reader raises ``SchemaError`` with what it knows. `reading` adds the file and turns it into a ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

Path = tuple[str | int, ...]
"""Keys and list positions from the top of a configuration, e.g. ``("input", 0, "dims")``."""

MAX_DEPTH = 32
"""How deep a configuration text may nest; the schema itself is 8 deep."""


class SchemaError(Exception):
    """A text that does not fit the schema at ``path``; ``line`` counts from 1, 0 when it is not known."""

    def __init__(self, path: Path, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.path = path
        self.reason = reason
        self.line = line

    def __str__(self) -> str:
        where = key_path(self.path)
        return f"{where}: {self.reason}" if where else self.reason


def key_path(path: Path) -> str:
    """The path as people write it: ``input[0].dims[2]``."""
    parts = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return "".join(parts).removeprefix(".")


def nearest_line(lines: dict[Path, int], path: Path) -> int:
    """The line of ``path``, or of its closest ancestor that has one; 0 when none has."""
    return next((lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in lines), 0)


def unknown_key(owner: Descriptor, key: str) -> str:
    """Why ``key`` is refused, and which key of ``owner`` was probably meant."""
    return f"{owner.name} has no such key{_suggestion(key, owner.fields_by_name)}"


def unknown_value(kind: EnumDescriptor, value: object) -> str:
    """Why ``value`` is refused, and which value of the enum was probably meant."""
    named = _suggestion(str(value).upper(), kind.values_by_name)
    return f"'{value}' is no {kind.name}{named or '; it is one of ' + ', '.join(kind.values_by_name)}"


def schema_of(message: Message) -> Descriptor:
    """The message's descriptor, whichever implementation of protobuf made it."""
    return cast(Descriptor, message.DESCRIPTOR)


def map_fields(field: FieldDescriptor) -> tuple[FieldDescriptor, FieldDescriptor]:
    """What a map's keys and its values are."""
    entry = cast(Descriptor, field.message_type).fields_by_name
    return entry["key"], entry["value"]


def is_repeated(field: FieldDescriptor) -> bool:
    """True for lists and maps."""
    # `label` warns in new releases of protobuf and `is_repeated` is missing in old ones; the default tells in all.
    return isinstance(field.default_value, list)


def is_map(field: FieldDescriptor) -> bool:
    """True for maps, which are repeated entries of a key and a value underneath."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _suggestion(word: str, known: Iterable[str]) -> str:
    import difflib  # only a mistake needs it, and every start would pay for it

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
