"""docs/behaviours.md against its citations: each resolves, and each line of the page is cited."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "behaviours.md"
IDS = r"[A-Z]\d\d(?:-[A-Z]?\d\d)?"
CITATION = re.compile(rf"\[({IDS}(?:(?:, | and | to ){IDS})*)\]")
LINES = set(re.findall(r'^\| <a id="[a-z]\d\d"></a>([A-Z]\d\d) \|', PAGE.read_text(encoding="utf-8"), re.MULTILINE))
# These name documents that are not in the repository.
DANGLING = re.compile(r"\bspec [A-Z]\d\d|\((?:clouds|users) \d|\bperf\.md\b")


def ids(citation: str) -> Iterator[str]:
    """Yield the ids of a citation: `D07-D12` stands for six."""
    for each in re.findall(IDS, citation):
        first, _, last = each.partition("-")
        for number in range(int(first[1:]), int(last[-2:] or first[1:]) + 1):
            yield f"{first[0]}{number:02d}"


def texts() -> Iterator[tuple[Path, str]]:
    """Yield the text files that may cite the page."""
    for root in ("core", "adapters", "tests", "docs"):
        for path in sorted((ROOT / root).rglob("*")):
            if path.suffix in (".py", ".md", ".json", ".toml") and path not in (PAGE, Path(__file__).resolve()):
                yield path, path.read_text(encoding="utf-8")


def test_a_range_of_ids_names_each_of_them() -> None:
    assert list(ids("D07-D09, K01")) == ["D07", "D08", "D09", "K01"]


def test_each_citation_is_a_line_of_the_page_and_each_line_is_cited() -> None:
    cited = {each: path for path, text in texts() for found in CITATION.findall(text) for each in ids(found)}
    assert not {each: path for each, path in cited.items() if each not in LINES}
    assert not LINES - set(cited), "nothing cites these lines"


def test_no_reference_names_a_document_that_is_not_here() -> None:
    found = [f"{path.relative_to(ROOT)}: {match[0]}" for path, text in texts() for match in DANGLING.finditer(text)]
    assert not found
