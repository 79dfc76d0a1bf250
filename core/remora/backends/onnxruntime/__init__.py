"""ONNX Runtime backend with one session per device, shared by all instances there.

A session may run in many threads at once, so instances are cheap and the weights are in memory once. ONNX Runtime is
imported when the first model is opened.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remora.backends import Instance, Placement, Source
from remora.backends.model_files import (
    cpu_as_device,
    default_max_batch,
    model_path,
    require_file,
)
from remora.backends.onnxruntime.opening import (
    GpuUnusableError,
    import_onnxruntime,
    open_session,
    opening_failure,
    require_cuda,
    usable_providers,
)
from remora.backends.onnxruntime.plan import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    TENSORRT_PROVIDER,
    Device,
    ProviderPlan,
    SessionPlan,
    first_device,
    plan_graphs,
    plan_providers,
    plan_session,
    requires_gpu,
)
from remora.backends.onnxruntime.session import OnnxSession
from remora.backends.ragged import array_instance
from remora.backends.transfers import transfer_for
from remora.calls import TensorInfo
from remora.errors import InternalError, UnsupportedError
from remora.proto.model_config_pb2 import ModelConfig
from remora.tensors.device import CUDA, HOST, Memory, memory_of

if TYPE_CHECKING:
    from remora.config import BatchingChoice
    from remora.system.cuda import Cuda

_log = logging.getLogger(__name__)

_DEFAULT_FILE = "model.onnx"


class OnnxRuntimeBackend:
    """Backend for ``.onnx`` models.

    Its settings: ``default-max-batch-size`` [C13], ``optimized-model-cache`` and ``tensorrt-engine-cache``
    (directories, see `model_cache` and `engine_cache`), ``device-tensors`` (decision 0030), and defaults for the
    parameters that `plan_session` reads.
    """

    name = "onnxruntime"

    def open(self, source: Source, config: ModelConfig) -> OnnxModel:
        """Load the model into a session for the device of its first instance.

        Raises:
            NotFoundError: there is no model file.
            ConfigError: a parameter or accelerator is unknown, or a required GPU cannot be used.
            UnsupportedError: an input or output of the model is not a tensor.
            InternalError: ONNX Runtime cannot load the file; the text has its reason in one line.
        """
        path = _find_model(source, config)
        return OnnxModel(import_onnxruntime(source.name), source, path, config)


class OnnxModel:
    """Opened model with its signature and its sessions."""

    def __init__(self, runtime: Any, source: Source, path: Path, config: ModelConfig) -> None:
        self._runtime = runtime
        self._source = source
        self._path = path
        self._sessions: dict[Device, OnnxSession] = {}
        self._exclusive: set[Device] = set()
        self.batching: BatchingChoice | None = None
        self._opening = threading.Lock()
        for key in plan_session(config, source.settings, source.cpus).ignored:
            _log.warning("model '%s': the onnxruntime backend does not know the parameter '%s'", source.name, key)
        self._requires_gpu = requires_gpu(config)
        self._device = self._first_device(config)
        self._signature = self._session(config, self._device).signature

    def _first_device(self, config: ModelConfig) -> Device:
        """Return the likely device of the first instance.

        On a machine without GPUs, CUDA is tried only for a model that requires it, because it logs its failure.
        """
        if self._source.gpus == 0 and not self._requires_gpu:
            return Device()
        on_gpu = first_device(config, (CUDA_PROVIDER,)).kind == "GPU"
        return first_device(config, usable_providers(self._runtime, on_gpu=on_gpu))

    @property
    def preferred_kinds(self) -> tuple[str, ...]:
        """Kinds that KIND_AUTO resolves to (`Backend`)."""
        on_gpu = self._source.gpus != 0 and CUDA_PROVIDER in self._runtime.get_available_providers()
        if self._device.kind == "GPU":
            on_gpu = CUDA_PROVIDER in self._sessions[self._device].providers
        return ("GPU", "CPU") if on_gpu else ("CPU",)

    def complete(self, config: ModelConfig) -> None:
        """Fill in omitted fields of ``config`` from the model's tensors, and check the others [C13].

        Raises:
            ConfigError: the configuration contradicts the model.
        """
        from remora.backends.batching_trial import try_rows
        from remora.config import complete_from_tensors

        default = default_max_batch(self._source.settings)
        configured = {tensor.name for tensor in config.input}
        outputs = list(self._signature.outputs.values())
        inputs = self._inputs_for(configured)
        choice = complete_from_tensors(
            config,
            inputs,
            outputs,
            default_max_batch=default,
            axes=self._signature.axes,
            trial=lambda: try_rows(self._session(config, self._device).quiet_run(), inputs, outputs),
        )
        self.batching = choice or self.batching
        for tensor in config.input:
            if tensor.name in self._signature.optional and tensor.name not in configured:
                tensor.optional = True

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError for a configuration with other inputs or outputs than the model's."""
        checked = ModelConfig()
        checked.CopyFrom(config)
        self.complete(checked)

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Return an instance on the shared session of its device.

        KIND_MODEL uses the default device. Raises ConfigError.
        """
        self.check(config)
        device = self._device
        if placement.kind != "MODEL":
            device = Device(placement.kind, placement.device_id if placement.kind == "GPU" else 0)
        graphs = plan_graphs(config)
        session = self._session(config, device)
        if not session.captures:
            graphs = None
        quick = all(provider == CPU_PROVIDER for provider in session.providers)
        memory = self._memory(session, device, on_cpu=quick)
        if memory is None:
            gpu = None if quick or device.kind != "GPU" else device.id
            return array_instance(placement.name, config, session.run_for(config), quick=quick, gpu=gpu)
        if graphs is not None:
            session = self._own_session(config, device)
        bound = session.bound(config, memory, transfer_for(config, memory, _runtime), graphs)

        def close() -> None:
            bound.close()
            self._drop_session(device, session)

        return array_instance(
            placement.name,
            config,
            bound.run,
            quick=quick,
            staying=bound.staying,
            devices=frozenset({memory.device}),
            close=close,
            gpu=None if memory.device == HOST else device.id,
        )

    def _own_session(self, config: ModelConfig, device: Device) -> OnnxSession:
        """Return a session for one instance alone, whose graphs replay its memory.

        The first session that was opened is used first.
        """
        session = self._session(config, device)
        with self._opening:
            if device not in self._exclusive:
                self._exclusive.add(device)
                return session
        return self._open(config, device)

    def _drop_session(self, device: Device, session: OnnxSession) -> None:
        """Drop a session that belonged to one instance alone.

        Its graphs replay memory that was released with the instance.
        """
        with self._opening:
            if device in self._exclusive and self._sessions.get(device) is session:
                self._exclusive.discard(device)
                del self._sessions[device]

    def _memory(self, session: OnnxSession, device: Device, *, on_cpu: bool) -> Memory | None:
        """Return the memory for the session's tensors, or None if they pass through the host."""
        if not session.binds:
            return None
        if on_cpu:
            return memory_of(HOST) if cpu_as_device(self._source.settings) else None
        if device.kind != "GPU":
            return None
        try:
            return memory_of((CUDA, device.id))
        except UnsupportedError as error:
            _log.warning("model '%s': tensors pass through the host: %s", self._source.name, error)
            return None

    def close(self) -> None:
        """Release the sessions."""
        self._sessions.clear()
        self._exclusive.clear()

    def _inputs_for(self, configured: set[str]) -> list[TensorInfo]:
        """Return the model's inputs, optional ones only if the configuration names them."""
        signature = self._signature
        inputs = [info for info in signature.inputs.values() if not configured or info.name not in signature.optional]
        optional = {**signature.inputs, **signature.defaults}
        return inputs + [info for name, info in optional.items() if name in configured & signature.optional]

    def _session(self, config: ModelConfig, device: Device) -> OnnxSession:
        """Return the session of a device.

        If a GPU cannot be used and the model does not require one, this is the CPU's session.
        """
        with self._opening:
            if device not in self._sessions:
                try:
                    self._sessions[device] = self._open(config, device)
                except (GpuUnusableError, InternalError) as error:
                    if self._requires_gpu or device.kind == "CPU":
                        raise
                    _log.warning("%s; running on the CPU instead", error)
                    cpu = self._sessions.get(Device()) or self._open(config, Device())
                    self._sessions[device] = self._sessions[Device()] = cpu
            return self._sessions[device]

    def _open(self, config: ModelConfig, device: Device) -> OnnxSession:
        """Open a session on a device, without the accelerators that cannot be used."""
        name, runtime = self._source.name, self._runtime
        available = usable_providers(runtime, on_gpu=device.kind == "GPU")
        first = plan_providers(config, device, available)
        if device.kind == "GPU":
            require_cuda(runtime, name, available)
        for missing in first.missing:
            _log.warning("model '%s': onnxruntime lacks the configured %s; continuing without", name, missing)
        for option in first.left_out:
            _log.warning(
                "model '%s' runs without %s: TensorRT's provider keeps one CUDA graph for all shapes", name, option
            )
        graphs = True
        while True:
            providers = plan_providers(config, device, available, graphs=graphs)
            try:
                return self._open_with(config, providers, device)
            except InternalError as error:
                if providers.captures:
                    graphs, less = False, "CUDA graphs"
                elif TENSORRT_PROVIDER in providers.names:
                    available.discard(TENSORRT_PROVIDER)
                    less = f"the {TENSORRT_PROVIDER}"
                else:
                    raise
                _log.warning("%s; continuing without %s", error, less)

    def _open_with(self, config: ModelConfig, providers: ProviderPlan, device: Device) -> OnnxSession:
        name, runtime = self._source.name, self._runtime
        plan = plan_session(config, self._source.settings, self._source.cpus)
        # the default, which bindings override
        if any("enable_cuda_graph" in options for _, options in providers.chain):
            plan = plan._replace(run_entries={**plan.run_entries, "gpu_graph_id": "-1"})
        inner = self._create(plan, providers, device)
        lost = tuple(wanted for wanted in providers.names if wanted not in inner.get_providers())
        for missing in lost:
            hint = ""
            if missing == TENSORRT_PROVIDER:
                from remora.backends.onnxruntime.engine_cache import needed_tensorrt

                hint = f" (it needs the libraries of TensorRT {needed_tensorrt(runtime)})"
            _log.warning("model '%s': the %s cannot be used here%s; continuing without", name, missing, hint)
        return OnnxSession(name, runtime, inner, plan, captures=device.kind == "CPU" or providers.captures)

    def _with_engine_cache(self, providers: ProviderPlan, device: Device) -> tuple[ProviderPlan, bool]:
        """Return the providers with TensorRT's engine cache, and True if an engine must be built.

        The build takes long and is logged.
        """
        from remora.backends.onnxruntime.engine_cache import (
            engine_cache,
            engine_folder,
            gpu_and_tensorrt,
            load_tensorrt,
            needed_tensorrt,
        )

        load_tensorrt(needed_tensorrt(self._runtime))

        folder = engine_folder(self._source.settings.get("tensorrt-engine-cache", ""))
        options = dict(providers.chain)[TENSORRT_PROVIDER]
        cache_options: dict[str, str] = {}
        if folder is not None:
            machine = gpu_and_tensorrt(device.id, needed_tensorrt(self._runtime))
            try:
                cache_options = engine_cache(folder, self._path, self._runtime.__version__, machine, options)
            except OSError as error:
                _log.warning("model '%s': its TensorRT engines are not cached: %s", self._source.name, error)
        building = not cache_options or not any(Path(cache_options["trt_engine_cache_path"]).glob("*.engine"))
        if building:
            where = "" if cache_options else "; it is not cached: set tensorrt-engine-cache"
            _log.info("model '%s': TensorRT builds its engine, which can take minutes%s", self._source.name, where)
        chain = tuple(
            (each, {**cache_options, **own} if each == TENSORRT_PROVIDER else own) for each, own in providers.chain
        )
        return providers._replace(chain=chain), building

    def _create(self, plan: SessionPlan, providers: ProviderPlan, device: Device) -> Any:
        runtime, path = self._runtime, self._path
        building = False
        if TENSORRT_PROVIDER in providers.names:
            providers, building = self._with_engine_cache(providers, device)

        def create(file: Path, **changes: Any) -> Any:
            return open_session(runtime, self._source, file, plan, providers.chain, **changes)

        try:
            if building:
                from remora.backends.onnxruntime.engine_cache import log_build_progress

                with log_build_progress(self._source.name):
                    return create(path)
            folder = self._source.settings.get("optimized-model-cache")
            if folder and providers.names in ((CPU_PROVIDER,), (CUDA_PROVIDER, CPU_PROVIDER)):
                from remora.backends.onnxruntime.model_cache import OptimizedModels

                flavour = f"{runtime.__version__} {plan.graph_level} {plan.entries}"
                if device.kind == "GPU":
                    from remora.backends.onnxruntime.engine_cache import gpu_and_tensorrt, needed_tensorrt

                    flavour += f" {providers.chain} {gpu_and_tensorrt(device.id, needed_tensorrt(runtime))}"
                cache = OptimizedModels(Path(folder), flavour)
                level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
                return cache.load(path, create, lambda file: create(file, graph_optimization_level=level))
            return create(path)
        except OSError as error:
            raise opening_failure(runtime, self._source, path, error) from error


def _runtime() -> Cuda:
    from remora.system.cuda import cuda  # imported only on machines with a GPU

    return cuda()


def _find_model(source: Source, config: ModelConfig) -> Path:
    """Return the file to load [C18].

    It is the source itself, a file of its directory, or the model inside a directory there.
    """
    path = model_path(source, config, _DEFAULT_FILE)
    if path.is_dir():  # a model with external data: the graph and its weights in one directory
        inside = path / _DEFAULT_FILE
        graphs = [inside] if inside.is_file() else sorted(path.glob("*.onnx"))
        path = graphs[0] if len(graphs) == 1 else inside
    return require_file(path, source, "*.onnx")
