"""Explanation of a text that protobuf refuses: the key path and the closest valid key.

A small scanner with the schema finds both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.text_format import ParseError

from remora.config.schema_errors import Path, SchemaError, is_repeated, unknown_key, unknown_value

_TOKEN = re.compile(
    r"""
    (?P<skip>\#[^\n]*|\s+)
    |(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<word>[A-Za-z_][\w]*)
    |(?P<number>[-+]?[.\d][\w.+-]*)
    |(?P<mark>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_TEMPLATE = re.compile(r"\$\{\w+\}|\$\w+|\{\{\s*\w+\s*\}\}|TYPE_\#\w+")
"""Place of a value in the templates that public repositories hold."""
_POSITION = re.compile(r"^\d+:\d+ : ")
_QUOTED_TEXT = re.compile(r"^'.*?': (?=[A-Z])", re.DOTALL)


def explain(schema: Descriptor, text: str, error: ParseError) -> SchemaError:
    """Return the parser's error with the key path.

    For an unknown key it also names the closest valid one.
    """
    template = _TEMPLATE.search(text)
    if template is not None:
        reason = f"{template[0]} must be filled in: this is a template of a configuration, not one that can be served"
        return SchemaError((), reason, text.count("\n", 0, template.start()) + 1)
    line = error.GetLine() or 0
    offset = _offset(text, line, error.GetColumn() or 0) if line else len(text)
    nearest: Path = ()
    for place in _places(schema, text):
        if place.reason:
            return SchemaError(place.path, place.reason, text.count("\n", 0, place.offset) + 1)
        if place.offset > offset:
            break
        nearest = place.path
    message = str(error).replace(f"{schema.file.package}.", "")
    reason = _QUOTED_TEXT.sub("", _POSITION.sub("", message))
    return SchemaError(nearest, " ".join(reason.split()), line)


def _offset(text: str, line: int, column: int) -> int:
    """Return the offset of a line and column, both counted from 1."""
    return sum(len(row) + 1 for row in text.split("\n")[: line - 1]) + column - 1


class _Place(NamedTuple):
    """A key of the text, or the end of a message. ``reason`` is the error there, "" for none."""

    path: Path
    offset: int
    reason: str = ""


@dataclass(slots=True)
class _Open:
    """A message before its closing brace. ``listed`` is its field whose ``[`` is open."""

    schema: Descriptor
    path: Path
    counts: dict[str, int] = field(default_factory=dict)
    listed: FieldDescriptor | None = None


def _places(schema: Descriptor, text: str) -> Iterator[_Place]:
    """Yield every key of the text in order, up to the first one that the schema lacks."""
    stack = [_Open(schema, ())]
    awaited: FieldDescriptor | None = None  # the field whose value comes next
    key: Path = ()
    for match in _TOKEN.finditer(text):
        token, kind, top = match.group(), match.lastgroup, stack[-1]
        if kind == "skip":
            continue
        if kind == "word" and awaited is None:
            awaited = top.schema.fields_by_name.get(token)
            if awaited is None:
                yield _Place((*top.path, token), match.start(), unknown_key(top.schema, token))
                return
            key = (*top.path, token)
            yield _Place(key, match.start())
        elif kind in ("word", "number", "text"):
            choices = awaited.enum_type if awaited is not None else None
            if kind == "word" and choices is not None and token not in choices.values_by_name:
                yield _Place(key, match.start(), unknown_value(choices, token))
                return
            awaited = top.listed
        elif token == "[":
            top.listed = awaited
        elif token == "]":
            awaited = top.listed = None
        elif token in ("{", "<") and awaited is not None and awaited.message_type is not None:
            stack.append(_Open(awaited.message_type, _numbered(top, awaited)))
            awaited = None
        elif token in ("}", ">") and len(stack) > 1:
            stack.pop()
            yield _Place(top.path, match.start())
            awaited = stack[-1].listed


def _numbered(owner: _Open, child: FieldDescriptor) -> Path:
    """Return the path of a message that begins here, with its index if it is repeated."""
    if not is_repeated(child):
        return (*owner.path, child.name)
    index = owner.counts.get(child.name, 0)
    owner.counts[child.name] = index + 1
    return (*owner.path, child.name, index)
