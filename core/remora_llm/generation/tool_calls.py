"""Parsers of the tool calls in an answer that is still being written. Pure.

A parser gets the text in parts and returns events. Invariants: the events do not depend on the parts; the time is
linear in the text; text that turns out to be no call is returned as text, so that nothing is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple, Protocol

_ARGUMENT_KEYS = ("arguments", "parameters")
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\],:]')


class TextPart(NamedTuple):
    """Text of the answer outside of calls."""

    text: str


class CallBegin(NamedTuple):
    """Begin of a call; its arguments follow."""

    call: int
    name: str


class ArgumentsPart(NamedTuple):
    """Part of the JSON text of a call's arguments."""

    call: int
    text: str


ToolEvent = TextPart | CallBegin | ArgumentsPart


class ToolParser(Protocol):
    """Parser of one answer."""

    def feed(self, text: str) -> list[ToolEvent]:
        """Return what a part of the text contains."""

    def finish(self) -> list[ToolEvent]:
        """Return what was held back, at the end of the text."""


class _JsonPlace:
    """Place within a JSON value: its nesting, and whether it is in a string."""

    __slots__ = ("depth", "escaped", "in_string")

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.escaped = False

    def skip_string(self, text: str, at: int) -> int:
        """Return the position behind the next piece of a string."""
        if self.escaped:
            self.escaped = False
            return at + 1
        found = _IN_STRING.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self.escaped = True
        else:
            self.in_string = False
        return found.end()


class _CallScanner:
    """Scanner of one JSON object with a name and arguments, in parts.

    ``name`` is None before it is known. Arguments that precede the name are kept until then.
    """

    __slots__ = ("_begun", "_kept", "_key", "_place", "_raw", "_role", "arguments", "done", "name", "seen")

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = False
        self.done = False
        self.seen: list[str] = []
        """The whole text, until the object is known to be a call."""
        self._place = _JsonPlace()
        self._begun = False
        self._role = "key"
        self._key = ""
        self._raw: list[str] = []
        self._kept: list[str] = []

    @property
    def is_call(self) -> bool:
        """True if name and arguments have begun."""
        return self.name is not None and self.arguments

    def feed(self, text: str, at: int) -> tuple[int, list[str]]:
        """Scan from a position.

        Returns the position behind the object, or the end, and new text of arguments."""
        begin, size = at, len(text)
        place = self._place
        mark = at  # begin of the value or key that is being read
        while at < size and not self.done:
            if place.in_string:
                at = place.skip_string(text, at)
                continue
            found = _OUTSIDE.search(text, at)
            if found is None:
                at = size
                break
            character, at = found[0], found.end()
            if character == '"':
                place.in_string = True
            elif character in "{[":
                place.depth += 1
                if place.depth == 1:
                    mark = at
            elif character in "}]":
                place.depth -= 1
                if place.depth == 0:
                    self._take(text[mark : at - 1])
                    self._end_value()
                    self.done = True
            elif place.depth == 1 and character == ":" and self._role == "key":
                self._take(text[mark : at - 1])
                self._end_key()
                mark = at
            elif place.depth == 1 and character == "," and self._role == "value":
                self._take(text[mark : at - 1])
                self._end_value()
                mark = at
        if not self.done and place.depth:
            self._take(text[mark:at])
        if not self.is_call:
            self.seen.append(text[begin:at])
        parts, self._kept = (self._kept, []) if self.is_call else ([], self._kept)
        return at, parts

    def _take(self, raw: str) -> None:
        if self._role == "value" and self._key in _ARGUMENT_KEYS:
            raw = raw if self._begun else raw.lstrip()
            self._begun = self._begun or bool(raw)
            if raw:
                self._kept.append(raw)
        elif self._role == "key" or self._key == "name":
            self._raw.append(raw)

    def _end_key(self) -> None:
        self._key = _string_of("".join(self._raw)) or ""
        self._raw, self._role, self._begun = [], "value", False
        if self._key in _ARGUMENT_KEYS:
            self.arguments = True

    def _end_value(self) -> None:
        if self._role == "value" and self._key == "name" and self.name is None:
            self.name = _string_of("".join(self._raw))
        self._raw, self._role, self._key = [], "key", ""


def _string_of(raw: str) -> str | None:
    """Return the value of a JSON string, None for anything else."""
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class _Calls:
    """Calls of one answer: numbers them and turns scanned text into events."""

    def __init__(self) -> None:
        self._scanner: _CallScanner | None = None
        self._count = 0
        self._announced = False

    @property
    def is_open(self) -> bool:
        """True within an object."""
        return self._scanner is not None

    def begin(self) -> None:
        """Expect an object."""
        self._scanner, self._announced = _CallScanner(), False

    def feed(self, text: str, at: int, events: list[ToolEvent]) -> int:
        """Scan the object and append its events; return the position behind what was read."""
        scanner = self._scanner
        assert scanner is not None
        at, parts = scanner.feed(text, at)
        if scanner.is_call:
            if not self._announced:
                self._announced = True
                events.append(CallBegin(self._count, scanner.name or ""))
            events += [ArgumentsPart(self._count, part) for part in parts]
        if scanner.done:
            self._close(events)
        return at

    def _close(self, events: list[ToolEvent]) -> None:
        scanner, self._scanner = self._scanner, None
        assert scanner is not None
        if self._announced:
            self._count += 1
        elif scanner.name is not None:  # a call without arguments
            events += [CallBegin(self._count, scanner.name), ArgumentsPart(self._count, "{}")]
            self._count += 1
        else:
            events.append(TextPart("".join(scanner.seen)))

    def finish(self, events: list[ToolEvent]) -> None:
        """Return an object that is not a call, and was cut off, as text."""
        scanner, self._scanner = self._scanner, None
        if scanner is not None and not self._announced and scanner.seen:
            events.append(TextPart("".join(scanner.seen)))


