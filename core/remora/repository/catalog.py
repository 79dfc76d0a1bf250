"""Catalog of the models in all repositories, each under a unique key.

A name found in more than one location is ambiguous and not loadable [M15], unless namespacing is enabled: then the key
is ``<repository>::<name>``, else it is the name. A location that cannot be scanned keeps the models of its last scan,
so that an outage of the network unloads nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from remora.errors import NotFoundError, RemoraError
from remora.repository import Fingerprint, ModelFolder, Repository

_log = logging.getLogger("remora.models")

_SEPARATOR = "::"


class CatalogEntry(NamedTuple):
    """A model and its repository."""

    repository: Repository
    folder: ModelFolder

    def fingerprint(self) -> Fingerprint:
        """Return the model's files as of the last scan."""
        return self.repository.fingerprint(self.folder.name)


class Catalog:
    """The models of several repositories.

    Thread-safe: scan results are replaced, never changed, under a lock.

    Args:
        repositories: the locations to scan, in this order.
        namespacing: treat models of the same name in different locations as different models.
    """

    def __init__(self, repositories: Sequence[Repository], *, namespacing: bool = False) -> None:
        self.repositories = tuple(repositories)
        self.namespacing = namespacing
        self._lock = threading.Lock()
        self._seen: list[dict[str, list[ModelFolder]]] = [{} for _ in repositories]
        self._offered: dict[str, list[CatalogEntry]] = {}
        self._known: set[int] = set()  # locations that were read at least once
        self._unseen: dict[int, str] = {}
        self._scans = 0
        self._running = 0
        self._scanned: list[dict[str, int]] = [{} for _ in repositories]
        """While scans run, the number of the last scan of each name; "" for all names."""

    def scan(self, name: str = "", *, forgiving: bool = False) -> None:
        """Scan every location, or only for the models called ``name``.

        Raises RemoraError for a location that cannot be scanned; with ``forgiving`` it is logged instead.
        """
        for index, repository in enumerate(self.repositories):
            with self._lock:
                self._scans += 1
                number = self._scans
                self._running += 1
            try:
                found = repository.models(name)
            except RemoraError as error:
                if not forgiving:
                    raise
                if index not in self._known:
                    self._unseen[index] = f"model repository '{repository.location}' was never read: {error}"
                _log.warning("cannot scan model repository '%s': %s", repository.location, error)
            else:
                self._known.add(index)
                self._unseen.pop(index, None)
                with self._lock:  # else concurrent scans of two names would each drop the other's result
                    self._record(index, number, name, found)
            finally:
                with self._lock:
                    self._running -= 1
                    if not self._running:
                        for scanned in self._scanned:
                            scanned.clear()
        with self._lock:
            self._offered = self._by_key()

    def _record(self, index: int, number: int, name: str, found: dict[str, list[ModelFolder]]) -> None:
        """Keep what a scan has found, except where a scan that began later knows more.

        The lock is held.
        """
        seen, scanned = self._seen[index], self._scanned[index]
        newest = scanned.get("", 0)
        if number < max(newest, scanned.get(name, 0)):
            return
        scanned[name] = number
        if name:
            self._seen[index] = {**{other: folders for other, folders in seen.items() if other != name}, **found}
            return
        later = {other for other, at in scanned.items() if at > number}
        kept = {other: folders for other, folders in seen.items() if other in later}
        self._seen[index] = {**{other: folders for other, folders in found.items() if other not in later}, **kept}

    def unseen(self) -> list[str]:
        """Return why locations were never read, for each of which that is so."""
        return list(self._unseen.values())

    def models(self) -> list[str]:
        """Return the unambiguous keys."""
        return sorted(key for key, offers in self._offered.items() if len(offers) == 1)

    def is_offered(self, key: str) -> bool:
        """Return True if a key stands for exactly one model."""
        return len(self._offered.get(key, ())) == 1

    def all_keys(self) -> list[str]:
        """Return all keys, including ambiguous ones."""
        return sorted(self._offered)

    def is_ambiguous(self, key: str) -> bool:
        """Return True if more than one location has a model of this key."""
        return len(self._offered.get(key, ())) > 1

    def keys_of(self, name: str) -> list[str]:
        """Return the keys of the models called ``name``."""
        return list(dict.fromkeys(self._key(entry) for entry in self._entries() if entry.folder.name == name))

    def near(self, name: str, key: str) -> str:
        """Return the key that a step of the ensemble ``key`` refers to.

        A model in the same namespace is preferred.
        """
        if not self.namespacing:
            return name
        own = f"{key.rpartition(_SEPARATOR)[0]}{_SEPARATOR}{name}"
        keys = self.keys_of(name)
        return own if own in keys or len(keys) != 1 else keys[0]

    def only(self, key: str) -> CatalogEntry:
        """Return the entry of a key. Raises NotFoundError when it is missing or ambiguous."""
        entries = self._offered.get(key, [])
        if len(entries) == 1:
            return entries[0]
        if entries:
            places = ", ".join(str(entry.folder.path) for entry in entries)
            raise NotFoundError(f"it is in more than one place ({places}): keep one, or give --model-namespacing=true")
        places = ", ".join(f"'{repository.location}'" for repository in self.repositories) or "no repository"
        raise NotFoundError(f"no folder of that name in {places}")

    def _entries(self) -> Iterator[CatalogEntry]:
        for repository, seen in zip(self.repositories, self._seen, strict=True):
            for folders in seen.values():
                yield from (CatalogEntry(repository, folder) for folder in folders)

    def _by_key(self) -> dict[str, list[CatalogEntry]]:
        found: dict[str, list[CatalogEntry]] = {}
        for entry in self._entries():
            found.setdefault(self._key(entry), []).append(entry)
        return found

    def _key(self, entry: CatalogEntry) -> str:
        return f"{entry.repository.location}{_SEPARATOR}{entry.folder.name}" if self.namespacing else entry.folder.name


def namespace_of(key: str) -> str:
    """Return the namespace of a key, or "" without namespacing."""
    return key.rpartition(_SEPARATOR)[0]


def name_of(key: str) -> str:
    """Return the model name of a key."""
    return key.rpartition(_SEPARATOR)[2]
