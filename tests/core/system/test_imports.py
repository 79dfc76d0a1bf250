"""Imports are timed while a start goes on, and are left alone afterwards."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path

import pytest

from fakes import FakeClock
from remora.system.imports import time_imports


def test_slow_imports_are_told_with_what_they_are_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    (tmp_path / "slow_inner.py").write_text("import builtins\nbuiltins.advance(30)\n")
    (tmp_path / "slow_outer.py").write_text("import slow_inner, quick\n")
    (tmp_path / "quick.py").write_text("import json\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(builtins, "advance", clock.advance, raising=False)
    told: list[tuple[str, int, int, str]] = []
    before = builtins.__import__
    end = time_imports(clock.monotonic_ns, lambda *row: told.append(row), 20)
    try:
        __import__("slow_outer")
    finally:
        end()
        for name in ("slow_inner", "slow_outer", "quick"):
            sys.modules.pop(name, None)
    assert [(name, stop - start, within) for name, start, stop, within in told] == [
        ("slow_inner", 30, "slow_outer"),
        ("slow_outer", 30, ""),
    ]
    assert builtins.__import__ is before


def test_a_hook_that_somebody_put_over_ours_stays() -> None:
    before = builtins.__import__
    end = time_imports(lambda: 0, lambda *row: None, 1)
    ours = builtins.__import__

    def theirs(*rest: object, **named: object) -> object:
        return ours(*rest, **named)  # type: ignore[arg-type]

    builtins.__import__ = theirs  # type: ignore[assignment]
    try:
        end()
        assert builtins.__import__ is theirs
    finally:
        builtins.__import__ = before


def test_a_module_that_is_not_there_is_still_not_there() -> None:
    end = time_imports(lambda: 0, lambda *row: None, 1)
    try:
        with pytest.raises(ModuleNotFoundError):
            __import__("no_such_module_at_all")
        from collections import abc

        assert abc.Mapping
    finally:
        end()
