"""Limits on the grammars of requests, checked before a native library reads them. Pure.

Compilers of grammars recurse along nesting and references on the thread's native stack, whose overflow would end the
process, and the time of some of their steps grows faster than the grammar. The limits are far above what answers of
language models need, and low enough for `GRAMMAR_STACK_BYTES`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

GRAMMAR_STACK_BYTES = 64 << 20
"""Native stack of threads that compile or step grammars; five times what the deepest permitted grammar needs."""
MAX_GRAMMAR_BYTES = 256 << 10
MAX_SCHEMA_LEVELS = 1500
"""Levels of a schema, references included: 500 definitions that refer to one another, each three levels deep."""
MAX_OPTIONAL_PROPERTIES = 498
"""Optional properties of an object; llguidance keeps four items for each in one row of at most 2,000."""
MAX_CHOICES = 1999
"""Choices, or alternatives of a Lark grammar; llguidance keeps an item for each in one row of at most 2,000."""
MAX_PATTERN_PROPERTIES = 64
"""Patterns of property names in a whole schema, whose compilation takes time in their third power."""
MAX_LARK_COLONS = 2000
"""Colons of a Lark grammar. Each rule has one, and so has each member of a schema inside the grammar."""

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def grammar_excess(kind: str, text: str) -> str:
    """Return the limit that a grammar exceeds, with both numbers, or "".

    A text that is not what its kind needs exceeds none, because its compiler names the reason.

    Args:
        kind: one of `remora_llm.generation.tasks.GrammarKind`.
        text: the grammar's.
    """
    if len(text) > MAX_GRAMMAR_BYTES or len(text.encode("utf-8", "replace")) > MAX_GRAMMAR_BYTES:
        return f"it has more than {MAX_GRAMMAR_BYTES} bytes"
    if kind == "lark":
        return _lark_excess(text)
    if kind not in ("json_schema", "choice"):
        return ""
    try:
        document = json.loads(text)
    except RecursionError:
        return f"it is nested deeper than {MAX_SCHEMA_LEVELS} levels"
    except ValueError:
        return ""  # the compiler refuses it with its reason
    if kind == "json_schema":
        return _schema_excess(document)
    if isinstance(document, list) and len(document) > MAX_CHOICES:
        return f"it has {len(document)} choices; at most {MAX_CHOICES} are possible"
    return ""


def _lark_excess(text: str) -> str:
    if text.count(":") > MAX_LARK_COLONS:
        return f"it has {text.count(':')} rules and members of schemas; at most {MAX_LARK_COLONS} are possible"
    if text.count("|") >= MAX_CHOICES:
        return f"it has {text.count('|') + 1} alternatives; at most {MAX_CHOICES} are possible"
    return ""


def _schema_excess(document: Any) -> str:
    patterns = 0
    for part in _objects(document):
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, Mapping):
            needed = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
            optional = sum(name not in needed for name in properties)
            if optional > MAX_OPTIONAL_PROPERTIES:
                most = MAX_OPTIONAL_PROPERTIES
                return f"an object of it has {optional} optional properties; at most {most} are possible"
        found = part.get("patternProperties")
        patterns += len(found) if isinstance(found, Mapping) else 0
    if patterns > MAX_PATTERN_PROPERTIES:
        return f"it has {patterns} patternProperties; at most {MAX_PATTERN_PROPERTIES} are possible"
    levels = schema_levels(document)
    if levels > MAX_SCHEMA_LEVELS:
        return f"it is {levels} levels deep, references included; at most {MAX_SCHEMA_LEVELS} are possible"
    return ""


def schema_levels(document: Any) -> int:
    """Return the depth of a JSON schema in objects and lists, references followed.

    A definition counts once on each path, so that recursive schemas have a depth, too. The result is an upper bound:
    with recursion it is the depth of all definitions together.
    """
    targets = {id(document): 0}
    """Number of the region that begins with a container: the whole document, and each target of a reference."""
    numbers: dict[str, int] = {}
    for part in _objects(document):
        for reference in _references(part):
            if reference not in numbers:
                found = _resolved(document, reference)
                numbers[reference] = 0 if found is None else targets.setdefault(id(found), len(targets))
    depths = [1] * len(targets)
    followed: dict[int, set[int]] = {region: set() for region in range(len(targets))}
    waiting: list[tuple[Any, int, int]] = [(document, 0, 0)]
    while waiting:
        value, region, depth = waiting.pop()
        if not isinstance(value, dict | list):
            continue
        begun = targets.get(id(value), region)
        if begun != region:
            followed[region].add(begun)
            region, depth = begun, 0
        depths[region] = max(depths[region], depth + 1)
        if isinstance(value, dict):
            followed[region].update(numbers[each] for each in _references(value))
        members = value.values() if isinstance(value, dict) else value
        waiting += [(each, region, depth + 1) for each in members]
    return _longest(depths, followed)


def _longest(depths: list[int], followed: Mapping[int, set[int]]) -> int:
    """Return the largest sum of depths on a path, or the sum of all if there is a cycle."""
    sums: dict[int, int] = {}
    try:
        for region in TopologicalSorter(followed).static_order():  # those that a region leads to come before it
            sums[region] = depths[region] + max((sums[each] for each in followed[region]), default=0)
    except CycleError:
        return sum(depths)
    return max(sums.values())


def _objects(document: Any) -> Iterator[dict[str, Any]]:
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _references(part: Mapping[str, Any]) -> list[str]:
    return [value for key in _REFERENCES if isinstance(value := part.get(key), str)]


def _resolved(document: Any, reference: str) -> Any:
    """Return the container at a reference's JSON pointer, None for other references."""
    _, mark, pointer = reference.partition("#")
    if not mark or (pointer and not pointer.startswith("/")):
        return None
    value = document
    for word in unquote(pointer).split("/")[1:]:
        word = word.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(word)
        elif isinstance(value, list) and word.isdecimal() and len(word) < 8 and int(word) < len(value):
            value = value[int(word)]
        else:
            return None
    return value if isinstance(value, dict | list) else None
