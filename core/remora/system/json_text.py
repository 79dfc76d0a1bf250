"""Reader of JSON that other programs or people have written, outside of requests.

`json.loads` fails with RecursionError for deep texts, which no caller expects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import json

MAX_DEPTH = 200
"""Deepest nesting that is read, so that no later step that recurses over the value can fail."""


def read_json(text: str | bytes | bytearray, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of a JSON text.

    ``pairs`` makes the objects, as ``object_pairs_hook`` does.

    Raises JSONDecodeError, a ValueError, also for a text that is nested too deep, and what ``pairs`` raises.
    """
    import json  # imported here, because most starts read no JSON

    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise _too_deep() from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [each for found in level for each in _members(found) if isinstance(each, dict | list)]
        if not level:
            return value
    raise _too_deep()


def _members(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep() -> json.JSONDecodeError:
    import json

    return json.JSONDecodeError(f"nested deeper than {MAX_DEPTH} levels", "", 0)
