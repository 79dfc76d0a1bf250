"""Files of clouds: what a storage is, as data and one protocol; the law: what is read is what was listed.

An object is named by its path below the storage's location and by its ETag. A read asks for that ETag: when somebody
replaced the object meanwhile, the read fails instead of mixing two contents.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import NamedTuple, Protocol

from remora.errors import UnavailableError


class StoredObject(NamedTuple):
    """One file of a storage. ``path`` is relative to the storage's location and has no ``..`` in it."""

    path: str
    size: int
    etag: str


class ChangedError(UnavailableError):
    """An object is no longer what the listing said: list again."""


class Storage(Protocol):
    """A place below which files lie. Thread-safe; every method may block, and retries what may pass."""

    @property
    def location(self) -> str:
        """The place's URL, without secrets."""

    @property
    def identity(self) -> str:
        """What tells the place from all others: an object of the same path and ETag there is the same object."""

    def listing(self, prefix: str = "") -> list[StoredObject]:
        """All files below ``prefix``, in no order; the files of one folder when it names one.

        Raises NotFoundError for a bucket that is not there, UnavailableError when it cannot be asked, or holds more
        files than a model repository has use for.
        """

    def read(self, item: StoredObject, start: int, end: int) -> memoryview:
        """The bytes from ``start`` to ``end`` of an object; exactly as many.

        Raises ChangedError when the object is another one now, UnavailableError when it cannot be had.
        """


class Secret:
    """A value that no log, error text or repr shows."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The value, for the one that must know it."""
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
    """Whether an object's path may become a path below a folder of ours; names of clouds may hold anything."""
    parts = path.split("/")
    return (
        bool(path)
        and "\0" not in path
        and not PurePosixPath(path).is_absolute()
        and all(part not in ("", ".", "..") and len(part.encode()) <= 255 for part in parts)
    )
