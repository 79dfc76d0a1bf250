"""OpenVINO backend with one compiled model and one infer request per instance.

Serves OpenVINO's own files (``model.xml`` with ``model.bin``) and ONNX. OpenVINO is imported when the first model is
opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from remora.api.backends import check_external_data, concurrent_instances, try_rows
from remora.backends import Instance, Placement, Source
from remora.backends.arrays import texts
from remora.backends.model_files import (
    default_max_batch,
    get_bool,
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

_DATATYPES = {
    "boolean": "BOOL",
    "u8": "UINT8",
    "u16": "UINT16",
    "u32": "UINT32",
    "u64": "UINT64",
    "i8": "INT8",
    "i16": "INT16",
    "i32": "INT32",
    "i64": "INT64",
    "f16": "FP16",
    "f32": "FP32",
    "f64": "FP64",
    "bf16": "BF16",
    "string": "BYTES",
}
_HINTS = ("PERFORMANCE_HINT", "INFERENCE_PRECISION_HINT")
_KNOWN = frozenset({"INFERENCE_NUM_THREADS", "NUM_STREAMS", "SKIP_OV_DYNAMIC_BATCHSIZE", *_HINTS})


class OpenVinoBackend:
    """Backend for ``model.xml`` and ONNX files.

    Its settings are defaults for the parameters of `compile_options`.
    """

    name = "openvino"
    preferred_kinds = ("CPU",)

    def open(self, source: Source, config: ModelConfig) -> OpenVinoModel:
        """Read the model and compile it for the CPU.

        Raises:
            NotFoundError: there is no model file.
            ConfigError: a parameter is invalid, or OpenVINO is not installed.
            UnsupportedError: a tensor has a type without a protocol datatype.
            InternalError: OpenVINO cannot read or compile the file.
        """
        path = model_path(source, config, "model.xml")
        if not path.exists() and not config.default_model_filename.endswith(".onnx"):
            beside = path.with_name("model.onnx")
            path = beside if beside.is_file() else path
        require_file(path, source, "*.xml", "*.onnx")
        openvino = import_framework("openvino", source.name, "OpenVINO", "openvino")
        try:
            return OpenVinoModel(openvino, source, path, config)
        except RemoraError:
            raise
        except Exception as error:  # OpenVINO raises RuntimeError for everything
            raise load_failure(source, path, _reason(error)) from error


class OpenVinoModel:
    """Opened model."""

    def __init__(self, openvino: Any, source: Source, path: Path, config: ModelConfig) -> None:
        self._source = source
        warn_of_unused(config, _KNOWN, "openvino")
        core = openvino.Core()
        check_external_data(path)  # passes files of OpenVINO's own format
        model = core.read_model(path)
        if config.max_batch_size and not get_bool(config, source.settings, "SKIP_OV_DYNAMIC_BATCHSIZE", default=False):
            _let_batches_vary(model)
        self._inputs = [_info(source.name, "input", port, index) for index, port in enumerate(model.inputs)]
        self._outputs = [_info(source.name, "output", port, index) for index, port in enumerate(model.outputs)]
        self.batching: BatchingChoice | None = None
        self._compiled: Any = core.compile_model(
            model, "CPU", compile_options(config, source.settings, source.cpus, concurrent_instances(config))
        )

    def complete(self, config: ModelConfig) -> None:
        """Fill in omitted fields of ``config`` from the model's tensors, and check the others.

        Raises ConfigError.
        """
        batch = default_max_batch(self._source.settings)
        choice = complete_from_tensors(
            config, self._inputs, self._outputs, default_max_batch=batch, trial=self._try_rows
        )
        self.batching = choice or self.batching

    def _try_rows(self) -> Trial:
        run = _Run(self._compiled.create_infer_request(), self._inputs, self._outputs)
        return try_rows(run, self._inputs, self._outputs)

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Return an instance with a separate infer request.

        Raises ConfigError if it is placed on a GPU.
        """
        if placement.kind == "GPU":
            raise ConfigError(
                f"model '{config.name}' asks for a GPU, but OpenVINO models run on the CPU here: set the instance "
                "group's kind to KIND_CPU or KIND_AUTO"
            )
        run = _Run(self._compiled.create_infer_request(), self._inputs, self._outputs)
        return array_instance(placement.name, config, run, quick=True)

    def close(self) -> None:
        """Release the compiled model."""
        self._compiled = None


