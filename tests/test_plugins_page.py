"""docs/plugins.md against the hooks that the code has, and the example against what the page permits."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from remora.server.http.route_groups import OpenGroup, RouteGroup, RouteParts

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "docs" / "examples" / "plugin"
INTERFACE = re.findall(r"`(remora[\w.]*)`", PAGE.partition("## Modules to import")[2])


def hooks_in_code() -> set[str]:
    """Groups of entry points that the code reads."""
    found = set()
    for path in sorted((ROOT / "core").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"plugins\.(?:find_)?installed\(\"(\w+)\"", text))
    return {f"remora.{kind}" for kind in found}


def imported(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "remora":
                yield node.module or ""


def test_the_page_has_a_row_for_each_hook_of_the_code_and_no_other() -> None:
    rows = re.findall(r"^\| [^|]+ \| `(remora\.\w+)` \|", PAGE, re.MULTILINE)
    assert len(rows) == 5
    assert set(rows) == hooks_in_code()


def test_the_page_names_each_member_of_a_group_and_each_part_that_it_gets() -> None:
    members = [name for kind in (RouteGroup, OpenGroup) for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    asked = [name for name in members if not name.startswith("_")]
    assert [name for name in asked if not re.search(rf"`{name}\b", PAGE)] == []
    assert [name for name in RouteParts._fields if name != "mailbox" and f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("module", INTERFACE)
def test_a_module_for_plug_ins_is_there(module: str) -> None:
    assert importlib.util.find_spec(module.rpartition(".")[0] if module[-1].isupper() else module) or "." not in module


def test_the_example_uses_each_hook_but_the_platforms_and_imports_what_the_page_permits_alone() -> None:
    groups = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(groups) == hooks_in_code() - {"remora.hosts"}
    assert sorted(set(imported(EXAMPLE)) - set(INTERFACE)) == []
