"""Writer of an image's bill of materials (CycloneDX 1.6), or of its licences as text.

Invariant: the same packages give the same bytes. Run it with the interpreter of the environment to describe; it needs
only the standard library.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from typing import Any

_SUBJECT = "remora"


def main() -> int:
    """Print the document, or the licences; return 1 if remora is not installed."""
    found = {_name(each): each for each in distributions()}
    if _SUBJECT not in found:
        print(f"sbom.py: {_SUBJECT} is not installed in {sys.prefix}", file=sys.stderr)
        return 1
    if "--licences" in sys.argv[1:]:
        print("".join(licences(found)), end="")
        return 0
    json.dump(document(found), sys.stdout, indent=1, sort_keys=True)
    print()
    return 0


def document(found: dict[str, Distribution]) -> dict[str, Any]:
    """Return the bill of materials, without time and serial number to compare builds."""
    names = sorted(found)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _component(found[_SUBJECT], kind="application")},
        "components": [_component(found[name]) for name in names if name != _SUBJECT],
        "dependencies": [
            {"ref": _purl(found[name]), "dependsOn": [_purl(found[need]) for need in _needs(found[name], found)]}
            for name in names
        ],
    }


def licences(found: dict[str, Distribution]) -> Iterator[str]:
    """Yield each package with its licence, followed by the paths of its licence files."""
    for name in sorted(found):
        package = found[name]
        yield f"{name} {package.version}: {_licence(package) or 'see its files'}\n"
        for file in sorted(map(str, package.files or ())):
            if re.search(r"\.dist-info/(?:.*/)?(?:licen[cs]e|copying|notice|copyright)[^/]*$", file, re.IGNORECASE):
                yield f"    {file}\n"


def _licence(package: Distribution) -> str:
    """Return a package's licence: its expression, or the first line of its text."""
    expression = _field(package, "License-Expression")
    if expression:
        return expression
    lines = _field(package, "License").strip().splitlines()
    if lines:
        # The first line only, because some packages put the whole licence there.
        return str(lines[0][:120])
    classified = [each for each in package.metadata.get_all("Classifier") or () if each.startswith("License ::")]
    return ", ".join(each.rpartition(" :: ")[2] for each in classified)


def _component(package: Distribution, kind: str = "library") -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": kind,
        "bom-ref": _purl(package),
        "name": _name(package),
        "version": package.version,
        "purl": _purl(package),
    }
    if _field(package, "License-Expression"):
        component["licenses"] = [{"expression": _licence(package)}]
    elif text := _licence(package):
        component["licenses"] = [{"license": {"name": text}}]
    return component


def _needs(package: Distribution, found: dict[str, Distribution]) -> list[str]:
    """Return the installed packages that this one requires, regardless of markers and extras."""
    asked = (re.match(r"[\w.-]+", line) for line in package.requires or ())
    return sorted({_normal(match[0]) for match in asked if match} & found.keys())


def _field(package: Distribution, name: str) -> str:
    """Return the first value of a field of a package's metadata, or ""."""
    return str((package.metadata.get_all(name) or [""])[0])


def _purl(package: Distribution) -> str:
    return f"pkg:pypi/{_name(package)}@{package.version}"


def _name(package: Distribution) -> str:
    return _normal(package.metadata["Name"])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
