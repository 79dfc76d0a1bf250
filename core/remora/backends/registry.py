"""Finding a backend by its name; a backend's module is imported when the first model needs it and not before."""

from __future__ import annotations

import importlib
from pathlib import Path

from remora.backends import API_VERSION, Backend, BackendModel, Instance, Placement, Source
from remora.config import ANY_KIND
from remora.errors import ConfigError, InternalError, InvalidArgumentError
from remora.proto.model_config_pb2 import ModelConfig

BUILT_IN = {
    "onnxruntime": "remora.backends.onnxruntime:OnnxRuntimeBackend",
    "python": "remora.backends.python:PythonBackend",
    "fil": "remora.backends.trees:TreesBackend",
    "native": "remora.backends.native:NativeBackend",
    "openvino": "remora.backends.openvino:OpenVinoBackend",
    "tensorflow": "remora.backends.tensorflow:TensorFlowBackend",
    "tensorrt": "remora.backends.tensorrt:TensorRtBackend",
    "pytorch": "remora.backends.pytorch:PyTorchBackend",
    "ensemble": "remora.backends.registry:EnsembleBackend",
}
_GROUP = "remora.backends"


def find_backend(name: str) -> Backend:
    """The backend called ``name``: a built-in one, or one that an installed package offers in the entry point group
    ``remora.backends``. Raises InvalidArgumentError with Triton's text when there is none."""
    target = BUILT_IN.get(name)
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
    """The backend that ``<directory>/<name>`` holds, None when that is none or a built-in backend has the name.

    ``backend.py`` has a class ``Backend`` (docs/backends.md), ``model.py`` a Python model that serves all models which
    name the backend [Y16], and ``libremora_<name>.so`` is a native library that does.

    Raises:
        ConfigError: there is only a library for Triton's C API, which this engine does not have, or ``backend.py`` has
            no class ``Backend`` for this API.
    """
    if name in BUILT_IN or name != Path(name).name:
        return None
    folder = directory / name
    code, file, library = folder / "backend.py", folder / "model.py", folder / f"libremora_{name}.so"
    if code.is_file():
        return _backend_of(code, name)
    if file.is_file():
        from remora.backends.python import PythonBackend

        return PythonBackend(name=name, file=file)
    if library.is_file():
        from remora.backends.native import NativeBackend

        return NativeBackend(name, library)
    if (folder / f"libtriton_{name}.so").is_file():
        raise ConfigError(
            f"backend '{name}' is a library for Triton's C API, which this engine does not have: build it with "
            f"remora_backend.h as libremora_{name}.so (docs/backends.md)"
        )
    return None


def _backend_of(code: Path, name: str) -> Backend:
    """The backend that a file's class ``Backend`` makes. Raises ConfigError when there is none for this API."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(f"remora_backend_{name}", code)
    if spec is None or spec.loader is None:
        raise ConfigError(f"backend '{name}' cannot be imported from its backend.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    made = getattr(module, "Backend", None)
    if made is None:
        raise ConfigError(f"backend '{name}': its backend.py has no class Backend")
    backend: Backend = made()
    _check_version(backend, name)
    return backend


def kinds_of(backend: Backend, model: BackendModel | None = None) -> tuple[str, ...]:
    """What KIND_AUTO stands for with a backend, and with one of its models where it is opened; see `Backend`."""
    return tuple(getattr(model, "preferred_kinds", getattr(backend, "preferred_kinds", ANY_KIND)))


def installed_backends() -> list[tuple[str, str]]:
    """The backends that installed packages offer: the name of each, and its package with its version."""
    from importlib.metadata import entry_points  # 40 ms: only where somebody asks

    found = []
    for entry in entry_points(group=_GROUP):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
        found.append((entry.name, package))
    return sorted(found)


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


class EnsembleBackend:
    """The platform ``ensemble``."""

    name = "ensemble"

    def open(self, source: Source, config: ModelConfig) -> BackendModel:
        return _Ensemble()


class _Ensemble:
    """What the engine holds in the place of an opened model."""

    def complete(self, config: ModelConfig) -> None:
        """Nothing: an ensemble's configuration is written whole."""

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        raise InternalError(f"'{config.name}' is an ensemble: it runs on the models of its steps, not on instances")

    def close(self) -> None:
        """Nothing to give back: the models of the steps are their own."""
