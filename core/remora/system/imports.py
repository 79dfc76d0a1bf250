"""How long imports take, measured while a start goes on; the law: afterwards nothing is left of the measuring.

A finder in front of Python's own finds modules as that does, and times how long each takes to run. The parts of other
libraries are not told apart: there are hundreds of them, and each look costs microseconds of the start.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Told = Callable[[str, int, int, str], None]
"""Module, begin and end in ns, and the import that it is within."""


def time_imports(now_ns: Callable[[], int], told: Told, least_ns: int) -> Callable[[], None]:
    """Tell of each import that takes at least ``least_ns``, on any thread, until what is returned is called."""
    finder: Any = _TimingFinder(now_ns, told, least_ns)
    place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(place, finder)

    def end() -> None:
        with suppress(ValueError):
            sys.meta_path.remove(finder)

    return end


class _TimingFinder:
    """Finds what `PathFinder` finds. Loaders are made for one module each, so that one's method can be its own."""

    def __init__(self, now_ns: Callable[[], int], told: Told, least_ns: int) -> None:
        self._now_ns = now_ns
        self._told = told
        self._least_ns = least_ns
        self._under_way = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None and not name.startswith("remora"):
            return None  # Python's own finder is asked next
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            with suppress(AttributeError):  # a loader that takes no attributes is not timed
                self._time(spec.loader, name)
        return spec

    def _time(self, loader: Any, name: str) -> None:
        run = loader.exec_module

        def timed(module: ModuleType) -> None:
            del loader.exec_module
            outer: str = getattr(self._under_way, "module", "")
            self._under_way.module = name
            begin_ns = self._now_ns()
            try:
                run(module)
            finally:
                end_ns = self._now_ns()
                self._under_way.module = outer
                if end_ns - begin_ns >= self._least_ns:
                    self._told(name, begin_ns, end_ns, outer)

        loader.exec_module = timed
