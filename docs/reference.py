"""Generator of the reference: configuration.md, cli.md, api.md, and the packages in architecture.md.

    python docs/reference.py            write the pages
    python docs/reference.py --check    exit with status 1 if a page is stale

`make reference` runs the first command, the tests run the second. The sources are the option dataclasses, the
parsers of the commands, the docstrings of the public names, and the first lines of the modules.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import remora
from remora.cli import command_parsers
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


def modules_page() -> str:
    """Return the page of all modules, which only the site has."""
    opening = "The first line of each module. [Architecture](architecture.md) shows how they work together."
    every = modules()
    threads = {name: path for name, path in every.items() if _starts_threads(path)}
    return f"# Modules\n\n{opening}\n\n{_table(every)}\n## Modules that start threads\n\n{_table(threads)}"


def packages_table() -> str:
    """Return the Markdown table of the packages, and of those directly within `remora`."""
    found = {name: path for name, path in modules().items() if path.name == "__init__.py"}
    return _table({name: path for name, path in found.items() if "." not in name or re.fullmatch(r"remora\.\w+", name)})


def _table(modules: dict[str, Path]) -> str:
    """Return the Markdown table of modules: name, first line of the docstring."""
    lines = ["| Module | Contents |", "|---|---|"]
    for name, path in modules.items():
        opening = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]
        lines.append(f"| `{name}` | {opening.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _starts_threads(path: Path) -> bool:
    """Return True if a module uses a class of threads."""
    classes = {"Thread", "Timer", "ThreadPoolExecutor"}
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return any(isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in classes for node in nodes)


def commands() -> str:
    """Return the Markdown of all commands: usage, description, and a table of the arguments."""
    parts = []
    for name, parser in command_parsers():
        parts.append(f"## remora {name}\n\n{_prose(parser.description or '')}\n")
        if name == "serve":
            parts.append(
                "`remora serve [PATH ...] [--OPTION VALUE ...]`: [configuration](configuration.md) lists the options.\n"
            )
            continue
        rows = [_argument(each) for each in parser._actions if each.help != argparse.SUPPRESS and each.dest != "help"]
        rows = [row for row in rows if row]
        if rows:
            parts.append("| Argument | Default | |\n|---|---|---|\n" + "\n".join(rows) + "\n")
        if parser.epilog:
            parts.append(f"```text\n{parser.epilog}\n```\n")
    return "\n".join(parts)


def _prose(text: str) -> str:
    """Return a description as Markdown: indented lines are commands."""
    paragraphs = [textwrap.dedent(each) if each.startswith("  ") else each for each in text.strip().split("\n\n")]
    original = text.strip().split("\n\n")
    return "\n\n".join(
        f"```text\n{each}\n```" if before.startswith("  ") else each
        for each, before in zip(paragraphs, original, strict=True)
    )


def _argument(action: argparse.Action) -> str:
    """Return the row of an argument, "" for the choice of a sub-command."""
    if isinstance(action, argparse._SubParsersAction):
        return ""
    metavar = action.metavar if isinstance(action.metavar, str) else (action.dest or "").upper()
    if action.choices and not action.metavar:
        metavar = "|".join(map(str, action.choices))
    if action.option_strings:
        name = ", ".join(action.option_strings) + (f" {metavar}" if action.nargs != 0 else "")
    else:
        name = metavar
    default = action.default
    shown = "" if default in (None, "", False, argparse.SUPPRESS) or default == [] else f"`{default}`"
    text = re.sub(r"\(default %\(default\)\w\)", "", action.help or "").replace("%%", "%")
    text = " ".join(text.split())
    return f"| `{name.replace('|', chr(92) + '|')}` | {shown} | {text.replace('|', chr(92) + '|')} |"


def api() -> str:
    """Return the Markdown of the public names: signature and docstring, with public methods and attributes."""
    parts = []
    for name in sorted(remora.__all__, key=str.lower):
        value = getattr(remora, name)
        if name == "__version__" or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(value))).body[-1]
        if isinstance(tree, ast.ClassDef):
            parts.append(_class(name, tree))
        elif isinstance(tree, ast.FunctionDef):
            parts.append(f"## remora.{name}\n\n{_signature(name, tree)}\n{_docstring(tree)}")
    return "\n".join(parts)


def _class(name: str, tree: ast.ClassDef) -> str:
    methods = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    text = f"## remora.{name}\n\n"
    if "__init__" in methods:
        text += _signature(name, methods["__init__"]) + "\n"
    text += _docstring(tree)
    for method, each in methods.items():
        if method.startswith("_") or not ast.get_docstring(each):
            continue
        decorators = {ast.unparse(decorator) for decorator in each.decorator_list}
        is_property = bool(decorators & {"property", "cached_property"})
        text += (
            f"\n### {name}.{method}\n\n{'' if is_property else _signature(method, each) + chr(10)}{_docstring(each)}"
        )
    return text


def _signature(name: str, tree: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = ast.unparse(tree.args)
    arguments = re.sub(r"^self(, |$)|^cls(, |$)", "", arguments)
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns and name[:1].islower() else ""
    text = f"{name}({arguments}){returns}"
    if len(text) > 100:
        text = f"{name}(\n    {_broken(arguments)}\n){returns}"
    return f"```text\n{text}\n```\n"


def _broken(arguments: str) -> str:
    """Return arguments with each on a line; commas within brackets do not separate."""
    depth, lines, current = 0, [], ""
    for letter in arguments:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            lines.append(current.strip() + ",")
            current = ""
        else:
            current += letter
    return "\n    ".join([*lines, current.strip()])


def _docstring(tree: ast.AST) -> str:
    text = ast.get_docstring(tree) or ""  # type: ignore[arg-type]
    opening, _, rest = text.partition("\n")
    rest = rest.strip("\n")
    return f"{opening}\n" + (f"\n```text\n{rest}\n```\n" if rest else "")


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "configuration.md": {
        "engine options": lambda: options_table(EngineOptions),
        "server options": lambda: options_table(ServerOptions),
    },
    "architecture.md": {"packages": packages_table},
    "cli.md": {"commands": commands},
    "api.md": {"public names": api},
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
