"""One local file as a `Storage`, so that a local archive is handled like one in a bucket."""

from __future__ import annotations

from pathlib import Path

from remora.errors import NotFoundError, UnavailableError
from remora.storage import ChangedError, StoredObject


class LocalFile:
    """A local file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def location(self) -> str:
        return str(self._path)

    @property
    def identity(self) -> str:
        """The resolved path (see `Storage`)."""
        return str(self._path.resolve())

    def listing(self, prefix: str = "") -> list[StoredObject]:
        """Return the file, with its modification time and inode as ETag. Raises NotFoundError."""
        try:
            status = self._path.stat()
        except OSError as error:
            raise NotFoundError(f"cannot read '{self._path}': {error.strerror}") from None
        return [StoredObject(self._path.name, status.st_size, f"{status.st_mtime_ns}-{status.st_ino}")]

    def read(self, item: StoredObject, start: int, end: int) -> memoryview:
        """Read a range of the file (see `Storage`)."""
        if self.listing() != [item]:
            raise ChangedError(f"'{self._path}' was replaced while it was read")
        try:
            with self._path.open("rb") as file:
                file.seek(start)
                data = file.read(end - start)
        except OSError as error:
            raise UnavailableError(f"cannot read '{self._path}': {error.strerror}") from error
        if len(data) != end - start:
            raise ChangedError(f"'{self._path}' was cut short while it was read")
        return memoryview(data)
