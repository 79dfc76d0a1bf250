"""The table of failures in docs/infrastructure.md: every test that it names exists."""

from __future__ import annotations

import ast
import re

from infra.terraform import ROOT

PAGE = ROOT / "docs" / "infrastructure.md"
CITED = re.findall(r"`((?:tests|infra)/[\w./-]+)::(\w+)`", PAGE.read_text())


def names_in(file: str) -> set[str]:
    """The tests of a file, or the runs of a test of Terraform."""
    text = (ROOT / file).read_text()
    if file.endswith(".hcl"):
        return set(re.findall(r'^run "(\w+)"', text, re.MULTILINE))
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}


def test_every_test_of_the_table_exists() -> None:
    missing = [f"{file}::{name}" for file, name in CITED if not (ROOT / file).exists() or name not in names_in(file)]
    assert len(CITED) > 60
    assert missing == []


def test_every_failure_names_its_test() -> None:
    table = PAGE.read_text().partition("## Failures and their tests")[2]
    rows = re.findall(r"^\| (?!-)([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)
    assert rows
    assert [failure for failure, test in rows if test != "Test" and "::" not in test] == []
