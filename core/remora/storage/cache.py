"""Disk cache of remote models, shared by all processes of the machine.

    objects/KEY, KEY.json     files as downloaded, with their metadata; KEY is made of location, ETag and size
    partial/SOURCE/KEY        unfinished files, with the journals to resume from
    models/SNAPSHOT/NAME/...  a model's files under their names: hard links that appear atomically
    models/SNAPSHOT.using     lock shared by the processes that use the snapshot, until they end
    locks/SOURCE              lock of the process that downloads a model

A file is renamed into place after its bytes are checked. They may not be on disk yet, so after a reboot a file is read
and compared with its checksum before it is used (decision 0015).

Invariant: only complete files are visible in objects and models.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from remora.errors import UnavailableError
from remora.storage import Storage, StoredObject
from remora.storage.downloads import Downloads, Wanted, digest_of_file
from remora.system.json_text import read_json
from remora.system.locks import holding, take

_log = logging.getLogger("remora.models")

LIMIT_BYTES = 50 << 30
_TRIALS = 3


class Entry(NamedTuple):
    """One file of the cache."""

    source: str
    size: int
    used_ns: int
    in_use: bool


class Layout(NamedTuple):
    """Layout of a model's folder apart from its files.

    Attributes:
        folders: empty folders.
        unpack: the files are archives, to be unpacked into the folder.
    """

    folders: Sequence[str] = ()
    unpack: bool = False


_AS_LISTED = Layout()


class Fetched(NamedTuple):
    """A model's folder, and the number of bytes downloaded for it."""

    path: Path
    fetched_bytes: int
    total_bytes: int


