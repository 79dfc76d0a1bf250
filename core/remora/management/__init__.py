"""Answers to all calls other than inference, from state that is read on demand.

Each protocol decodes a Call and encodes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from remora import calls, plugins
from remora._version import __version__
from remora.calls import ModelInfo, ModelStats, ServerInfo
from remora.errors import InvalidArgumentError, UnsupportedError
from remora.management.settings import LiveSettings
from remora.models.lifecycle import Lifecycle
from remora.options import EngineOptions
from remora.startup import Ledger, StartupReport
from remora.statistics import MetricsSettings, ServerLoad
from remora.system.clock import Clock

if TYPE_CHECKING:
    from remora.cache import ResponseCache
    from remora.management.explanation import Explanation
    from remora.management.metrics import MetricsExporter
    from remora.models.served_model import ServedModel
    from remora.system.gpus import Gpus
    from remora.tracing.tracer import Traces

EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


class Surroundings:
    """Parts of the process around an engine that its metrics page includes.

    Attributes:
        models: returns models of other engines.
        connections: returns the number of open connections by protocol.
        load: returns the load of the server, None without a server.
        denials: requests refused for want of a valid API key, by reason.
    """

    def __init__(self) -> None:
        self.models: Callable[[], Iterable[ServedModel]] = tuple
        self.connections: Callable[[], Mapping[str, int]] = dict
        self.load: Callable[[], ServerLoad | None] = lambda: None
        self.denials: Mapping[str, int] = {}


class CallAnswers:
    """Dispatcher of management calls. Thread-safe.

    Args:
        options: the engine's.
        lifecycle: the engine's.
        clock: the engine's.
        ledger: timing of the engine's start.
        cache: the response cache; None without one.
        traces: another engine's; None creates new ones.
        gpus: the machine's.
    """

    def __init__(
        self,
        options: EngineOptions,
        lifecycle: Lifecycle,
        clock: Clock,
        ledger: Ledger,
        cache: ResponseCache | None,
        traces: Traces | None = None,
        gpus: Gpus | None = None,
    ) -> None:
        self._gpus = gpus if options.allow_gpu_metrics else None
        # Read at the start, because the energy metric counts from here and not from the first scrape.
        self._energy_j = self._gpus.energies() if self._gpus is not None else {}
        self._options = options
        self._lifecycle = lifecycle
        self._table = lifecycle.table
        self._clock = clock
        self._ledger = ledger
        self._cache = cache
        self._settings = LiveSettings(self._may_be_traced, options, clock, traces)
        self.traces = self._settings.traces
        self._exporter: MetricsExporter | None = None
        self.around = Surroundings()

    def _may_be_traced(self, model: str) -> bool:
        """Return True if a model is loaded, as Triton requires, or can be loaded on demand."""
        on_demand = self._options.model_control_mode == "ondemand"
        state = self._table.called(model)
        return state is not None and (on_demand or state.newest is not None)

    def perform(self, call: calls.Call) -> object:
        """Answer a call (see `Engine.perform`)."""
        match call:
            case calls.ServerLive():
                return self._lifecycle.is_live()
            case calls.ServerReady():
                return self._lifecycle.is_ready()
            case calls.ModelReady(model, version):
                return self._lifecycle.is_model_ready(model, version)
            case calls.ServerMetadata():
                return ServerInfo(self._options.id, __version__, EXTENSIONS)
            case calls.ModelMetadata(model, version):
                return self._metadata(model, version)
            case calls.ModelConfig(model, version):
                return self._table.resolve(model, version).config
            case calls.ModelStatistics(model, version):
                return self._statistics(model, version)
            case calls.ModelSequences(model, version):
                return self._table.resolve(model, version).sequences()
            case calls.ModelExplain(model, version, request):
                return self._explain(model, version, request)
            case calls.Startup():
                return self._startup()
            case calls.RecentTraces():
                return self.traces.recent()
            case calls.RepositoryIndex(ready):
                return self._lifecycle.index(ready=ready)
            case calls.ModelLoad(model, parameters):
                self._lifecycle.load(model, parameters)
                return None
            case calls.ModelUnload(model, unload_dependents):
                self._lifecycle.unload(model, unload_dependents=unload_dependents)
                return None
            case calls.ModelRelease(model, action, parameters):
                return self._lifecycle.releases.perform(model, action, parameters)
            case calls.Metrics():
                from remora.management.metrics import page_text

                return page_text(self._families())
            case calls.MetricFamilies():
                return self._families()
            case _:
                return self._settings.perform(call)

    def _families(self) -> list[calls.MetricFamily]:
        if self._exporter is None:
            from remora.management.metrics import MetricsExporter

            gpus = self._gpus.readings if self._gpus is not None else list
            settings = MetricsSettings.of(self._options.metrics_config)
            self._exporter = MetricsExporter(settings, self._clock, self._cache, gpus, self._energy_j)
        models = [*self._table.ready_models(), *self.around.models()]
        shares = self._lifecycle.releases.shares() if self._lifecycle.has_releases else ()
        around = self.around
        return self._exporter.families(
            models, self._startup(), around.connections(), around.denials, around.load(), shares
        )

    def _startup(self) -> StartupReport:
        answered = [model.statistics.first_answer_ns for model in self._table.ready_models()]
        return self._ledger.report(min((ns for ns in answered if ns), default=0))

    def _explain(self, name: str, version: int, request: str) -> Explanation:
        model = self._table.resolve(name, version)
        explained: Explanation
        if model.generation is not None:
            explained = plugins.load(plugins.ANSWERS)(model, request)
            return explained
        if request:
            raise UnsupportedError(
                f"model '{name}' is not a language model: single requests are explained for those; traces show others"
            )
        explained = plugins.load_for("the explanation of batches", plugins.BATCHES)(model, self._clock.monotonic_ns())
        return explained

    def _metadata(self, name: str, version: int) -> ModelInfo:
        model = self._table.resolve(name, version)
        if version >= 0:
            return model.metadata([model.version_text])
        state = self._table.called(name)
        return model.metadata([str(number) for number in state.ready_versions] if state else [model.version_text])

    def _statistics(self, name: str, version: int) -> list[ModelStats]:
        if not name:
            return [model.stats() for model in self._table.ready_models()]
        state = self._table.called(name)
        if state is None or state.newest is None:
            raise InvalidArgumentError(f"requested model '{name}' is not available")
        found = [model.stats() for number, model in sorted(state.ready.items()) if version in (-1, number)]
        if not found:
            raise InvalidArgumentError(f"requested model version is not available for model '{name}'")
        return found
