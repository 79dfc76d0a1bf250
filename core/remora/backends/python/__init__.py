"""Python backend that runs Triton's Python models unchanged.

Every instance imports the model's file anew, so that its globals are separate, as in Triton where an instance is a
process. The engine's threads run the model's code; a model that needs an interpreter to itself belongs into a worker
process.

Invariant: whatever a model's code does becomes an answer or an error, and never affects other models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from remora.backends import BackendModel, Capabilities, Instance, Placement, Source
from remora.backends.calling import opening
from remora.backends.model_files import model_path, require_file, shown_path
from remora.backends.python.calls import ModelCalls
from remora.backends.python.config import ModelConfig as CompletedConfig
from remora.backends.python.config import take_over
from remora.backends.python.failures import describe, describe_load
from remora.backends.python.host import Host, hosted
from remora.backends.python.instance import CLASS_NAME, PythonInstance, model_class
from remora.backends.python.loading import LoadedModule, load_module
from remora.backends.worker.settings import PROCESS, asks_for_environment, isolation
from remora.errors import InternalError
from remora.model_files import MODULE_PATH, path_of_parameter
from remora.proto.model_config_pb2 import ModelConfig
from remora.tensors.device import CUDA, HOST, DeviceId

DEFAULT_FILENAME = "model.py"

_CODE = "code-of-the-backend"
"""Setting that carries the path of a shared backend's file to the process that opens the model."""

JsonText = Callable[[ModelConfig], str]


def _config_json(config: ModelConfig) -> str:
    from remora.config import to_json

    return to_json(config).decode()


class PythonBackend:
    """Backend for Python models.

    Args:
        to_json: converts a configuration to the JSON text that a model receives.
        name: the backend's name in configurations.
        file: the code shared by all its models [Y16]; None for models with their own code.
    """

    def __init__(self, to_json: JsonText = _config_json, *, name: str = "python", file: Path | None = None) -> None:
        self._to_json = to_json
        self.name = name
        self._file = file

    def open(self, source: Source, config: ModelConfig) -> BackendModel:
        """Open the model in a worker process or in this process.

        The parameter ISOLATION decides, else the setting ``isolation``. Raises as ``open_here`` does, and ConfigError
        for an unknown ISOLATION or for missing packages.
        """
        if self._file is not None:
            source = source._replace(settings={**source.settings, _CODE: str(self._file)})
        if isolation(config, source.settings) == PROCESS:
            from remora.backends.worker.model import WorkerModel  # lazy: only worker models need it

            return WorkerModel(source, config)
        if asks_for_environment(source, config):
            from remora.backends.python.environment import check_in_thread

            check_in_thread(source, config)
        return self.open_here(source, config)

    def open_here(self, source: Source, config: ModelConfig) -> PythonModel:
        """Import ``default_model_filename`` or model.py from the version's directory.

        Raises:
            NotFoundError: there is no such file.
            ConfigError: the file name leads out of the version's directory.
            InternalError: the file cannot be imported, or defines no model.
        """
        shared = source.settings.get(_CODE)
        file = Path(shared) if shared else require_file(model_path(source, config, DEFAULT_FILENAME), source, "*.py")
        modules = config.parameters[MODULE_PATH].string_value if MODULE_PATH in config.parameters else ""
        search = (path_of_parameter(modules, source.model_dir),) if modules else ()
        return PythonModel(source, file, self._to_json, shared=bool(shared), search=search)


def _devices(config: ModelConfig, placement: Placement) -> frozenset[DeviceId]:
    """Return the devices on which an instance accepts inputs.

    The default is main memory only; FORCE_CPU_ONLY_INPUT_TENSORS "no" changes it [Y15].
    """
    parameters = {key: value.string_value.lower() for key, value in config.parameters.items()}
    if parameters.get("FORCE_CPU_ONLY_INPUT_TENSORS") != "no":
        return frozenset()
    return frozenset({HOST, (CUDA, placement.device_id)} if placement.kind == "GPU" else {HOST})