class ModelCache:
    """Content-addressed cache of model files.

    Args:
        folder: created with access for its owner only.
        limit_bytes: maximum size; least recently used models are removed first, except those in use.
        boot: boot id of the machine.
        downloads: downloads the files.
    """

    def __init__(self, folder: Path, limit_bytes: int, boot: str, downloads: Downloads | None = None) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._boot = boot
        self._downloads = downloads or Downloads(boot)
        self._in_use: dict[str, int] = {}
        self._objects, self._partial, self._models, self._locks = (
            folder / name for name in ("objects", "partial", "models", "locks")
        )

    def fetch(
        self, storage: Storage, name: str, files: Mapping[str, StoredObject], layout: Layout = _AS_LISTED
    ) -> Fetched:
        """Return a folder ``name`` that contains the objects at the paths of ``files``.

        The folder does not change while this process runs. Any thread of any process may call; others wait for the one
        that downloads.

        Raises UnavailableError when the storage cannot be read or the folder not be written; ChangedError when objects
        were replaced; ConfigError for an archive that cannot be unpacked.
        """
        keys = {path: _key_of(storage, item) for path, item in files.items()}
        snapshot = _snapshot_of(name, keys, layout, self._boot)
        total = sum(item.size for item in files.values())
        try:
            for part in (self._objects, self._partial, self._models, self._locks):
                part.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._use(snapshot):
                return Fetched(self._models / snapshot / name, 0, total)
            source = _digest(storage.identity, name)
            with holding(self._locks / source):
                fetched = 0
                for _ in range(_TRIALS):
                    fetched += self._download(storage, source, {keys[path]: item for path, item in files.items()})
                    if self._use(snapshot) or self._assemble(snapshot, source, name, keys, layout):
                        return Fetched(self._models / snapshot / name, fetched, total)
        except OSError as error:
            raise UnavailableError(
                f"cannot keep models in '{self.folder}': {error.strerror or error}. Give a directory that can be "
                "written, with --model-cache-directory=DIR"
            ) from error
        raise UnavailableError(f"the cache '{self.folder}' is emptied faster than model '{name}' is downloaded")

    # -- files ---------------------------------------------------------------------------------------------------

    def _download(self, storage: Storage, source: str, wanted: Mapping[str, StoredObject]) -> int:
        """Download missing objects and return the number of bytes.

        The caller holds the source's lock.
        """
        missing = {key: item for key, item in wanted.items() if not self._has(key, item)}
        if not missing:
            return 0
        needed = sum(item.size for item in missing.values())
        self._make_room(needed, storage, keep=wanted)
        place = self._partial / source
        place.mkdir(exist_ok=True, mode=0o700)
        fetched = 0
        for arrived in self._downloads.fetch(storage, [Wanted(item, place / key) for key, item in missing.items()]):
            key, item = arrived.wanted.partial.name, arrived.wanted.item
            self._describe(key, f"{storage.location}/{item.path}", source, item.size, arrived.digest)
            arrived.wanted.partial.replace(self._objects / key)
            fetched += arrived.fetched_bytes
        return fetched

    def _has(self, key: str, item: StoredObject) -> bool:
        """Return True if an object is complete. One from before the last boot is read and compared."""
        known = self._known(key)
        path = self._objects / key
        try:
            if known is None or path.stat().st_size != item.size:
                return False
            if known["boot"] != self._boot:
                if digest_of_file(path, known["digest"]) != known["digest"]:
                    _log.warning("%s in the cache is damaged and is downloaded again", known["source"])
                    path.unlink()
                    return False
                self._describe(key, known["source"], known["lock"], item.size, known["digest"])
        except OSError:
            return False
        return True

    def _known(self, key: str) -> dict[str, str] | None:
        try:
            known = read_json((self._objects / f"{key}.json").read_bytes())
        except (OSError, ValueError):
            return None
        needed = ("source", "lock", "digest", "boot")
        return known if isinstance(known, dict) and all(isinstance(known.get(name), str) for name in needed) else None

    def _describe(self, key: str, source: str, lock: str, size: int, digest: str) -> None:
        text = json.dumps({"source": source, "lock": lock, "size": size, "digest": digest, "boot": self._boot})
        unfinished = self._objects / f"{key}.json.{os.getpid()}"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(self._objects / f"{key}.json")

    # -- models --------------------------------------------------------------------------------------------------

    def _use(self, snapshot: str) -> bool:
        """Protect a snapshot for the life of this process. Return False if it does not exist."""
        if snapshot in self._in_use:
            return True
        if not (self._models / snapshot).is_dir():
            return False
        using = self._models / f"{snapshot}.using"
        descriptor = take(using, shared=True)
        if not (self._models / snapshot).is_dir():
            os.close(descriptor)
            return False
        self._keep(snapshot, descriptor)
        with suppress(OSError):
            os.utime(using)  # the time of its last use
        return True

    def _assemble(self, snapshot: str, source: str, name: str, keys: Mapping[str, str], layout: Layout) -> bool:
        """Assemble and use a snapshot. Return False if one of its objects was removed meanwhile."""
        unfinished = self._partial / source / "model"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True, mode=0o700)
        unpacked = 0
        try:
            if layout.unpack:
                unpacked = sum(_unpack(self._objects / key, unfinished / name, path) for path, key in keys.items())
            else:
                _fill(unfinished / name, {path: self._objects / key for path, key in keys.items()}, layout.folders)
        except FileNotFoundError:
            return False
        descriptor = take(self._models / f"{snapshot}.using", shared=True)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d" % unpacked, 0)
        unfinished.rename(self._models / snapshot)
        self._keep(snapshot, descriptor)
        shutil.rmtree(unfinished.parent, ignore_errors=True)  # including leftovers of older contents
        return True

    def _keep(self, snapshot: str, descriptor: int) -> None:
        if self._in_use.setdefault(snapshot, descriptor) != descriptor:
            os.close(descriptor)  # another thread was faster

    def release(self, path: Path) -> None:
        """Stop using a folder returned by `fetch`."""
        descriptor = self._in_use.pop(path.parent.name, None)
        if descriptor is not None:
            os.close(descriptor)

    # -- room ----------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Return the cached files, least recently used first."""
        found = []
        for path, known in self._all():
            status = path.stat()
            found.append(Entry(known["source"], status.st_size, status.st_mtime_ns, status.st_nlink > 1))
        return sorted(found, key=lambda entry: entry.used_ns)

    def clear(self) -> int:
        """Remove everything that is not in use and return the number of bytes freed."""
        before = self.held_bytes()
        for snapshot in self._snapshots():
            self._remove_snapshot(snapshot)
        self._remove_objects(keep={})
        with suppress(OSError):
            for source in os.listdir(self._partial):
                with suppress(OSError), holding(self._locks / source, wait=False):
                    shutil.rmtree(self._partial / source, ignore_errors=True)
        return before - self.held_bytes()

    def held_bytes(self) -> int:
        """Return the size of all files, including unpacked archives."""
        unpacked = 0
        for using in self._models.glob("*.using"):
            with suppress(OSError, ValueError):
                unpacked += int(using.read_text(encoding="ascii"))
        return unpacked + sum(path.stat().st_size for path, _ in self._all())

    def _make_room(self, needed: int, storage: Storage, keep: Mapping[str, StoredObject]) -> None:
        """Remove unused models until the needed bytes fit. Raises UnavailableError for a full disk."""
        for snapshot in [*self._snapshots(), None]:
            used = self.held_bytes()
            free = shutil.disk_usage(self.folder).free
            if used + needed <= self._limit_bytes and needed <= free:
                return
            if snapshot is not None:
                self._remove_snapshot(snapshot)
            self._remove_objects(keep)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise UnavailableError(
                f"no room for '{storage.location}': it needs {needed} bytes and '{self.folder}' has {free} left. "
                "Give a larger --model-cache-directory"
            )

    def _snapshots(self) -> list[str]:
        """Return the snapshots, least recently used first."""
        with suppress(OSError):
            used = {path.name.removesuffix(".using"): path for path in self._models.glob("*.using")}
            names = [path.name for path in self._models.iterdir() if path.is_dir()]
            return sorted(names, key=lambda name: used[name].stat().st_mtime_ns if name in used else 0)
        return []

    def _remove_snapshot(self, snapshot: str) -> None:
        using = self._models / f"{snapshot}.using"
        with suppress(OSError), holding(using, wait=False):
            gone = self._partial / f"{snapshot}.gone"
            (self._models / snapshot).rename(gone)  # atomic, so that no process sees a partial snapshot
            shutil.rmtree(gone, ignore_errors=True)
            using.unlink()

    def _remove_objects(self, keep: Mapping[str, StoredObject]) -> None:
        """Remove the files that belong to no model."""
        for path, known in self._all():
            with suppress(OSError):
                if path.name in keep or path.stat().st_nlink > 1:
                    continue
                with holding(self._locks / known["lock"], wait=False):
                    path.with_name(f"{path.name}.json").unlink()
                    path.unlink()

    def _all(self) -> Iterator[tuple[Path, dict[str, str]]]:
        for description in sorted(self._objects.glob("*.json")):
            known = self._known(description.stem)
            path = description.with_suffix("")
            if known is not None and path.is_file():
                yield path, known


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def _key_of(storage: Storage, item: StoredObject) -> str:
    """Return an object's key, of its location and ETag.

    ETags alone are not unique across buckets.
    """
    return _digest(storage.identity, item.path, item.etag, str(item.size))


def _snapshot_of(name: str, keys: Mapping[str, str], layout: Layout, boot: str) -> str:
    """Return a snapshot's name with the boot id, because files are checked again after a boot."""
    rows = [f"{path}\0{key}" for path, key in sorted(keys.items())]
    return f"{_digest(name, *rows, str(layout.unpack), *sorted(layout.folders))}-{boot[:8] or 'any'}"


def _fill(folder: Path, files: Mapping[str, Path], folders: Sequence[str]) -> None:
    """Link files into a folder. Raises FileNotFoundError when a file was removed."""
    folder.mkdir()
    for path in folders:
        folder.joinpath(PurePosixPath(path)).mkdir(parents=True, exist_ok=True)
    for path, source in files.items():
        target = folder.joinpath(PurePosixPath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        _link(source, target)


def _unpack(archive: Path, folder: Path, title: str) -> int:
    """Unpack an archive, whose name is its key here, and return its size.

    Raises FileNotFoundError if it was removed, ConfigError if invalid.
    """
    from remora.storage.archive import unpack

    archive.stat()
    unpack(archive, folder, what="model archive", title=title)
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # such as a file system without hard links
        shutil.copyfile(source, target)
        target.chmod(0o444)
