"""Upload of a model folder to a bucket, below a digest of its content.

A changed model has another location, so instances that start later never mix two models. An interrupted upload goes on
with the files that are missing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from remora.api.storage import is_url, parse_location, settings_for
from remora.errors import RemoraError
from remora.system.install_advice import install_command
from remora_deploy.deploy.plan import Call, CallError, Progress, Step

_PIECE_BYTES = 1 << 20
_DIGEST_LETTERS = 16
_ARCHIVE = "model.tar.gz"
"""Name of a folder that is uploaded as one archive, as SageMaker names it."""


class Source(NamedTuple):
    """Location of a model, and the local folder to upload to it, or ""."""

    location: str
    folder: str = ""


def source_of(model: str, bucket: str, name: str, scheme: str, *, packed: bool = False) -> Source:
    """Return the source of a model that is a folder or a URL. Raises ValueError.

    With ``packed`` a folder is uploaded as one archive.
    """
    if not model:
        raise ValueError(f"--model: expected a folder or a location such as {scheme}bucket/models/{name}/")
    if is_url(model):
        if not model.startswith(scheme):
            raise ValueError(
                f"{model}: the model must be a folder, or a location such as {scheme}bucket/models/{name}/"
            )
        return Source(model)
    folder = Path(model)
    if not folder.is_dir():
        raise ValueError(
            f"{model}: not a folder; pass a model repository's folder or a location such as {scheme}bucket/models/"
        )
    if not bucket.startswith(scheme):
        raise ValueError(
            f"--bucket={bucket}: expected a location for the folder {model}, such as {scheme}bucket/models"
        )
    return Source(f"{bucket.rstrip('/')}/{name}/{digest_of(folder)}/{_ARCHIVE if packed else ''}", str(folder))


def digest_of(folder: Path) -> str:
    """Return the digest of a folder's content: names and bytes of its files, not their times."""
    whole = hashlib.sha256()
    for name, path in files_of(folder):
        one = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                one.update(piece)
        whole.update(f"{len(name)}:{name}:{one.hexdigest()}\n".encode())
    return whole.hexdigest()[:_DIGEST_LETTERS]


def files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield a folder's files with their names, in order. Raises ValueError for an empty one."""
    found = sorted(
        (str((Path(root) / name).relative_to(folder)), Path(root) / name)
        for root, folders, names in os.walk(folder)
        for name in names
        if name not in (".DS_Store",) and "__pycache__" not in Path(root).parts
    )
    if not found:
        raise ValueError(f"{folder}: the folder has no files")
    yield from found


def upload_steps(source: Source) -> tuple[Step, ...]:
    """Return the step that uploads a folder; none for a location."""
    if not source.folder:
        return ()
    call = Call("storage", "upload", {"folder": source.folder, "name": source.location})
    return (Step("upload", call, until=lambda text: Progress(text=text)),)


def upload(folder: str, location: str, environ: Mapping[str, str]) -> str:
    """Upload what is missing of a folder and return a summary. Raises CallError."""
    if "://" not in location:
        return _copied(Path(folder), Path(location))
    try:
        import obstore.store

        from remora.api.storage import open_store
    except ImportError:
        extra = {"gs://": "gcs", "az://": "azure"}.get(location[:5], "s3")
        raise CallError("failed", f"needs obstore: {install_command(extra)}") from None
    try:
        place = parse_location(location)
        store = open_store(
            obstore.store, place, settings_for(place, environ, lambda path: Path(path).read_text("utf-8")), 3
        )
        if location.endswith(_ARCHIVE):
            return _put_archive(obstore, store, Path(folder), place.path)
        pages = obstore.list(store, place.path)
        existing = {str(each["path"]): int(each["size"]) for page in pages for each in page}
        missing = [
            (name, path)
            for name, path in files_of(Path(folder))
            if existing.get(f"{place.path}/{name}") != path.stat().st_size
        ]
        for name, path in missing:
            obstore.put(store, f"{place.path}/{name}", path)
    except RemoraError as error:
        raise CallError("denied", f"{location}: {error}") from error
    except Exception as error:  # obstore's own classes
        raise _error_of(location, error) from None
    size = sum(path.stat().st_size for _, path in missing)
    return f"{len(missing)} files, {size / 1e6:.1f} MB" if missing else "already there"


def _put_archive(obstore: Any, store: Any, folder: Path, name: str) -> str:
    """Upload a folder as one archive, if no archive has its name."""
    if any(str(each["path"]) == name for page in obstore.list(store, name.rpartition("/")[0]) for each in page):
        return "already there"
    with TemporaryDirectory(prefix="remora-archive-") as scratch:
        archive = Path(scratch) / _ARCHIVE
        with tarfile.open(archive, "w:gz") as packed:
            for inner, path in files_of(folder):
                packed.add(path, inner)
        obstore.put(store, name, archive)
        return f"1 archive, {archive.stat().st_size / 1e6:.1f} MB"


def _copied(folder: Path, target: Path) -> str:
    """Copy a folder; the target appears when it is complete."""
    if target.is_dir():
        return "already there"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(dir=target.parent, prefix=".copy-") as scratch:
            whole = Path(scratch) / "models"
            for name, path in files_of(folder):
                (whole / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, whole / name)
            whole.rename(target)
    except OSError as error:
        raise CallError("failed", f"{target}: {error}") from error
    return f"copied to {target}"


def _error_of(location: str, error: Exception) -> CallError:
    """Convert an error of obstore, without its queries, where signatures are."""
    text = str(error).partition("\n\nDebug source")[0].partition("?")[0]
    denied = any(word in f"{type(error).__name__} {error}" for word in ("Unauthenticated", "Permission", "403", "401"))
    return CallError("denied" if denied else "failed", f"cannot upload to {location}: {' '.join(text.split())[:400]}")
