"""Extras of remora that the files of a model need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from remora.api.storage import Found
from remora.config import read_config
from remora.errors import ConfigError
from remora.model_files import CONFIG_FILENAMES, KINDS

_OF_BACKEND: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": ("onnx",),
    "generation": ("generation",),
    "openvino_genai": ("openvino-genai",),
    "openvino": ("openvino",),
    "pytorch": ("torch",),
    "fil": ("trees",),
    "tensorflow": ("tensorflow",),
    "tensorrt": ("tensorrt",),
    "vllm": ("vllm",),
}
_OF_SUFFIX = {".onnx": "onnxruntime", ".pt": "pytorch", ".pt2": "pytorch", ".plan": "tensorrt", ".ubj": "fil"}
"""Backends of files that are served by themselves."""
_BY_ITSELF = {kind.filename: kind.backend for kind in KINDS if kind.by_itself}
_BY_PLATFORM = {name: kind.backend for kind in KINDS for name in (kind.platform, *kind.aliases) if name}


def extras_of(files: Mapping[str, Path], kind: Found | None) -> list[str]:
    """Return the extras that the files of a source need, sorted.

    Args:
        files: the files by their path below the source.
        kind: what the source is, None for a repository, a model's folder or a Python file.

    A model file whose model names another backend in its configuration counts for that one alone. Libraries without an
    extra, such as scikit-learn, come from a ``requirements.txt``.
    """
    if kind is not None:
        names = [name for version in kind.links.values() for name in version]
        backends = {kind.backend} if kind.backend else set(_of_files(names))
    else:
        configured = dict(_of_configurations(files))
        plain = [path for path in files if not any(path.startswith(folder) for folder in configured)]
        backends = {*configured.values(), *_of_files(plain)}
    return sorted({extra for backend in backends for extra in _OF_BACKEND.get(backend, ())})


def _of_configurations(files: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield each folder whose configuration names a backend, and the backend.

    Folders end with a slash.
    """
    for path, file in files.items():
        folder, _, name = path.rpartition("/")
        if name not in CONFIG_FILENAMES:
            continue
        try:
            config = read_config(file)
        except ConfigError:  # another file of that name, such as one of transformers; the server reports real ones
            continue
        backend = config.backend or _BY_PLATFORM.get(config.platform, "")
        if backend:
            yield f"{folder}/" if folder else "", backend


def _of_files(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        parts = PurePosixPath(path).parts
        names = [part for part in parts if part in _BY_ITSELF]
        if names:
            yield _BY_ITSELF[names[0]]
        elif parts[-1] == "saved_model.pb":
            yield "tensorflow"
        elif PurePosixPath(path).suffix in _OF_SUFFIX:
            yield _OF_SUFFIX[PurePosixPath(path).suffix]
