"""The words of docstrings, comments, help texts and pages, with an allowance of house words that only shrinks."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = [path for root in ("core", "adapters") for path in sorted((ROOT / root).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TESTS = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path.name != "test_language.py"]
INFRASTRUCTURE = [
    path
    for root in ("infra", "containers")
    for path in sorted((ROOT / root).rglob("*"))
    if path.suffix in {".tf", ".hcl", ".yaml", ".md"} and ".terraform" not in path.parts
]

# Each hides the actor, personifies a value, or stands for a term of the field (docs/glossary.md).
WORDS = (
    "nobody",
    "somebody",
    "whoever",
    "be it",
    "of its own",
    "of their own",
    "the law",
    "(?:is|are|was|were) told",
    "(?:is|are|was|were) asked",
    "(?<!there )(?:is|are) (?:no(?! longer)|none)",
    "there is nothing to",
    "what is to be",
    "in trouble",
    "for company",
    "whims?",
    "errands?",
    "wish(?:es)?",
)
PATTERN = re.compile(r"\b(?:" + "|".join(WORDS) + r")\b", re.IGNORECASE)
ALLOWED = 4
FIRST_LINE = 90
LONG_ALLOWED = 52


def prose(path: Path, *, strings: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings of a module with their lines, and its other strings if ``strings``."""
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if strings and isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
        elif not strings and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


def hits() -> list[str]:
    """Return each banned word with its place, Triton's own texts left out."""
    found = []
    for path in CODE:
        if path.stem.endswith("_pb2"):
            continue
        for line, text in prose(path):
            found += [f"{path.relative_to(ROOT)}:{line}: {match[0]}" for match in PATTERN.finditer(text)]
    for path in PAGES:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{path.relative_to(ROOT)}:{number}: {match[0]}" for match in PATTERN.finditer(text)]
    return found


def test_the_text_uses_the_terms_of_the_field() -> None:
    found = hits()
    assert len(found) <= ALLOWED, f"{len(found)} hits, {ALLOWED} allowed:\n" + "\n".join(found)


def test_tests_and_infrastructure_use_the_terms_of_the_field() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in TESTS
        for line, text in prose(path, strings=False)
        for match in PATTERN.finditer(text)
    ]
    for path in INFRASTRUCTURE:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{path.relative_to(ROOT)}:{number}: {match[0]}" for match in PATTERN.finditer(text)]
    assert not found, "\n".join(found)


def test_a_docstrings_first_line_is_one_short_clause() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.body[0].lineno}: {len(first)} characters"
        for path in CODE
        if not path.stem.endswith("_pb2")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if len(first := (ast.get_docstring(node) or "").partition("\n")[0]) > FIRST_LINE
    ]
    assert len(long) <= LONG_ALLOWED, "put the rest into the body:\n" + "\n".join(long)


if __name__ == "__main__":
    print("\n".join(hits()))
