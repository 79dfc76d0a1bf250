"""Texts of the Makefile and of the files that it includes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def included() -> list[Path]:
    """Return the files that the Makefile includes, in order."""
    lines = re.findall(r"^include (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return [ROOT / name for line in lines for name in line.split()]


def make_text() -> str:
    """Return the Makefile with all files that it includes, long lines joined."""
    text = "\n".join(path.read_text() for path in (ROOT / "Makefile", *included()))
    return re.sub(r"\\\n\s*", "", text)


def described(text: str) -> list[str]:
    """Return the targets with a line in the help."""
    return re.findall(r"^([a-z-]+):.*##", text, re.MULTILINE)