class PythonModel:
    """One version of a Python model.

    The import that checked the file is reused for the first instance.

    Args:
        shared: the file belongs to a backend and serves other models too.
        search: further folders whose modules the model may import.
    """

    def __init__(
        self, source: Source, file: Path, to_json: JsonText, *, shared: bool = False, search: tuple[Path, ...] = ()
    ) -> None:
        self._shared = shared
        self._source = source
        self._file = file
        self._to_json = to_json
        self._version_dir = source.path if source.path.is_dir() else file.parent
        self._folders = tuple(dict.fromkeys((file.parent, self._version_dir, source.model_dir, *search)))
        self._spare: LoadedModule | None = self._load()

    def complete(self, config: ModelConfig) -> None:
        """Let the model's ``auto_complete_config`` fill in its configuration [C14].

        Raises:
            ConfigError: the returned configuration contains invalid values.
            InternalError: the function fails, contradicts the configuration, or does not return a configuration.
        """
        loaded = self._spare = self._spare or self._load()
        complete = getattr(model_class(loaded), "auto_complete_config", None)
        if complete is None:
            return
        completed = self._call_class_function(complete, config)
        if not isinstance(completed, CompletedConfig):
            raise InternalError(
                f"auto_complete_config function in model '{self._source.name}' must return a valid pb.ModelConfig "
                "object."
            )
        take_over(completed, config)

    def _call_class_function(self, function: Callable[[CompletedConfig], Any], config: ModelConfig) -> Any:
        """Call a function of the model's class with a configuration and return its result."""
        try:
            with hosted(self._host(), opening(self._source.name)):
                return function(CompletedConfig(self._to_json(config)))
        except BaseException as error:
            failure = describe(error, self._folders)
        raise InternalError(failure, from_model=True)

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Create and initialize an instance. Raises InternalError if the model fails to start."""
        loaded, self._spare = self._spare or self._load(), None
        if self._shared:  # a backend checks its models' configurations; in a model the name may mean anything
            check = vars(model_class(loaded)).get("validate_config")
            if isinstance(check, staticmethod | classmethod):
                self._call_class_function(check.__get__(None, model_class(loaded)), config)
        arguments = {
            "model_config": self._to_json(config),
            "model_instance_kind": placement.kind,
            "model_instance_device_id": str(placement.device_id),
            "model_instance_name": placement.name,
            "model_repository": str(self._source.model_dir),
            "model_version": str(self._source.version),
            "model_name": self._source.name,
        }
        instance = PythonInstance(placement.name, loaded, self._folders, self._host(placement.name), config)
        instance.capabilities = Capabilities(devices=_devices(config, placement), answers_late=True)
        try:
            instance.initialize(arguments)
        except BaseException:
            instance.discard()
            raise
        return instance

    def close(self) -> None:
        """Release the import that no instance has used."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def _host(self, instance_name: str = "") -> Host:
        source = self._source
        caller = ModelCalls(source.calls(), instance_name or source.name) if source.calls is not None else None
        return Host(source.name, source.version, str(self._version_dir), caller, instance_name or source.name)

    def _load(self) -> LoadedModule:
        failure = ""
        try:
            with hosted(self._host(), opening(self._source.name)):
                loaded = load_module(self._file, f"{self._source.name}_{self._source.version}", self._folders)
        except BaseException as error:
            failure = describe_load(error, self._file, self._folders)
        if failure:
            raise InternalError(failure, from_model=True)
        try:
            self._check(loaded)
        except InternalError:
            loaded.close()
            raise
        return loaded

    def _check(self, loaded: LoadedModule) -> None:
        kind = model_class(loaded)
        shown = shown_path(self._file, self._source)
        if kind is None:
            raise InternalError(
                f"AttributeError: module '{self._source.version}.{self._file.stem}' has no attribute '{CLASS_NAME}': "
                f"define a class of that name, with an execute method, in {shown}",
                from_model=True,
            )
        if not callable(getattr(kind, "execute", None)):
            raise InternalError(f"Python model {shown} does not implement `execute` method.", from_model=True)
