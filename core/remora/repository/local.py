"""Model folders on a local disk, in several layouts, found without opening a model.

- A Triton repository: ``<repo>/<model>/[config.pbtxt]/<version>/<model file>`` [M01].
- One model's directory: the same without the repository around it.
- A version's directory of a model, or a model file in it: only that version, named after the model's directory.
- A single model file, or a directory that contains one directly: version 1.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from remora.errors import NotFoundError, UnavailableError
from remora.model_files import CONFIG_FILENAMES, KINDS, MODEL_FILENAMES, parse_version
from remora.repository import BARE_SUFFIXES, FOREIGN_SUFFIXES, Fingerprint, ModelFolder, is_stray
from remora.storage.archive import is_archive
from remora.system.url_secrets import shown_place

_log = logging.getLogger("remora.models")
_FILE_SUFFIXES = (*BARE_SUFFIXES, ".pt", ".pt2", ".plan", ".ubj")
"""Files that are served as models if named explicitly. In a directory, most of these are not models."""


class LocalRepository:
    """A directory as a `Repository`.

    Args:
        directory: the repository; with ``any_layout`` also one model's directory or a model file.
        bare_name: the name of a model without a separate folder, in place of its file's or directory's name.
    """

    def __init__(self, directory: Path, *, any_layout: bool = False, bare_name: str = "") -> None:
        self._location = str(directory)
        self._directory = directory.absolute()  # because a model's code may change the working directory
        self._any_layout = any_layout
        self._bare_name = bare_name
        self._holds_models = False  # as the last look at an unknown layout found

    @property
    def location(self) -> str:
        """The directory as configured."""
        return self._location

    def models(self, name: str = "") -> dict[str, list[ModelFolder]]:
        """Scan the directory (see `Repository.models`). Raises NotFoundError when it does not exist."""
        try:
            if not self._any_layout:
                return scan_repository(self._directory, name)
            if name and self._holds_models and self._directory.is_dir():
                return _scan_folder(self._directory, "", name)
            single = _scan_single(self._directory, self._bare_name)
            self._holds_models = single is None and not self._bare_name
            found = _scan_folder(self._directory, self._bare_name) if single is None else single
        except OSError as error:  # such as an unmounted network disk or a missing permission
            raise UnavailableError(f"cannot scan '{self._directory}': {error.strerror or error}") from error
        return {name: found[name]} if name in found else {} if name else found

    def fingerprint(self, name: str) -> Fingerprint:
        """Return modification time in ns and size of each file [M06]."""
        stamps: dict[str, Hashable] = {}
        for folder in self.models(name).get(name, []):
            for path in _files_of(folder):
                with suppress(FileNotFoundError):  # deleted during the scan
                    status = path.stat()
                    stamps[path.relative_to(folder.path).as_posix()] = (status.st_mtime_ns, status.st_size)
        return stamps

    def fetch(self, name: str, versions: Collection[int] | None = None) -> ModelFolder:
        """Return the model's folder, which is local already. Raises NotFoundError."""
        folders = self.models(name).get(name, [])
        if not folders:
            raise NotFoundError(f"there is no model '{name}' in '{self._directory}'")
        return folders[0]


def scan_repository(repository: Path, name: str = "") -> dict[str, list[ModelFolder]]:
    """Return the models of a Triton repository, or only the one called ``name``.

    Raises NotFoundError if it is not a directory.
    """
    if not repository.is_dir():
        raise NotFoundError(
            f"failed to open model repository '{repository}': it is not a directory that can be read. "
            f"Give the directory that holds one folder per model{_nearest(repository)}."
        )
    return _folders_of(_entries(repository, name))


def _folders_of(entries: Iterable[Path]) -> dict[str, list[ModelFolder]]:
    found: dict[str, list[ModelFolder]] = {}
    for entry in entries:
        if not entry.is_dir():
            continue
        if is_stray(entry.name):
            _report_stray(entry)
        else:
            found[entry.name] = [model_folder(entry, entry.name)]
    return found


def _entries(directory: Path, name: str) -> list[Path]:
    """Return the entries of a directory in order, or the one with this name.

    A name with a separator names none.
    """
    if not name:
        return sorted(directory.iterdir())
    entry = directory / name
    if name != entry.name or name in (".", "..") or "\0" in name:
        return []
    try:
        os.lstat(entry)  # an error that does not say that it is missing must not make a model disappear
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            return []
        raise
    return [entry]


@lru_cache(maxsize=256)  # because a repository may be scanned every few seconds
def _report_stray(folder: Path) -> None:
    if not folder.name.startswith("."):
        _log.warning("'%s' is not a model: a file system or a tool has left it there", folder)


def scan(paths: Iterable[Path]) -> dict[str, list[ModelFolder]]:
    """Return the models under ``paths``, each a repository, a model's directory or a model file.

    A name that occurs more than once keeps all its folders; the lifecycle refuses it [M15].
    Raises NotFoundError for a path that does not exist or contains no model.
    """
    found: dict[str, list[ModelFolder]] = {}
    for path in paths:
        for name, folders in _scan_one(path).items():
            found.setdefault(name, []).extend(folders)
    return found


def _scan_one(path: Path) -> dict[str, list[ModelFolder]]:
    single = _scan_single(path, "")
    return _scan_folder(path, "") if single is None else single


def _scan_single(path: Path, bare_name: str) -> dict[str, list[ModelFolder]] | None:
    """Return the only model of a path, None for a directory that may hold several.

    Raises NotFoundError.
    """
    if path.is_file():
        return _scan_file(path, bare_name)
    if not path.is_dir():
        raise NotFoundError(f"no such file or directory: '{shown_place(str(path))}'{_nearest(path)}")
    version = _version_of_model(path) if not bare_name else None
    if version is not None:
        return {version.name: [version]}
    if _is_model(path):
        name = bare_name or path.resolve().name
        return {name: [model_folder(path, name)]}
    return None


