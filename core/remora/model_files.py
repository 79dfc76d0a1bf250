"""What a model's files and folders are called, and what the names tell; the law: names alone, and next to no imports.

Hosts look for models before the process is set up for numpy and the runtimes, which nothing here may load.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

Syntax = Literal["pbtxt", "json", "yaml"]
CONFIG_SYNTAX: Final[dict[str, Syntax]] = {".pbtxt": "pbtxt", ".json": "json", ".yaml": "yaml", ".yml": "yaml"}
"""The notation that a configuration's suffix stands for."""
CONFIG_FILENAMES = tuple(f"config{suffix}" for suffix in CONFIG_SYNTAX)
"""The names a model's configuration may have."""

_MAX_VERSION = (1 << 63) - 1
_NO_VERSIONS = frozenset({"warmup", "initial_state", "configs"})
_VERSION = re.compile(r"\s*\+?(\d+)", re.ASCII)


class FileKind(NamedTuple):
    """What a model file says about the model: its backend, and the platform that goes with it, if any."""

    filename: str
    backend: str
    platform: str = ""
    aliases: tuple[str, ...] = ()
    only_if_there: bool = False
    """The backend has files of several names: none is meant before it is there."""
    by_itself: bool = True
    """The name is telling enough without a backend in the configuration."""


KINDS = (
    # In Triton's order: the first file that is there wins.
    FileKind("model.savedmodel", "tensorflow", "tensorflow_savedmodel"),
    FileKind("model.graphdef", "tensorflow", "tensorflow_graphdef"),
    FileKind("model.plan", "tensorrt", "tensorrt_plan"),
    FileKind("model.onnx", "onnxruntime", "onnxruntime_onnx"),
    FileKind("model.xml", "openvino"),
    FileKind("model.pt", "pytorch", "pytorch_libtorch", ("libtorch",)),
    FileKind("model.pt2", "pytorch", "torch_aoti"),
    FileKind("model.py", "python"),
    # Ours: Triton asks for the backend's name in the configuration.
    FileKind("model.so", "native"),
    FileKind("xgboost.ubj", "fil", only_if_there=True),
    FileKind("xgboost.json", "fil", only_if_there=True),
    FileKind("checkpoint.tl", "fil", only_if_there=True),
    FileKind("model.txt", "fil", only_if_there=True, by_itself=False),
)

MODEL_FILENAMES = tuple(kind.filename for kind in KINDS if kind.by_itself)
"""The names that tell a model's backend by themselves."""


def parse_version(dirname: str) -> int | None:
    """The version that a directory's name stands for, or None when it is none [M02].

    As Triton reads it: the number in front counts (``1abc`` is 1), but a longer name must not begin with a zero.
    Negative numbers and numbers beyond 64 bits are no versions.
    """
    if dirname in _NO_VERSIONS or (len(dirname) > 1 and dirname.startswith("0")):
        return None
    match = _VERSION.match(dirname)
    if match is None or len(match[1]) > len(str(_MAX_VERSION)):
        return None
    version = int(match[1])
    return version if version <= _MAX_VERSION else None
