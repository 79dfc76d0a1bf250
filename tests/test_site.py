"""The site of `make docs`: all pages have a place, and their links lead to it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site() -> Any:
    """The script docs/site.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_written_and_its_links_lead_to_pages(site: Any, tmp_path: Path) -> None:
    site.write(tmp_path)
    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    assert {"index.md", "cli.md", "deploy/lambda.md", "decisions/0001-two-source-roots.md", "reporting.md"} <= pages
    for page in pages:
        text = site.FENCE.sub("", (tmp_path / page).read_text())
        for match in site.LINK.finditer(text):
            target = match["target"].partition("#")[0]
            assert not target or (tmp_path / page).parent.joinpath(target).is_file(), f"{page}: {target}"


def test_the_menu_names_pages_that_exist(site: Any) -> None:
    menu = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text())["nav"]
    named = re.findall(r"[\w./-]+\.md", str(menu))
    assert len(named) > 30
    assert set(named) <= set(site.places().values())
    missing = {place for place in site.places().values() if place.endswith(".md") and "/" not in place} - set(named)
    assert not missing, f"add them to docs/mkdocs.yml: {missing}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/cli.md#remora-serve)", "[a](cli.md#remora-serve)"),
        ("[a](docs/decisions)", "a"),
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
