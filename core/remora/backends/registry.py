"""Finding a backend by its name; a backend's module is imported when the first model needs it and not before."""

from __future__ import annotations

import importlib
from pathlib import Path

from remora.backends import API_VERSION, Backend
from remora.errors import ConfigError, InvalidArgumentError

_BUILT_IN = {
    "onnxruntime": "remora.backends.onnxruntime:OnnxRuntimeBackend",
    "python": "remora.backends.python:PythonBackend",
    "pytorch": "remora.backends.pytorch:PyTorchBackend",
    "ensemble": "remora.backends.ensemble:EnsembleBackend",
}
_GROUP = "remora.backends"


def find_backend(name: str) -> Backend:
    """The backend called ``name``: a built-in one, or one that an installed package offers in the entry point group
    ``remora.backends``. Raises InvalidArgumentError with Triton's text when there is none."""
    target = _BUILT_IN.get(name)
    if target is None:
        backend = _installed(name)
        if backend is None:
            raise InvalidArgumentError(
                f"unable to find backend library for backend '{name}', "
                "try specifying runtime on the model configuration."
            )
        return backend
    module, _, attribute = target.partition(":")
    made: Backend = getattr(importlib.import_module(module), attribute)()
    return made


def backend_in(directory: Path, name: str) -> Backend | None:
    """The backend that ``<directory>/<name>/model.py`` is (spec Y16): Python code that serves all models which name it.
    None when there is no such file, or a built-in backend of that name."""
    file = directory / name / "model.py"
    if name in _BUILT_IN or name != Path(name).name or not file.is_file():
        return None
    from remora.backends.python import PythonBackend

    return PythonBackend(name=name, file=file)


def _installed(name: str) -> Backend | None:
    from importlib.metadata import entry_points  # 40 ms: only for a backend that is not built in

    for entry in entry_points(group=_GROUP):
        if entry.name == name:
            made: Backend = entry.load()()
            _check_version(made, name)
            return made
    return None


def _check_version(backend: Backend, name: str) -> None:
    """Refuse a backend that was written for other protocols. Raises ConfigError."""
    version = str(getattr(backend, "api_version", API_VERSION))
    if version.partition(".")[0] != API_VERSION.partition(".")[0]:
        raise ConfigError(
            f"backend '{name}' is written for version {version} of the backend API, this engine has {API_VERSION}: "
            "install a version of the backend made for it"
        )
