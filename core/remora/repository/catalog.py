"""What all repositories together offer: each model under the key that it is known by.

A name that more than one place has is offered by none of them [M15], unless names are kept apart by namespaces:
then the key is ``<repository>::<name>``, else it is the name. A place that cannot be looked at now keeps offering what
it showed last: models do not go because a network is down.
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
    """A model and the place that has it."""

    repository: Repository
    folder: ModelFolder

    def fingerprint(self) -> Fingerprint:
        """The model's files as the last look saw them."""
        return self.repository.fingerprint(self.folder.name)


class Catalog:
    """The models of several repositories. Thread-safe: what was seen is replaced, never changed, by one at a time.

    Args:
        repositories: where to look, in this order.
        namespacing: models of one name in different places are different models.
    """

    def __init__(self, repositories: Sequence[Repository], *, namespacing: bool = False) -> None:
        self.repositories = tuple(repositories)
        self.namespacing = namespacing
        self._lock = threading.Lock()
        self._seen: list[dict[str, list[ModelFolder]]] = [{} for _ in repositories]
        self._offered: dict[str, list[CatalogEntry]] = {}

    def look(self, name: str = "", *, forgiving: bool = False) -> None:
        """Look at every place, or only for the models called ``name``.

        Raises RemoraError for a place that cannot be looked at; ``forgiving``, that is logged.
        """
        for index, repository in enumerate(self.repositories):
            try:
                found = repository.models(name)
            except RemoraError as error:
                if not forgiving:
                    raise
                _log.warning("cannot look at model repository '%s': %s", repository.location, error)
                continue
            with self._lock:  # else two looks at one name each forget what the other found
                if name:
                    rest = {other: folders for other, folders in self._seen[index].items() if other != name}
                    found = {**rest, **found}
                self._seen[index] = found
        with self._lock:
            self._offered = self._by_key()

    def models(self) -> list[str]:
        """The keys that stand for one model each."""
        return sorted(key for key, offers in self._offered.items() if len(offers) == 1)

    def is_offered(self, key: str) -> bool:
        """Whether a key stands for one model."""
        return len(self._offered.get(key, ())) == 1

    def all_keys(self) -> list[str]:
        """Every key, also those that more than one place has."""
        return sorted(self._offered)

    def is_ambiguous(self, key: str) -> bool:
        """Whether more than one place has a model of this key."""
        return len(self._offered.get(key, ())) > 1

    def keys_of(self, name: str) -> list[str]:
        """The keys of the models called ``name``."""
        return list(dict.fromkeys(self._key(offer) for offer in self._offers() if offer.folder.name == name))

    def near(self, name: str, key: str) -> str:
        """The key that a step of the ensemble ``key`` means by ``name``: of its own namespace if it is there."""
        if not self.namespacing:
            return name
        own = f"{key.rpartition(_SEPARATOR)[0]}{_SEPARATOR}{name}"
        keys = self.keys_of(name)
        return own if own in keys or len(keys) != 1 else keys[0]

    def only(self, key: str) -> CatalogEntry:
        """The offer of a key. Raises NotFoundError when there is none, or more than one."""
        offers = self._offered.get(key, [])
        if len(offers) == 1:
            return offers[0]
        if offers:
            places = ", ".join(str(offer.folder.path) for offer in offers)
            raise NotFoundError(f"it is in more than one place ({places}): keep one, or give --model-namespacing=true")
        places = ", ".join(f"'{repository.location}'" for repository in self.repositories) or "no repository"
        raise NotFoundError(f"no folder of that name in {places}")

    def _offers(self) -> Iterator[CatalogEntry]:
        for repository, seen in zip(self.repositories, self._seen, strict=True):
            for folders in seen.values():
                yield from (CatalogEntry(repository, folder) for folder in folders)

    def _by_key(self) -> dict[str, list[CatalogEntry]]:
        found: dict[str, list[CatalogEntry]] = {}
        for offer in self._offers():
            found.setdefault(self._key(offer), []).append(offer)
        return found

    def _key(self, offer: CatalogEntry) -> str:
        return f"{offer.repository.location}{_SEPARATOR}{offer.folder.name}" if self.namespacing else offer.folder.name


def namespace_of(key: str) -> str:
    """Where the model lies; "" where names are enough."""
    return key.rpartition(_SEPARATOR)[0]


def name_of(key: str) -> str:
    """The model's own name."""
    return key.rpartition(_SEPARATOR)[2]
