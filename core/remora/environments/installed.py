"""Check of a requirements file against the installed distributions.

It needs neither pip nor a package index. Images have no pip, and their packages must not be installed a second time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as Specification
from packaging.utils import canonicalize_name

from remora.environments.requirements import applies, contains, lines, without_options
from remora.system.json_text import read_json

_INCLUDE = re.compile(r"(-r|--requirement|-c|--constraint)(?:\s+|=|(?<=^-[rc]))(\S.*)")
_EDITABLE = re.compile(r"(-e|--editable)\b")


class Installed(NamedTuple):
    """Installed distribution.

    It has the version, the requirements as text, and the URL that it was installed from.
    """

    version: str
    requires: tuple[str, ...] = ()
    url: str = ""


Find = Callable[[str], Installed | None]
"""Function that returns the installed distribution of a name."""


class UnknownLineError(Exception):
    """Raised for a line that names no package, such as a path; the text names the line."""


def find_installed(name: str) -> Installed | None:
    """Return the distribution of this interpreter with a name, or None."""
    from importlib import metadata  # takes 40 ms, needed only with requirements

    try:
        found = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        return None
    origin = read_json(found.read_text("direct_url.json") or "{}")
    vcs = origin.get("vcs_info", {})
    url = f"{vcs['vcs']}+{origin['url']}" if vcs else str(origin.get("url", ""))
    revision = vcs.get("requested_revision")
    return Installed(found.version, tuple(found.requires or ()), f"{url}@{revision}" if revision else url)


def is_met(file: Path, find: Find = find_installed) -> bool:
    """Return True if nothing must be installed, as in an image with all packages.

    Requirements of the installed packages count too, with their extras and markers. A line that names no package, such
    as a path, is never met.
    """
    try:
        every = specifications(file)
        limits = [each for each, constrains in every if constrains]
        return _are_met([each for each, constrains in every if not constrains], limits, find)
    except (UnknownLineError, InvalidRequirement, OSError, ValueError):
        return False


def files_of(file: Path) -> dict[Path, str]:
    """Return a requirements file and the files that it includes, with their texts.

    Missing files are left out.
    """
    found: dict[Path, str] = {}
    pending, seen = [file], {file}
    while pending:
        path = pending.pop(0)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        found[path] = text
        for _, row in lines(text):
            include = _INCLUDE.match(row)
            if include and (other := path.parent / include[2]) not in seen:
                seen.add(other)
                pending.append(other)
    return found


def specifications(file: Path) -> list[tuple[Specification, bool]]:
    """Return the requirements of a file and of its included files.

    Those that only constrain versions come with True.

    Raises UnknownLineError, OSError, UnicodeDecodeError.
    """
    return list(_specifications(file, set(), constrains=False))


def _specifications(file: Path, seen: set[Path], *, constrains: bool) -> Iterator[tuple[Specification, bool]]:
    if file in seen:
        return
    seen.add(file)
    for number, row in lines(file.read_text(encoding="utf-8")):
        include = _INCLUDE.match(row)
        if include:
            only = constrains or include[1] in ("-c", "--constraint")
            yield from _specifications(file.parent / include[2], seen, constrains=only)
            continue
        if row.startswith("-") and not _EDITABLE.match(row):
            continue
        try:
            yield Specification(without_options(row)), constrains
        except InvalidRequirement:
            raise UnknownLineError(f"{file}:{number}: '{row}' names no package") from None


def _are_met(wanted: list[Specification], limits: list[Specification], find: Find) -> bool:
    pending = [(each, "") for each in wanted]
    seen: set[tuple[str, str]] = set()
    while pending:
        each, extra = pending.pop()
        if not applies(each, {"extra": extra}):
            continue
        name, found = canonicalize_name(each.name), find(each.name)
        if found is None or not contains(each, found.version) or (each.url and each.url != found.url):
            return False
        if any(canonicalize_name(limit.name) == name and not contains(limit, found.version) for limit in limits):
            return False
        for chosen in ("", *sorted(each.extras)):
            if (name, chosen) not in seen:
                seen.add((name, chosen))
                pending += [(Specification(text), chosen) for text in found.requires]
    return True
