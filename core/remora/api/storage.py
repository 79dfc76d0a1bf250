"""Names for plug-ins: repositories and remote storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remora.api import lazily

if TYPE_CHECKING:
    from remora.repository.catalog import Catalog, name_of
    from remora.repository.clouds import open_cache, open_storage
    from remora.repository.exporting import export, parse_source
    from remora.repository.files import Found, recognise
    from remora.repository.functions import sources_in
    from remora.repository.local import LocalRepository
    from remora.repository.sources import APP, function_source, open_repository
    from remora.storage.archive import is_archive, unpack
    from remora.storage.cache import ModelCache
    from remora.storage.credentials import settings_for
    from remora.storage.location import Location, is_url, parse_location
    from remora.storage.objects import open_store
    from remora.storage.stored_file import open_stored

__getattr__ = lazily(
    __name__,
    {
        "remora.repository.catalog": "Catalog name_of",
        "remora.repository.clouds": "open_cache open_storage",
        "remora.repository.exporting": "export parse_source",
        "remora.repository.files": "Found recognise",
        "remora.repository.functions": "sources_in",
        "remora.repository.local": "LocalRepository",
        "remora.repository.sources": "APP function_source open_repository",
        "remora.storage.archive": "is_archive unpack",
        "remora.storage.cache": "ModelCache",
        "remora.storage.credentials": "settings_for",
        "remora.storage.location": "Location is_url parse_location",
        "remora.storage.objects": "open_store",
        "remora.storage.stored_file": "open_stored",
    },
)