def _scan_folder(path: Path, bare_name: str, name: str = "") -> dict[str, list[ModelFolder]]:
    """Return the models among the folders and bare files of a directory.

    With ``name``, return only those called so.
    """
    entries = _entries(path, name)
    found = _folders_of(entries)
    named = [each for suffix in BARE_SUFFIXES for each in _entries(path, f"{name}{suffix}")] if name else entries
    files = sorted(entry for entry in named if entry.is_file() and entry.suffix in BARE_SUFFIXES)
    for entry in files:
        stem = bare_name if bare_name and len(files) == 1 else entry.stem
        found.setdefault(stem, []).append(ModelFolder(stem, path, path, {1: entry}))
    return found


def _scan_file(path: Path, bare_name: str) -> dict[str, list[ModelFolder]]:
    """Return the model that a file is or belongs to by its name.

    Raises NotFoundError for other files.
    """
    named = path.name in MODEL_FILENAMES
    version = _version_of_model(path.parent) if named and not bare_name else None
    if version is not None:
        return {version.name: [version]}
    if path.suffix in _FILE_SUFFIXES:
        name = bare_name or (path.resolve().parent.name if named else path.stem)
        return {name: [ModelFolder(name, path.parent, path.parent, {1: path})]}
    if named:  # the configuration and other files beside it belong to the model
        name = bare_name or path.resolve().parent.name
        return {name: [model_folder(path.parent, name)]}
    if path.name in CONFIG_FILENAMES:
        raise NotFoundError(f"'{path}' is a configuration: give the directory that it lies in")
    # From the end, because a JSON file is rather a forest than the configuration of an exported language model.
    kind = next((kind for kind in KINDS[::-1] if kind.by_itself and Path(kind.filename).suffix == path.suffix), None)
    folder = f", such as {path.stem}/1/{kind.filename} for this file" if kind else ""
    raise NotFoundError(
        f"'{path}' is not a model file: expected {', '.join((*_FILE_SUFFIXES, *FOREIGN_SUFFIXES))}, a folder of "
        f"transformers, MLflow or TensorFlow, or a model's directory{folder}"
    )


def _version_of_model(directory: Path) -> ModelFolder | None:
    """Return the model whose version a directory is, with only that version.

    Returns None for other directories.
    """
    home = directory.resolve()
    number = parse_version(home.name)
    if number is None or not home.name.isdecimal() or not home.parent.name:
        return None
    names = {entry.name for entry in home.iterdir()}
    if names.isdisjoint(MODEL_FILENAMES) or not names.isdisjoint(CONFIG_FILENAMES):
        return None
    return ModelFolder(home.parent.name, home.parent, home.parent.parent, {number: home})


def _nearest(path: Path) -> str:
    """Return a hint with the sibling whose name is closest to a missing path, or "" without one."""
    from difflib import get_close_matches  # imported here because only an error needs it

    try:
        names = [entry.name for entry in path.parent.iterdir() if _may_be_served(entry)]
    except OSError:
        return ""
    close = get_close_matches(path.name, names, n=1)
    return f"; did you mean '{path.parent / close[0]}'?" if close else ""


def _may_be_served(path: Path) -> bool:
    """Return True for a folder and for a file whose name is that of a model, code or an archive."""
    suffixes = (*_FILE_SUFFIXES, *FOREIGN_SUFFIXES, ".py")
    return path.is_dir() or path.name in MODEL_FILENAMES or path.suffix in suffixes or is_archive(path.name)


def _is_model(directory: Path) -> bool:
    """Return True for a model's directory.

    It has a config, a model file, or plain version directories.
    """
    for entry in directory.iterdir():
        if entry.name in CONFIG_FILENAMES or entry.name in MODEL_FILENAMES:
            return True
        if entry.is_dir() and parse_version(entry.name) is not None and not _is_model_of_repository(entry):
            return True
    return False


def _is_model_of_repository(directory: Path) -> bool:
    """Return True if a directory with a numeric name is a model itself, by its content."""
    return any(
        entry.name in CONFIG_FILENAMES or (entry.is_dir() and parse_version(entry.name) is not None)
        for entry in directory.iterdir()
    )


def model_folder(directory: Path, name: str) -> ModelFolder:
    """Return the model in a directory.

    An unreadable directory has no versions: it hides no other model, and loading it fails with an error.
    """
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        entries = []
    versions: dict[int, Path] = {}
    for entry in entries:
        number = parse_version(entry.name) if entry.is_dir() else None
        if number is not None:
            versions.setdefault(number, entry)
    if not versions and any(entry.name in MODEL_FILENAMES for entry in entries):
        versions = {1: directory}
    return ModelFolder(name, directory, directory.parent, versions)


def _files_of(folder: ModelFolder) -> Iterator[Path]:
    """Yield the files that belong to a model, for a bare file only that file.

    Excludes hidden files and Python's caches, because running a model must not change its fingerprint.
    """
    bare = [path for path in folder.versions.values() if path.is_file()]
    if bare:
        yield from bare
        return
    for entry in sorted(folder.path.iterdir()):
        if is_stray(entry.name):
            continue
        if not entry.is_dir():
            yield entry
            continue
        for directory, inner, names in os.walk(entry):  # follows a link at the version level, not below
            inner[:] = [name for name in inner if not is_stray(name)]
            yield from (Path(directory, name) for name in sorted(names) if not is_stray(name))
