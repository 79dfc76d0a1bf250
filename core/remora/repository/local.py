"""Model folders on a local disk, in every layout people have; reads directory listings, opens no model.

- A Triton repository: ``<repo>/<model>/[config.pbtxt]/<version>/<model file>`` (spec M01).
- One model's directory: the same without the repository around it.
- A model file alone, or a directory with the model file directly in it: version 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from remora.config import CONFIG_FILENAMES, MODEL_FILENAMES, parse_version
from remora.errors import NotFoundError

_BARE_SUFFIXES = (".onnx",)


class ModelFolder(NamedTuple):
    """A model as it lies on disk.

    ``versions`` maps a version number to its directory (or, for a bare file, to that file). ``path`` is where config,
    labels and warmup files lie, ``repository`` the directory around it.
    """

    name: str
    path: Path
    repository: Path
    versions: Mapping[int, Path]

    def filenames(self, version: int) -> tuple[str, ...]:
        """Names of the files in a version's directory; what the backend is told by (spec C04)."""
        path = self.versions[version]
        if path.is_file():  # a bare file has its model's name: its suffix says what it is
            return (f"model{path.suffix}",)
        return tuple(sorted(entry.name for entry in path.iterdir()))


def scan_repository(repository: Path) -> dict[str, list[ModelFolder]]:
    """All models of a Triton repository by name. Raises NotFoundError when it is no directory."""
    if not repository.is_dir():
        raise NotFoundError(
            f"failed to open model repository '{repository}': it is not a directory that can be read. "
            "Give the directory that holds one folder per model."
        )
    found: dict[str, list[ModelFolder]] = {}
    for entry in sorted(repository.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            found[entry.name] = [_model_folder(entry, entry.name)]
    return found


def scan(paths: Iterable[Path]) -> dict[str, list[ModelFolder]]:
    """The models under ``paths``, each a repository, a model's directory or a model file.

    A name that occurs more than once keeps all its folders; the lifecycle refuses it (spec M15).
    Raises NotFoundError for a path that does not exist or holds no model.
    """
    found: dict[str, list[ModelFolder]] = {}
    for path in paths:
        for name, folders in _scan_one(path).items():
            found.setdefault(name, []).extend(folders)
    return found


def _scan_one(path: Path) -> dict[str, list[ModelFolder]]:
    if path.is_file():
        if path.suffix not in _BARE_SUFFIXES:
            raise NotFoundError(f"'{path}' is not a model file: expected {' or '.join(_BARE_SUFFIXES)}, or a directory")
        name = path.stem if path.name not in MODEL_FILENAMES else path.resolve().parent.name
        return {name: [ModelFolder(name, path.parent, path.parent, {1: path})]}
    if not path.is_dir():
        raise NotFoundError(f"no such file or directory: '{path}'")
    if _is_model(path):
        name = path.resolve().name
        return {name: [_model_folder(path, name)]}
    found = scan_repository(path)
    for entry in sorted(path.iterdir()):
        if entry.is_file() and entry.suffix in _BARE_SUFFIXES:
            found.setdefault(entry.stem, []).append(ModelFolder(entry.stem, path, path, {1: entry}))
    return found


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


def _model_folder(directory: Path, name: str) -> ModelFolder:
    entries = sorted(directory.iterdir())
    versions: dict[int, Path] = {}
    for entry in entries:
        number = parse_version(entry.name) if entry.is_dir() else None
        if number is not None:
            versions.setdefault(number, entry)
    if not versions and any(entry.name in MODEL_FILENAMES for entry in entries):
        versions = {1: directory}
    return ModelFolder(name, directory, directory.parent, versions)
