"""A bucket path as a `Repository`, with one listing per scan."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from remora.errors import NotFoundError, UnavailableError
from remora.model_files import CONFIG_FILENAMES, MODEL_FILENAMES, parse_version
from remora.repository import BARE_SUFFIXES, Fingerprint, ModelFolder, Repository, is_stray
from remora.repository.files import holds_other_files
from remora.startup import Ledger
from remora.storage import ChangedError, Storage, StoredObject
from remora.storage.cache import Fetched, Layout, ModelCache

_log = logging.getLogger("remora.models")

_AT_ONCE_BYTES = 4 << 20
"""Models up to this size are fetched whole at once, because another round trip costs more than their bytes."""
_TRIALS = 4

Files = Mapping[str, StoredObject]
"""A model's objects by their paths in its folder."""


class RemoteRepository:
    """A bucket, or a path in one.

    Args:
        storage: the bucket.
        name: the model's name if the path is one model's folder.
        cache: holds the fetched files.
        ledger: records listings and downloads.
        any_layout: the path may also be one model's folder or a model file.
        bare_name: the user's name for that model.
        open_local: opens a fetched file or folder of another library; without it such content is not recognised.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        cache: ModelCache,
        ledger: Ledger,
        *,
        any_layout: bool = False,
        bare_name: str = "",
        open_local: Callable[[Path], Repository] | None = None,
    ) -> None:
        self._open_local = open_local
        self._other: tuple[Fingerprint, Repository] | None = None
        self._storage = storage
        self._bare_name = bare_name
        self._name = name
        self._cache = cache
        self._ledger = ledger
        self._any_layout = any_layout
        self._lock = threading.Lock()
        self._seen: dict[str, Files] = {}

    @property
    def location(self) -> str:
        """The URL, without secrets."""
        return self._storage.location

    def models(self, name: str = "") -> dict[str, list[ModelFolder]]:
        """Scan the bucket (see `Repository.models`). Costs one LIST per thousand files and no GET."""
        if name and not self._any_layout:
            found = {key: files for key, files in self._look(name).items() if key == name}
        else:
            found = self._look()
        if self._other is not None:
            return self._other[1].models(name)
        with self._lock:
            if name:
                self._seen.pop(name, None)
                self._seen |= {key: files for key, files in found.items() if key == name}
            else:
                self._seen = found
        return {key: [self._folder(key, files)] for key, files in found.items() if not name or key == name}

    def _look(self, name: str = "") -> dict[str, Files]:
        begin_ns = self._ledger.now_ns()
        objects = self._storage.listing(name)
        self._ledger.add(name, "list", begin_ns)
        if not objects and not name:
            raise NotFoundError(
                f"failed to open model repository '{self.location}': there are no files below it. "
                "Check the path, and that the credentials may list it"
            )
        files = {item.path: item for item in objects if not _is_ignored(item.path)}
        if self._any_layout and self._open_local is not None and holds_other_files(files):
            self._fetch_other(files, self._open_local)
            return {}
        self._other = None
        return group(objects, self._name if self._any_layout else "", self._bare_name)

    def _fetch_other(self, files: Files, open_local: Callable[[Path], Repository]) -> None:
        """Fetch what another library wrote and open it as a local path, unless it is unchanged."""
        stamps = {path: (item.etag, item.size) for path, item in files.items()}
        if self._other is not None and self._other[0] == stamps:
            return
        begin_ns = self._ledger.now_ns()
        fetched = self._cache.fetch(self._storage, self._name, files)
        self._ledger.add(self._name, "download" if fetched.fetched_bytes else "cache", begin_ns, fetched.fetched_bytes)
        self._other = stamps, open_local(fetched.path)

    def _folder(self, name: str, files: Files, path: Path | None = None) -> ModelFolder:
        """Return the folder of a model, below the cache.

        It exists only after the model is fetched.
        """
        path = path or self._cache.folder / "models" / "not-fetched" / name
        versions = versions_of(files)
        listed = {number: _filenames(files, folder) for number, folder in versions.items()}
        return ModelFolder(
            name, path, path.parent, {number: path / folder for number, folder in versions.items()}, listed
        )

    def fingerprint(self, name: str) -> Fingerprint:
        """Return ETag and size of each file as of the last scan, without a request."""
        if self._other is not None:
            return self._other[0]
        with self._lock:
            return {path: (item.etag, item.size) for path, item in self._seen.get(name, {}).items()}

    def fetch(self, name: str, versions: Collection[int] | None = None) -> ModelFolder:
        """Fetch a model (see `Repository.fetch`).

        Scans again if it was replaced since the last scan.
        """
        if self._other is not None:
            return self._other[1].fetch(name, versions)
        for _ in range(_TRIALS):
            with self._lock:
                files = self._seen.get(name)
            if files is None:
                self.models(name)
                with self._lock:
                    files = self._seen.get(name)
            if not files:
                raise NotFoundError(f"there is no model '{name}' in '{self.location}'")
            try:
                return self._folder(name, files, self._fetch(name, files, versions).path)
            except (ChangedError, NotFoundError) as error:  # replaced or removed since the scan
                _log.info("model '%s' of %s changes while it is fetched: %s", name, self.location, error)
                self.models(name)
        raise UnavailableError(f"model '{name}' of '{self.location}' changes faster than it can be fetched")

    def _fetch(self, name: str, files: Files, versions: Collection[int] | None) -> Fetched:
        every = versions_of(files)
        if versions is None or sum(item.size for item in files.values()) <= _AT_ONCE_BYTES:
            wanted = dict(files)
        else:
            left_out = [folder for number, folder in every.items() if number not in versions and folder != "."]
            wanted = {path: item for path, item in files.items() if path.partition("/")[0] not in left_out}
        folders = [path for path in files if _is_marker(path, files[path])]
        real = {path: item for path, item in wanted.items() if path not in folders}
        begin_ns = self._ledger.now_ns()
        fetched = self._cache.fetch(self._storage, name, real, Layout([path for path in folders if path in wanted]))
        self._ledger.add(name, "download" if fetched.fetched_bytes else "cache", begin_ns, fetched.fetched_bytes)
        return fetched


# -- interpretation of paths, without a storage -----------------------------------------------------------------------


def group(objects: Iterable[StoredObject], single: str, bare_name: str = "") -> dict[str, Files]:
    """Return the models of a listing.

    Args:
        objects: with paths below the repository.
        single: the model's name if the location is one model's folder or a model file; "" if it can only be a
            repository.
        bare_name: the user's name for that model.
    """
    tree = {item.path: item for item in objects if not _is_ignored(item.path)}
    if single and (_is_model(tree) or (bare_name and _is_file(tree))):
        return {bare_name or single: tree}
    found: dict[str, dict[str, StoredObject]] = {}
    for path, item in tree.items():
        name, slash, inner = path.partition("/")
        if slash:
            found.setdefault(name, {})[inner] = item
        elif single and name.endswith(BARE_SUFFIXES):
            found.setdefault(name.rpartition(".")[0], {})[name] = item
    return dict(sorted(found.items()))


def _is_file(tree: Files) -> bool:
    return len(tree) == 1 and all("/" not in path and path.endswith(BARE_SUFFIXES) for path in tree)


def versions_of(files: Files) -> dict[int, str]:
    """Return each version's folder or file in the model's folder.

    It is "." if the files are directly in the model's folder.
    """
    versions: dict[int, str] = {}
    for path in sorted(files):
        first, slash, _ = path.partition("/")
        number = parse_version(first)
        if number is not None and (slash or _is_marker(path, files[path])):
            versions.setdefault(number, first)
    if not versions:
        if any(path in MODEL_FILENAMES for path in files):
            return {1: "."}
        bare = [path for path in files if path.endswith(BARE_SUFFIXES) and "/" not in path]
        if len(bare) == len(files) == 1:
            return {1: bare[0]}
    return versions


def _is_model(tree: Files) -> bool:
    """Return True if the listing is one model's.

    A model has a configuration, a model file, or versions.
    """
    for path in tree:
        first, slash, inner = path.partition("/")
        if not slash and (first in CONFIG_FILENAMES or first in MODEL_FILENAMES):
            return True
        if slash and parse_version(first) is not None:
            # A model of a repository may have a numeric name; it then contains a configuration or versions.
            second, deeper, _ = inner.partition("/")
            if not (second in CONFIG_FILENAMES or (deeper and parse_version(second) is not None)):
                return True
    return False


def _filenames(files: Files, folder: str) -> tuple[str, ...]:
    """Return the file names from which the backend is inferred [C04]."""
    if folder in files and not _is_marker(folder, files[folder]):
        return (f"model.{folder.rpartition('.')[2]}",)
    prefix = "" if folder == "." else f"{folder}/"
    return tuple(sorted({path.removeprefix(prefix).partition("/")[0] for path in files if path.startswith(prefix)}))


def _is_marker(path: str, item: StoredObject) -> bool:
    """Return True for an empty object that marks a folder.

    Cloud consoles make such objects for version folders without files.
    """
    return item.size == 0 and "/" not in path and parse_version(path) is not None


def _is_ignored(path: str) -> bool:
    """Return True for files that belong to no model."""
    return any(map(is_stray, path.split("/")))
