"""Plans of sessions and execution providers from a model's configuration.

``plan_session`` reads the parameters [C16] and the graph level [C17], ``plan_providers`` the devices and the
accelerators. Pure: the plans are data, and neither ONNX Runtime nor the machine is accessed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup

DEFAULT_CPU_INSTANCES = 2
"""Default number of instances of an ONNX model on a CPU [I02]."""

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
TENSORRT_PROVIDER = "TensorrtExecutionProvider"
OPENVINO_PROVIDER = "OpenVINOExecutionProvider"

# Triton's numbers: 0 means unset, as does every other number that is not listed.
_GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}
_CONFIG_PREFIXES = ("session.", "ep.", "optimization.", "mlas.")
_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_CONV_SEARCH = {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"}
_ARENA_GROWTH = {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"}
_CUDA_PARAMETERS = ("cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream")
_SESSION_PARAMETERS = ("intra_op_thread_count", "inter_op_thread_count", "execution_mode", "enable_mem_arena",
                       "enable_mem_pattern", _SHRINKAGE, "share_session_between_instances")  # fmt: skip
_PRECISIONS = {"FP32": None, "FP16": "trt_fp16_enable", "INT8": "trt_int8_enable"}
_TENSORRT_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}


class Device(NamedTuple):
    """Device of a session, with ``kind`` ``"CPU"`` or ``"GPU"``."""

    kind: str = "CPU"
    id: int = 0


class SessionPlan(NamedTuple):
    """Options of a session.

    ``graph_level`` is the name of an ``onnxruntime.GraphOptimizationLevel``, ``entries`` are session configuration
    entries, ``run_entries`` those of each run. ``ignored`` names the parameters that this backend does not use.
    """

    intra_op_threads: int
    inter_op_threads: int = 1
    parallel: bool = False
    graph_level: str = "ORT_ENABLE_ALL"
    mem_arena: bool = True
    mem_pattern: bool = True
    entries: Mapping[str, str] = {}
    run_entries: Mapping[str, str] = {}
    ignored: tuple[str, ...] = ()


class GraphPlan(NamedTuple):
    """Choice of the sets of input shapes that get a CUDA graph.

    They are those of ``graph_spec``, or else the first few. ``specs`` have the full shapes of the inputs that they
    name. Other inputs may have any shape, so the number of graphs is limited in this case too.
    """

    specs: tuple[Mapping[str, tuple[int, ...]], ...] = ()
    most: int = 16

    def wants(self, shapes: Sequence[tuple[str, tuple[int, ...]]], made: int) -> bool:
        """Return True if inputs of these shapes get a graph when there are ``made`` graphs."""
        if made >= max(self.most, len(self.specs)):
            return False
        if not self.specs:
            return True
        shape_of = dict(shapes)
        return any(all(shape_of.get(name) == shape for name, shape in spec.items()) for spec in self.specs)


def plan_graphs(config: ModelConfig) -> GraphPlan | None:
    """Return the graphs that ``optimization { cuda { graphs: true } }`` requests, or None [C17].

    Raises:
        ConfigError: a specification names an unknown input, or uses an unsupported option.
    """
    cuda = config.optimization.cuda
    if not cuda.graphs:
        return None
    names = [row.name for row in config.input]
    batch = (lambda spec: (spec.batch_size,)) if config.max_batch_size > 0 else (lambda spec: ())
    specs: list[dict[str, tuple[int, ...]]] = []
    for spec in cuda.graph_spec:
        unknown = sorted(set(spec.input) - set(names))
        if unknown:
            raise ConfigError(f"model '{config.name}': cuda.graph_spec names '{unknown[0]}', which is not an input")
        if spec.HasField("graph_lower_bound"):
            raise ConfigError(
                f"model '{config.name}': cuda.graph_spec.graph_lower_bound is not supported: list each batch size that "
                "gets a graph in a separate graph_spec"
            )
        fixed = {row.name: tuple(row.dims) for row in config.input if -1 not in row.dims}
        named = {name: tuple(shape.dim) for name, shape in spec.input.items()}
        specs.append({name: batch(spec) + dims for name, dims in {**fixed, **named}.items()})
    return GraphPlan(tuple(specs))


class ProviderPlan(NamedTuple):
    """Execution providers of a session, the preferred one first.

    ``missing`` names configured providers that are not installed. ``left_out`` names requested options that would give
    wrong answers.
    """

    chain: tuple[tuple[str, dict[str, str]], ...]
    missing: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.chain)

    @property
    def captures(self) -> bool:
        """True if the session captures CUDA graphs."""
        return any(options.get("enable_cuda_graph") in ("1", "true", "True") for _, options in self.chain)


def plan_session(config: ModelConfig, settings: Mapping[str, str], cpus: int) -> SessionPlan:
    """Return the session options for a configuration.

    Unless a parameter (or else a backend setting of the same name) gives the threads of an operator, the ``cpus`` are
    divided among the instances that can run at once, so that together they use no more than the process may use.
    Threads wait without spinning, because a spinning pool takes the processor from the server and from other models.

    Raises:
        ConfigError: a parameter is invalid.
    """
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    values = {key: parameters.get(key, settings.get(key, "")) for key in _SESSION_PARAMETERS}
    share = max(1, cpus // concurrent_instances(config))
    intra = _count(config, "intra_op_thread_count", values) or share
    parallel = _count(config, "execution_mode", values) != 0
    # Without parallel execution there is no second pool; with it, the default would be all processors of the machine.
    inter = (_count(config, "inter_op_thread_count", values) or intra) if parallel else 1
    entries = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    entries.update({key: value for key, value in sorted(parameters.items()) if key.startswith(_CONFIG_PREFIXES)})
    known = (*_SESSION_PARAMETERS, *_CUDA_PARAMETERS)
    return SessionPlan(
        intra_op_threads=intra,
        inter_op_threads=inter,
        parallel=parallel,
        graph_level=_GRAPH_LEVELS.get(config.optimization.graph.level, "ORT_ENABLE_ALL"),
        mem_arena=_flag(config, "enable_mem_arena", values),
        mem_pattern=_flag(config, "enable_mem_pattern", values),
        entries=entries,
        run_entries={_SHRINKAGE: values[_SHRINKAGE]} if values[_SHRINKAGE] else {},
        ignored=tuple(key for key in sorted(parameters) if key not in known and not key.startswith(_CONFIG_PREFIXES)),
    )


def concurrent_instances(config: ModelConfig) -> int:
    """Return the number of instances of the model that can run at the same time.

    Passive ones never run [I01, I02, I05].
    """
    if not config.instance_group:
        return DEFAULT_CPU_INSTANCES
    on_gpu = (ModelInstanceGroup.KIND_GPU, ModelInstanceGroup.KIND_MODEL)
    total = 0
    for group in config.instance_group:
        if not group.passive:
            count = group.count or (1 if group.kind in on_gpu else DEFAULT_CPU_INSTANCES)
            total += count * max(1, len(group.gpus))
    return max(1, total)


def first_device(config: ModelConfig, available: Collection[str]) -> Device:
    """Return the likely device of the model's first instance, before the engine has placed it."""
    group = config.instance_group[0] if config.instance_group else ModelInstanceGroup()
    gpu = Device("GPU", group.gpus[0] if group.gpus else 0)
    if group.kind == ModelInstanceGroup.KIND_GPU:
        return gpu
    return gpu if group.kind != ModelInstanceGroup.KIND_CPU and CUDA_PROVIDER in available else Device()


