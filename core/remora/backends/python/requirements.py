"""Parser of a model's requirements.txt and check against installed versions. Pure.

Only names, plain version comparisons and markers are evaluated, because they need no package index. Everything else
(links, other files, options) is left to pip.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

_NAME = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(\[[^\]]*\])?\s*(.*)", re.DOTALL)
_COMMENT = re.compile(r"(^|\s)#.*$")
_MORE = re.compile(r"-[re]|--(requirement|editable)\b")
"""Options that name a package to install."""
_CLAUSE = re.compile(r"(===|==|!=|<=|>=|~=|<|>)\s*(\S+)")
_PLAIN_VERSION = re.compile(r"\d+(\.\d+)*")


class Requirement(NamedTuple):
    """One requirement line.

    ``specifier`` restricts the version ("" for any), ``marker`` states when the line applies ("" for always).
    """

    line: int
    text: str
    name: str
    specifier: str = ""
    marker: str = ""


class Unmet(NamedTuple):
    """A requirement that is not met.

    ``installed`` is the installed version, "" for none.
    """

    requirement: Requirement
    installed: str


def read_requirements(text: str) -> list[Requirement]:
    """Return the packages that a requirements file names, in order.

    A continued line has the number of its first line.
    """
    return [found for number, row in _lines(text) if (found := _requirement(number, row)) is not None]


def asks_for_anything(text: str) -> bool:
    """Return True if pip has anything to install, including links, paths and other files."""
    return any(not row.startswith("-") or _MORE.match(row) for _, row in _lines(text))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file without comments, with their line numbers."""
    pending, first = "", 0
    for number, row in enumerate(text.splitlines(), 1):
        first = first or number
        if row.endswith("\\"):
            pending += row[:-1]
            continue
        line = _COMMENT.sub("", pending + row).strip()
        if line:
            yield first, line
        pending, first = "", 0


def _requirement(line: int, text: str) -> Requirement | None:
    if text.startswith("-") or "://" in text.partition("@")[0]:
        return None
    plain, _, marker = text.partition(";")
    plain = re.split(r"\s--", plain, maxsplit=1)[0]  # the options of this line, such as --hash
    matched = _NAME.fullmatch(plain.strip())
    if matched is None:
        return None
    rest = matched[3].strip().strip("()")
    specifier = "" if rest.startswith("@") else rest
    return Requirement(line, text, matched[1], specifier.strip(), re.split(r"\s--", marker, maxsplit=1)[0].strip())


def unmet(
    requirements: list[Requirement],
    version_of: Callable[[str], str | None],
    environment: Mapping[str, str],
) -> list[Unmet]:
    """Return the requirements that are missing or installed in another version.

    Args:
        version_of: returns the installed version of a package, or None.
        environment: the values of the variables in markers, such as ``python_version``.
    """
    missing: list[Unmet] = []
    for requirement in requirements:
        if not applies(requirement.marker, environment):
            continue
        installed = version_of(requirement.name)
        if installed is None or not satisfies(installed, requirement.specifier):
            missing.append(Unmet(requirement, installed or ""))
    return missing


def satisfies(version: str, specifier: str) -> bool:
    """Return True if a version satisfies comparisons such as ``>=1.2,<2``.

    A version or comparison that cannot be evaluated, such as ``1.0rc1``, counts as satisfied.
    """
    return all(_fits(version, clause) for clause in specifier.split(",") if clause.strip())


def _fits(version: str, clause: str) -> bool:
    matched = _CLAUSE.fullmatch(clause.strip())
    if matched is None:
        return True
    operator, wanted = matched[1], matched[2]
    public = version.partition("+")[0]
    if operator in ("==", "!=") and wanted.endswith(".*"):
        prefix = wanted[:-2].split(".")
        return (public.split(".")[: len(prefix)] == prefix) == (operator == "==")
    if not (_PLAIN_VERSION.fullmatch(public) and _PLAIN_VERSION.fullmatch(wanted)):
        return True
    have, want = _padded(public, wanted)
    match operator:
        case "==":
            return have == want
        case "!=":
            return have != want
        case "<":
            return have < want
        case "<=":
            return have <= want
        case ">":
            return have > want
        case ">=":
            return have >= want
        case "~=":
            kept = max(wanted.count("."), 1)
            return have >= want and have[:kept] == want[:kept]
    return True


def _padded(*versions: str) -> list[tuple[int, ...]]:
    parts = [tuple(int(part) for part in version.split(".")) for version in versions]
    length = max(len(part) for part in parts)
    return [part + (0,) * (length - len(part)) for part in parts]


def applies(marker: str, environment: Mapping[str, str]) -> bool:
    """Return True if a marker is true.

    Only plain comparisons joined by ``and`` are evaluated; any other marker counts as false.
    """
    if not marker:
        return True
    for part in re.split(r"\s+and\s+", marker):
        matched = re.fullmatch(r"\(?\s*(\w+)\s*(==|!=|<=|>=|<|>)\s*['\"]([^'\"]*)['\"]\s*\)?", part.strip())
        if matched is None or matched[1] not in environment:
            return False
        have, operator, want = environment[matched[1]], matched[2], matched[3]
        if _PLAIN_VERSION.fullmatch(have) and _PLAIN_VERSION.fullmatch(want):
            true = _fits(have, f"{operator}{want}")
        else:
            true = (have == want) == (operator == "==") if operator in ("==", "!=") else False
        if not true:
            return False
    return True
