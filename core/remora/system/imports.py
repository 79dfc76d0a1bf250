"""Timing of Python imports during the start of the server.

A finder placed before Python's own finds the same modules and times their execution. The submodules of third-party
packages are not timed separately because there are hundreds of them and each look-up costs microseconds.

Invariants: after the timing ends, no trace of it is left in `sys.meta_path`. The list itself is replaced and never
changed, because an import in another thread that iterates over it would skip a finder and miss an existing module.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

ImportRecorder = Callable[[str, int, int, str], None]
"""Module, begin and end in ns, and the name of the enclosing import."""


def time_imports(now_ns: Callable[[], int], record: ImportRecorder, least_ns: int) -> Callable[[], None]:
    """Record slow imports, on any thread, until the returned function is called.

    An import is slow if it takes at least ``least_ns``.
    """
    finder: Any = _TimingFinder(now_ns, record, least_ns)
    finders = sys.meta_path
    place = finders.index(PathFinder) if PathFinder in finders else len(finders)
    sys.meta_path = [*finders[:place], finder, *finders[place:]]

    def end() -> None:
        sys.meta_path = [each for each in sys.meta_path if each is not finder]

    return end


class _TimingFinder:
    """Meta path finder that times what `PathFinder` finds.

    Each loader serves one module, so it can be patched.
    """

    def __init__(self, now_ns: Callable[[], int], record: ImportRecorder, least_ns: int) -> None:
        self._now_ns = now_ns
        self._record = record
        self._least_ns = least_ns
        self._under_way = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None and not name.startswith("remora"):
            return None  # the next finder, Python's own, handles it
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            with suppress(AttributeError):  # a loader without settable attributes is not timed
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
                    self._record(name, begin_ns, end_ns, outer)

        loader.exec_module = timed
