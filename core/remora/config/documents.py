"""Readers of JSON and YAML texts as plain values with the line of every key.

Both return dictionaries with text keys, lists, and scalars. Sizes are limited and repeated keys refused. YAML is read
from parser events: tags are ignored, no objects are constructed, and an alias shares its value instead of copying it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from remora.config.schema_errors import MAX_DEPTH, Path, SchemaError, nearest_line

_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)
_LONGEST_NUMBER = 400
"""Characters of a number in YAML: more than any float has, and few enough for numbers to the base of 60."""


def read_json(text: str) -> object:
    """Parse a JSON text.

    Raises:
        SchemaError: invalid JSON, nesting too deep, or a repeated key.
    """
    _check_json_depth(text)
    try:
        return json.loads(text, object_pairs_hook=_without_repetition)
    except json.JSONDecodeError as error:
        raise SchemaError((), f"not JSON: {error.msg} at column {error.colno}", error.lineno) from error
    except _RepeatedKeyError as error:
        path, line = _first_repetition(text)
        raise SchemaError(path or (error.key,), "the key appears twice", line) from None
    except ValueError as error:
        raise SchemaError((), f"not JSON: {error}") from error


def json_line(text: str, path: Path) -> int:
    """Return the line of ``path``, or of its closest ancestor, in a valid JSON text."""
    lines: dict[Path, int] = {}
    for found, line in _json_places(text):
        lines.setdefault(found, line)
    return nearest_line(lines, path)


def read_yaml(text: str) -> tuple[object, dict[Path, int]]:
    """Return the value of a YAML text of one document, and the line of each path.

    An empty text gives an empty map.

    Raises:
        SchemaError: invalid YAML, nesting too deep, or a repeated key.
    """
    import yaml  # imported here because few models have a YAML configuration

    try:
        # libyaml, if built in, emits the same events in a tenth of the time.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        try:
            return _Yaml(loader).document()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise SchemaError((), f"not YAML: {error.problem or error.context}", mark.line + 1 if mark else 0) from error
    except (yaml.YAMLError, ValueError) as error:
        raise SchemaError((), f"not YAML: {' '.join(str(error).split())}") from error


class _RepeatedKeyError(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKeyError(next(key for key in keys if keys.count(key) > 1))
    return found


def _check_json_depth(text: str) -> None:
    depth = 0
    for match in _JSON_TOKEN.finditer(text):
        token = match.group()
        if token in ("{", "["):
            depth += 1
            if depth > MAX_DEPTH:
                line = text.count("\n", 0, match.start()) + 1
                raise SchemaError((), f"nested deeper than {MAX_DEPTH} levels", line)
        elif token in ("}", "]"):
            depth -= 1


def _json_places(text: str) -> Iterator[tuple[Path, int]]:
    """Yield every key and list item of a JSON text with its line, in order.

    The text is valid as far as it is read.
    """
    path: list[str | int | None] = []  # key or index in each open container; None before the key is read
    line, seen = 1, 0
    for match in _JSON_TOKEN.finditer(text):
        token = match.group()
        line += text.count("\n", seen, match.start())
        seen = match.start()
        if token in ("}", "]"):
            path.pop()
        elif token == "," and path:
            top = path[-1]
            path[-1] = top + 1 if isinstance(top, int) else None
        elif token not in (",", ":"):
            if path and path[-1] is None:
                path[-1] = json.loads(token)
                yield _known(path), line
            elif path and isinstance(path[-1], int):
                yield _known(path), line
                path += _opened(token)
            else:
                path += _opened(token)


def _opened(token: str) -> list[str | int | None]:
    return [None] if token == "{" else [0] if token == "[" else []


def _known(path: list[str | int | None]) -> Path:
    return tuple(step for step in path if step is not None)


def _first_repetition(text: str) -> tuple[Path, int]:
    seen: set[Path] = set()
    for path, line in _json_places(text):
        if path in seen:
            return path, line
        seen.add(path)
    return (), 0


class _Yaml:
    """Builder of plain values from a loader's events. Records the line of each."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.lines: dict[Path, int] = {}
        self.anchors: dict[str, object] = {}

    def document(self) -> tuple[object, dict[Path, int]]:
        import yaml

        self.loader.get_event()  # the stream's start
        if self.loader.check_event(yaml.StreamEndEvent):
            return {}, self.lines
        self.loader.get_event()  # the document's start
        value = self._value((), 0)
        self.loader.get_event()  # the document's end
        if not self.loader.check_event(yaml.StreamEndEvent):
            raise SchemaError((), "a second document begins", self.loader.peek_event().start_mark.line + 1)
        return ({} if value is None else value), self.lines

    def _value(self, path: Path, depth: int) -> object:
        import yaml

        event = self.loader.get_event()
        line = event.start_mark.line + 1
        self.lines.setdefault(path, line)
        if depth > MAX_DEPTH:
            raise SchemaError(path, f"nested deeper than {MAX_DEPTH} levels", line)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise SchemaError(path, f"no value is anchored as '{event.anchor}' before this line", line)
            return self.anchors[event.anchor]
        value: object
        if isinstance(event, yaml.SequenceStartEvent):
            value = self._sequence(path, depth)
        elif isinstance(event, yaml.MappingStartEvent):
            value = self._mapping(path, depth)
        else:
            value = self._scalar(event)
        if event.anchor is not None:
            self.anchors[event.anchor] = value
        return value

    def _sequence(self, path: Path, depth: int) -> list[object]:
        import yaml

        items: list[object] = []
        while not self.loader.check_event(yaml.SequenceEndEvent):
            items.append(self._value((*path, len(items)), depth + 1))
        self.loader.get_event()
        return items

    def _mapping(self, path: Path, depth: int) -> dict[str, object]:
        import yaml

        items: dict[str, object] = {}
        while not self.loader.check_event(yaml.MappingEndEvent):
            event = self.loader.get_event()
            line = event.start_mark.line + 1
            if not isinstance(event, yaml.ScalarEvent):
                raise SchemaError(path, "a key must be plain text", line)
            # A key is its literal text, so that 7.5 in a map of compute capabilities is "7.5" instead of a number.
            key = event.value
            if key in items:
                raise SchemaError((*path, key), "the key appears twice", line)
            self.lines[(*path, key)] = line
            items[key] = self._value((*path, key), depth + 1)
        self.loader.get_event()
        return items

    def _scalar(self, event: Any) -> object:
        import yaml

        tag = (
            event.tag
            if event.tag not in (None, "!")
            else self.loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        )
        if len(event.value) > _LONGEST_NUMBER and tag.endswith((":int", ":float", ":timestamp")):
            raise SchemaError((), "not YAML: a number has too many digits", event.start_mark.line + 1)
        node = yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark)
        return self.loader.construct_object(node)
