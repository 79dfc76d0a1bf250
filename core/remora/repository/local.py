"""Model folders on a local disk, in every layout people have; reads directory listings, opens no model.

- A Triton repository: ``<repo>/<model>/[config.pbtxt]/<version>/<model file>`` [M01].
- One model's directory: the same without the repository around it.
- A version's directory of a model, or a model file in it: that version alone, called as the model's directory is.
- A model file alone, or a directory with the model file directly in it: version 1.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from remora.errors import NotFoundError, UnavailableError
from remora.model_files import CONFIG_FILENAMES, KINDS, MODEL_FILENAMES, parse_version
from remora.repository import BARE_SUFFIXES, Fingerprint, ModelFolder

_FILE_SUFFIXES = (*BARE_SUFFIXES, ".pt", ".pt2", ".plan", ".ubj")
"""Files that are served as models when their path is given. In a directory, most of these are no models."""


class LocalRepository:
    """A directory as a `Repository`.

    Args:
        directory: the repository; with ``any_layout`` also one model's directory or a model file.
        bare_name: what a model is called that has no folder of its own in the directory, instead of its file's or the
            directory's name.
    """

    def __init__(self, directory: Path, *, any_layout: bool = False, bare_name: str = "") -> None:
        self._directory = directory
        self._any_layout = any_layout
        self._bare_name = bare_name

    @property
    def location(self) -> str:
        """The directory, as it was given."""
        return str(self._directory)

    def models(self, name: str = "") -> dict[str, list[ModelFolder]]:
        """See `Repository.models`. Raises NotFoundError when there is no such directory."""
        try:
            if not self._any_layout:
                return scan_repository(self._directory, name)
            found = _scan_one(self._directory, self._bare_name)
        except OSError as error:  # a disk of the network that is away, a directory that may not be read
            raise UnavailableError(f"cannot look at '{self._directory}': {error.strerror or error}") from error
        return {name: found[name]} if name in found else {} if name else found

    def fingerprint(self, name: str) -> Fingerprint:
        """Modification time in ns and size of each file [M06]."""
        stamps: dict[str, Hashable] = {}
        for folder in self.models(name).get(name, []):
            for path in _files_of(folder):
                with suppress(FileNotFoundError):  # it went while we looked
                    status = path.stat()
                    stamps[path.relative_to(folder.path).as_posix()] = (status.st_mtime_ns, status.st_size)
        return stamps

    def fetch(self, name: str, versions: Collection[int] | None = None) -> ModelFolder:
        """The model's folder: it is here already. Raises NotFoundError."""
        folders = self.models(name).get(name, [])
        if not folders:
            raise NotFoundError(f"there is no model '{name}' in '{self._directory}'")
        return folders[0]


def scan_repository(repository: Path, name: str = "") -> dict[str, list[ModelFolder]]:
    """The models of a Triton repository, or the one that is called ``name``.

    Raises NotFoundError when it is no directory.
    """
    if not repository.is_dir():
        raise NotFoundError(
            f"failed to open model repository '{repository}': it is not a directory that can be read. "
            f"Give the directory that holds one folder per model{_nearest(repository)}."
        )
    found: dict[str, list[ModelFolder]] = {}
    for entry in sorted(repository.iterdir()):
        if (not name or entry.name == name) and not entry.name.startswith(".") and entry.is_dir():
            found[entry.name] = [model_folder(entry, entry.name)]
    return found


def scan(paths: Iterable[Path]) -> dict[str, list[ModelFolder]]:
    """The models under ``paths``, each a repository, a model's directory or a model file.

    A name that occurs more than once keeps all its folders; the lifecycle refuses it [M15].
    Raises NotFoundError for a path that does not exist or holds no model.
    """
    found: dict[str, list[ModelFolder]] = {}
    for path in paths:
        for name, folders in _scan_one(path).items():
            found.setdefault(name, []).extend(folders)
    return found


