"""Writes the options' tables into docs/configuration.md; the law: the option dataclasses are the only source.

    python docs/reference.py            write the page anew
    python docs/reference.py --check    only say whether it is fresh, by the exit status

`make reference` runs the first, the tests the second.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from remora.options import EngineOptions, ServerOptions

PAGE = Path(__file__).parent / "configuration.md"
TABLES = {"engine": EngineOptions, "server": ServerOptions}
MARKED = "<!-- {0} options: written by docs/reference.py -->\n{1}<!-- end -->"


def table(kind: type[Any]) -> str:
    """A Markdown table of an option dataclass: flag, default, what it does."""
    lines = ["| Flag | Default | |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        lines.append(f"| `{_flag(field)}` | {_default(field)} | {_sentence(field)} |")
    return "\n".join(lines) + "\n"


def _flag(field: dataclasses.Field[Any]) -> str:
    if field.name == "paths":
        return "PATH..."  # what stands on the command line without a flag
    value = f" {field.metadata['metavar']}" if field.metadata.get("metavar") else ""
    return f"--{field.name.replace('_', '-')}{value}"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING or field.default in ("", (), None):
        return ""
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _sentence(field: dataclasses.Field[Any]) -> str:
    choices = field.metadata.get("choices") or ()
    more = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
    return str(field.metadata["help"]).replace("|", "\\|") + more


def rendered(page: str) -> str:
    """The page with every marked table made anew. Raises ValueError when a mark is missing."""
    for name, kind in TABLES.items():
        place = re.search(MARKED.format(name, ".*?"), page, re.DOTALL)
        if place is None:
            raise ValueError(f"{PAGE.name}: no place marked for the {name} options")
        page = page[: place.start()] + MARKED.format(name, table(kind)) + page[place.end() :]
    return page


def main(arguments: list[str]) -> int:
    """Write the page, or with --check only compare it."""
    page = PAGE.read_text(encoding="utf-8")
    fresh = rendered(page)
    if "--check" in arguments:
        if fresh != page:
            print(f"{PAGE} is stale: make reference", file=sys.stderr)
        return int(fresh != page)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
