"""Model sent with the load request [M11].

It lies in a temporary folder that is deleted with its last version.

Invariant: file names are checked before anything is written, so no file is written outside of the folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

from remora.errors import InvalidArgumentError, NotFoundError
from remora.repository import Fingerprint, ModelFolder
from remora.repository.local import model_folder
from remora.system.temporary_folders import TemporaryFolder

_PREFIX = "file:"
_MAX_PART_BYTES = 255
_MAX_PARTS = 16


def sent_files(parameters: Mapping[str, str | bytes]) -> dict[str, bytes]:
    """Return the files among the parameters of a load request.

    The keys are the paths in the model's folder. Raises InvalidArgumentError for a path that is invalid or outside of
    the folder.
    """
    files: dict[str, bytes] = {}
    for key, content in parameters.items():
        if key.startswith(_PREFIX):
            path = key.removeprefix(_PREFIX)
            _check(path)
            files[path] = content.encode() if isinstance(content, str) else content
    for path in files:
        parents = [str(parent) for parent in Path(path).parents]
        clash = next((parent for parent in parents if parent in files), None)
        if clash is not None:
            raise InvalidArgumentError(f"'{_PREFIX}{clash}' is sent as a file, and '{_PREFIX}{path}' lies inside it")
    return files


def _check(path: str) -> None:
    parts = path.split("/")
    harmless = len(parts) <= _MAX_PARTS and all(
        part not in ("", ".", "..")
        and len(part.encode()) <= _MAX_PART_BYTES
        and part.isprintable()
        and "\\" not in part
        for part in parts
    )
    if not harmless:
        raise InvalidArgumentError(
            f"'{_PREFIX}{path}' is not a path inside a model's folder: expected one such as '{_PREFIX}1/model.onnx'"
        )


class SentModel:
    """One model in a temporary folder, as a `Repository`.

    The folder is removed with this object.

    Args:
        name: the model's name.
        files: by path in the model's folder, as returned by `sent_files`.
    """

    location = "the load request"

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self._temporary = TemporaryFolder("sent", "model")
        directory = self._temporary.path
        for path, content in files.items():
            place = directory / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        self._folder = model_folder(directory, name)
        self._files = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}

    def models(self, name: str = "") -> dict[str, list[ModelFolder]]:
        return {self._folder.name: [self._folder]} if name in ("", self._folder.name) else {}

    def fingerprint(self, name: str) -> Fingerprint:
        """Return a digest of each file, so that sending the same files again changes nothing."""
        return self._files if name == self._folder.name else {}

    def fetch(self, name: str, versions: Collection[int] | None = None) -> ModelFolder:
        """Return the folder. Raises NotFoundError for another model's name."""
        if name != self._folder.name:
            raise NotFoundError(f"the load request sent '{self._folder.name}', not '{name}'")
        return self._folder