class _Run:
    """Infer request as a function from arrays to arrays (``arrays.Run``). One thread at a time."""

    def __init__(self, request: Any, inputs: list[TensorInfo], outputs: list[TensorInfo]) -> None:
        self._request = request
        self._inputs = {info.name: (index, info.datatype) for index, info in enumerate(inputs)}
        self._outputs = {info.name: (index, info.datatype) for index, info in enumerate(outputs)}

    def __call__(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        arguments = {}
        for name, array in inputs.items():
            index, datatype = self._inputs[name]
            if datatype == "BYTES":
                arguments[index] = np.array(texts(f"input '{name}'", array), np.str_).reshape(array.shape)
            else:
                arguments[index] = np.ascontiguousarray(array)
        try:
            # outputs are copies, because the request reuses its memory
            results = self._request.infer(arguments, share_inputs=True)
        except Exception as error:
            raise InternalError(_reason(error), from_model=True) from error
        answer = []
        for name in wanted:
            index, datatype = self._outputs[name]
            array = results[index]
            if datatype == "BYTES":
                array = _encoded(array)
            elif datatype == "BF16":  # OpenVINO's numpy type for BF16 also has 16 bits, so viewing it changes no value
                array = array.view(DTYPES["BF16"])
            answer.append(Tensor(name, datatype, array))
        return answer


def compile_options(config: ModelConfig, settings: Mapping[str, str], cpus: int, instances: int) -> dict[str, str]:
    """Return OpenVINO's properties for a model [C16].

    All its instances together use at most ``cpus``. FP32 is computed in FP32 unless ``INFERENCE_PRECISION_HINT`` is
    set. Raises ConfigError.
    """
    options = {
        "INFERENCE_NUM_THREADS": str(get_int(config, settings, "INFERENCE_NUM_THREADS") or cpus),
        "INFERENCE_PRECISION_HINT": "f32",
    }
    hints = {key: text for key in _HINTS if (text := get_parameter(config, settings, key))}
    streams = get_int(config, settings, "NUM_STREAMS")
    if streams or "PERFORMANCE_HINT" not in hints:
        options["NUM_STREAMS"] = str(streams or min(instances, cpus))
    return {**options, **hints}


def _let_batches_vary(model: Any) -> None:
    """Make the first dimension of every input variable if all are 1.

    Such a model was exported for a single row.
    """
    shapes = {port: list(port.partial_shape) for port in model.inputs}
    if all(shape and shape[0].is_static and shape[0].get_length() == 1 for shape in shapes.values()):
        model.reshape({port: [-1, *shape[1:]] for port, shape in shapes.items()})


def _info(model: str, role: str, port: Any, index: int) -> TensorInfo:
    names = port.get_names()
    name = port.get_any_name() if names else f"{role}_{index}"
    kind = port.element_type.get_type_name()
    if kind not in _DATATYPES:
        raise UnsupportedError(
            f"model '{model}': {role} '{name}' has the OpenVINO type {kind}, which cannot be served: convert it to f32"
        )
    shape = port.partial_shape
    dims = () if shape.rank.is_dynamic else tuple(d.get_length() if d.is_static else -1 for d in shape)
    return TensorInfo(name, _DATATYPES[kind], dims)


def _encoded(array: Array) -> Array:
    encoded = np.empty(array.size, object)
    encoded[:] = [text if isinstance(text, bytes) else str(text).encode() for text in array.ravel()]
    return encoded.reshape(array.shape)


def _reason(error: Exception) -> str:
    """Return OpenVINO's reason in one line, which follows the places in its source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if not line.startswith(("Exception from", "Check '", "FrontEnd API failed"))]
    return (reasons or lines or [type(error).__name__])[-1][:1000]
