"""Protocol and data types of model repositories.

A `Repository` is one location of models: a local directory or a bucket. The lifecycle uses only this protocol: `models`
scans, `fingerprint` detects changes, and `fetch` makes a model's files local. Model names are looked up in a listing
and never joined to a path.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

Fingerprint = Mapping[str, Hashable]
"""A model's files by path relative to its folder (``config.pbtxt``, ``1/model.onnx``), each with a stamp that changes
whenever the content may have changed."""

BARE_SUFFIXES = (".onnx",)
"""Suffixes of files that are a model by themselves, named after the file."""

FOREIGN_SUFFIXES = (".joblib", ".pkl", ".skops", ".cbm", ".bst")
"""Suffixes of other libraries' files, for errors; `remora.repository.files` also recognises files by content."""

_STRAY_FOLDERS = frozenset(
    ("lost+found", "__pycache__", "__MACOSX", "$RECYCLE.BIN", "System Volume Information", "@eaDir", "#recycle")
)
"""Folders that file systems, interpreters and archive tools leave behind."""


def is_stray(name: str) -> bool:
    """Return True for a hidden name and for one that a file system or a tool leaves behind.

    Neither belongs to a model.
    """
    return name.startswith(".") or name in _STRAY_FOLDERS


_NAMES_OF_SUFFIXES = {".ubj": "xgboost.ubj"}
_NOT_LISTED: Mapping[int, tuple[str, ...]] = {}


class ModelFolder(NamedTuple):
    """A model on disk, or to be fetched there.

    ``versions`` maps a version number to its directory (or, for a bare file, to that file). ``path`` contains the
    config, labels and warmup files; ``repository`` is its parent directory. ``listed`` has the file names of versions
    that may not be on disk yet.
    """

    name: str
    path: Path
    repository: Path
    versions: Mapping[int, Path]
    listed: Mapping[int, tuple[str, ...]] = _NOT_LISTED

    def absolute(self) -> ModelFolder:
        """Return the folder with absolute paths.

        A model's code may change the working directory. Links and ``..`` stay as they are, because ``..`` after a link
        means the parent of the link's target.
        """
        versions = {number: path.absolute() for number, path in self.versions.items()}
        return self._replace(path=self.path.absolute(), repository=self.repository.absolute(), versions=versions)

    def filenames(self, version: int) -> tuple[str, ...]:
        """Return the file names in a version's directory, from which the backend is inferred [C04]."""
        if version in self.listed:
            return self.listed[version]
        path = self.versions[version]
        if path.is_file():  # a bare file is named after its model, and its suffix determines the kind
            return (_NAMES_OF_SUFFIXES.get(path.suffix, f"model{path.suffix}"),)
        return tuple(sorted(entry.name for entry in path.iterdir()))

    def file_bytes(self, version: int) -> int:
        """Return the size of a version's files on disk."""
        path = self.versions[version]
        paths = path.rglob("*") if path.is_dir() else (path,)
        return sum(each.stat().st_size for each in paths if each.is_file())


class Repository(Protocol):
    """One location of models. Thread-safe. Every method may block."""

    @property
    def location(self) -> str:
        """The operator's name of the location, without secrets: for logs, errors and namespaces."""

    def models(self, name: str = "") -> dict[str, list[ModelFolder]]:
        """Scan the location and return its models by name, or only the model ``name``.

        Fetches no files. A name that occurs more than once keeps all its folders. Raises NotFoundError when the
        location does not exist, UnavailableError when it cannot be reached.
        """

    def fingerprint(self, name: str) -> Fingerprint:
        """Return the files of a model as of the last scan, empty for an unknown model."""

    def fetch(self, name: str, versions: Collection[int] | None = None) -> ModelFolder:
        """Fetch a model's common files and those of ``versions`` (None for all).

        Cheap if nothing has changed. The files at the returned paths do not change while they may be in use. Raises
        NotFoundError for an unknown model, UnavailableError when it cannot be fetched.
        """


class CacheSettings(NamedTuple):
    """Cache of models that are not in local folders.

    Attributes:
        directory: the user's cache directory when empty.
        limit_bytes: maximum size; 0 for the default.
    """

    directory: str = ""
    limit_bytes: int = 0
