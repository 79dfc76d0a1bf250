"""Names for plug-ins: each is that of its module, for type checkers and at run time."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import remora.api
from remora.api import lazily

FILES = sorted(path for path in Path(remora.api.__file__).parent.glob("*.py") if path.stem != "__init__")


def declared(path: Path) -> dict[str, str]:
    """The names that type checkers see, with their modules."""
    return {
        alias.name: node.module or ""
        for block in ast.parse(path.read_text()).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.stem))
def test_a_name_is_the_same_for_type_checkers_and_at_run_time(path: Path) -> None:
    face = importlib.import_module(f"remora.api.{path.stem}")
    names = declared(path)
    assert names
    for name, home in names.items():
        module = importlib.import_module(home)
        found = getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{home}.{name}")
        assert getattr(face, name) is found
    table = next(node.value for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign))
    assert isinstance(table, ast.Call)
    listed = {name: home for home, text in ast.literal_eval(table.args[1]).items() for name in text.split()}
    assert listed == names


def test_a_name_that_no_module_has_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'm' has no attribute 'other'"):
        lazily("m", {"json": "dumps"})("other")


def test_the_import_of_a_subject_imports_none_of_its_modules(child_environment: dict[str, str]) -> None:
    code = "import sys, " + ", ".join(f"remora.api.{path.stem}" for path in FILES) + "; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], env=child_environment, capture_output=True, text=True, check=True
    )
    loaded = {name for name in run.stdout.split() if name.startswith("remora.")}
    assert loaded == {"remora._version", "remora.api", *(f"remora.api.{path.stem}" for path in FILES)}
