"""`remora pull` and `remora cache`: models of clouds on this disk, before a server wants them."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remora.cli.output import columns
from remora.errors import AlreadyExistsError, NotFoundError
from remora.repository import CacheSettings, ModelFolder
from remora.repository.sources import open_repository

if TYPE_CHECKING:
    from remora.storage.cache import ModelCache

_STAGE = ".remora-pull"


def add_pull(commands: Any) -> argparse.ArgumentParser:
    """The arguments of `remora pull`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "pull",
        help="bring models of a cloud here",
        description="Bring the models at a URL (or in an archive) into DIR, one folder for each, as `remora serve DIR` "
        "takes them; without DIR, into the cache that `remora serve URL` looks into. One that was stopped goes on.",
    )
    parser.add_argument("url", metavar="URL", help="a repository, a model or an archive: s3://, gs://, as://, https://")
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="where to put the models")
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME", help="only this one; may be given again"
    )
    parser.add_argument("--force", action="store_true", help="replace models that DIR has already")
    _add_cache_options(parser)
    return parser


def add_cache(commands: Any) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The arguments of `remora cache list` and `remora cache clear`."""
    cache = commands.add_parser("cache", help="the models of clouds that are kept on this disk")
    kinds = cache.add_subparsers(metavar="ACTION", required=True)
    listing: argparse.ArgumentParser = kinds.add_parser(
        "list", help="print every file that is kept", description="Print every file that is kept, the oldest first."
    )
    listing.add_argument("--json-out", action="store_true", help="print it as JSON")
    clear: argparse.ArgumentParser = kinds.add_parser(
        "clear",
        help="remove what no server uses",
        description="Remove the models that no running server uses. They are brought again when needed.",
    )
    for parser in (listing, clear):
        _add_cache_options(parser)
    return listing, clear


def _add_cache_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-cache-directory",
        default="",
        metavar="DIR",
        help="another cache than the user's, as for `remora serve`",
    )


def pull(options: argparse.Namespace) -> int:
    """Bring models here and print what came. Raises RemoraError."""
    stage = options.directory / _STAGE if options.directory else None
    if stage is not None:
        options.directory.mkdir(parents=True, exist_ok=True)
    # In DIR's own file system, so that what is whole gets its place by a rename.
    settings = CacheSettings(str(stage) if stage else options.model_cache_directory)
    repository = open_repository(options.url, any_layout=True, cache=settings)
    found = repository.models()
    absent = [name for name in options.model if name not in found]
    if absent:
        raise NotFoundError(f"'{repository.location}' has no model '{absent[0]}'; it has {', '.join(sorted(found))}")
    rows = [("model", "versions", "MB", "seconds", "in")]
    for name in options.model or sorted(found):
        if options.directory is not None:
            _refuse_what_is_there(options.directory / name, force=options.force)
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


def _refuse_what_is_there(target: Path, *, force: bool) -> None:
    if target.exists() and not force:
        raise AlreadyExistsError(f"'{target}' is there already: --force replaces it")


def _place(folder: ModelFolder, target: Path) -> Path:
    """Give a model that was fetched its place, in one step; its files become ordinary ones."""
    source = folder.path
    bare = [path for path in folder.versions.values() if path.is_file()]
    if bare:  # a file alone is a model only by itself: here it becomes version 1 of one
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
    """Print what the cache holds."""
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
    """Remove what no server uses."""
    cache = _cache(options)
    given_back = cache.clear()
    left = cache.held_bytes()
    kept = f"; {left / 1e6:.1f} MB are in use and stay" if left else ""
    print(f"removed {given_back / 1e6:.1f} MB from {cache.folder}{kept}")
    return 0


def _cache(options: argparse.Namespace) -> ModelCache:
    from remora.repository.clouds import open_cache

    return open_cache(CacheSettings(options.model_cache_directory))
