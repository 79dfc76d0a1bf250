"""Inference engine that loads models from repositories and answers requests for them.

`Engine` is the whole public API for programs that embed remora; servers and adapters use the same class. The module is
independent of protocols, cloud platforms and event loops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

import numpy.typing as npt

from remora import calls, plugins
from remora.calls import ModelInfo, ModelStats, SequenceReport, ServerInfo
from remora.errors import RemoraError, RetiredError, UnavailableError, UnsupportedError
from remora.in_process import AnswerStream
from remora.management import CallAnswers
from remora.messages import Array, Data, InferForm, Outcome, Parameter, Response, Ticket
from remora.models.lifecycle import Lifecycle
from remora.models.loader import ModelLoader
from remora.models.readiness import Readiness
from remora.models.served_model import ServedModel
from remora.options import EngineOptions
from remora.proto.model_config_pb2 import ModelConfig
from remora.startup import Ledger, StartupReport
from remora.statistics import ServerLoad
from remora.system.clock import Clock, SystemClock

if TYPE_CHECKING:
    from remora.backends.calling import ModelCaller
    from remora.management.explanation import Explanation
    from remora.management.export import MetricsExport
    from remora.models.rollout import RoutedModel
    from remora.repository.functions import ObjectModels
    from remora.tracing import Capture
    from remora.tracing.arrival import Arrival
    from remora.tracing.tracer import Traces


_LAST_EXPORT_S = 3.0
"""Longest time for the last export of metrics."""
_ATTEMPTS = 4
"""Versions of a model that one request tries, each replaced by the next while the request was being decoded."""


class FrontEnd(NamedTuple):
    """Functions by which a front end submits inference requests, created once.

    Attributes:
        submit: ``submit(model, *arguments)`` decodes the request for that version and calls ``model.submit``. It raises
            RetiredError if the version was replaced meanwhile, and must not have answered in that case. It may be
            called from several threads.
        arrival: ``arrival(*arguments)`` returns how the request arrived. Called only while requests are traced.
        decoupled_refusal: error text for decoupled models, with ``{name}`` for the model's name; empty if the front end
            serves them.
        routed: ``routed(model, *arguments)`` returns the arguments for a request that a release routes; None to keep
            them. It may raise.
    """

    submit: Callable[..., Ticket | None]
    arrival: Callable[..., Arrival | None]
    decoupled_refusal: str = ""
    routed: Callable[..., tuple[object, ...]] | None = None


class InferResult(Mapping[str, Array]):
    """Outputs of one inference by name, with the parameters of the response.

    BYTES outputs are object arrays of ``bytes``; BF16 outputs are the raw bits in uint16.
    """

    __slots__ = ("_arrays", "model_name", "model_version", "parameters")

    def __init__(self, model: ServedModel, response: Response) -> None:
        self.model_name = model.name
        self.model_version = model.version
        self.parameters = response.parameters
        self._arrays = {tensor.name: tensor.data for tensor in response.outputs}

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Any:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in self._arrays.items())
        return f"<InferResult of {self.model_name} version {self.model_version}: {shapes}>"


class Engine:
    """In-process server of the models of one or more repositories.

    >>> with Engine("models") as engine:                      # doctest: +SKIP
    ...     engine.infer("digits", {"image": pixels})["label"]

    Args:
        paths: each a model repository, the directory of a model, or a model file such as ``model.onnx``.
        options: all other settings; ``paths`` are appended to ``options.paths``.
        clock: time source; tests pass a fake clock.
        ledger: records how the startup time is spent. The engine creates one by default.
        traces: traces of another engine in this process, which closes them, because a trace file has a single writer.
            The engine creates its traces by default.
        models: functions, classes or objects of `remora.model` and `remora.Pipeline`, which run in threads.
        settings: single fields of EngineOptions, as an alternative to ``options``.

    Thread-safe. `infer` blocks its caller, `infer_async` returns a Future and `infer_stream` an iterator. All three use
    `submit_to`.
    """

    def __init__(
        self,
        *paths: str | Path,
        options: EngineOptions | None = None,
        clock: Clock | None = None,
        ledger: Ledger | None = None,
        traces: Traces | None = None,
        models: Sequence[Callable[..., Any]] = (),
        **settings: Any,
    ) -> None:
        options = replace(options or EngineOptions(), **settings)
        self._objects: ObjectModels | None = None
        if models:
            from remora.repository.functions import ObjectModels  # imports tempfile, which most engines never need

            self._objects = ObjectModels(models)
            paths = (*paths, self._objects.folder)
        self.options = replace(options, paths=(*options.paths, *paths))
        self._clock = clock or SystemClock()
        self.ledger = ledger or Ledger(self._clock.monotonic_ns)
        self._keeps_ledger = ledger is None
        loader = ModelLoader(self.options, self._clock)
        self._calls: ModelCaller | None = None
        self._calls_lock = threading.Lock()
        loader.calls = self._model_calls
        loader.ledger = self.ledger
        self._cache = loader.cache
        self._lifecycle = Lifecycle(self.options, loader, self._clock)
        self._table = self._lifecycle.table
        self._answers = CallAnswers(
            self.options, self._lifecycle, self._clock, self.ledger, self._cache, traces, loader.devices
        )
        self.traces = self._answers.traces
        self._ends_traces = traces is None
        self.capture = self._open_capture()
        self._export = self._open_export()
        self.start_failures: Mapping[str, RemoraError] = {}
        """Errors of the models that could not be loaded at startup, by model name. They are logged as well."""
        self._has_begun = False

    def _model_calls(self) -> ModelCaller:
        from remora.models.calls import ModelCalls

        with self._calls_lock:  # all models share one caller, because a cycle of calls spans several models
            if self._calls is None:
                self._calls = ModelCalls(self._lifecycle, self.traces)
            return self._calls

    # -- lifecycle --------------------------------------------------------------------------------------------------

    def start(self) -> Engine:
        """Load the models.

        Raises RemoraError for the first model that cannot be loaded, unless ``exit_on_error`` is off.
        """
        self._has_begun = True
        failures = self.start_failures = self._lifecycle.start()
        if self._export is not None:
            self._export.start()
        if self._keeps_ledger:
            self.ledger.ready()  # later loads do not count as startup
        if failures and self.options.exit_on_error:
            self.stop()
            error = failures[min(failures)]
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            raise type(error)(f"{str(error).rstrip()}{more}") from error
        return self

    def stop(self, timeout_s: float | None = None) -> bool:
        """Finish the requests in flight and close all models.

        Returns False if ``timeout_s`` expired first; its default is the option ``exit_timeout_secs``.
        """
        if self._export is not None:  # before the models and their metrics go
            self._export.close(_LAST_EXPORT_S)
        done = self._lifecycle.stop(self.options.exit_timeout_secs if timeout_s is None else timeout_s)
        if self._cache is not None:
            self._cache.close()
        if self._ends_traces:
            self.traces.close()
        if self.capture is not None:
            self.capture.close()
        if self._objects is not None:
            self._objects.close()
        return done

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _open_capture(self) -> Capture | None:
        """Return the capture that the options ask for. Raises RemoraError."""
        options = self.options
        if not options.capture:
            return None
        capture: Capture = plugins.load_for("--capture", plugins.CAPTURE)(options, self._clock)
        return capture

    def _open_export(self) -> MetricsExport | None:
        """Return the export of metrics that the options ask for. Raises RemoraError."""
        if not self.options.metrics_export:
            return None
        from remora.management.export import open_export  # imported here because it is usually off

        return open_export(self.options, lambda: self.perform(calls.MetricFamilies()), self._clock)

    def flush(self, timeout_s: float) -> None:
        """Deliver traces and metrics within the timeout.

        Hosts need it that freeze the process between requests.
        """
        self.traces.flush(timeout_s)
        if self._export is not None:
            self._export.flush(timeout_s)

    def begin_drain(self) -> None:
        """Report "not ready" from now on and keep serving, so that traffic moves away before `stop`."""
        self._lifecycle.begin_drain()

    def hold_readiness(self, reason: str) -> Callable[[], None]:
        """Report "not ready" for ``reason`` until the returned function is called.

        A server uses it for its startup steps other than loading models.
        """
        return self._lifecycle.hold_readiness(reason)

    def readiness(self) -> Readiness:
        """Return whether the engine accepts traffic, and the reasons if it does not."""
        return self._lifecycle.readiness()

    @property
    def open_sequences(self) -> int:
        """Number of sequences that have begun and not ended, over all models."""
        return sum(model.open_sequences for model in self._lifecycle.ready_models())

    @property
    def running(self) -> int:
        """Number of queued and running requests, over all models."""
        return sum(model.scheduler.pending + model.scheduler.running for model in self._lifecycle.ready_models())

    # -- inference --------------------------------------------------------------------------------------------------

    def wait_for(self, model: str, version: int = -1, timeout_s: float | None = None) -> ServedModel:
        """Return the serving version like `resolve`, blocking while it is being loaded.

        Raises UnavailableError after ``timeout_s``, which is at most the option ``waiting_secs``.
        """
        return self._lifecycle.wait_for(model, version, timeout_s)

    def resolve(self, model: str, version: int = -1) -> ServedModel:
        """Return the model version that serves; -1 selects the highest ready version.

        Raises NotFoundError or UnavailableError with Triton's texts [H09], and LoadingError while it is being loaded.
        """
        return self._table.resolve(model, version)

    @property
    def loads_on_request(self) -> bool:
        """True if clients may load and unload models."""
        return self._lifecycle.loads_on_request

    def decides_readiness(self, model: str, version: int) -> bool:
        """Return True if the model decides whether it is ready, so that `ModelReady` may wait."""
        return self._lifecycle.decides_readiness(model, version)

    def submit_to(
        self, front_end: FrontEnd, name: str, version: int, *arguments: object, wait_s: float | None = 0.0
    ) -> Ticket | None:
        """Find the serving version of a model and submit a request to it.

        The order is Triton's: look-up, refusal of decoupled models, decoding, validation, queueing. If the version was
        replaced meanwhile, the request is submitted to its successor.

        Args:
            front_end: the functions of the front end.
            name: name of the model.
            version: -1 for the highest ready version.
            arguments: passed on to the front end's functions.
            wait_s: how long to block while the model is being loaded: 0 does not block, None blocks for at most the
                option ``waiting_secs``.

        Returns:
            The result of ``front_end.submit``: the ticket, or None if the request is already answered.

        Raises:
            NotFoundError, UnavailableError: no version serves [H09].
            LoadingError: the model is being loaded and ``wait_s`` is 0.
            UnsupportedError: the model is decoupled and the front end refuses such models.
            Exception: any error of ``front_end.submit``.
        """
        retired: ServedModel | None = None
        for _ in range(_ATTEMPTS):
            model = self.resolve(name, version) if wait_s == 0.0 else self.wait_for(name, version, wait_s)
            known: ServedModel = model
            if not model.is_plain:
                arguments = _prepared(model, front_end, arguments)
                if model.generation is not None:
                    known = cast("ServedModel", self._with_caller(model, front_end.arrival(*arguments)))
            if self.traces.on:
                model = known = self.traces.wrap_model(known, front_end.arrival(*arguments), retired)
            captured = known if self.capture is None else self.capture.wrap_model(known)
            try:
                return front_end.submit(captured, *arguments)
            except RetiredError as error:
                retired, replaced = model, error
        raise replaced

    def _with_caller(self, model: ServedModel, arrival: Arrival | None) -> object:
        """Return a language model that knows the caller of the next request."""
        if arrival is None:
            return model
        from remora.models.callers import CallerModel  # imported here, because few servers need it

        return CallerModel(model, self.traces.key_of(arrival.carrier))

    def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        outputs: Sequence[str] = (),
        version: int = -1,
        id: str = "",
        parameters: Mapping[str, Parameter] | None = None,
        timeout_s: float | None = None,
    ) -> InferResult:
        """Run one request and wait for its answer.

        Args:
            model: name of the model.
            inputs: array-likes in the shapes of the model's metadata (batch dimension first if the model has one).
                Text and bytes become BYTES. Values are cast to the model's datatype if the cast is lossless.
            outputs: names of the wanted outputs; empty for all.
            parameters: parameters for the model. ``sequence_id``, ``sequence_start``, ``sequence_end``, ``priority``
                and ``timeout`` (microseconds) have their V2 meaning.
            timeout_s: how long to wait for the answer before the request is cancelled.

        Raises:
            RemoraError: the request is refused or fails.
            TimeoutError: ``timeout_s`` is over.
        """
        ticket, future = self._start(model, inputs, outputs, version, id, parameters)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            ticket.cancel()
            raise

    def infer_async(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        outputs: Sequence[str] = (),
        version: int = -1,
        id: str = "",
        parameters: Mapping[str, Parameter] | None = None,
    ) -> Future[InferResult]:
        """Submit one request like `infer` and return its Future.

        Cancelling it does not stop a running request.
        """
        ticket, future = self._start(model, inputs, outputs, version, id, parameters)
        # The ticket refers to the future: a callback with the ticket would keep both until the garbage collector runs.
        cancel = ticket.request.cancel
        future.add_done_callback(lambda done: cancel() if done.cancelled() else None)
        return future

    def infer_stream(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        outputs: Sequence[str] = (),
        version: int = -1,
        id: str = "",
        parameters: Mapping[str, Parameter] | None = None,
    ) -> AnswerStream[InferResult]:
        """Run one request and return an iterator over its answers.

        A decoupled model gives any number of answers, every other model one. Arguments are those of `infer`. The
        iterator raises the model's errors. Closing it, leaving its ``with`` block or dropping it cancels the request. A
        model far ahead of its reader is blocked (backpressure).

        Raises RemoraError if the request is refused.
        """
        streams: list[AnswerStream[InferResult]] = []

        def submit(served: ServedModel) -> Ticket:
            form, data = _request(served, inputs, outputs, id, parameters)
            stream = AnswerStream(partial(InferResult, served))
            ticket = served.submit(form, data, stream.receiver())
            streams.append(stream.follow(ticket))
            return ticket

        self._check_start(model, version)
        self.submit_to(FrontEnd(submit, _no_arrival), model, version, wait_s=None)
        return streams[0]

    def _check_start(self, model: str, version: int) -> None:
        """Raise UnavailableError if a model is not loaded and nothing loads it."""
        if self._has_begun:
            return
        try:
            self._table.look_up(model, version)
        except RemoraError as error:
            text = f"model '{model}' is not loaded, because the engine was not started: "
            raise UnavailableError(f"{text}use 'with Engine(...) as engine:', or call start()") from error

    def _start(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        outputs: Sequence[str],
        version: int,
        id: str,
        parameters: Mapping[str, Parameter] | None,
    ) -> tuple[Ticket, Future[InferResult]]:
        future: Future[InferResult] = Future()

        def submit(served: ServedModel) -> Ticket:
            form, data = _request(served, inputs, outputs, id, parameters)

            def reply(_: Ticket, outcome: Outcome) -> None:
                if not future.set_running_or_notify_cancel():
                    return  # the caller cancelled the future, and a cancelled future takes no result
                if isinstance(outcome, Response):
                    future.set_result(InferResult(served, outcome))
                elif isinstance(outcome, RemoraError):
                    future.set_exception(outcome)

            return served.submit(form, data, reply)

        refusal = f"model '{model}' is decoupled: it may give any number of responses to a request; call infer_stream"
        self._check_start(model, version)
        ticket = self.submit_to(FrontEnd(submit, _no_arrival, refusal), model, version, wait_s=None)
        assert ticket is not None
        return ticket, future

    # -- models -----------------------------------------------------------------------------------------------------

    def load(self, model: str, config: str | None = None) -> None:
        """Load or reload a model (explicit mode).

        ``config`` is JSON text that replaces the model's configuration file.
        """
        self.perform(calls.ModelLoad(model, {"config": config} if config is not None else {}))

    def unload(self, model: str) -> None:
        """Unload a model (explicit mode); its running requests finish in the background."""
        self.perform(calls.ModelUnload(model))

    def models(self) -> list[ServedModel]:
        """Return all ready model versions, sorted by name and version."""
        return self._lifecycle.ready_models()

    def only_model(self) -> str:
        """Return the only model that is ready or loadable on demand, "" for none or several.

        Raises LoadingError while the startup models are still being loaded and the answer is unknown.
        """
        return self._lifecycle.only_model()

    def measure_other_models(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        """Add the models of other engines to the metrics; their ``metric_labels`` distinguish them."""
        self._answers.around.models = models

    def measure_connections(self, count: Callable[[], Mapping[str, int]]) -> None:
        """Add a server's number of connections per protocol to the metrics."""
        self._answers.around.connections = count

    def measure_load(self, load: Callable[[], ServerLoad]) -> None:
        """Add a server's answers and the lateness of its event loop to the metrics."""
        self._answers.around.load = load

    def measure_denials(self, counts: Mapping[str, int]) -> None:
        """Add the requests without a valid API key, by reason, to the metrics.

        ``counts`` is read whenever the metrics are.
        """
        self._answers.around.denials = counts

    # -- calls ------------------------------------------------------------------------------------------------------

    @overload
    def perform(self, call: calls.ServerLive | calls.ServerReady | calls.ModelReady) -> bool: ...
    @overload
    def perform(self, call: calls.ServerMetadata) -> ServerInfo: ...
    @overload
    def perform(self, call: calls.ModelMetadata) -> ModelInfo: ...
    @overload
    def perform(self, call: calls.ModelConfig) -> ModelConfig: ...
    @overload
    def perform(self, call: calls.ModelStatistics) -> list[ModelStats]: ...
    @overload
    def perform(self, call: calls.ModelSequences) -> SequenceReport: ...
    @overload
    def perform(self, call: calls.ModelExplain) -> Explanation: ...
    @overload
    def perform(self, call: calls.Startup) -> StartupReport: ...
    @overload
    def perform(self, call: calls.RecentTraces) -> list[dict[str, Any]]: ...
    @overload
    def perform(self, call: calls.RepositoryIndex) -> list[calls.IndexEntry]: ...
    @overload
    def perform(self, call: calls.ModelLoad | calls.ModelUnload) -> None: ...
    @overload
    def perform(self, call: calls.ModelRelease) -> dict[str, Any]: ...
    @overload
    def perform(self, call: calls.Metrics) -> str: ...
    @overload
    def perform(self, call: calls.MetricFamilies) -> list[calls.MetricFamily]: ...
    @overload
    def perform(self, call: calls.Call) -> object: ...

    def perform(self, call: calls.Call) -> object:
        """Perform a management call and return the result that the call's docstring describes.

        ``ModelLoad`` takes as long as loading the model: do not call it from an event loop. Raises RemoraError.
        """
        return self._answers.perform(call)


def _prepared(model: ServedModel, front_end: FrontEnd, arguments: tuple[object, ...]) -> tuple[object, ...]:
    """Return the arguments for a request to a decoupled or routed model.

    Raises UnsupportedError for a decoupled one that the front end refuses, and what ``front_end.routed`` does.
    """
    if model.decoupled and front_end.decoupled_refusal:
        raise UnsupportedError(front_end.decoupled_refusal.replace("{name}", model.name))
    if model.is_routed:
        arrival = front_end.arrival(*arguments)
        cast("RoutedModel", model).identify(arrival.carrier if arrival is not None else None)
        if front_end.routed is not None:
            return front_end.routed(model, *arguments)
    return arguments


def _no_arrival() -> None:
    """Return None, because in-process requests have no headers."""


def _request(
    model: ServedModel,
    inputs: Mapping[str, npt.ArrayLike],
    outputs: Sequence[str],
    id: str,
    parameters: Mapping[str, Parameter] | None,
) -> tuple[InferForm, list[Data]]:
    from remora.in_process import as_form, as_request

    specs, data = as_request(model, inputs)
    return as_form(specs, outputs, id, parameters or {}), data
