"""What a configuration asks of ONNX Runtime; the law: pure, so nothing here imports it or looks at the machine.

``plan_session`` reads the parameters [C16] and the graph level [C17], ``plan_providers`` the devices and the
accelerators. What they find is data, which ``onnxruntime`` acts on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup

DEFAULT_CPU_INSTANCES = 2
"""How many instances an ONNX model has on a CPU when nobody says [I02]."""

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
TENSORRT_PROVIDER = "TensorrtExecutionProvider"
OPENVINO_PROVIDER = "OpenVINOExecutionProvider"

# Triton's numbers: 0 is "not said", everything else not listed means the same.
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
    """Where a session lives: ``kind`` is ``"CPU"`` or ``"GPU"``."""

    kind: str = "CPU"
    id: int = 0


class SessionPlan(NamedTuple):
    """How a session is set up.

    ``graph_level`` is the name of an ``onnxruntime.GraphOptimizationLevel``, ``entries`` are session configuration
    entries, ``run_entries`` those of each run. ``ignored`` names the parameters that mean nothing to this backend.
    """

    intra_op_threads: int
    inter_op_threads: int
    parallel: bool
    graph_level: str
    mem_arena: bool
    mem_pattern: bool
    entries: Mapping[str, str]
    run_entries: Mapping[str, str]
    ignored: tuple[str, ...]


class GraphPlan(NamedTuple):
    """Which sets of inputs' shapes get a CUDA graph: those of ``graph_spec``, or else the first few that come.

    ``specs`` give the full shapes of the inputs that they name. Others may have any, so these have an end too.
    """

    specs: tuple[Mapping[str, tuple[int, ...]], ...] = ()
    most: int = 16

    def wants(self, shapes: Sequence[tuple[str, tuple[int, ...]]], made: int) -> bool:
        """Whether inputs of these shapes get a graph when there are ``made`` of them already."""
        if made >= max(self.most, len(self.specs)):
            return False
        if not self.specs:
            return True
        given = dict(shapes)
        return any(all(given.get(name) == shape for name, shape in spec.items()) for spec in self.specs)


def plan_graphs(config: ModelConfig) -> GraphPlan | None:
    """The graphs that ``optimization { cuda { graphs: true } }`` asks for [C17]; None for none.

    Raises:
        ConfigError: a specification names an input that the model does not have, or asks for more than we do.
    """
    cuda = config.optimization.cuda
    if not cuda.graphs:
        return None
    names = [row.name for row in config.input]
    batch = (lambda spec: (spec.batch_size,)) if config.max_batch_size > 0 else (lambda spec: ())
    specs: list[dict[str, tuple[int, ...]]] = []
    for spec in cuda.graph_spec:
        strange = sorted(set(spec.input) - set(names))
        if strange:
            raise ConfigError(f"model '{config.name}': cuda.graph_spec names '{strange[0]}', which is no input of it")
        if spec.HasField("graph_lower_bound"):
            raise ConfigError(
                f"model '{config.name}': cuda.graph_spec.graph_lower_bound is not offered: list each batch size that "
                "is to have a graph in a graph_spec of its own"
            )
        fixed = {row.name: tuple(row.dims) for row in config.input if -1 not in row.dims}
        named = {name: tuple(shape.dim) for name, shape in spec.input.items()}
        specs.append({name: batch(spec) + dims for name, dims in {**fixed, **named}.items()})
    return GraphPlan(tuple(specs))


class ProviderPlan(NamedTuple):
    """Which execution providers a session gets, the preferred one first, and which it was to have but cannot.

    ``left_out`` names what was asked for and would give wrong answers.
    """

    chain: tuple[tuple[str, dict[str, str]], ...]
    missing: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names alone."""
        return tuple(name for name, _ in self.chain)

    @property
    def captures(self) -> bool:
        """True if the session captures CUDA graphs."""
        return any(options.get("enable_cuda_graph") in ("1", "true", "True") for _, options in self.chain)


