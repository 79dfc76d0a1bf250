"""Repository in a temporary folder that is written from files of another form."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from remora.errors import NotFoundError
from remora.repository import Fingerprint, ModelFolder
from remora.repository.local import LocalRepository
from remora.system.temporary_folders import TemporaryFolder


class WrittenRepository:
    """Repository that is written again whenever one of its sources changes. Thread-safe.

    Args:
        location: the source as configured.
        write: writes the models' folders into an empty folder and returns the paths of the sources. Raises
            NotFoundError and UnavailableError. A failure after the first success is reported once, and the old models
            stay.
    """

    def __init__(self, location: str, write: Callable[[Path], Iterable[str]]) -> None:
        self._location = location
        self._write = write
        self._lock = threading.Lock()
        self._written: list[TemporaryFolder] = []
        self._inside: LocalRepository | None = None
        self._stamps: dict[str, tuple[int, int]] = {}

    @property
    def location(self) -> str:
        """The source as configured."""
        return self._location

    def models(self, name: str = "") -> dict[str, list[ModelFolder]]:
        """Return the models (see `Repository.models`), and write them if a source is new or changed.

        Raises NotFoundError and UnavailableError as the constructor's ``write``.
        """
        with self._lock:
            stamps = {path: _stamp(path) for path in self._stamps}
            if self._inside is None or stamps != self._stamps:
                self._stamps = stamps
                self._write_again()
            assert self._inside is not None
            return self._inside.models(name)

    def fingerprint(self, name: str) -> Fingerprint:
        """Return the stamps of the written files (see `Repository.fingerprint`)."""
        return self._inside.fingerprint(name) if self._inside else {}

    def fetch(self, name: str, versions: Collection[int] | None = None) -> ModelFolder:
        """Return the model's folder, which is local (see `Repository.fetch`)."""
        if self._inside is None:
            raise NotFoundError(f"there is no model '{name}' in '{self._location}'")
        return self._inside.fetch(name, versions)

    def _write_again(self) -> None:
        folder = TemporaryFolder("models")
        sources = list(self._write(folder.path))
        # The folder before the last one stays, because models of it may be running until their successors are ready.
        self._written = [*self._written[-1:], folder]
        self._inside = LocalRepository(folder.path)
        self._stamps = {path: _stamp(path) for path in sources}


def _stamp(path: str) -> tuple[int, int]:
    try:
        status = Path(path).stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
