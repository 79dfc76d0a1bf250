"""Every usual mistake of a platform's containers has a test that would catch it: the table is usual_mistakes.toml."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest

from remora_deploy.emulate import find_platform

TESTS = Path(__file__).resolve().parents[1]
TABLE: dict[str, list[dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("usual_mistakes.toml").read_text(encoding="utf-8")
)
EACH = [(platform, number) for platform, rows in TABLE.items() for number in range(len(rows))]


@cache
def names_in(path: str) -> frozenset[str]:
    """The names of the test functions in a file."""
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_each_platform_has_its_ten() -> None:
    assert {platform: len(rows) for platform, rows in TABLE.items()} == dict.fromkeys(
        ("sagemaker", "azureml", "knative", "kserve", "lambda", "vertex"), 10
    )


@pytest.mark.parametrize(("platform", "number"), EACH)
def test_a_mistake_has_a_test_that_is_there(platform: str, number: int) -> None:
    row = TABLE[platform][number]
    assert set(row) <= {"mistake", "tests", "checks"}
    tests, checks = row.get("tests", []), row.get("checks", [])
    assert row["mistake"]
    assert tests or checks, "nothing would catch it"
    for test in tests:
        path, _, name = test.partition("::")
        assert name.startswith("test_")
        assert name in names_in(path), test
    for check in checks:
        played, _, wanted = check.partition(":")
        assert wanted in {each.id for each in find_platform(played).checks}, check


def test_azures_server_is_not_a_requirement_of_ours() -> None:
    try:
        wanted = requires("remora") or []
    except PackageNotFoundError:
        wanted = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = " ".join(wanted).lower()
    assert "azureml" not in names.replace('extra == "azureml"', "").replace("extra == 'azureml'", "")
    assert "flask" not in names