def plan_session(config: ModelConfig, settings: Mapping[str, str], cpus: int) -> SessionPlan:
    """The session options that a configuration asks for.

    Unless a parameter (or else a backend setting of the same name) gives the threads of an operator, the ``cpus`` are
    shared out among the instances that can run at once, so that together they use what the process may use and no
    more. Threads wait without spinning: a spinning pool takes the processor from the server and from its neighbours.

    Raises:
        ConfigError: for a parameter that cannot be read.
    """
    given = {key: value.string_value for key, value in config.parameters.items()}
    said = {key: given.get(key, settings.get(key, "")) for key in _SESSION_PARAMETERS}
    share = max(1, cpus // concurrent_instances(config))
    intra = _count(config, "intra_op_thread_count", said) or share
    parallel = _count(config, "execution_mode", said) != 0
    # Without parallel execution there is no second pool; with it, the default would be all of the machine's processors.
    inter = (_count(config, "inter_op_thread_count", said) or intra) if parallel else 1
    entries = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    entries.update({key: value for key, value in sorted(given.items()) if key.startswith(_CONFIG_PREFIXES)})
    known = (*_SESSION_PARAMETERS, *_CUDA_PARAMETERS)
    return SessionPlan(
        intra_op_threads=intra,
        inter_op_threads=inter,
        parallel=parallel,
        graph_level=_GRAPH_LEVELS.get(config.optimization.graph.level, "ORT_ENABLE_ALL"),
        mem_arena=_truth(config, "enable_mem_arena", said),
        mem_pattern=_truth(config, "enable_mem_pattern", said),
        entries=entries,
        run_entries={_SHRINKAGE: said[_SHRINKAGE]} if said[_SHRINKAGE] else {},
        ignored=tuple(key for key in sorted(given) if key not in known and not key.startswith(_CONFIG_PREFIXES)),
    )


def concurrent_instances(config: ModelConfig) -> int:
    """How many instances of the model can run at the same time; passive ones never do [I01, I02, I05]."""
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
    """Where the model's first instance will live as far as one can tell before the engine has placed it."""
    group = config.instance_group[0] if config.instance_group else ModelInstanceGroup()
    gpu = Device("GPU", group.gpus[0] if group.gpus else 0)
    if group.kind == ModelInstanceGroup.KIND_GPU:
        return gpu
    return gpu if group.kind != ModelInstanceGroup.KIND_CPU and CUDA_PROVIDER in available else Device()


def insists_on_gpu(config: ModelConfig) -> bool:
    """Whether somebody asked for a GPU in so many words; a model that would merely like one can run on a CPU."""
    return any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)


def plan_providers(
    config: ModelConfig, device: Device, available: Collection[str], *, graphs: bool = True
) -> ProviderPlan:
    """The execution providers for a session on ``device``; ``available`` are those of the installed ONNX Runtime.

    CUDA graphs belong to the CUDA provider alone. TensorRT's provider keeps one graph for all shapes and addresses, so
    its second set of shapes would be answered with memory that no kernel has written.

    Raises:
        ConfigError: for an accelerator or one of its parameters that no provider has, with Triton's texts.
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
    """The provider's options among the model's own parameters, where Triton keeps them for compatibility."""
    given = {key: config.parameters[key].string_value for key in _CUDA_PARAMETERS if key in config.parameters}
    for key, names in (("cudnn_conv_algo_search", _CONV_SEARCH), ("arena_extend_strategy", _ARENA_GROWTH)):
        if key in given:
            if given[key] not in names:
                raise ConfigError(f"unsupported {key} value '{given[key]}' is requested")
            given[key] = names[given[key]]
    return given


def _count(config: ModelConfig, key: str, said: Mapping[str, str]) -> int:
    """A whole number of 0 or more; 0 when nothing is said."""
    text = said[key].strip() or "0"
    if not (text.isascii() and text.isdigit()) or len(text) > 6:
        raise ConfigError(
            f"model '{config.name}': parameter '{key}' is '{text}'; it must be a whole number, 0 for automatic"
        )
    return int(text)


def _truth(config: ModelConfig, key: str, said: Mapping[str, str]) -> bool:
    """A yes or no; yes when nothing is said."""
    text = said[key].strip().lower() or "1"
    if text not in ("1", "true", "0", "false"):
        raise ConfigError(f"model '{config.name}': parameter '{key}' is '{text}'; it must be 1, 0, true or false")
    return text in ("1", "true")
