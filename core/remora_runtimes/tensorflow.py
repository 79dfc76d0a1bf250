"""TensorFlow backend for SavedModels and their signatures.

A graph that accesses files is refused. TensorFlow is imported when the first model is opened. Its thread pools belong
to the process; the first model sets them up.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from remora.api.backends import DATATYPE_BY_NAME, try_rows
from remora.backends import Instance, Placement, Source
from remora.backends.model_files import (
    default_max_batch,
    get_int,
    get_parameter,
    import_framework,
    load_failure,
    model_path,
    require_file,
    warn_of_unused,
)
from remora.backends.ragged import array_instance
from remora.calls import TensorInfo
from remora.config import BatchingChoice, Trial, complete_from_tensors
from remora.errors import ConfigError, InternalError, RemoraError, UnsupportedError
from remora.messages import DTYPES, Array, Tensor
from remora.proto.model_config_pb2 import ModelConfig

_log = logging.getLogger(__name__)

_DATATYPES = DATATYPE_BY_NAME | {"string": "BYTES"}
_DEFAULT_SIGNATURE = "serving_default"
_DEFAULT_TAG = "serve"
_KNOWN = frozenset(
    {"TF_GRAPH_TAG", "TF_SIGNATURE_DEF", "TF_NUM_INTRA_THREADS", "TF_NUM_INTER_THREADS", "TF_USE_PER_SESSION_THREADS",
     "MAX_SESSION_SHARE_COUNT"}
)  # fmt: skip

REFUSED_OPERATIONS = frozenset(
    {"ReadFile", "WriteFile", "MatchingFiles", "PyFunc", "PyFuncStateless", "EagerPyFunc", "DebugIdentityV3"}
)
"""Operations that a served graph must not contain: access to the machine's files, and Python functions."""

MAX_GRAPH_BYTES = 2 << 30
"""Largest ``saved_model.pb``; protobuf messages cannot be longer."""


class TensorFlowBackend:
    """Backend for ``model.savedmodel``, whose settings are defaults for the parameters."""

    name = "tensorflow"

    def open(self, source: Source, config: ModelConfig) -> TensorFlowModel:
        """Load the SavedModel.

        Raises:
            NotFoundError: there is no model.
            ConfigError: a parameter is invalid, the model lacks the signature, or TensorFlow is not installed.
            UnsupportedError: a frozen graph, a refused operation, or a tensor type without a protocol datatype.
            InternalError: TensorFlow cannot read the model.
        """
        if config.platform == "tensorflow_graphdef":
            raise UnsupportedError(
                f"model '{source.name}' is a frozen graph, which does not describe its inputs: save it as a SavedModel"
            )
        path = require_file(model_path(source, config, "model.savedmodel"), source, "*savedmodel*", "saved_model.pb")
        graph = path / "saved_model.pb"
        require_file(graph, source)
        if graph.stat().st_size > MAX_GRAPH_BYTES:
            raise InternalError(f"model '{source.name}': its graph is {graph.stat().st_size} bytes long")
        tensorflow = import_framework("tensorflow", source.name, "TensorFlow", "tensorflow")
        try:
            return TensorFlowModel(tensorflow, source, path, config)
        except RemoraError:
            raise
        except Exception as error:  # TensorFlow's errors have no common class
            raise load_failure(source, path, error) from error


