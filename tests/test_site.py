"""The site of `make docs`: all pages have a place, and their links lead to it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGE = re.compile(r"[\w./-]+\.md")


@pytest.fixture(scope="module")
def site() -> Iterator[Any]:
    """The script docs/site.py as a module, with the scripts beside it."""
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield module


def test_every_page_is_written_and_its_links_lead_to_pages(site: Any, tmp_path: Path) -> None:
    site.write(tmp_path)
    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    assert {"index.md", "cli.md", "deploy/lambda.md", "decisions/0001-two-source-roots.md", "reporting.md"} <= pages
    for page in pages:
        text = site.FENCE.sub("", (tmp_path / page).read_text())
        for match in site.LINK.finditer(text):
            target = match["target"].partition("#")[0]
            assert not target or (tmp_path / page).parent.joinpath(target).is_file(), f"{page}: {target}"


def menu() -> dict[str, set[str]]:
    """Return the pages of each part of the menu by its title."""
    entries = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text())["nav"]
    return {title: set(PAGE.findall(str(part))) for entry in entries for title, part in entry.items()}


def test_the_menu_names_pages_that_exist(site: Any) -> None:
    named = set().union(*menu().values())
    assert len(named) > 30
    assert named <= set(site.places().values())
    missing = {place for place in site.places().values() if place.endswith(".md") and "/" not in place} - named
    assert not missing, f"add them to docs/mkdocs.yml: {missing}"


def test_the_menu_has_three_doors_and_how_it_works_is_behind_the_third() -> None:
    doors = menu()
    assert list(doors) == ["Overview", "Use", "Operate", "How it works"]
    inside = {"architecture.md", "behaviours.md", "changelog.md", "decisions/index.md", "modules.md"}
    assert inside <= doors["How it works"]
    assert not inside & (doors["Overview"] | doors["Use"] | doors["Operate"])


def test_the_documentation_by_task_has_the_doors_and_pages_of_the_menu(site: Any) -> None:
    page = (ROOT / "docs" / "README.md").read_text()
    doors = dict(re.findall(r"^## ([\w ]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    known = site.places()
    linked = {
        title: {
            known[path]
            for target in re.findall(r"\]\(([^)]+)\)", text)
            if (path := (ROOT / "docs" / target).resolve()) in known
            if "examples" not in path.parts
        }
        for title, text in doors.items()
    }
    assert linked == {title: pages - {"pages.md"} for title, pages in menu().items() if title != "Overview"}


def test_the_site_has_a_page_of_all_modules_and_one_of_all_decisions(site: Any, tmp_path: Path) -> None:
    site.write(tmp_path)
    modules = (tmp_path / "modules.md").read_text()
    assert "| `remora.engine` | Inference engine" in modules
    assert modules.count("\n| `") > 400
    records = [path.name for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    assert re.findall(r"\]\(([\w.-]+)\)", (tmp_path / "decisions" / "index.md").read_text()) == records


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/cli.md#remora-serve)", "[a](cli.md#remora-serve)"),
        ("[a](docs/decisions)", "[a](decisions/index.md)"),
        ("[a](core)", "[a](modules.md)"),
        ("[a](core/remora/engine.py)", "a"),
        ("[a](#heading)", "[a](#heading)"),
        ("[a](https://example.invalid)", "[a](https://example.invalid)"),
        ("```text\n[a](docs/gone.md)\n```", "```text\n[a](docs/gone.md)\n```"),
        ('<img src="docs/images/page.png" alt="">', '<img src="images/page.png" alt="">'),
    ],
)
def test_links_are_rewritten_for_the_site(site: Any, text: str, expected: str) -> None:
    assert site.rewritten(text, ROOT / "README.md", site.places()) == expected


def test_a_link_to_nothing_is_refused(site: Any) -> None:
    with pytest.raises(ValueError, match=r"'docs/gone.md' leads nowhere"):
        site.rewritten("[a](docs/gone.md)", ROOT / "README.md", site.places())
