"""The Python backend, in-thread: Triton's Python models, unchanged (spec group Y); the law: whatever a model's code
does becomes an answer or an error, and never harms its neighbours.

Every instance imports the model's file anew, so that its globals are its own, as they are in Triton where an instance
is a process. The engine's threads run the model's code; a model that needs the interpreter to itself belongs into a
worker process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextvars import copy_context
from pathlib import Path
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from remora.backends import Execution, Instance, Placement, Source
from remora.backends.python_config import ConfigConflictError, take_over
from remora.backends.python_config import ModelConfig as CompletedConfig
from remora.backends.python_failures import describe, describe_load
from remora.backends.python_host import Host, hosted
from remora.backends.python_loading import LoadedModule, load_module
from remora.backends.python_messages import COMPLETE_FINAL, InferenceResponse
from remora.backends.python_requests import RELEASE_RESCHEDULE, ReceivedRequest
from remora.backends.python_tensor import DATATYPES
from remora.custom_metrics import REGISTRY
from remora.errors import ConfigError, InternalError, NotFoundError, UnsupportedError, error_of
from remora.messages import Outcome, Response
from remora.proto.model_config_pb2 import ModelConfig

if TYPE_CHECKING:
    import asyncio

CLASS_NAME = "TritonPythonModel"
DEFAULT_FILENAME = "model.py"

JsonText = Callable[[ModelConfig], str]


def _config_json(config: ModelConfig) -> str:
    from remora.config import to_json

    return to_json(config).decode()


class PythonBackend:
    """Opens Python models.

    Args:
        to_json: how a configuration is shown to a model.
    """

    name = "python"

    def __init__(self, to_json: JsonText = _config_json) -> None:
        self._to_json = to_json

    def open(self, source: Source, config: ModelConfig) -> PythonModel:
        """Import the model's file: ``default_model_filename`` or model.py in the version's folder.

        Raises:
            NotFoundError: no such file.
            ConfigError: a file name that leads out of the version's folder.
            InternalError: the file cannot be imported, or defines no model.
        """
        return PythonModel(source, _model_file(source, config), self._to_json)


def _model_file(source: Source, config: ModelConfig) -> Path:
    if source.path.is_file():
        return source.path
    filename = config.default_model_filename or DEFAULT_FILENAME
    file = source.path / filename
    if not file.resolve().is_relative_to(source.path.resolve()):
        raise ConfigError(f"default_model_filename '{filename}' of model '{source.name}' leaves the version's folder")
    if not file.is_file():
        raise NotFoundError(
            f"unable to find '{file}' for model '{source.name}': put the model's code there, or name its file with "
            "default_model_filename"
        )
    return file


class PythonModel:
    """One version of a Python model. The import that checked the file serves the first instance."""

    def __init__(self, source: Source, file: Path, to_json: JsonText) -> None:
        self._source = source
        self._file = file
        self._to_json = to_json
        version_dir = source.path if source.path.is_dir() else file.parent
        self._folders = tuple(dict.fromkeys((file.parent, version_dir, source.model_dir)))
        self._spare: LoadedModule | None = self._load()

    def complete(self, config: ModelConfig) -> None:
        """Let the model's ``auto_complete_config`` fill in its configuration (spec C14).

        Raises:
            ConfigError: it contradicts what is configured, or gives back no configuration.
            InternalError: it fails.
        """
        loaded = self._spare = self._spare or self._load()
        complete = getattr(_model_class(loaded), "auto_complete_config", None)
        if complete is None:
            return
        failure = ""
        try:
            with hosted(self._host()):
                completed = complete(CompletedConfig(self._to_json(config)))
        except ConfigConflictError as error:
            raise ConfigError(str(error), from_model=True) from None
        except BaseException as error:
            failure = describe(error, self._folders)
        if failure:
            raise InternalError(failure, from_model=True)
        if not isinstance(completed, CompletedConfig):
            raise ConfigError(
                f"auto_complete_config function in model '{self._source.name}' must return a valid pb.ModelConfig "
                "object."
            )
        take_over(completed, config)

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """A new instance, initialized. Raises InternalError when the model refuses to start."""
        loaded, self._spare = self._spare or self._load(), None
        arguments = {
            "model_config": self._to_json(config),
            "model_instance_kind": placement.kind,
            "model_instance_device_id": str(placement.device_id),
            "model_instance_name": placement.name,
            "model_repository": str(self._source.model_dir),
            "model_version": str(self._source.version),
            "model_name": self._source.name,
        }
        instance = PythonInstance(placement.name, loaded, self._folders, self._host(), config)
        try:
            instance.initialize(arguments)
        except BaseException:
            instance.discard()
            raise
        return instance

    def close(self) -> None:
        """Forget the import that no instance has used."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def _host(self) -> Host:
        return Host(self._source.name, self._source.version, str(self._source.model_dir))

    def _load(self) -> LoadedModule:
        failure = ""
        try:
            with hosted(self._host()):
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
        kind = _model_class(loaded)
        if kind is None:
            raise InternalError(
                f"AttributeError: module '{self._source.version}.{self._file.stem}' has no attribute '{CLASS_NAME}': "
                f"define a class of that name, with an execute method, in {self._file}",
                from_model=True,
            )
        if not callable(getattr(kind, "execute", None)):
            raise InternalError(f"Python model {self._file} does not implement `execute` method.", from_model=True)


