"""How long imports take, measured while a start goes on; the law: afterwards nothing is left of the measuring.

Python has no hook for the end of an import but its `__import__`, which is put aside for the time.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

Told = Callable[[str, int, int, str], None]
"""Module, begin and end in ns, and the slow import that it is within."""


def time_imports(now_ns: Callable[[], int], told: Told, least_ns: int) -> Callable[[], None]:
    """Tell of each import that takes at least ``least_ns``, on any thread, until what is returned is called."""
    original = builtins.__import__
    under_way = threading.local()

    def timed(name: str, *rest: Any, **named: Any) -> ModuleType:
        if (rest[3] if len(rest) > 3 else named.get("level", 0)) > 0:  # its own package is being imported, and timed
            return original(name, *rest, **named)
        begin_ns = now_ns()
        outer: str = getattr(under_way, "module", "")
        under_way.module = name
        try:
            return original(name, *rest, **named)
        finally:
            under_way.module = outer
            end_ns = now_ns()
            if end_ns - begin_ns >= least_ns:
                told(name, begin_ns, end_ns, outer)

    def end() -> None:
        if builtins.__import__ is timed:  # else somebody has put a hook over ours, which then stays
            builtins.__import__ = original

    builtins.__import__ = timed
    return end
