"""Names of model files and directories, and what they imply.

This module imports next to nothing, because hosts look for models before the process is configured for numpy and the
runtimes.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

Syntax = Literal["pbtxt", "json", "yaml"]
CONFIG_SYNTAX: Final[dict[str, Syntax]] = {".pbtxt": "pbtxt", ".json": "json", ".yaml": "yaml", ".yml": "yaml"}
"""Notation of a configuration file by suffix."""
CONFIG_FILENAMES = tuple(f"config{suffix}" for suffix in CONFIG_SYNTAX)
"""Possible names of a model's configuration file."""

_MAX_VERSION = (1 << 63) - 1
_NO_VERSIONS = frozenset({"warmup", "initial_state", "configs"})
_VERSION = re.compile(r"\s*\+?(\d+)", re.ASCII)


class FileKind(NamedTuple):
    """A model file name with the backend and platform that it implies."""

    filename: str
    backend: str
    platform: str = ""
    aliases: tuple[str, ...] = ()
    only_if_there: bool = False
    """The backend has files of several names, so none is the default before it exists."""
    by_itself: bool = True
    """The name is specific enough without a backend in the configuration."""


KINDS = (
    # In Triton's order: the first existing file wins.
    FileKind("model.savedmodel", "tensorflow", "tensorflow_savedmodel"),
    FileKind("model.graphdef", "tensorflow", "tensorflow_graphdef"),
    FileKind("model.plan", "tensorrt", "tensorrt_plan"),
    FileKind("model.onnx", "onnxruntime", "onnxruntime_onnx"),
    FileKind("model.xml", "openvino"),
    FileKind("model.pt", "pytorch", "pytorch_libtorch", ("libtorch",)),
    FileKind("model.pt2", "pytorch", "torch_aoti"),
    FileKind("model.py", "python"),
    # Extensions: Triton requires the backend's name in the configuration.
    FileKind("model.so", "native"),
    FileKind("xgboost.ubj", "fil", only_if_there=True),
    FileKind("xgboost.json", "fil", only_if_there=True),
    FileKind("checkpoint.tl", "fil", only_if_there=True),
    FileKind("model.txt", "fil", only_if_there=True, by_itself=False),
)

MODEL_FILENAMES = tuple(kind.filename for kind in KINDS if kind.by_itself)
"""Names that imply a model's backend by themselves."""


def parse_version(dirname: str) -> int | None:
    """Return the version number of a directory name, or None if it is not a version [M02].

    As in Triton, leading digits count (``1abc`` is 1), but a longer name must not begin with a zero. Negative numbers
    and numbers beyond 64 bits are not versions.
    """
    if dirname in _NO_VERSIONS or (len(dirname) > 1 and dirname.startswith("0")):
        return None
    match = _VERSION.match(dirname)
    if match is None or len(match[1]) > len(str(_MAX_VERSION)):
        return None
    version = int(match[1])
    return version if version <= _MAX_VERSION else None