def _scan_one(path: Path, bare_name: str = "") -> dict[str, list[ModelFolder]]:
    if path.is_file():
        return _scan_file(path, bare_name)
    if not path.is_dir():
        raise NotFoundError(f"no such file or directory: '{path}'{_nearest(path)}")
    version = _version_of_model(path) if not bare_name else None
    if version is not None:
        return {version.name: [version]}
    if _is_model(path):
        name = bare_name or path.resolve().name
        return {name: [model_folder(path, name)]}
    found = scan_repository(path)
    files = [entry for entry in sorted(path.iterdir()) if entry.is_file() and entry.suffix in BARE_SUFFIXES]
    for entry in files:
        name = bare_name if bare_name and len(files) == 1 else entry.stem
        found.setdefault(name, []).append(ModelFolder(name, path, path, {1: entry}))
    return found


def _scan_file(path: Path, bare_name: str) -> dict[str, list[ModelFolder]]:
    """The model that a file is, or that it belongs to by its name. Raises NotFoundError for other files."""
    named = path.name in MODEL_FILENAMES
    version = _version_of_model(path.parent) if named and not bare_name else None
    if version is not None:
        return {version.name: [version]}
    if path.suffix in _FILE_SUFFIXES:
        name = bare_name or (path.resolve().parent.name if named else path.stem)
        return {name: [ModelFolder(name, path.parent, path.parent, {1: path})]}
    if named:  # the configuration and the other files beside it are the model's too
        name = bare_name or path.resolve().parent.name
        return {name: [model_folder(path.parent, name)]}
    if path.name in CONFIG_FILENAMES:
        raise NotFoundError(f"'{path}' is a configuration: give the directory that it lies in")
    kind = next((kind for kind in KINDS if kind.by_itself and Path(kind.filename).suffix == path.suffix), None)
    folder = f", such as {path.stem}/1/{kind.filename} for this file" if kind else ""
    raise NotFoundError(
        f"'{path}' is not a model file: expected {', '.join(_FILE_SUFFIXES)} or a model's directory{folder}"
    )


def _version_of_model(directory: Path) -> ModelFolder | None:
    """The model of which a directory is one version, with that version alone; None for any other directory."""
    home = directory.resolve()
    number = parse_version(home.name)
    if number is None or not home.name.isdecimal() or not home.parent.name:
        return None
    names = {entry.name for entry in home.iterdir()}
    if names.isdisjoint(MODEL_FILENAMES) or not names.isdisjoint(CONFIG_FILENAMES):
        return None
    return ModelFolder(home.parent.name, home.parent, home.parent.parent, {number: home})


def _nearest(path: Path) -> str:
    """A hint at the entry beside a missing path whose name is nearest; empty without one."""
    from difflib import get_close_matches  # only for a mistake

    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    close = get_close_matches(path.name, names, n=1)
    return f"; did you mean '{path.parent / close[0]}'?" if close else ""


def _is_model(directory: Path) -> bool:
    """A model's own directory has a config, a model file, or version directories that are no models themselves."""
    for entry in directory.iterdir():
        if entry.name in CONFIG_FILENAMES or entry.name in MODEL_FILENAMES:
            return True
        if entry.is_dir() and parse_version(entry.name) is not None and not _is_model_of_repository(entry):
            return True
    return False


def _is_model_of_repository(directory: Path) -> bool:
    """A directory with a number for its name that holds a config or versions of its own is a model called that."""
    return any(
        entry.name in CONFIG_FILENAMES or (entry.is_dir() and parse_version(entry.name) is not None)
        for entry in directory.iterdir()
    )


def model_folder(directory: Path, name: str) -> ModelFolder:
    """The model that a directory holds, whatever the directory is called. One that may not be read (lost+found of a
    volume) has no versions: it hides no other model, and whoever loads it is told why."""
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
    """Every file that belongs to a model; of a bare file's directory that file alone.

    What Python leaves behind and what is hidden belongs to no model: a model must not change by being run.
    """
    bare = [path for path in folder.versions.values() if path.is_file()]
    if bare:
        yield from bare
        return
    for entry in sorted(folder.path.iterdir()):
        if _is_passing(entry.name):
            continue
        if not entry.is_dir():
            yield entry
            continue
        for directory, inner, names in os.walk(entry):  # a version may be a link to a directory; deeper ones are not
            inner[:] = [name for name in inner if not _is_passing(name)]
            yield from (Path(directory, name) for name in sorted(names) if not _is_passing(name))


def _is_passing(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"
