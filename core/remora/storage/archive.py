"""Unpacks archives of models and environments; the law: nothing lands outside the folder, and limits come first.

Tar archives (plain, gzip, bzip2 or xz) and zip archives. What an archive says of itself is not believed: bytes are
counted while they are written as well.
"""

from __future__ import annotations

import posixpath
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, NamedTuple

from remora.errors import ConfigError

if TYPE_CHECKING:
    import tarfile

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz", ".zip")
"""How the name of an archive ends."""

_PIECE_BYTES = 1 << 20
_TRUSTED_BYTES = 64 << 20
"""Archives that unpack to less than this may be packed as tightly as they like."""


class ArchiveLimits(NamedTuple):
    """How much an archive may hold, unpacked.

    Attributes:
        total_bytes: all files together.
        members: files, folders and links.
        ratio: how many times the archive's own size all files may take; zeros pack a thousandfold, models hardly.
    """

    total_bytes: int = 32 << 30
    members: int = 1_000_000
    ratio: int = 200


class _Member(NamedTuple):
    """One entry, whatever kind of archive it is in. ``target`` is where a link points."""

    name: str
    kind: str
    size: int
    target: str = ""


def is_archive(name: str) -> bool:
    """Whether a file of that name is unpacked before it is used."""
    return name.lower().endswith(SUFFIXES)


def unpack(archive: Path, folder: Path, limits: ArchiveLimits = ArchiveLimits(), *, what: str = "archive") -> None:  # noqa: B008
    """Unpack ``archive`` into ``folder``, which is made.

    Args:
        archive: a tar or zip file; which one is told by its content.
        folder: must not exist. What is in it after a failure is of no use.
        limits: checked before a member is written.
        what: what error texts call the archive.

    Raises:
        ConfigError: it is no archive, holds more than ``limits``, or has a member that would leave the folder.
    """
    import tarfile  # here, because every start looks at this module and few unpack
    import zipfile
    import zlib

    folder.mkdir(parents=True)
    try:
        allowance = _Allowance(archive, limits, what)
        if _begins_as_zip(archive):
            _unpack_zip(archive, folder, allowance)
        else:
            _unpack_tar(archive, folder, allowance)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise ConfigError(f"cannot unpack {what} '{archive}': {error}") from error


def _begins_as_zip(archive: Path) -> bool:
    """By its first bytes: a tar archive may well end with a zip file."""
    with archive.open("rb") as file:
        return file.read(4) in (b"PK\x03\x04", b"PK\x05\x06")


class _Allowance:
    """What an archive may still hold. Raises ConfigError where that is too little."""

    def __init__(self, archive: Path, limits: ArchiveLimits, what: str) -> None:
        self._archive = archive
        self._what = what
        self._limits = limits
        self._members = 0
        self._bytes = 0
        self._most = min(limits.total_bytes, max(archive.stat().st_size * limits.ratio, _TRUSTED_BYTES))

    def admit(self, member: _Member) -> None:
        """A member is about to be written."""
        self._members += 1
        self._bytes += member.size
        if self._members > self._limits.members or self._bytes > self._most:
            raise ConfigError(
                f"{self._what} '{self._archive}' holds more than {self._limits.members} members or {self._most} bytes, "
                "unpacked"
            )
        why = refusal(member)
        if why:
            raise ConfigError(f"{self._what} '{self._archive}': member '{member.name}' {why}")


def _unpack_tar(archive: Path, folder: Path, allowance: _Allowance) -> None:
    import tarfile

    with tarfile.open(archive) as tar:
        for info in tar:
            allowance.admit(_Member(info.name, _tar_kind(info), info.size, info.linkname))
            # The filter looks again, at what links that are already unpacked make of the path.
            tar.extract(info, folder, filter="data")


def _tar_kind(info: tarfile.TarInfo) -> str:
    kinds = (("file", info.isfile()), ("folder", info.isdir()), ("link", info.issym()), ("hard link", info.islnk()))
    return next((kind for kind, holds in kinds if holds), "")


def _unpack_zip(archive: Path, folder: Path, allowance: _Allowance) -> None:
    import zipfile

    with zipfile.ZipFile(archive) as packed:
        for info in packed.infolist():
            kind = "folder" if info.is_dir() else "" if stat.S_ISLNK(info.external_attr >> 16) else "file"
            allowance.admit(_Member(info.filename, kind, info.file_size))
            path = folder / PurePosixPath(info.filename)
            if kind == "folder":
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with packed.open(info) as source, path.open("xb") as target:
                for piece in _pieces(source, info.file_size):
                    target.write(piece)
            if info.external_attr >> 16 & 0o100:
                path.chmod(0o755)


def _pieces(source: IO[bytes], size: int) -> Iterator[bytes]:
    """What a member really holds, and no byte more than it says."""
    left = size
    while left:
        piece = source.read(min(left, _PIECE_BYTES))
        if not piece:
            raise EOFError("a member is shorter than it says")
        left -= len(piece)
        yield piece
    if source.read(1):
        raise EOFError("a member is longer than it says")


def refusal(member: _Member) -> str:
    """Why a member is not unpacked; "" when it is. Pure, and stricter than it has to be: such names have no use."""
    if _leaves(member.name):
        return "has a path that leaves the archive"
    if not member.kind:
        return "is neither file, directory nor link"
    if member.kind == "link":
        target = posixpath.join(posixpath.dirname(member.name), member.target)
        if member.target.startswith("/") or posixpath.normpath(target).split("/")[0] == "..":
            return f"links to '{member.target}', outside the archive"
    if member.kind == "hard link" and _leaves(member.target):
        return f"links to '{member.target}', outside the archive"
    return ""


def _leaves(name: str) -> bool:
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\0" in name
