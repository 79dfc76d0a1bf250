"""The engine: models from a folder, requests in, answers out. It knows no protocol, no cloud and no event loop.

`Engine` is the whole public surface for programs that embed remora; servers and adapters use the same one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy.typing as npt

from remora import calls
from remora.calls import ModelInfo, ModelStats, SequenceReport, ServerInfo
from remora.errors import RemoraError, RetiredError, UnsupportedError
from remora.in_process import AnswerStream
from remora.management import CallAnswers
from remora.messages import Array, Data, InferForm, Outcome, Parameter, Response, Ticket
from remora.models.lifecycle import Lifecycle, Readiness
from remora.models.loader import ModelLoader
from remora.models.served_model import ServedModel
from remora.options import EngineOptions
from remora.proto.model_config_pb2 import ModelConfig
from remora.startup import Ledger, StartupReport
from remora.system.clock import Clock, SystemClock

if TYPE_CHECKING:
    from remora.backends.calling import ModelCaller
    from remora.management.explain import Explanation
    from remora.tracing.tracer import Arrival, Traces


_ATTEMPTS = 4
"""How many versions of a model one request is offered, each of which was replaced while the request was decoded."""


class FrontEnd(NamedTuple):
    """Functions by which a front end submits inference requests; made once, used for every request.

    Attributes:
        submit: ``submit(model, *arguments)`` decodes the request for that version and calls ``model.submit``. It raises
            RetiredError when the version was replaced meanwhile, and must not have answered then. It may be called from
            several threads.
        arrival: ``arrival(*arguments)`` returns how the request arrived. Called only while requests are traced.
        decoupled_refusal: error text for decoupled models; empty if the front end serves them.
    """

    submit: Callable[..., Ticket | None]
    arrival: Callable[..., Arrival | None]
    decoupled_refusal: str = ""


class InferResult(Mapping[str, Array]):
    """The outputs of one inference by name, and what else the model said.

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
    """Serves the models of one or more folders inside this process.

    >>> with Engine("models") as engine:                      # doctest: +SKIP
    ...     engine.infer("digits", {"image": pixels})["label"]

    Args:
        paths: each a model repository, one model's directory, or a model file such as ``model.onnx``.
        options: everything else; ``paths`` are added to its own.
        clock: another one in tests.
        ledger: keeps where the time of the start goes; one of the engine's own when not given.
        traces: another engine's of this process, which ends them: one file takes one writer. Its own when not given.
        settings: single fields of EngineOptions, for those who do not want to build one.

    Thread-safe. `infer` blocks its caller; `infer_async` gives a Future, `infer_stream` an iterator; `submit` is what
    all stand on.
    """

    def __init__(
        self,
        *paths: str | Path,
        options: EngineOptions | None = None,
        clock: Clock | None = None,
        ledger: Ledger | None = None,
        traces: Traces | None = None,
        **settings: Any,
    ) -> None:
        options = replace(options or EngineOptions(), **settings)
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
        self.start_failures: Mapping[str, RemoraError] = {}
        """The models that could not be loaded at the start, and why; all of it is in the log as well."""

    def _model_calls(self) -> ModelCaller:
        from remora.models.calls import ModelCalls

        with self._calls_lock:  # one for all: circles of calls go through many models
            if self._calls is None:
                self._calls = ModelCalls(self._lifecycle, self.traces)
            return self._calls

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> Engine:
        """Load the models. Raises RemoraError for the first that cannot be loaded, unless ``exit_on_error`` is off."""
        failures = self.start_failures = self._lifecycle.start()
        if self._keeps_ledger:
            self.ledger.ready()  # what is loaded later is no part of the start
        if failures and self.options.exit_on_error:
            self.stop()
            error = failures[min(failures)]
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            raise type(error)(f"{str(error).rstrip()}{more}") from error
        return self

    def stop(self, timeout_s: float | None = None) -> bool:
        """Finish what is under way and close all models; False when ``timeout_s`` (default the option) ran out."""
        done = self._lifecycle.stop(self.options.exit_timeout_secs if timeout_s is None else timeout_s)
        if self._cache is not None:
            self._cache.close()
        if self._ends_traces:
            self.traces.close()
        return done

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def begin_drain(self) -> None:
        """Be not ready from now on, and go on serving: traffic is to go elsewhere before `stop`."""
        self._lifecycle.draining = True

    def hold_readiness(self, reason: str) -> Callable[[], None]:
        """Be not ready for ``reason`` until what this returns is called: a server is waited for besides the models."""
        return self._lifecycle.hold_readiness(reason)

    def readiness(self) -> Readiness:
        """Whether traffic may come, and what is waited for when it may not."""
        return self._lifecycle.readiness()

    @property
    def open_sequences(self) -> int:
        """Sequences that have begun and not ended, over all models."""
        return sum(model.open_sequences for model in self._lifecycle.ready_models())

    @property
    def running(self) -> int:
        """Requests that wait or run, over all models."""
        return sum(model.scheduler.pending + model.scheduler.running for model in self._lifecycle.ready_models())

    # -- inference --------------------------------------------------------------------------------------------------

    def wait_for(self, model: str, version: int = -1, timeout_s: float | None = None) -> ServedModel:
        """As `resolve`, and blocks while what would serve is being loaded and may be waited for.

        Raises UnavailableError when ``timeout_s``, at most the option ``waiting_secs``, is over.
        """
        return self._lifecycle.wait_for(model, version, timeout_s)

    def resolve(self, model: str, version: int = -1) -> ServedModel:
        """The model version that would serve; -1 for the highest ready one.

        Raises NotFoundError or UnavailableError with Triton's texts [H09], and LoadingError when it is on its way.
        """
        return self._table.resolve(model, version)

    def submit_to(
        self, front_end: FrontEnd, name: str, version: int, *arguments: object, wait_s: float | None = 0.0
    ) -> Ticket | None:
        """Find the serving version of a model and submit a request to it.

        The order is Triton's: look-up, refusal of decoupled models, decoding, validation, queueing. A request whose
        version was replaced in between is offered to the version that serves now.

        Args:
            front_end: the functions of the front end.
            name: the model.
            version: -1 for the highest version that is ready.
            arguments: passed on to the front end's functions.
            wait_s: how long to block while the model is being loaded: 0 for not at all, None for at most the option
                ``waiting_secs``.

        Returns:
            What ``front_end.submit`` returns: the ticket, or None if the request is answered already.

        Raises:
            NotFoundError, UnavailableError: no version serves [H09].
            LoadingError: the model is being loaded and ``wait_s`` is 0.
            UnsupportedError: the model is decoupled and the front end refuses such models.
            Exception: whatever ``front_end.submit`` raises.
        """
        retired: ServedModel | None = None
        for _ in range(_ATTEMPTS):
            model = self.resolve(name, version) if wait_s == 0.0 else self.wait_for(name, version, wait_s)
            if model.decoupled and front_end.decoupled_refusal:
                raise UnsupportedError(front_end.decoupled_refusal)
            if self.traces.on:
                model = self.traces.over(model, front_end.arrival(*arguments), retired)
            try:
                return front_end.submit(model, *arguments)
            except RetiredError as error:
                retired, replaced = model, error
        raise replaced

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
            model: the model's name.
            inputs: arrays, or anything numpy makes arrays of, in the shapes that the metadata shows (batch dimension
                first where there is one). Text and bytes become BYTES. Values are cast to the model's datatype where
                that loses nothing.
            outputs: names wanted; none for all.
            parameters: for the model, but that ``sequence_id``, ``sequence_start``, ``sequence_end``, ``priority`` and
                ``timeout`` (microseconds) mean what they mean in V2.
            timeout_s: how long to wait; then TimeoutError, and the request is cancelled.

        Raises RemoraError.
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
        """As `infer`, without waiting. Cancelling the future does not stop a request that already runs."""
        ticket, future = self._start(model, inputs, outputs, version, id, parameters)
        future.add_done_callback(lambda done: ticket.cancel() if done.cancelled() else None)
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
        """Run one request and iterate over its answers: any number from a decoupled model, one from every other.

        Arguments as for `infer`. An error that the model answers with is raised by the iterator. Closing it, leaving
        its ``with`` block or dropping it cancels the request; a model far ahead of its reader is held up.

        Raises RemoraError when the request is refused.
        """
        streams: list[AnswerStream[InferResult]] = []

        def submit(served: ServedModel) -> Ticket:
            form, data = _request(served, inputs, outputs, id, parameters)
            stream = AnswerStream(partial(InferResult, served))
            ticket = served.submit(form, data, stream.receiver())
            streams.append(stream.follow(ticket))
            return ticket

        self.submit_to(FrontEnd(submit, _no_arrival), model, version, wait_s=None)
        return streams[0]

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
        ticket = self.submit_to(FrontEnd(submit, _no_arrival, refusal), model, version, wait_s=None)
        assert ticket is not None
        return ticket, future

    # -- models -----------------------------------------------------------------------------------------------------

    def load(self, model: str, config: str | None = None) -> None:
        """Load or reload a model (explicit mode); ``config`` is JSON text that stands in for its configuration file."""
        self.perform(calls.ModelLoad(model, {"config": config} if config is not None else {}))

    def unload(self, model: str) -> None:
        """Take a model out of service (explicit mode); what runs is finished in the background."""
        self.perform(calls.ModelUnload(model))

    def models(self) -> list[ServedModel]:
        """All model versions that serve now, by name and version."""
        return self._lifecycle.ready_models()

    def only_model(self) -> str:
        """The name of the one model that serves, or that a request would load; "" when none does, or several do.

        Raises LoadingError when that is not known before the models of the start are loaded.
        """
        return self._lifecycle.only_model()

    def measure_beside(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        """Have the metrics page show the models of other engines as well; their ``metric_labels`` tell them apart."""
        self._answers.beside = models

    def measure_connections(self, count: Callable[[], Mapping[str, int]]) -> None:
        """Have the metrics page show how many connections of each protocol a server has."""
        self._answers.connections = count

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
    def perform(self, call: calls.RepositoryIndex) -> list[calls.IndexEntry]: ...
    @overload
    def perform(self, call: calls.ModelLoad | calls.ModelUnload) -> None: ...
    @overload
    def perform(self, call: calls.Metrics) -> str: ...
    @overload
    def perform(self, call: calls.Call) -> object: ...

    def perform(self, call: calls.Call) -> object:
        """Answer a call that is no inference; the result is what the call's docstring says.

        ``ModelLoad`` may take as long as the model does: do not call it from an event loop. Raises RemoraError.
        """
        return self._answers.perform(call)


def _no_arrival() -> None:
    """Return None: requests of programs have no headers."""


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
