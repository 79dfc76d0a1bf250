"""Environments on disk, shared by all processes of the machine.

An environment is a directory under its key, with a marker that is written last: environments cannot be moved once
created, so the marker makes them visible atomically. Two lock files lie beside the directory: the process that creates
or removes the environment holds the first, and every process that uses it shares the second until it exits.

Invariant: a visible environment is complete, and an environment in use is not removed.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from remora.errors import InternalError
from remora.system import locks

_log = logging.getLogger("remora.models")

_MARKER = ".remora-complete"

_in_use: dict[Path, int] = {}
"""Lock files that this process holds shared, by environment. Global, because locks belong to the process."""


class EnvironmentCache:
    """Cache of environment directories by key.

    Args:
        folder: created with mode 0700 if it does not exist.
        limit_bytes: total size of all environments; the least recently used are removed first.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes

    def has(self, key: str) -> bool:
        """Return True if the environment of that key is complete."""
        return (self._folder / key / _MARKER).is_file()

    def folder_for(self, key: str, make: Callable[[Path], None]) -> Path:
        """Return the environment of that key, creating it with ``make(folder)`` if necessary.

        The environment stays in use until the process exits. Raises InternalError if the cache cannot be written;
        exceptions of ``make`` propagate.
        """
        environment = self._folder / key
        if environment in _in_use:
            return environment
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with locks.holding(self._folder / f"{key}.making"):
                if not (environment / _MARKER).is_file():
                    self._make(environment, make)
                with suppress(OSError):
                    os.utime(environment / _MARKER)  # records the last use
                if environment not in _in_use:
                    _in_use[environment] = locks.take(self._folder / f"{key}.using", shared=True)
        except OSError as error:
            raise InternalError(
                f"cannot keep environments of Python models in {self._folder}: {error}. Give a directory that can be "
                "written, with --backend-config=python,environment-cache-directory=DIR"
            ) from error
        self._shrink()
        return environment

    def _make(self, environment: Path, make: Callable[[Path], None]) -> None:
        shutil.rmtree(environment, ignore_errors=True)  # remains of a process that died while creating it
        try:
            make(environment)
            unfinished = environment / f"{_MARKER}.part"
            unfinished.write_text(str(_size_of(environment)), encoding="ascii")
            unfinished.replace(environment / _MARKER)
        except BaseException:
            shutil.rmtree(environment, ignore_errors=True)
            raise

    def _shrink(self) -> None:
        """Remove the least recently used environments that are not in use until the rest fits."""
        kept = sorted(_entries(self._folder), key=lambda entry: entry.used_ns)
        total = sum(entry.size for entry in kept)
        for entry in kept:
            if total <= self._limit_bytes:
                return
            with suppress(OSError):  # another process creates or uses it
                self._remove(entry.path)
                total -= entry.size

    def _remove(self, environment: Path) -> None:
        """Remove an environment. Raises BlockingIOError if it is in use."""
        making, using = (environment.with_name(f"{environment.name}.{what}") for what in ("making", "using"))
        with locks.holding(making, wait=False), locks.holding(using, wait=False):
            (environment / _MARKER).unlink()
            shutil.rmtree(environment, ignore_errors=True)
        _log.info("removed the environment %s: the cache is full", environment)


class _Entry(NamedTuple):
    path: Path
    size: int
    used_ns: int


def _entries(folder: Path) -> Iterator[_Entry]:
    for marker in folder.glob(f"*/{_MARKER}"):
        with suppress(OSError, ValueError):
            yield _Entry(marker.parent, int(marker.read_text(encoding="ascii")), marker.stat().st_mtime_ns)


def _size_of(folder: Path) -> int:
    """Return the size in bytes, not counting links."""
    return sum(
        entry.stat(follow_symlinks=False).st_size
        for root, _, _ in os.walk(folder)
        for entry in os.scandir(root)
        if entry.is_file(follow_symlinks=False)
    )
