"""Python files with decorated functions as a `Repository`.

A child process imports the file and writes a repository of linked models (`remora.repository.exporting`), so that the
user's imports stay out of the server's process. The repository is written again when one of the imported files changes.
A ``requirements.txt`` beside the file applies to the import and to each model.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from remora.errors import NotFoundError, UnavailableError
from remora.model_files import REQUIREMENTS, SOURCE_FILES
from remora.repository.written import WrittenRepository
from remora.system.temporary_folders import TemporaryFolder

_TIMEOUT_S = 300.0
"""Limit for the import of a file. A larger one would hide a file that never ends."""


_NO_SETTINGS: Mapping[str, str] = {}


def function_repository(
    source: str, *, bare_name: str = "", settings: Mapping[str, str] = _NO_SETTINGS
) -> WrittenRepository:
    """Return the models of one Python file or module.

    Scanning it raises NotFoundError for a missing file, and UnavailableError with the reason if it cannot be imported
    or defines no model.

    Args:
        source: ``app.py``, ``app.py:a,b`` or ``package.module:a``.
        bare_name: the model's name, if the source has a single model.
        settings: settings of the python backend, which say where environments are cached.
    """
    return WrittenRepository(source, lambda folder: _export(source, bare_name, folder, settings))


def _export(source: str, bare_name: str, folder: Path, settings: Mapping[str, str]) -> list[str]:
    """Write the models in a child process and return the paths of its sources."""
    file = source.rpartition(":")[0] if not source.endswith(".py") else source
    if file.endswith(".py") and not Path(file).is_file():
        raise NotFoundError(f"no such file or directory: '{file}'")
    requirements = Path(file).with_name(REQUIREMENTS) if file.endswith(".py") else None
    found = requirements is not None and requirements.is_file()
    python = _interpreter(requirements, settings) if requirements and found else sys.executable
    # Without compiled modules (-B), because a host may forbid changes in the folder of the models.
    words = [python, "-B", "-m", "remora.repository.exporting", str(folder), source, bare_name]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"cannot load '{source}': its import took over {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        reason = done.stderr.strip() or f"its process ended with exit code {done.returncode}"
        raise UnavailableError(f"cannot load '{source}': {reason}")
    files = [str(path) for path in sources_in(folder)]
    if requirements is None:
        return files
    for model in folder.glob("*/1/model.py") if found else ():  # ensembles have no code
        (model.parents[1] / REQUIREMENTS).symlink_to(requirements.resolve())
    return [*files, str(requirements)]


def sources_in(repository: Path) -> list[Path]:
    """Return the files that a repository of functions imports; none of others. Raises OSError."""
    listing = repository / SOURCE_FILES
    return [Path(line) for line in listing.read_text(encoding="utf-8").splitlines()] if listing.is_file() else []


def _interpreter(requirements: Path, settings: Mapping[str, str]) -> str:
    from remora.environments import interpreter_with, read_requirements_of  # most files need no packages
    from remora.environments.requirements import asks_for_anything

    text = read_requirements_of(requirements.parent, f"'{requirements.parent}'")
    if not text or not asks_for_anything(text):
        return sys.executable
    return str(interpreter_with(requirements, f"'{requirements.parent}'", settings))


class ObjectModels:
    """Repository of model objects of this process, in a temporary folder until `close`.

    Args:
        models: functions, classes, or objects of `remora.model` and `remora.Pipeline`.

    Raises ModelDefinitionError.
    """

    def __init__(self, models: Sequence[Callable[..., Any]]) -> None:
        from remora.repository.exporting import export_objects  # imported only by programs that pass objects

        self._folder = TemporaryFolder("models")
        self._keys = export_objects(self._folder.path, models)

    @property
    def folder(self) -> str:
        """The repository's path."""
        return str(self._folder.path)

    def close(self) -> None:
        """Remove the folder and the references to the objects. Idempotent."""
        from remora.functions.runtime import forget_live

        for key in self._keys:
            forget_live(key)
        self._folder.remove()