class TensorFlowModel:
    """Opened SavedModel, whose signature all instances share."""

    def __init__(self, tensorflow: Any, source: Source, path: Path, config: ModelConfig) -> None:
        self._tensorflow = tensorflow
        self._source = source
        warn_of_unused(config, _KNOWN, "tensorflow")
        check_operations(source.name, _operations(path / "saved_model.pb"))
        self._set_threads(config)
        self._let_gpu_memory_grow()
        self._loaded: Any = tensorflow.saved_model.load(
            str(path), tags=[get_parameter(config, source.settings, "TF_GRAPH_TAG") or _DEFAULT_TAG]
        )
        wanted = get_parameter(config, source.settings, "TF_SIGNATURE_DEF") or _DEFAULT_SIGNATURE
        signatures = self._loaded.signatures
        if wanted not in signatures:
            there = ", ".join(sorted(signatures)) or "none"
            raise ConfigError(
                f"model '{source.name}' has no signature '{wanted}': set TF_SIGNATURE_DEF to one of these: {there}"
            )
        self._function: Any = signatures[wanted]
        takes, gives = self._function.structured_input_signature[1], self._function.structured_outputs
        self.batching: BatchingChoice | None = None
        self._inputs = [_info(source.name, "input", name, spec) for name, spec in takes.items()]
        self._outputs = [_info(source.name, "output", name, spec) for name, spec in gives.items()]

    @property
    def preferred_kinds(self) -> tuple[str, ...]:
        """Kinds that KIND_AUTO resolves to (`Backend`)."""
        return ("GPU", "CPU") if self._tensorflow.config.list_physical_devices("GPU") else ("CPU",)

    def complete(self, config: ModelConfig) -> None:
        """Fill in omitted fields of ``config`` from the signature, and check the others.

        Raises ConfigError.
        """
        batch = default_max_batch(self._source.settings)
        choice = complete_from_tensors(
            config, self._inputs, self._outputs, default_max_batch=batch, trial=self._try_rows
        )
        self.batching = choice or self.batching

    def _try_rows(self) -> Trial:
        run = _Run(self._tensorflow, self._function, self._inputs, self._outputs, None)
        return try_rows(run, self._inputs, self._outputs)

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Return an instance on a device that TensorFlow sees.

        Raises ConfigError if TensorFlow does not see the requested GPU.
        """
        device = None
        if placement.kind != "MODEL":
            device = f"/{placement.kind}:{placement.device_id if placement.kind == 'GPU' else 0}"
        seen = len(self._tensorflow.config.list_physical_devices("GPU")) if placement.kind == "GPU" else 1
        if placement.kind == "GPU" and placement.device_id >= seen:
            raise ConfigError(
                f"model '{config.name}' asks for GPU {placement.device_id}, but TensorFlow sees {seen}: install a "
                "build of TensorFlow for CUDA and check the driver, or set the instance group's kind to KIND_CPU"
            )
        run = _Run(self._tensorflow, self._function, self._inputs, self._outputs, device)
        gpu = placement.device_id if placement.kind == "GPU" else None
        return array_instance(placement.name, config, run, quick=placement.kind == "CPU", gpu=gpu)

    def close(self) -> None:
        """Release the model."""
        self._loaded = self._function = None

    def _let_gpu_memory_grow(self) -> None:
        """Make TensorFlow allocate GPU memory on demand, because other frameworks need some too."""
        devices = self._tensorflow.config
        for gpu in devices.list_physical_devices("GPU"):
            try:
                devices.experimental.set_memory_growth(gpu, True)
            except RuntimeError as error:  # the process has already used the GPU
                _log.warning("TensorFlow keeps all of a GPU's memory to itself: %s", error)

    def _set_threads(self, config: ModelConfig) -> None:
        """Set the sizes of the thread pools, which is possible only before their first use.

        Without a parameter they get the process's share of CPUs.
        """
        threading = self._tensorflow.config.threading
        settings = self._source.settings
        for key, kind, default in (
            ("TF_NUM_INTRA_THREADS", "intra", self._source.cpus),
            ("TF_NUM_INTER_THREADS", "inter", 0),
        ):
            configured = get_int(config, settings, key)
            wanted = configured or default
            if not wanted or wanted == getattr(threading, f"get_{kind}_op_parallelism_threads")():
                continue
            try:
                getattr(threading, f"set_{kind}_op_parallelism_threads")(wanted)
            except RuntimeError:
                if configured:
                    _log.warning("model '%s': %s comes too late: the pool is running", self._source.name, key)


class _Run:
    """Signature as a function from arrays to arrays (``arrays.Run``).

    Any number of threads may call it.
    """

    def __init__(
        self, tensorflow: Any, function: Any, inputs: list[TensorInfo], outputs: list[TensorInfo], device: str | None
    ) -> None:
        self._tensorflow = tensorflow
        self._function = function
        self._inputs = {info.name: info.datatype for info in inputs}
        self._outputs = {info.name: info.datatype for info in outputs}
        self._device = device

    def __call__(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        tensorflow = self._tensorflow
        try:
            with tensorflow.device(self._device):
                arguments = {name: self._to_tensor(name, array) for name, array in inputs.items()}
                results = self._function(**arguments)
                return [Tensor(name, self._outputs[name], self._array(name, results[name])) for name in wanted]
        except Exception as error:
            reason = str(getattr(error, "message", error)).partition("\n")[0]
            raise InternalError(f"TensorFlow: {reason[:1000]}", from_model=True) from error

    def _to_tensor(self, name: str, array: Array) -> Any:
        if self._inputs[name] == "BF16":
            return self._tensorflow.bitcast(self._tensorflow.constant(array), self._tensorflow.bfloat16)
        return self._tensorflow.constant(array, self._tensorflow.string if array.dtype.hasobject else None)

    def _array(self, name: str, tensor: Any) -> Array:
        array = np.asarray(tensor.numpy())
        if self._outputs[name] == "BF16":
            return array.view(DTYPES["BF16"])
        return array.astype(object) if self._outputs[name] == "BYTES" else array


def check_operations(model: str, operations: Mapping[str, str]) -> None:
    """Refuse a graph with operations that reach out of the model.

    Args:
        model: name of the model.
        operations: name of a node for each kind of operation.

    Raises:
        UnsupportedError: with the operation and its node.
    """
    for kind in sorted(REFUSED_OPERATIONS & operations.keys()):
        raise UnsupportedError(
            f"model '{model}': its graph has the operation {kind} ({operations[kind]}), which reaches out of the model "
            "and is refused: do that part before the request is sent, or in a Python model"
        )


def _operations(path: Path) -> dict[str, str]:
    """Return the kinds of operations in a SavedModel, each with a node's name.

    Functions are included.
    """
    messages = __import__("tensorflow.core.protobuf.saved_model_pb2", fromlist=["SavedModel"])
    saved = messages.SavedModel.FromString(path.read_bytes())
    operations: dict[str, str] = {}
    for meta in saved.meta_graphs:
        nodes = list(meta.graph_def.node)
        for function in meta.graph_def.library.function:
            nodes += function.node_def
        for node in nodes:
            operations.setdefault(node.op, node.name)
    return operations


def _info(model: str, role: str, name: str, spec: Any) -> TensorInfo:
    kind = spec.dtype.name
    if kind not in _DATATYPES:
        raise UnsupportedError(
            f"model '{model}': {role} '{name}' has the TensorFlow type {kind}, which cannot be served"
        )
    dims = () if spec.shape.rank is None else tuple(-1 if dim is None else int(dim) for dim in spec.shape)
    return TensorInfo(name, _DATATYPES[kind], dims)
