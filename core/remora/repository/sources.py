"""Function that opens the repository at a path, a URL or in an archive."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from remora.repository import CacheSettings, Repository
from remora.repository.local import LocalRepository
from remora.storage.archive import is_archive

if TYPE_CHECKING:
    from remora.startup import Ledger

_USUAL = CacheSettings()


def open_repository(
    location: str | Path,
    *,
    any_layout: bool = False,
    bare_name: str = "",
    cache: CacheSettings = _USUAL,
    ledger: Ledger | None = None,
) -> Repository:
    """Open the repository at a path or URL, or in an archive at either.

    Args:
        location: a local path, or a URL whose scheme selects the cloud.
        any_layout: also accept one model's directory or a model file ([M01] has repositories only).
        bare_name: the model's name then; by default that of its directory or file.
        cache: for models of clouds and archives.
        ledger: records the time of listings and downloads.

    Raises:
        NotFoundError: an unsupported scheme.
        InvalidArgumentError: an invalid URL.
    """
    text = str(location)
    scheme, colon, rest = text.partition("://")
    if colon and scheme.lower() == "file":
        text, colon = rest, ""
    if colon or is_archive(text):
        from remora.repository.clouds import open_elsewhere  # imports the storage client, which local paths never need

        return open_elsewhere(text, any_layout=any_layout, bare_name=bare_name, cache=cache, ledger=ledger)
    return LocalRepository(Path(text), any_layout=any_layout, bare_name=bare_name)
