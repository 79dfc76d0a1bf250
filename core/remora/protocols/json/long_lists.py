"""Long lists that are built and freed in steps, between which other threads may run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

_RELEASE_STEP = 16_384
"""Values that are freed at once."""
_CONTAINERS = (list, dict)
_SHORT = 32
"""Lists of up to this length are freed together, `_RELEASE_STEP` at a time."""


class _Elements:
    """Elements of all parts, with a length hint.

    By the hint `list.extend` makes room once. A list that grows part by part is moved again and again, and moving
    millions of values takes up to 0.1 s.
    """

    __slots__ = ("_count", "_parts")

    def __init__(self, parts: Iterable[Sequence[Any]], count: int) -> None:
        self._parts = parts
        self._count = count

    def __length_hint__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._parts)


def extend(values: list[Any], parts: Iterable[Sequence[Any]], count: int) -> None:
    """Append the elements of all parts, which are ``count`` together.

    Other threads may run between two parts if ``parts`` is a generator.
    """
    values.extend(_Elements(parts, count))


def release(document: Any) -> None:
    """Free a JSON document that is not used any more, a bounded number of values at a time.

    Freeing all at once would keep other threads waiting. Lists and objects within it become empty.
    """
    left = [document]
    while left:
        top = left[-1]
        if type(top) is dict:
            left[-1] = list(top.values())
            while top:
                top.popitem()
        elif type(top) is not list or not top:
            left.pop()
        else:
            part = top[-_RELEASE_STEP:]
            del top[-_RELEASE_STEP:]
            left += [each for each in part if _is_long(each)]


def _is_long(value: Any) -> bool:
    """Return True if a list or an object is not freed in one step with others."""
    if type(value) is list:
        return len(value) > _SHORT or (bool(value) and type(value[0]) in _CONTAINERS)
    return type(value) is dict and (len(value) > _SHORT or any(type(each) in _CONTAINERS for each in value.values()))
