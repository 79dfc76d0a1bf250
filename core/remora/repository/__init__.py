"""Where models come from; the law: a model's name is looked up in a listing, never joined to a path.

A `Repository` is one place that holds models: a local directory, or a bucket of a cloud. The lifecycle knows only this
protocol. It scans with `models`, sees by `fingerprint` what changed since, and has by `fetch` what it opens on disk.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

Fingerprint = Mapping[str, Hashable]
"""A model's files as paths relative to its folder (``config.pbtxt``, ``1/model.onnx``), each with a stamp that is
another one when the file's content may be another one."""

BARE_SUFFIXES = (".onnx",)
"""Of files that are a model by themselves, called as the file is."""

_NAMES_OF_SUFFIXES = {".ubj": "xgboost.ubj"}
_NOT_LISTED: Mapping[int, tuple[str, ...]] = {}


class ModelFolder(NamedTuple):
    """A model as it lies on disk, or will once it is fetched.

    ``versions`` maps a version number to its directory (or, for a bare file, to that file). ``path`` is where config,
    labels and warmup files lie, ``repository`` the directory around it. ``listed`` has the names of the files of
    versions that may not be on disk yet.
    """

    name: str
    path: Path
    repository: Path
    versions: Mapping[int, Path]
    listed: Mapping[int, tuple[str, ...]] = _NOT_LISTED

    def filenames(self, version: int) -> tuple[str, ...]:
        """Names of the files in a version's directory; what the backend is told by [C04]."""
        if version in self.listed:
            return self.listed[version]
        path = self.versions[version]
        if path.is_file():  # a bare file has its model's name: its suffix says what it is
            return (_NAMES_OF_SUFFIXES.get(path.suffix, f"model{path.suffix}"),)
        return tuple(sorted(entry.name for entry in path.iterdir()))

    def file_bytes(self, version: int) -> int:
        """The size of a version's files on disk."""
        path = self.versions[version]
        paths = path.rglob("*") if path.is_dir() else (path,)
        return sum(each.stat().st_size for each in paths if each.is_file())


class Repository(Protocol):
    """One place that holds models. Thread-safe; every method may block."""

    @property
    def location(self) -> str:
        """What the operator called it, without secrets: for log lines, error texts and namespaces."""

    def models(self, name: str = "") -> dict[str, list[ModelFolder]]:
        """What is there now, by name; with ``name`` that model alone. One look, no file is brought here.

        A name that occurs more than once keeps all its folders. Raises NotFoundError when the place itself is not
        there, UnavailableError when it cannot be reached.
        """

    def fingerprint(self, name: str) -> Fingerprint:
        """The files of a model as the last look at it saw them; empty for a model that is not there."""

    def fetch(self, name: str, versions: Collection[int] | None = None) -> ModelFolder:
        """Bring a model here: its own files, and those of ``versions`` (None for all of them). Cheap when nothing
        changed.

        What is at the folder's paths stays as it is while it may be open. Raises NotFoundError when it is not there,
        and UnavailableError when it cannot be had.
        """


class CacheSettings(NamedTuple):
    """Where models are kept that are not simply on disk.

    Attributes:
        directory: the user's cache directory when empty.
        limit_bytes: what it may hold; 0 for what is usual.
    """

    directory: str = ""
    limit_bytes: int = 0
