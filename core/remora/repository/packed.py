"""Archive as a `Repository`, unpacked into the cache.

It is unpacked again whenever the archive changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path

from remora.config import find_config
from remora.errors import NotFoundError
from remora.repository import Fingerprint, ModelFolder, Repository
from remora.repository.files import holds_other_files
from remora.repository.local import LocalRepository
from remora.startup import Ledger
from remora.storage import Storage
from remora.storage.archive import SUFFIXES
from remora.storage.cache import Layout, ModelCache


class PackedRepository:
    """A tar or zip file that contains a repository, one model's folder or a model file.

    Args:
        storage: has the archive as its only object.
        cache: holds the unpacked archive.
        ledger: records the download.
        bare_name: name of a single model; by default that of the archive's folder or of the archive.
        open_local: opens an unpacked file or folder of another library; None if there is none.
    """

    def __init__(
        self,
        storage: Storage,
        cache: ModelCache,
        ledger: Ledger,
        *,
        bare_name: str = "",
        open_local: Callable[[Path], Repository] | None = None,
    ) -> None:
        self._open_local = open_local
        self._storage = storage
        self._bare_name = bare_name
        self._ledger = ledger
        self._cache = cache
        self._lock = threading.Lock()
        self._etag = ""
        self._inside: Repository | None = None

    @property
    def location(self) -> str:
        """The archive's path or URL, without secrets."""
        return self._storage.location

    def models(self, name: str = "") -> dict[str, list[ModelFolder]]:
        """Scan the archive (see `Repository.models`). The first scan downloads it."""
        with self._lock:
            items = self._storage.listing()
            if len(items) != 1:
                raise NotFoundError(f"'{self.location}' is not an archive but a folder with {len(items)} files")
            if self._inside is None or items[0].etag != self._etag:
                packed, begin_ns = items[0].path, self._ledger.now_ns()
                fetched = self._cache.fetch(self._storage, _stem(packed), {packed: items[0]}, Layout(unpack=True))
                self._ledger.add("", "download" if fetched.fetched_bytes else "cache", begin_ns, fetched.fetched_bytes)
                self._inside, self._etag = self._opened(fetched.path), items[0].etag
            return self._inside.models(name)

    def _opened(self, place: Path) -> Repository:
        root = _root(place)
        listed = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
        if self._open_local is not None and holds_other_files(listed):
            return self._open_local(root)
        return LocalRepository(root, any_layout=True, bare_name=self._bare_name)

    def fingerprint(self, name: str) -> Fingerprint:
        """Return the stamps of the unpacked files (see `Repository.fingerprint`)."""
        return self._known().fingerprint(name)

    def fetch(self, name: str, versions: Collection[int] | None = None) -> ModelFolder:
        """Return the model's folder, local since the last scan (see `Repository.fetch`)."""
        return self._known().fetch(name, versions)

    def _known(self) -> Repository:
        if self._inside is None:
            self.models()
        assert self._inside is not None
        return self._inside


def _stem(filename: str) -> str:
    """Return the name of a model without a separate folder: the file name without its suffix."""
    lower = filename.lower()
    return next((filename[: -len(suffix)] for suffix in SUFFIXES if lower.endswith(suffix)), filename) or "model"


def _root(folder: Path) -> Path:
    """Return the archive's single top folder, else the unpack folder itself.

    A top folder that is a model does not count.
    """
    found = LocalRepository(folder, any_layout=True).models()
    if len(found) == 1 and [entry for entry in folder.iterdir() if entry.is_dir()] == list(folder.iterdir()):
        (models,) = found.values()
        if len(models) == 1 and not models[0].versions and find_config(models[0].path, "") is None:
            return models[0].path
    return folder
