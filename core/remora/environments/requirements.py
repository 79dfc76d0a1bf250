"""Parser of a model's requirements.txt and check against installed versions. Pure.

`packaging` evaluates names, versions and markers as pip does. Lines that name no package (links, other files, options)
are left to pip.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # imported for the first file, because few models have one
    from packaging.requirements import Requirement as Specification

_COMMENT = re.compile(r"(^|\s)#.*$")
_MORE = re.compile(r"-[re]|--(requirement|editable)\b")
"""Options that name a package to install."""
_LINE_OPTIONS = re.compile(r"\s--")
"""Options of one requirement, such as --hash."""


class Requirement(NamedTuple):
    """One requirement line and its meaning."""

    line: int
    text: str
    specification: Specification

    @property
    def name(self) -> str:
        """Name of the package."""
        return self.specification.name


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
    from packaging.requirements import InvalidRequirement
    from packaging.requirements import Requirement as Specification

    found = []
    for number, row in lines(text):
        if row.startswith("-"):
            continue
        try:
            specification = Specification(without_options(row))
        except InvalidRequirement:  # a path or a link
            continue
        found.append(Requirement(number, row, specification))
    return found


def without_options(row: str) -> str:
    """Return a requirement line without its options, such as --hash."""
    return _LINE_OPTIONS.split(row, maxsplit=1)[0]


def asks_for_anything(text: str) -> bool:
    """Return True if pip has anything to install, including links, paths and other files."""
    return any(not row.startswith("-") or _MORE.match(row) for _, row in lines(text))


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file without comments, with their line numbers.

    A continued line has the number of its first line.
    """
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


def unmet(
    requirements: list[Requirement],
    version_of: Callable[[str], str | None],
    environment: Mapping[str, str] | None = None,
) -> list[Unmet]:
    """Return the requirements that are missing or installed in another version.

    An installed pre-release satisfies a requirement whose range contains it, as with pip.

    Args:
        version_of: returns the installed version of a package, or None.
        environment: values of variables in markers that replace those of this interpreter.
    """
    missing: list[Unmet] = []
    for requirement in requirements:
        if not applies(requirement.specification, environment):
            continue
        installed = version_of(requirement.name)
        if installed is None or not contains(requirement.specification, installed):
            missing.append(Unmet(requirement, installed or ""))
    return missing


def applies(specification: Specification, environment: Mapping[str, str] | None) -> bool:
    """Return True if a requirement's marker is true, or makes an invalid comparison.

    pip reports the invalid comparison.
    """
    from packaging.markers import UndefinedComparison, UndefinedEnvironmentName

    marker = specification.marker
    try:
        return marker is None or marker.evaluate(dict(environment or {}))
    except (UndefinedComparison, UndefinedEnvironmentName):
        return True


def contains(specification: Specification, version: str) -> bool:
    """Return True if the specifier contains the version.

    An invalid version satisfies only an empty specifier.
    """
    from packaging.version import InvalidVersion

    specifier = specification.specifier
    try:
        return not specifier or specifier.contains(version, prereleases=True)
    except InvalidVersion:  # raised before packaging 26
        return False
