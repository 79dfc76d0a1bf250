"""Print the lowest supported version of each package as pip's constraints, from the ranges of pyproject.toml.

``python .ci/lowest.py pyproject.toml EXTRA...`` prints those of the dependencies and of the named extras. A later range
of the same package wins only if it is higher.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


def requirements(project: dict[str, object], extras: list[str]) -> Iterator[Requirement]:
    """Yield the requirements of the project and of extras, those of extras within extras too."""
    found = [*project["dependencies"], *(line for each in extras for line in project["optional-dependencies"][each])]  # type: ignore
    for line in found:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) == project["name"]:
            inner = {"dependencies": [], **{key: project[key] for key in ("name", "optional-dependencies")}}
            yield from requirements(inner, sorted(requirement.extras))
        elif requirement.marker is None or requirement.marker.evaluate():
            yield requirement


def lowest(project: dict[str, object], extras: list[str]) -> dict[str, Version]:
    """Return the lower bound of each package. Raises ValueError for a range without one."""
    bounds: dict[str, Version] = {}
    for requirement in requirements(project, extras):
        found = [Version(each.version) for each in requirement.specifier if each.operator in (">=", "==", "~=")]
        if not found:
            raise ValueError(f"{requirement} has no lower bound")
        name = canonicalize_name(requirement.name)
        bounds[name] = max(*found, bounds.get(name, found[0]), found[0])
    return bounds


if __name__ == "__main__":
    document = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    for name, version in sorted(lowest(document, sys.argv[2:]).items()):
        print(f"{name}=={version}")
