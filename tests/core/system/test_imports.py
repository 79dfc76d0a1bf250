"""Imports are timed while a start goes on, and are left alone afterwards."""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from remora.system.imports import time_imports
from support.engine.fakes import FakeClock

Told = list[tuple[str, int, str]]


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    """A clock that the modules of a folder on the path can turn: two slow ones, one within the other, and a quick."""
    clock = FakeClock()
    (tmp_path / "slow_inner.py").write_text("import builtins\nbuiltins.advance(30)\n")
    (tmp_path / "slow_outer.py").write_text("import slow_inner, quick\n")
    (tmp_path / "quick.py").write_text("import json\n")
    (tmp_path / "failing.py").write_text("import builtins\nbuiltins.advance(40)\nraise ValueError('no')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(builtins, "advance", clock.advance, raising=False)
    yield clock
    for name in ("slow_inner", "slow_outer", "quick", "failing"):
        sys.modules.pop(name, None)


def test_slow_imports_are_reported_with_their_importers(clock: FakeClock) -> None:
    told: Told = []
    before = list(sys.meta_path)
    end = time_imports(
        clock.monotonic_ns, lambda name, begin, stop, outer: told.append((name, stop - begin, outer)), 20
    )
    try:
        module = importlib.import_module("slow_outer")
    finally:
        end()
    assert told == [("slow_inner", 30, "slow_outer"), ("slow_outer", 30, "")]
    assert sys.meta_path == before
    assert "exec_module" not in vars(module.__spec__.loader), "nothing is left on what was imported"


def test_an_import_that_fails_fails_as_it_would(clock: FakeClock) -> None:
    told: Told = []
    end = time_imports(
        clock.monotonic_ns, lambda name, begin, stop, outer: told.append((name, stop - begin, outer)), 20
    )
    try:
        with pytest.raises(ValueError, match="no"):
            importlib.import_module("failing")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_module_at_all")
    finally:
        end()
        end()
    assert told == [("failing", 40, "")]


def test_an_import_that_is_under_way_when_the_timing_ends_finds_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "__init__.py").touch()
    (tmp_path / "some_package" / "inner.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    before = sys.meta_path
    end = time_imports(lambda: 0, lambda *_: None, 20)

    class EndingFinder:
        """Finder between the timing and Python's own, at which another thread ends the timing."""

        def find_spec(self, *_: object) -> None:
            end()

    finders = sys.meta_path
    place = finders.index(PathFinder)
    sys.meta_path = [*finders[:place], EndingFinder(), *finders[place:]]
    try:
        importlib.import_module("some_package.inner")
    finally:
        sys.meta_path = before
        for name in ("some_package", "some_package.inner"):
            sys.modules.pop(name, None)
