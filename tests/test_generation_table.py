"""The tables of docs/reliability.md: every test that they name exists, and each promise of language models has one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text()
SECTION = PAGE.partition("## Language models: promises, faults and their tests")[2].partition("\n## ")[0]


def names_in(file: str) -> set[str]:
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_of_the_tables_exists() -> None:
    cited = re.findall(r"`(tests/[\w./-]+)::(\w+)`", SECTION)
    assert len(cited) > 60
    assert [f"{file}::{name}" for file, name in cited if not (ROOT / file).exists() or name not in names_in(file)] == []


def test_every_row_names_its_test() -> None:
    rows = re.findall(r"^\| (?!-)([^|]+) \| (.+) \|$", SECTION, re.MULTILINE)
    assert len(rows) > 35
    assert [promise for promise, tests in rows if tests != "Test" and "::test_" not in tests] == []


def test_the_slowest_tests_are_in_files_that_exist() -> None:
    files = re.findall(r"^\| [\d.]+ \| `([\w./]+)`: ", PAGE.partition("## Test duration")[2], re.MULTILINE)
    assert len(files) > 10
    assert [file for file in files if not (ROOT / "tests" / file).exists()] == []
