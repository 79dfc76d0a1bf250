"""The table of mutants keeps up with the code: each piece is there once, and so are the tests that guard it."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
AT_LEAST = 10
"""Mistakes to plant in each decider."""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_table", ROOT / "tests" / "mutants" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


MUTANTS = load().MUTANTS


@pytest.mark.parametrize("file", sorted({row.file for row in MUTANTS}))
def test_each_piece_is_in_its_file_once_and_becomes_another(file: str) -> None:
    rows = [row for row in MUTANTS if row.file == file]
    source = (ROOT / rows[0].path).read_text()
    assert [row.original for row in rows if source.count(row.original) != 1] == []
    assert [row for row in rows if row.original == row.replacement] == []
    assert all((ROOT / path).is_file() for row in rows for path in row.tests)


def test_each_decider_has_enough_of_them_and_none_twice() -> None:
    assert min(Counter(row.file for row in MUTANTS).values()) >= AT_LEAST
    assert len(set(MUTANTS)) == len(MUTANTS)
