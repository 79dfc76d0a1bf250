"""Identity of a scoring run by content.

It has all that decides a byte of the output: the model, the input and options. Places and times do not count, so that a
model that was copied or touched continues a run, and one that was replaced does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from remora.api.storage import sources_in
from remora.model_files import (
    CONFIG_FILENAMES,
    MODEL_FILE,
    MODULE_PATH,
    digest_files,
    parse_version,
    path_of_parameter,
)
from remora.proto.model_config_pb2 import ModelConfig

if TYPE_CHECKING:
    from remora.models.served_model import ServedModel

_PIECE_BYTES = 1 << 20
WHOLE_BYTES = 4 << 30
"""Largest input of which every byte is read; a larger one is known by time stamps and samples."""
_SAMPLES = 1024


def digest_of_models(models: Iterable[ServedModel]) -> str:
    """Return a digest of the versions, configurations and files of models. Raises OSError."""
    whole = hashlib.sha256()
    for model in sorted(models, key=lambda model: (model.name, model.version)):
        whole.update(f"{model.version}\0".encode())
        whole.update(_config(model.config))
        for path in _files(model):
            digest_files(whole.update, path)
    return whole.hexdigest()


def _config(config: ModelConfig) -> bytes:
    """Return a configuration without the model's name and the places of its files."""
    placed = ModelConfig()
    placed.CopyFrom(config)
    placed.name = ""
    for group in placed.instance_group:
        group.name = ""  # made of the model's name
    for name in (MODEL_FILE, MODULE_PATH):
        if name in placed.parameters:
            placed.parameters[name].string_value = ""
    return placed.SerializeToString(deterministic=True)


def _files(model: ServedModel) -> Iterator[Path]:
    """Yield the files and folders that, with its configuration, decide what a model computes."""
    yield model.files
    if model.files.is_file():
        return  # a bare file, whose folder may hold anything
    if model.files != model.folder and model.folder.is_dir():
        for path in sorted(model.folder.iterdir()):
            if path.name in CONFIG_FILENAMES:
                continue  # it may have places, and the model has what it sets
            if path.is_file() or (parse_version(path.name) is None and path.name != "__pycache__"):
                yield path
    parameters = model.config.parameters
    if MODEL_FILE in parameters:
        yield Path(parameters[MODEL_FILE].string_value)
    if MODULE_PATH in parameters and (modules := parameters[MODULE_PATH].string_value):
        # A function's folder of modules may hold anything; the files that it imports are known.
        sources = sources_in(model.folder.parent)
        yield from sources or [path_of_parameter(modules, model.folder)]


def digest_of_input(file: BinaryIO, size: int, modified_ns: int) -> str:
    """Return a digest of an input file. Raises OSError."""
    whole = hashlib.blake2b(str(size).encode(), digest_size=32)
    if size <= WHOLE_BYTES:
        _update(whole.update, file, 0, size)
    else:
        whole.update(str(modified_ns).encode())
        for sample in range(_SAMPLES):
            _update(whole.update, file, (size - _PIECE_BYTES) * sample // (_SAMPLES - 1), _PIECE_BYTES)
    file.seek(0)
    return whole.hexdigest()


def _update(update: Callable[[bytes], Any], file: BinaryIO, begin: int, size: int) -> None:
    file.seek(begin)
    left = size
    while left > 0 and (piece := file.read(min(_PIECE_BYTES, left))):
        update(piece)
        left -= len(piece)


def as_stored(identity: dict[str, object]) -> dict[str, Any]:
    """Return an identity as it is read back from JSON."""
    stored: dict[str, Any] = json.loads(json.dumps(identity))
    return stored
