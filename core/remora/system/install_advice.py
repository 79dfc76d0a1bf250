"""Shell command that installs the missing packages of an extra.

It depends on the origin of this installation. The command never names a package `remora` of an index, because this
project has none there and anybody could register the name. Without a checkout, an archive or a repository as origin,
the command names the packages themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remora.system.json_text import read_json

# The start of the server imports this module, so imports that only a message needs are inside the functions.

_DISTRIBUTION = "remora"
_EXTRA = r"""(.*?)\s*;.*\bextra\s*==\s*["']([^"']+)["']"""
_LIMITS = r"([^<>=!~;\s(]+)\s*\(?([^)]*)\)?"


def install_command(extra: str) -> str:
    """Return the shell command that installs the requirements of ``extra``.

    Reads the installation's metadata; call it only when something is missing.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution(_DISTRIBUTION)
    except PackageNotFoundError:  # the source tree on the import path
        return command_for(extra, checkout_origin(Path(__file__).resolve().parents[3]), ())
    text = found.read_text("direct_url.json")
    return command_for(extra, read_json(text) if text else {}, found.requires or ())


def checkout_origin(directory: Path) -> dict[str, Any]:
    if not (directory / "pyproject.toml").is_file():
        return {}
    return {"url": directory.as_uri(), "dir_info": {"editable": True}}


def command_for(extra: str, origin: dict[str, Any], requirements: Sequence[str]) -> str:
    """Return the command for an installation and these requirements.

    The recorded origin (PEP 610) decides.
    """
    import shlex

    source = _source_of(origin, extra)
    if source:
        return f"pip install {source}"
    named = [match for each in requirements if (match := re.match(_EXTRA, each)) and match[2] == extra]
    packages = [shlex.quote(_in_order(match[1])) for match in named]
    return f"pip install {' '.join(packages)}" if packages else f"install the packages of remora's extra '{extra}'"


def _source_of(origin: dict[str, Any], extra: str) -> str:
    """Return pip's quoted argument for the same origin, or "" without a usable origin."""
    import shlex
    from urllib.parse import unquote, urlsplit

    url = str(origin.get("url", ""))
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        folder = f"#subdirectory={origin['subdirectory']}" if origin.get("subdirectory") else ""
        return shlex.quote(f"{_DISTRIBUTION}[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}{folder}")
    if parts.scheme == "file" and not path.exists():
        return ""  # such as a wheel used to build an image, or a checkout that was moved
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return editable + shlex.quote(f"{path}[{extra}]")
    return shlex.quote(f"{_DISTRIBUTION}[{extra}] @ {url}") if url else ""


def _in_order(requirement: str) -> str:
    """Return a requirement with its lower limit first, the usual order."""
    match = re.fullmatch(_LIMITS, requirement)
    if match is None:
        return requirement
    return match[1] + ",".join(sorted((limit.strip() for limit in match[2].split(",") if limit), reverse=True))
