"""Lookup of backends by name, with lazy import of their modules."""

from __future__ import annotations

from pathlib import Path

from remora import plugins
from remora.backends import API_VERSION, Backend, BackendModel, Instance, Placement, Source
from remora.config import ANY_KIND
from remora.errors import ConfigError, InternalError, InvalidArgumentError
from remora.proto.model_config_pb2 import ModelConfig


def find_backend(name: str) -> Backend:
    """Return the built-in or installed backend called ``name``.

    Installed packages register backends in the entry point group ``remora.backends``. Raises InvalidArgumentError with
    Triton's text if neither exists.
    """
    row = plugins.BACKENDS.get(name)
    if row is not None and plugins.is_present(row.target):
        backend = plugins.load(row.target)
    else:
        backend = plugins.find_installed("backends", name)
    if backend is None:
        raise InvalidArgumentError(
            f"unable to find backend library for backend '{name}', try specifying runtime on the model configuration."
        )
    made: Backend = backend()
    _check_version(made, name)
    return made


def backend_in(directory: Path, name: str) -> Backend | None:
    """Return the backend in ``<directory>/<name>``, or None.

    None means that the directory holds no backend or that a built-in backend has the name. ``backend.py`` has a class
    ``Backend`` (docs/backends.md), ``model.py`` is a Python model that serves all models that name the backend [Y16],
    and ``libremora_<name>.so`` is a native library that does the same.

    Raises:
        ConfigError: there is only a library for Triton's C API, which this engine does not have, or ``backend.py`` has
            no class ``Backend`` for this API.
        UnsupportedError: there is a native library, and the package that opens it is not installed.
    """
    if name in plugins.BACKENDS or name != Path(name).name:
        return None
    folder = directory / name
    code, file, library = folder / "backend.py", folder / "model.py", folder / f"libremora_{name}.so"
    if code.is_file():
        return _backend_of(code, name)
    if file.is_file():
        from remora.backends.python import PythonBackend

        return PythonBackend(name=name, file=file)
    if library.is_file():
        native: Backend = plugins.load_for(f"the library of backend '{name}'", plugins.BACKENDS["native"].target)(
            name, library
        )
        return native
    if (folder / f"libtriton_{name}.so").is_file():
        raise ConfigError(
            f"backend '{name}' is a library for Triton's C API, which this engine does not have: build it with "
            f"remora_backend.h as libremora_{name}.so (docs/backends.md)"
        )
    return None


def _backend_of(code: Path, name: str) -> Backend:
    """Return an object of a file's class ``Backend``.

    Raises ConfigError if the class is missing or was written for another API version.
    """
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
    """Return the device kinds that KIND_AUTO stands for.

    An opened model overrides its backend; see `Backend`.
    """
    return tuple(getattr(model, "preferred_kinds", getattr(backend, "preferred_kinds", ANY_KIND)))


def installed_backends() -> list[tuple[str, str]]:
    """Return the name and the package with version of each backend of an installed package."""
    found = plugins.installed("backends")
    return [(each.name, f"{each.dist.name} {each.dist.version}" if each.dist is not None else "") for each in found]


def _check_version(backend: Backend, name: str) -> None:
    """Refuse a backend written for an incompatible API version. Raises ConfigError."""
    version = str(getattr(backend, "api_version", API_VERSION))
    if version.partition(".")[0] != API_VERSION.partition(".")[0]:
        raise ConfigError(
            f"backend '{name}' is written for version {version} of the backend API, this engine has {API_VERSION}: "
            "install a version of the backend made for it"
        )


class EnsembleBackend:
    """Backend of the platform ``ensemble``."""

    name = "ensemble"

    def open(self, source: Source, config: ModelConfig) -> BackendModel:
        return _Ensemble()


class _Ensemble:
    """Placeholder for the opened model of an ensemble."""

    def complete(self, config: ModelConfig) -> None:
        """Do nothing, because the configuration of an ensemble is always complete."""

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        raise InternalError(f"'{config.name}' is an ensemble: it runs on the models of its steps, not on instances")

    def close(self) -> None:
        """Do nothing, because the models of the steps are closed separately."""