def _model_class(loaded: LoadedModule) -> Any:
    return getattr(loaded.module, CLASS_NAME, None)


class _ContractError(Exception):
    """What ``execute`` gave back is not what it has to."""


class PythonInstance:
    """One object of a model's class. ``execute`` raises when the whole execution has failed and returns, marked as
    answered, the errors that the model has answered single requests with (spec T02)."""

    quick = False

    def __init__(
        self, name: str, loaded: LoadedModule, folders: Sequence[Path], host: Host, config: ModelConfig
    ) -> None:
        self.name = name
        self._loaded = loaded
        self._folders = folders
        self._host = host
        self._decoupled = config.model_transaction_policy.decoupled
        self._outputs = frozenset(output.name for output in config.output)
        self._datatypes = {tensor.name: DATATYPES[tensor.data_type] for tensor in config.input if tensor.data_type}
        self._runner: asyncio.Runner | None = None
        self._model: Any = None

    def initialize(self, arguments: dict[str, str]) -> None:
        """Make the model's object and call its ``initialize`` (spec Y02). Raises InternalError when that fails."""
        failure = ""
        try:
            with hosted(self._host):
                self._model = _model_class(self._loaded)()
                initialize = getattr(self._model, "initialize", None)
                if initialize is not None:
                    self._awaited(initialize(arguments))
        except BaseException as error:
            failure = describe(error, self._folders)
        if failure:
            raise InternalError(failure, from_model=True)

    def execute(self, execution: Execution) -> list[Outcome]:
        """Run the batch; see ``Instance.execute``.

        Raises:
            InternalError: the model raised, or broke the contract of ``execute`` (spec Y03, Y04).
            UnsupportedError: the model is decoupled, or asks for rescheduling.
        """
        if self._decoupled:
            raise UnsupportedError(
                f"model '{self._host.model_name}' is decoupled (any number of responses to a request), which is not "
                "offered yet: remove model_transaction_policy from its configuration and return one response each"
            )
        host = self._host
        requests = [
            ReceivedRequest(request, self._datatypes, host.model_name, host.model_version)
            for request in execution.requests
        ]
        try:
            with hosted(host):
                answers = self._awaited(self._model.execute(requests))
            return self._outcomes(requests, answers)
        except UnsupportedError:
            raise
        except _ContractError as error:
            failure = str(error)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: a model does not stop the server
            failure = describe(error, self._folders)
            logging.getLogger(f"remora.model.{host.model_name}").debug("execute failed", exc_info=error)
        # Raised out here the error does not drag the model's frames, and their arrays, along with it.
        raise InternalError(
            f"Failed to process the request(s) for model '{self.name}', message: {failure}", from_model=True
        )

    def close(self) -> None:
        """Call the model's ``finalize``; what it raises is logged."""
        log = logging.getLogger(f"remora.model.{self._host.model_name}")
        try:
            finalize = getattr(self._model, "finalize", None)
            if finalize is not None:
                with hosted(self._host):
                    self._awaited(finalize())
        except BaseException as error:
            log.error("finalize of instance '%s' failed: %s", self.name, describe(error, self._folders), exc_info=error)
        finally:
            self.discard()

    def discard(self) -> None:
        """Give everything back without asking the model."""
        self._model = None
        if self._runner is not None:
            self._runner.close()
        REGISTRY.retire(self._host)
        self._loaded.close()

    def _awaited(self, result: Any) -> Any:
        """The result itself, or what it comes to when the model's method is a coroutine.

        The instance keeps its loop: what a model opens in one execution (a connection, a task) is there in the next.
        """
        if not isinstance(result, CoroutineType):
            return result
        import asyncio  # 30 ms that models without coroutines do not need

        if self._runner is None:
            self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        return self._runner.run(result, context=copy_context())

    def _outcomes(self, requests: list[ReceivedRequest], answers: object) -> list[Outcome]:
        for request in requests:
            request.returned()
        if answers is None:
            answers = [None] * len(requests)
        if not isinstance(answers, list):
            raise _ContractError(f"Expected a list in the execute return, found type '{type(answers)}'.")
        if len(answers) != len(requests):
            raise _ContractError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(answers)}\n"
            )
        return [self._outcome(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def _outcome(self, request: ReceivedRequest, answer: object) -> Outcome:
        if request.release_flags == RELEASE_RESCHEDULE:
            raise UnsupportedError(
                f"model '{self._host.model_name}' asks for its request to be scheduled again, which is not offered "
                "yet: let the model finish a request in one execution"
            )
        if answer is None:
            answer = request.reply.take() if request.reply is not None else None
        elif not isinstance(answer, InferenceResponse):
            raise _ContractError(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(answer)}'."
            )
        elif request.reply is not None:
            request.reply.send(answer, COMPLETE_FINAL)
        if answer is None:
            return InternalError(
                f"model '{self.name}' gave no response to a request: execute returned None for it and nothing was sent "
                "through its response sender; return one InferenceResponse for each request",
                from_model=True,
            )
        return self._response(request, answer)

    def _response(self, request: ReceivedRequest, answer: InferenceResponse) -> Outcome:
        error = answer.error()
        if error is not None:
            return error_of(error.code().name, error.message(), from_model=True, answered=True)
        requested = request.wanted()
        seen = request.seen_inputs()
        return Response(
            [
                tensor.message(seen)
                for tensor in answer.output_tensors()
                if tensor.name() in requested and tensor.name() in self._outputs
            ],
            answer.parameter_values(),
        )
