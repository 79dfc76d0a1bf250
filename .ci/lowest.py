"""Print the lowest supported version of each package as pip's constraints, from the ranges of pyproject.toml.

``python .ci/lowest.py pyproject.toml EXTRA...`` prints those of the dependencies and of the named extras. Of several
ranges of one package, the highest lower bound counts.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


def requirements(lines: Iterable[str], extras: dict[str, list[str]], project: str) -> Iterator[Requirement]:
    """Yield the requirements of lines; those that name extras of the project are replaced by the extras' own."""
    for line in lines:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) == project:
            inner = [each for extra in sorted(requirement.extras) for each in extras[extra]]
            yield from requirements(inner, extras, project)
        elif requirement.marker is None or requirement.marker.evaluate():
            yield requirement


def lowest(found: Iterable[Requirement]) -> dict[str, Version]:
    """Return the lower bound of each package. Raises ValueError for a range without one."""
    bounds: dict[str, Version] = {}
    for requirement in found:
        versions = [Version(each.version) for each in requirement.specifier if each.operator in (">=", "==", "~=")]
        if not versions:
            raise ValueError(f"{requirement} has no lower bound")
        name = canonicalize_name(requirement.name)
        bounds[name] = max([*versions, bounds.get(name, versions[0])])
    return bounds


if __name__ == "__main__":
    document = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    optional = document["optional-dependencies"]
    chosen = [*document["dependencies"], *(line for extra in sys.argv[2:] for line in optional[extra])]
    for package, version in sorted(lowest(requirements(chosen, optional, document["name"])).items()):
        print(f"{package}=={version}")