class MarkedCalls:
    """Parser of calls behind a mark.

    Examples: Hermes' ``<tool_call>{...}</tool_call>`` and Mistral's ``[TOOL_CALLS][{...}]``.

    Args:
        mark: begins a call.
        close: ends it; empty if calls go on to the end of the answer.
    """

    def __init__(self, mark: str, close: str = "") -> None:
        self._mark = mark
        self._close = close
        self._calls = _Calls()
        self._inside = False
        self._held = ""
        self._unused: list[str] | None = None
        """The text since the mark, until an object begins."""

    def feed(self, text: str) -> list[ToolEvent]:
        """Return what a part of the text contains."""
        events: list[ToolEvent] = []
        text, self._held, at = self._held + text, "", 0
        while at < len(text):
            if self._calls.is_open:
                at = self._calls.feed(text, at, events)
            elif self._inside:
                at = self._between(text, at, events)
            else:
                at = self._outside(text, at, events)
        return _joined(events)

    def _between(self, text: str, at: int, events: list[ToolEvent]) -> int:
        """Look for the next object, or the end of the calls."""
        place = text.find("{", at)
        if self._close:
            end = text.find(self._close, at)
            if end >= 0 and (place < 0 or end < place):
                self._inside = False
                self._skip(text[at : end + len(self._close)])
                self._give_up(events)
                return end + len(self._close)
        if place >= 0:
            self._unused = None
            self._calls.begin()
            return place
        keep = len(text) - _prefix(text, self._close, at)
        self._skip(text[at:keep])
        self._held = text[keep:]
        return len(text)

    def _skip(self, text: str) -> None:
        if self._unused is not None:
            self._unused.append(text)

    def _give_up(self, events: list[ToolEvent]) -> None:
        """Return a mark that no object follows as text."""
        unused, self._unused = self._unused, None
        if unused is not None:
            events.append(TextPart("".join(unused)))

    def _outside(self, text: str, at: int, events: list[ToolEvent]) -> int:
        place = text.find(self._mark, at)
        if place >= 0:
            events.append(TextPart(text[at:place]))
            self._inside, self._unused = True, [self._mark]
            return place + len(self._mark)
        keep = len(text) - _prefix(text, self._mark, at)
        events.append(TextPart(text[at:keep]))
        self._held = text[keep:]
        return len(text)

    def finish(self) -> list[ToolEvent]:
        """Return what was held back."""
        events: list[ToolEvent] = []
        self._give_up(events)
        if not self._inside or events:
            events.append(TextPart(self._held))
        self._held = ""
        self._calls.finish(events)
        return _joined(events)


class BareCalls:
    """Parser of calls without a mark.

    An answer that begins with a JSON object, or a list of objects, is a sequence of calls.

    Args:
        mark: optional text before the first object, such as Llama 3's ``<|python_tag|>``.
    """

    def __init__(self, mark: str = "") -> None:
        self._mark = mark
        self._calls = _Calls()
        self._held = ""
        self._state = "begin"

    def feed(self, text: str) -> list[ToolEvent]:
        """Return what a part of the text contains."""
        events: list[ToolEvent] = []
        if self._state == "text":
            return [TextPart(text)] if text else []
        text, self._held, at = self._held + text, "", 0
        if self._state == "begin":
            at = self._begin(text)
            if at < 0:
                return []
            if self._state == "text":
                return [TextPart(text)]
        while at < len(text):
            if self._calls.is_open:
                at = self._calls.feed(text, at, events)
                continue
            place = text.find("{", at)
            if place < 0:
                break  # separators between calls, such as ";" and ","
            self._calls.begin()
            at = place
        return _joined(events)

    def _begin(self, text: str) -> int:
        """Decide at the begin of the answer whether it is a call. Return -1 while that is open."""
        stripped = text.lstrip()
        if self._mark and stripped.startswith(self._mark):
            stripped = stripped[len(self._mark) :].lstrip()
        elif self._mark and stripped and self._mark.startswith(stripped):
            self._held = text
            return -1
        inner = stripped.removeprefix("[").lstrip()
        if not inner:
            self._held = text
            return -1
        self._state = "calls" if inner.startswith("{") else "text"
        return len(text) - len(inner)

    def finish(self) -> list[ToolEvent]:
        """Return what was held back."""
        events: list[ToolEvent] = [TextPart(self._held)]
        self._held = ""
        self._calls.finish(events)
        return _joined(events)


def _prefix(text: str, mark: str, at: int) -> int:
    """Return the length of the longest end of a text that begins a mark."""
    for size in range(min(len(mark) - 1, len(text) - at), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


def _joined(events: list[ToolEvent]) -> list[ToolEvent]:
    """Return events without empty texts, neighbouring parts of the same kind joined."""
    found: list[ToolEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, TextPart):
            if not event.text:
                continue
            if isinstance(last, TextPart):
                found[-1] = TextPart(last.text + event.text)
                continue
        elif isinstance(event, ArgumentsPart) and isinstance(last, ArgumentsPart) and last.call == event.call:
            found[-1] = ArgumentsPart(event.call, last.text + event.text)
            continue
        found.append(event)
    return found


PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": lambda: MarkedCalls("<tool_call>", "</tool_call>"),
    "llama3": lambda: BareCalls("<|python_tag|>"),
    "mistral": lambda: MarkedCalls("[TOOL_CALLS]"),
    "json": BareCalls,
}
"""Parsers by name."""


def detect_parser(template: str) -> str:
    """Return the parser for the format that a chat template teaches, "" for none."""
    for mark, name in (("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama3")):
        if mark in template:
            return name
    return "json" if '"parameters"' in template and '"name"' in template else ""
