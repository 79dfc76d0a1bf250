"""Names of model files and directories, and what they imply.

This module imports next to nothing, because hosts look for models before the process is configured for numpy and the
runtimes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Final, Literal, NamedTuple

Syntax = Literal["pbtxt", "json", "yaml"]
CONFIG_SYNTAX: Final[dict[str, Syntax]] = {".pbtxt": "pbtxt", ".json": "json", ".yaml": "yaml", ".yml": "yaml"}
"""Notation of a configuration file by suffix."""
CONFIG_FILENAMES = tuple(f"config{suffix}" for suffix in CONFIG_SYNTAX)
"""Possible names of a model's configuration file."""

GOLDEN_TESTS = "tests.json"
"""Name of the file with a model's golden tests."""
REQUESTS: Final = "requests"
"""Name of the folder with example requests of a model, as V2 JSON."""
RELEASE_FILE: Final = "release.yaml"
"""Name of the file that declares a model's release."""
RELEASE_STATE_FILE: Final = "releases.json"
"""Name of the file with the state of a server's releases."""
RELEASE_STATE_FOLDER: Final = ".remora"
"""Folder of that file in the first local repository."""
REQUIREMENTS: Final = "requirements.txt"
"""Name of the file with the packages of a model's code."""

MODULE_PATH: Final = "MODULE_PATH"
"""Parameter of a Python model's configuration: a folder whose modules the model may import."""
MODEL_FILE: Final = "MODEL_FILE"
"""Parameter of a Python model's configuration: the file or folder of another library that it runs."""
TRUST_PICKLE: Final = "TRUST_PICKLE"
"""Parameter of a Python model's configuration that allows this file to be a pickle."""
JSON_TENSORS: Final = "JSON_TENSORS"
"""Parameter of a configuration: inputs and outputs, joined by commas, whose elements are JSON documents."""
FUNCTION: Final = "FUNCTION"
"""Parameter of a configuration: docstring, hints, defaults and examples of a function's arguments, as JSON."""
NAMED_OUTPUTS: Final = "named_outputs"
"""Parameter of a forest: a classifier answers ``label`` and ``probabilities`` instead of FIL's one output."""
MACHINE_CODE: Final = "data/aotinductor/"
"""Folder in the top folder of a PyTorch archive with code that AOTInductor has compiled."""
SOURCE_FILES: Final = "source.txt"
"""Name of the file in a repository of Python functions that lists the imported files."""

MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
"""Text in a parameter's path that stands for the model's directory."""

_MAX_VERSION = (1 << 63) - 1
_NO_VERSIONS = frozenset({"warmup", "initial_state", "configs"})
_VERSION = re.compile(r"\s*\+?(\d+)", re.ASCII)


def leaves_folder(path: str) -> bool:
    """Return True if a path in a model's file may lead out of its folder, on any system."""
    posix, windows = PurePosixPath(path), PureWindowsPath(path)
    return posix.is_absolute() or bool(windows.drive or windows.root) or ".." in windows.parts


def path_of_parameter(written: str, model_dir: Path) -> Path:
    """Return the absolute path that a parameter of a model's configuration means.

    ``$$TRITON_MODEL_DIRECTORY`` stands for the model's directory, at which relative paths start too.
    """
    home = model_dir.absolute()
    return home / written.replace(MODEL_DIRECTORY, str(home))


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
    # An exported language model, whose model.onnx is not a model by itself.
    FileKind("genai_config.json", "generation", only_if_there=True),
    FileKind("openvino_model.xml", "openvino_genai", only_if_there=True),
    # Hugging Face's folders, which this backend refuses with the command that exports them.
    FileKind("model.safetensors", "generation", only_if_there=True),
    FileKind("model.safetensors.index.json", "generation", only_if_there=True),
    FileKind("model.gguf", "openvino_genai", only_if_there=True),
    FileKind("model.json", "vllm", only_if_there=True, by_itself=False),
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


def digest_files(update: Callable[[bytes], None], path: Path) -> None:
    """Call ``update`` with the names, sizes and bytes of a file, or of all files below a folder, in order."""
    for file in sorted(path.rglob("*") if path.is_dir() else [path]):
        if file.is_file() and "__pycache__" not in file.parts:
            update(repr((str(file.relative_to(path)), file.stat().st_size)).encode())
            with file.open("rb") as stream:
                while piece := stream.read(1 << 20):
                    update(piece)