def requires_gpu(config: ModelConfig) -> bool:
    """Return True if the configuration requires a GPU.

    A model that merely prefers one can run on a CPU.
    """
    return any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)


def plan_providers(
    config: ModelConfig, device: Device, available: Collection[str], *, graphs: bool = True
) -> ProviderPlan:
    """Return the execution providers for a session on ``device``.

    ``available`` are those of the installed ONNX Runtime. Only the CUDA provider gets CUDA graphs: TensorRT's provider
    keeps one graph for all shapes and addresses, so its second set of shapes would be answered with memory that no
    kernel has written.

    Raises:
        ConfigError: an accelerator or a parameter of one is unknown, with Triton's texts.
    """
    wanted = _gpu_chain(config, device) if device.kind == "GPU" else _cpu_chain(config)
    chain = [(name, dict(options)) for name, options in wanted if name in available]
    missing = [name for name, _ in wanted if name not in available]
    left_out = []
    for name, options in chain:
        if name == TENSORRT_PROVIDER and options.pop("trt_cuda_graph_enable", "0") in ("1", "true", "True"):
            left_out.append("trt_cuda_graph_enable")
    if config.optimization.cuda.graphs and device.kind == "GPU" and graphs:
        if chain and chain[0][0] == CUDA_PROVIDER:
            chain[0] = (CUDA_PROVIDER, {"enable_cuda_graph": "1", **chain[0][1]})
        elif chain:
            left_out.append("cuda.graphs")
    return ProviderPlan((*chain, (CPU_PROVIDER, {})), tuple(missing), tuple(left_out))


