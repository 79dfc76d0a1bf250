"""Protocol and data types of remote file storage.

An object is identified by its path below the storage's location and by its ETag. A read requests that ETag, so it fails
if the object was replaced meanwhile, instead of mixing two contents.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import NamedTuple, Protocol

from remora.errors import UnavailableError


class StoredObject(NamedTuple):
    """A file of a storage.

    ``path`` is relative to the storage's location and contains no ``..``.
    """

    path: str
    size: int
    etag: str


class ChangedError(UnavailableError):
    """Raised when an object no longer matches its listing, which must be repeated."""


class Storage(Protocol):
    """A location of files. Thread-safe. Every method may block, and retries transient errors."""

    @property
    def location(self) -> str:
        """The location's URL, without secrets."""

    @property
    def identity(self) -> str:
        """A key of the location: with it, path and ETag identify an object globally."""

    def listing(self, prefix: str = "") -> list[StoredObject]:
        """List all files below ``prefix``, unordered, or those of the folder that it names.

        Raises NotFoundError for a missing bucket, UnavailableError when it cannot be listed or has too many files for a
        model repository.
        """

    def read(self, item: StoredObject, start: int, end: int) -> memoryview:
        """Return exactly the bytes from ``start`` to ``end`` of an object.

        Raises ChangedError when the object was replaced, UnavailableError when it cannot be read.
        """


class Secret:
    """A value that is never shown in logs, error texts or its repr."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__


def is_plain(path: str) -> bool:
    """Return True if an object's path is safe below a local folder.

    Names in clouds may contain anything.
    """
    parts = path.split("/")
    return (
        bool(path)
        and "\0" not in path
        and not PurePosixPath(path).is_absolute()
        and all(part not in ("", ".", "..") and len(part.encode()) <= 255 for part in parts)
    )
