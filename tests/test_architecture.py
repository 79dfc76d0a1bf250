"""docs/architecture.md against the tree: every module is in its table, and every row is a module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
SOURCES = {"remora": ROOT / "core", "remora_adapters": ROOT / "adapters"}
ROW = re.compile(r"^\| `(?P<module>remora\w*(?:\.\w+)*)` \| (?P<job>.+) \|$", re.MULTILINE)
FILE = re.compile(r"`(?P<path>(?:core|adapters|tests|docs)/[\w./-]+)`")


def modules() -> set[str]:
    """The dotted names of all modules, packages included, generated code and private ones left out."""
    found = set()
    for package, source in SOURCES.items():
        for path in (source / package).rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if (not name.endswith("_pb2") and not parts[-1].startswith("_")) or parts[-1] == "__init__":
                found.add(name)
    return found


def rows() -> list[tuple[str, str]]:
    return [(row["module"], row["job"]) for row in ROW.finditer(PAGE.read_text())]


def test_the_page_and_the_tree_name_the_same_modules() -> None:
    listed, real = {module for module, _ in rows()}, modules()
    assert not real - listed, f"in the tree but not in {PAGE.name}: {sorted(real - listed)}"
    assert not listed - real, f"in {PAGE.name} but not in the tree: {sorted(listed - real)}"


def test_no_module_is_listed_twice() -> None:
    listed = [module for module, _ in rows()]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(("module", "job"), rows(), ids=[module for module, _ in rows()])
def test_a_job_is_one_line(module: str, job: str) -> None:
    assert len(job) <= 160, f"{module}: say it shorter"


@pytest.mark.parametrize("path", sorted({match["path"] for match in FILE.finditer(PAGE.read_text())}))
def test_a_file_that_the_page_names_exists(path: str) -> None:
    assert (ROOT / path).exists()
