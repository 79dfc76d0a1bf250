"""A double of a cloud, and what is opened there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remora.storage.cache import ModelCache
from remora.storage.credentials import StorageSettings, settings_for
from remora.storage.downloads import Downloads
from remora.storage.location import parse_location
from remora.storage.objects import ObjectStorage
from support.servers.object_store import ObjectStore, object_store

Opened = Callable[[str], ObjectStorage]


@pytest.fixture
def clouds() -> Iterator[ObjectStore]:
    """A double with a bucket called ``bucket``."""
    with object_store() as store:
        store.buckets["bucket"] = {}
        yield store


@pytest.fixture
def opened(clouds: ObjectStore) -> Opened:
    """Opens a URL of the double; requests are repeated twice."""

    def settings(url: str) -> StorageSettings:
        return settings_for(parse_location(url), clouds.environment, lambda path: Path(path).read_text())

    return lambda url: ObjectStorage(parse_location(url), lambda: settings(url), retries=2)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ModelCache]:
    """A cache that fetches in ranges of 1,000 bytes."""
    downloads = Downloads("boot-1", range_bytes=1000)
    yield ModelCache(tmp_path / "cache", 1 << 30, "boot-1", downloads)
    downloads.close()
