"""Opening of repositories in buckets and archives, with their credentials and cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from remora.errors import NotFoundError
from remora.repository import CacheSettings, Repository
from remora.repository.files import OTHER_SUFFIXES
from remora.repository.packed import PackedRepository
from remora.repository.remote import RemoteRepository
from remora.startup import Ledger
from remora.storage.archive import is_archive
from remora.storage.cache import LIMIT_BYTES, ModelCache
from remora.storage.credentials import settings_for
from remora.storage.local_file import LocalFile
from remora.storage.location import SCHEMES, Location, is_url, parse_location
from remora.storage.objects import ObjectStorage
from remora.system.clock import SystemClock
from remora.system.environment import boot_id, cache_directory, variables

_TRITONS_DIRECTORIES = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY",
    "gs": "TRITON_GCS_MOUNT_DIRECTORY",
    "az": "TRITON_AZURE_MOUNT_DIRECTORY",
}


def open_elsewhere(
    place: str,
    *,
    any_layout: bool,
    bare_name: str = "",
    cache: CacheSettings,
    ledger: Ledger | None = None,
    open_local: Callable[[Path], Repository],
) -> Repository:
    """Open the repository at a URL or in a local archive.

    ``open_local`` opens what another library wrote after it is fetched or unpacked; other arguments and errors as of
    `open_repository`.
    """
    cloud = parse_location(place).cloud if is_url(place) else ""
    models = open_cache(cache, cloud)
    ledger = ledger or Ledger(SystemClock.monotonic_ns)
    if "://" not in place:
        return PackedRepository(LocalFile(Path(place)), models, ledger, bare_name=bare_name, open_local=open_local)
    storage, location = open_storage(place)
    if is_archive(location.path):
        return PackedRepository(storage, models, ledger, bare_name=bare_name, open_local=open_local)
    name = _model_name(location)
    return RemoteRepository(
        storage, name, models, ledger, any_layout=any_layout, bare_name=bare_name, open_local=open_local
    )


def open_storage(url: str) -> tuple[ObjectStorage, Location]:
    """Open the storage at a URL with the credentials of the environment.

    Raises as `open_repository`.
    """
    if not is_url(url):
        scheme = url.partition("://")[0]
        raise NotFoundError(
            f"cannot open model repository '{scheme}://...': there is no storage for '{scheme}://'. Give a local "
            f"directory, or a URL of {', '.join(f'{known}://' for known in SCHEMES)}"
        )
    location = parse_location(url)
    return ObjectStorage(location, lambda: settings_for(location, variables(), _read_text)), location


def open_cache(settings: CacheSettings, cloud: str = "") -> ModelCache:
    """Open the model cache of this machine or, by Triton's variables, of a ``cloud`` [M23].

    Raises UnavailableError when no cache directory is writable.
    """
    named = settings.directory or variables().get(_TRITONS_DIRECTORIES.get(cloud, ""), "")
    folder = Path(named) if named else cache_directory("models", variables())
    return ModelCache(folder, settings.limit_bytes or LIMIT_BYTES, boot_id())


def _model_name(location: Location) -> str:
    """Return the name of a single model.

    It is that of its folder, or of the folder that contains its file.
    """
    folder, _, last = location.path.rpartition("/")
    stem, _, suffix = last.rpartition(".")
    if f".{suffix}" in OTHER_SUFFIXES and stem != "model":
        return stem
    in_folder = suffix == "onnx" or f".{suffix}" in OTHER_SUFFIXES
    return (folder.rpartition("/")[2] if in_folder else last) or location.bucket


def _read_text(path: str) -> str:
    return Path(path).expanduser().read_text(encoding="utf-8")