def _gpu_chain(config: ModelConfig, device: Device) -> list[tuple[str, dict[str, str]]]:
    cuda = _cuda_parameters(config)
    chain = []
    for accelerator in config.optimization.execution_accelerators.gpu_execution_accelerator:
        options = dict(accelerator.parameters)
        if accelerator.name == "tensorrt":
            chain.append((TENSORRT_PROVIDER, {**_tensorrt_options(options), "device_id": str(device.id)}))
        elif accelerator.name == "cuda":
            cuda.update(options)
        else:
            raise ConfigError(f"unknown Execution Accelerator '{accelerator.name}' is requested")
    chain.append((CUDA_PROVIDER, {**cuda, "device_id": str(device.id)}))
    return chain


def _cpu_chain(config: ModelConfig) -> list[tuple[str, dict[str, str]]]:
    chain = []
    for accelerator in config.optimization.execution_accelerators.cpu_execution_accelerator:
        if accelerator.name != "openvino":
            raise ConfigError(f"unknown Execution Accelerator '{accelerator.name}' is requested")
        chain.append((OPENVINO_PROVIDER, {"device_type": "CPU", **accelerator.parameters}))
    return chain


def _tensorrt_options(parameters: Mapping[str, str]) -> dict[str, str]:
    options = {}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in _PRECISIONS:
                raise ConfigError(f"unsupported precision mode '{value}' is requested")
            switch = _PRECISIONS[value]
            if switch is not None:
                options[switch] = "1"
        elif key in _TENSORRT_NAMES or key.startswith("trt_"):
            options[_TENSORRT_NAMES.get(key, key)] = value
        else:
            raise ConfigError(f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator")
    return options


def _cuda_parameters(config: ModelConfig) -> dict[str, str]:
    """Return the CUDA provider's options among the model's parameters.

    Triton keeps them there for compatibility.
    """
    parameters = {key: config.parameters[key].string_value for key in _CUDA_PARAMETERS if key in config.parameters}
    for key, names in (("cudnn_conv_algo_search", _CONV_SEARCH), ("arena_extend_strategy", _ARENA_GROWTH)):
        if key in parameters:
            if parameters[key] not in names:
                raise ConfigError(f"unsupported {key} value '{parameters[key]}' is requested")
            parameters[key] = names[parameters[key]]
    return parameters


def _count(config: ModelConfig, key: str, values: Mapping[str, str]) -> int:
    """Return a whole number of 0 or more, 0 if unset."""
    text = values[key].strip() or "0"
    if not (text.isascii() and text.isdigit()) or len(text) > 6:
        raise ConfigError(
            f"model '{config.name}': parameter '{key}' is '{text}'; it must be a whole number, 0 for automatic"
        )
    return int(text)


def _flag(config: ModelConfig, key: str, values: Mapping[str, str]) -> bool:
    """Return a boolean, True if unset."""
    text = values[key].strip().lower() or "1"
    if text not in ("1", "true", "0", "false"):
        raise ConfigError(f"model '{config.name}': parameter '{key}' is '{text}'; it must be 1, 0, true or false")
    return text in ("1", "true")
