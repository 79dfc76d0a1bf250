"""Commands `remora pull` and `remora cache`, which download and manage cached models."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from remora.api.storage import open_repository
from remora.cli.arguments import bind
from remora.cli.output import columns
from remora.errors import AlreadyExistsError, NotFoundError
from remora.repository import CacheSettings, ModelFolder

if TYPE_CHECKING:
    from remora.api.storage import ModelCache

_STAGE = ".remora-pull"


def add_pull(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora pull`."""
    parser.description = (
        "Download the models at a URL, or extract them from an archive, into DIR with one folder each, "
        "as `remora serve DIR` expects; without DIR, into the cache of `remora serve URL`. An interrupted download "
        "resumes."
    )
    parser.add_argument("url", metavar="URL", help="repository, model or archive: s3://, gs://, as://, https://")
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="target directory (default: the cache)")
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME", help="download only this model; repeatable"
    )
    parser.add_argument("--force", action="store_true", help="replace models that DIR already has")
    _add_cache_options(parser)
    bind(parser, pull)


def add_cache(cache: argparse.ArgumentParser) -> None:
    """Add the actions of `remora cache`."""
    kinds = cache.add_subparsers(metavar="ACTION", required=True)
    listing = kinds.add_parser(
        "list", help="print every cached file", description="Print every cached file, the oldest first."
    )
    listing.add_argument("--json-out", action="store_true", help="print the list as JSON")
    clearing = kinds.add_parser(
        "clear",
        help="remove unused models",
        description="Remove the models that no running server uses. A server downloads them again when needed.",
    )
    for parser, run in ((listing, show), (clearing, clear)):
        _add_cache_options(parser)
        bind(parser, run)


def _add_cache_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-cache-directory",
        default="",
        metavar="DIR",
        help="cache directory, as for `remora serve` (default: the user's)",
    )


def pull(options: argparse.Namespace) -> int:
    """Download models and print them. Raises RemoraError."""
    stage = options.directory / _STAGE if options.directory else None
    if stage is not None:
        options.directory.mkdir(parents=True, exist_ok=True)
    # Stage in DIR's file system, so that a complete model can be renamed to its place.
    settings = CacheSettings(str(stage) if stage else options.model_cache_directory)
    repository = open_repository(options.url, any_layout=True, cache=settings)
    found = repository.models()
    absent = [name for name in options.model if name not in found]
    if absent:
        raise NotFoundError(f"'{repository.location}' has no model '{absent[0]}'; it has {', '.join(sorted(found))}")
    rows = [("model", "versions", "MB", "seconds", "in")]
    for name in options.model or sorted(found):
        if options.directory is not None:
            _refuse_existing(options.directory / name, force=options.force)
        begin = time.perf_counter()
        folder = repository.fetch(name)
        path = _place(folder, options.directory / name) if options.directory else folder.path
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        versions = ",".join(map(str, sorted(folder.versions))) or "-"
        rows.append((name, versions, f"{size / 1e6:.1f}", f"{time.perf_counter() - begin:.2f}", str(path)))
    if stage is not None:
        shutil.rmtree(stage, ignore_errors=True)
    print(columns(rows))
    return 0


def _refuse_existing(target: Path, *, force: bool) -> None:
    if target.exists() and not force:
        raise AlreadyExistsError(f"'{target}' exists already: --force replaces it")


def _place(folder: ModelFolder, target: Path) -> Path:
    """Move a fetched model to its place in one step, with ordinary file permissions."""
    source = folder.path
    bare = [path for path in folder.versions.values() if path.is_file()]
    if bare:  # make a bare model file version 1 of a model directory
        (source / "1").mkdir()
        bare[0].rename(source / "1" / f"model{bare[0].suffix}")
    for path in source.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o644)
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        os.rename(target, old)
        source.rename(target)
        shutil.rmtree(old)
    else:
        source.rename(target)
    return target


def show(options: argparse.Namespace) -> int:
    """Print the contents of the cache."""
    cache = _cache(options)
    entries = cache.entries()
    if options.json_out:
        rows = [{"source": each.source, "bytes": each.size, "arrived_s": each.used_ns // 10**9} for each in entries]
        print(json.dumps({"directory": str(cache.folder), "files": rows}, indent=2))
        return 0
    if entries:
        shown = [
            (each.source, f"{each.size / 1e6:.1f}", time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used_ns / 1e9)))
            for each in entries
        ]
        print(columns([("file", "MB", "arrived"), *shown]))
    print(f"{len(entries)} files, {cache.held_bytes() / 1e6:.1f} MB in {cache.folder}")
    return 0


def clear(options: argparse.Namespace) -> int:
    """Remove the models that no server uses."""
    cache = _cache(options)
    removed_bytes = cache.clear()
    kept_bytes = cache.held_bytes()
    kept = f"; {kept_bytes / 1e6:.1f} MB are in use and kept" if kept_bytes else ""
    print(f"removed {removed_bytes / 1e6:.1f} MB from {cache.folder}{kept}")
    return 0


def _cache(options: argparse.Namespace) -> ModelCache:
    from remora.api.storage import open_cache

    return open_cache(CacheSettings(options.model_cache_directory))
