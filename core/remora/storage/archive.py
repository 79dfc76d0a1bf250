"""Unpacking of tar archives (plain, gzip, bzip2 or xz) and zip archives.

Invariant: nothing is written outside of the folder, and limits are checked before a member is written. Declared sizes
are not trusted: bytes are also counted while they are written, and the headers of a tar archive while they are read.
"""

from __future__ import annotations

import importlib
import logging
import posixpath
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, NamedTuple, cast

from remora.errors import ConfigError

if TYPE_CHECKING:
    import tarfile

_log = logging.getLogger("remora.models")

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz", ".zip")
"""The suffixes of archives."""

_PIECE_BYTES = 1 << 20
_TRUSTED_BYTES = 64 << 20
"""Unpacked size up to which the compression ratio is not limited."""


_MOST_NAME, _MOST_PARTS = 4096, 64
"""Limits of a member's name, in characters and in folders that are in each other."""
_HEADER_BYTES = 1 << 20
"""Limit of the headers of one member of a tar archive, which tarfile holds in memory."""
_COMPRESSED = ((b"\x1f\x8b", "gzip"), (b"BZh", "bz2"), (b"\xfd7zXZ\0", "lzma"))
"""First bytes of compressed files, and the modules that read them."""


class ArchiveLimits(NamedTuple):
    """Limits on the unpacked content of an archive.

    Attributes:
        total_bytes: size of all files together.
        members: number of files, folders and links.
        ratio: maximum of unpacked to packed size; zeros compress a thousandfold, models hardly at all.
    """

    total_bytes: int = 32 << 30
    members: int = 1_000_000
    ratio: int = 200


class _Member(NamedTuple):
    """An entry of any kind of archive. ``target`` is the target of a link."""

    name: str
    kind: str
    size: int
    target: str = ""


def is_archive(name: str) -> bool:
    """Return True if a file of that name is an archive."""
    return name.lower().endswith(SUFFIXES)


def unpack(
    archive: Path,
    folder: Path,
    limits: ArchiveLimits = ArchiveLimits(),  # noqa: B008
    *,
    what: str = "archive",
    title: str = "",
) -> None:
    """Unpack ``archive`` into ``folder``, which is created.

    A line of the log precedes it, because it may take minutes.

    Args:
        archive: a tar or zip file, told apart by its content.
        folder: must not exist; incomplete after a failure.
        limits: checked before a member is written.
        what: the name of the archive's role in error texts.
        title: the archive in the log; "" for the name of the file.

    Raises:
        ConfigError: not an archive, beyond ``limits``, or with a member outside of the folder.
    """
    folder.mkdir(parents=True)
    try:
        size = -(-archive.stat().st_size // 1_000_000)
        _log.info("unpacking %s, %s MB (once)", title or archive.name, f"{size:,}")
        allowance = _Allowance(archive, limits, what)
        if _begins_as_zip(archive):
            _unpack_zip(archive, folder, allowance)
        else:
            _unpack_tar(archive, folder, allowance)
    except ConfigError:
        raise
    except Exception as error:  # readers of damaged archives raise errors of many types
        raise ConfigError(f"cannot unpack {what} '{archive}': {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "there is not enough memory for it"
    if isinstance(error, RecursionError):
        return "a member has too many headers"
    return str(error) or type(error).__name__


def _begins_as_zip(archive: Path) -> bool:
    """Detect a zip file by its first bytes, because a tar archive may end with a zip file."""
    with archive.open("rb") as file:
        return file.read(4) in (b"PK\x03\x04", b"PK\x05\x06")


class _Allowance:
    """Remaining limits of an archive. Raises ConfigError when one is exceeded."""

    def __init__(self, archive: Path, limits: ArchiveLimits, what: str) -> None:
        self._archive = archive
        self._what = what
        self._limits = limits
        self._members = 0
        self._bytes = 0
        self._most = min(limits.total_bytes, max(archive.stat().st_size * limits.ratio, _TRUSTED_BYTES))

    def admit(self, member: _Member) -> None:
        """Check a member before it is written."""
        self._members += 1
        self._bytes += member.size
        if self._members > self._limits.members or self._bytes > self._most:
            raise ConfigError(
                f"{self._what} '{self._archive}' holds more than {self._limits.members} members or {self._most} bytes, "
                "unpacked"
            )
        why = refusal(member)
        if why:
            raise ConfigError(f"{self._what} '{self._archive}': member '{member.name[:200]}' {why}")


def _unpack_tar(archive: Path, folder: Path, allowance: _Allowance) -> None:
    import tarfile  # imported here because every start loads this module and few unpack archives

    with _open_tar_stream(archive) as file:
        bounded = _BoundedReads(file)
        with tarfile.open(fileobj=cast("IO[bytes]", bounded), mode="r:") as tar:
            for info in tar:
                allowance.admit(_Member(info.name, _tar_kind(info), info.size, info.linkname))
                bounded.allow(info.size)
                # The filter checks again because links that are already unpacked may redirect the path.
                tar.extract(info, folder, filter="data")
                bounded.allow(0)


def _open_tar_stream(archive: Path) -> IO[bytes]:
    with archive.open("rb") as file:
        begin = file.read(8)
    module = next((module for mark, module in _COMPRESSED if begin.startswith(mark)), "builtins")
    opened: IO[bytes] = importlib.import_module(module).open(archive, "rb")
    return opened


class _BoundedReads:
    """File of which only an allowed number of bytes can be read.

    tarfile holds the headers of a member in memory as a whole, whatever size they declare.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell
        self._remaining = _HEADER_BYTES

    def allow(self, size: int) -> None:
        """Allow the content of a member and the headers of the next."""
        self._remaining = size + _HEADER_BYTES

    def read(self, size: int) -> bytes:
        self._remaining -= size
        if self._remaining < 0:
            raise EOFError(f"a member has headers of more than {_HEADER_BYTES} bytes")
        return self._file.read(size)


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
    """Yield the content of a member.

    Raises EOFError if its length differs from the declared size.
    """
    remaining = size
    while remaining:
        piece = source.read(min(remaining, _PIECE_BYTES))
        if not piece:
            raise EOFError("a member is shorter than its declared size")
        remaining -= len(piece)
        yield piece
    if source.read(1):
        raise EOFError("a member is longer than its declared size")


def refusal(member: _Member) -> str:
    """Return why a member is refused, or "" if it is accepted, more strictly than necessary."""
    if _leaves(member.name):
        return "has a path that leaves the archive"
    if len(member.name) > _MOST_NAME or member.name.count("/") > _MOST_PARTS:
        return f"has a path of more than {_MOST_NAME} characters or {_MOST_PARTS} folders"
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
