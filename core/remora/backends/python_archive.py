"""Unpacks an environment's tar archive; the law: nothing of it lands outside its folder, and limits come first."""

from __future__ import annotations

import posixpath
import tarfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from remora.errors import ConfigError


class Limits(NamedTuple):
    """How much an archive may hold, unpacked."""

    total_bytes: int = 32 << 30
    members: int = 1_000_000


def unpack(archive: Path, folder: Path, limits: Limits = Limits()) -> None:  # noqa: B008 - a tuple of numbers
    """Unpack ``archive`` into ``folder``, which is made. Archives may be compressed by gzip, bzip2 or xz.

    Raises:
        ConfigError: it is no tar archive, holds more than ``limits``, or has a member that would leave the folder.
    """
    folder.mkdir(parents=True)
    members = total = 0
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                members += 1
                total += member.size
                if members > limits.members or total > limits.total_bytes:
                    raise ConfigError(
                        f"environment archive '{archive}' holds more than {limits.members} members or "
                        f"{limits.total_bytes} bytes, unpacked"
                    )
                why = refusal(member)
                if why:
                    raise ConfigError(f"environment archive '{archive}': member '{member.name}' {why}")
                # The filter looks again, at what links that are already unpacked make of the path.
                tar.extract(member, folder, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(f"cannot unpack environment archive '{archive}': {error}") from error


def refusal(member: tarfile.TarInfo) -> str:
    """Why a member is not unpacked; "" when it is. Pure, and stricter than it has to be: such names have no use."""
    if _leaves(member.name):
        return "has a path that leaves the archive"
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return "is neither file, directory nor link"
    if member.issym():
        target = posixpath.join(posixpath.dirname(member.name), member.linkname)
        if member.linkname.startswith("/") or posixpath.normpath(target).split("/")[0] == "..":
            return f"links to '{member.linkname}', outside the archive"
    if member.islnk() and _leaves(member.linkname):
        return f"links to '{member.linkname}', outside the archive"
    return ""


def _leaves(name: str) -> bool:
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\0" in name
