"""Generator of the reference tables: options in configuration.md, modules in architecture.md.

    python docs/reference.py            write the pages
    python docs/reference.py --check    exit with status 1 if a page is stale

`make reference` runs the first command, the tests run the second. The sources are the option dataclasses and the first
lines of the modules.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remora.options import EngineOptions, ServerOptions

DOCS = Path(__file__).parent
SOURCES = (DOCS.parent / "core", DOCS.parent / "adapters")
END = "<!-- end -->"


def options_table(kind: type[Any]) -> str:
    """Return the Markdown table of an option dataclass: flag, default, help."""
    lines = ["| Flag | Default | |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        lines.append(f"| `{_flag(field)}` | {_default(field)} | {_sentence(field)} |")
    return "\n".join(lines) + "\n"


def _flag(field: dataclasses.Field[Any]) -> str:
    if field.name == "paths":
        return "PATH..."  # a positional argument
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


def modules() -> dict[str, Path]:
    """Return the files of all public modules by dotted name, without generated code."""
    found: dict[str, Path] = {}
    for source in SOURCES:
        for path in source.rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            if parts[-1] == "__init__":
                found[".".join(parts[:-1])] = path
            elif not parts[-1].startswith("_") and not parts[-1].endswith("_pb2"):
                found[".".join(parts)] = path
    return dict(sorted(found.items()))


def modules_table() -> str:
    """Return the Markdown table of the modules: name, first line of the docstring."""
    lines = ["| Module | Contents |", "|---|---|"]
    for name, path in modules().items():
        opening = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]
        lines.append(f"| `{name}` | {opening.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "configuration.md": {
        "engine options": lambda: options_table(EngineOptions),
        "server options": lambda: options_table(ServerOptions),
    },
    "architecture.md": {"modules": modules_table},
}


def rendered(name: str, page: str) -> str:
    """Return the page with its marked tables generated anew.

    Raises:
        ValueError: the page lacks a mark.
    """
    for subject, table in TABLES[name].items():
        mark = f"<!-- {subject}: written by docs/reference.py -->\n"
        place = re.search(re.escape(mark) + ".*?" + re.escape(END), page, re.DOTALL)
        if place is None:
            raise ValueError(f"{name}: no mark for the table of {subject}")
        page = page[: place.start()] + mark + table() + END + page[place.end() :]
    return page


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them if `--check` is given."""
    stale = 0
    for name in TABLES:
        path = DOCS / name
        page = path.read_text(encoding="utf-8")
        fresh = rendered(name, page)
        if "--check" not in arguments:
            path.write_text(fresh, encoding="utf-8")
        elif fresh != page:
            print(f"{path} is stale: make reference", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
