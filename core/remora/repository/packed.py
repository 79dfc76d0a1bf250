"""An archive as a `Repository`: unpacked once into the cache, looked at again when the file is another one."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path

from remora.config import find_config
from remora.errors import NotFoundError
from remora.repository import Fingerprint, ModelFolder
from remora.repository.local import LocalRepository
from remora.startup import Ledger
from remora.storage import Storage
from remora.storage.archive import SUFFIXES
from remora.storage.cache import Layout, ModelCache


class PackedRepository:
    """A tar or zip file that holds a repository, one model's folder or a model file.

    Args:
        storage: has the archive as its only object.
        cache: where it is unpacked.
        ledger: told of the download.
        bare_name: what the model is called when the archive holds one; as the archive's folder or the archive if empty.
    """

    def __init__(self, storage: Storage, cache: ModelCache, ledger: Ledger, *, bare_name: str = "") -> None:
        self._storage = storage
        self._bare_name = bare_name
        self._ledger = ledger
        self._cache = cache
        self._lock = threading.Lock()
        self._etag = ""
        self._inside: LocalRepository | None = None

    @property
    def location(self) -> str:
        """The archive's path or URL, without secrets."""
        return self._storage.location

    def models(self, name: str = "") -> dict[str, list[ModelFolder]]:
        """See `Repository.models`. The first look brings the archive: nothing else says what is in it."""
        with self._lock:
            items = self._storage.listing()
            if len(items) != 1:
                raise NotFoundError(f"'{self.location}' is no archive but a folder with {len(items)} files")
            if self._inside is None or items[0].etag != self._etag:
                packed, begin_ns = items[0].path, self._ledger.now_ns()
                fetched = self._cache.fetch(self._storage, _stem(packed), {packed: items[0]}, Layout(unpack=True))
                self._ledger.add("", "download" if fetched.fetched_bytes else "cache", begin_ns, fetched.fetched_bytes)
                self._inside, self._etag = self._opened(fetched.path), items[0].etag
            return self._inside.models(name)

    def _opened(self, place: Path) -> LocalRepository:
        return LocalRepository(_root(place), any_layout=True, bare_name=self._bare_name)

    def fingerprint(self, name: str) -> Fingerprint:
        """See `Repository.fingerprint`; of the files as the archive had them."""
        return self._known().fingerprint(name)

    def fetch(self, name: str, versions: Collection[int] | None = None) -> ModelFolder:
        """See `Repository.fetch`: the model is here since the last look."""
        return self._known().fetch(name, versions)

    def _known(self) -> LocalRepository:
        if self._inside is None:
            self.models()
        assert self._inside is not None
        return self._inside


def _stem(filename: str) -> str:
    """What a model without a folder of its own is called."""
    lower = filename.lower()
    return next((filename[: -len(suffix)] for suffix in SUFFIXES if lower.endswith(suffix)), filename) or "model"


def _root(folder: Path) -> Path:
    """Archives are often made of a folder, not of what is in it: that folder then, unless it is a model."""
    found = LocalRepository(folder, any_layout=True).models()
    if len(found) == 1 and [entry for entry in folder.iterdir() if entry.is_dir()] == list(folder.iterdir()):
        (models,) = found.values()
        if len(models) == 1 and not models[0].versions and find_config(models[0].path, "") is None:
            return models[0].path
    return folder
