"""Inference on one ONNX Runtime session, with conversion of inputs and outputs.

Only types that numpy lacks are copied. BYTES are decoded to the text that ONNX Runtime expects, and encoded again.
BF16, which numpy lacks, passes through ONNX Runtime's own tensor objects.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from remora.backends.arrays import Run, texts
from remora.backends.onnxruntime.binding import Binding
from remora.backends.onnxruntime.opening import reason_of, run_options
from remora.backends.onnxruntime.plan import GraphPlan, SessionPlan
from remora.backends.transfers import Transfer
from remora.calls import TensorInfo
from remora.config.datatypes import DATATYPE_BY_NAME
from remora.errors import InternalError, RemoraError, UnsupportedError
from remora.messages import DTYPES, Array, Tensor
from remora.proto.model_config_pb2 import ModelConfig
from remora.tensors.device import Memory

_log = logging.getLogger(__name__)
_BFLOAT16 = 16  # TensorProto.DataType.BFLOAT16
_FATAL = 4  # the highest of ONNX Runtime's log levels


class Bound(NamedTuple):
    """Functions of one instance.

    ``run`` returns outputs on the host, ``staying`` may leave them on the device, ``close`` releases both.
    """

    run: Run
    staying: Run
    close: Callable[[], None]


class _TensorTypes:
    """Datatypes of a session's tensors, and the conversions that they need.

    ``texts`` names the inputs of BYTES, ``bfloat16`` is True with a tensor of BF16, and ``plain`` if all tensors are
    numpy's.
    """

    def __init__(self, signature: OnnxSignature) -> None:
        self.inputs = signature.datatypes
        self.outputs = {name: info.datatype for name, info in signature.outputs.items()}
        everything = (*self.inputs.values(), *self.outputs.values())
        self.texts = frozenset(name for name, datatype in self.inputs.items() if datatype == "BYTES")
        self.bfloat16 = "BF16" in everything
        self.binds = "BYTES" not in everything
        self.plain = self.binds and not self.bfloat16


class OnnxSession:
    """Session with its signature. Any number of threads may run it at once."""

    def __init__(self, model: str, runtime: Any, inner: Any, plan: SessionPlan, *, captures: bool = True) -> None:
        self.captures = captures
        """True if equal shapes may be answered by a CUDA graph."""
        self.signature = read_signature(
            model, inner.get_inputs(), inner.get_outputs(), inner.get_overridable_initializers()
        )
        self.providers: tuple[str, ...] = tuple(inner.get_providers())
        self._model = model
        self._runtime = runtime
        self._inner = inner
        self._types = types = _TensorTypes(self.signature)
        self._entries = plan.run_entries
        self._options = run_options(runtime, plan.run_entries) if plan.run_entries else None
        # The Python class's checks cost a tenth of a small run; the engine and the C++ class check as well.
        self._call = getattr(getattr(inner, "_sess", None), "run", None) or inner.run
        if types.bfloat16 and types.texts:
            raise UnsupportedError(
                f"model '{model}' mixes BF16 tensors and string inputs, for which ONNX Runtime has no Python "
                "interface; export its inputs and outputs as FP32"
            )

    def quiet_run(self) -> Run:
        """Return ``run`` without ONNX Runtime's own lines on stderr for runs that fail."""
        quiet = copy.copy(self)
        quiet._options = run_options(self._runtime, self._entries)
        quiet._options.log_severity_level = _FATAL
        return quiet.run

    def run_for(self, config: ModelConfig) -> Run:
        """Return the function that an instance runs."""
        return self._shaped(config, self.run)

    def _shaped(self, config: ModelConfig, run: Run) -> Run:
        """Return ``run`` with scalar outputs reshaped to the dims of 1 in ``config``."""
        scalars = {
            output.name: tuple(output.dims)
            for output in config.output
            if not config.max_batch_size and set(output.dims) == {1} and not self.signature.outputs[output.name].shape
        }
        if not scalars:
            return run

        def shaped(inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
            return [
                tensor if tensor.data.shape else tensor._replace(data=tensor.data.reshape(scalars.get(tensor.name, ())))
                for tensor in run(inputs, wanted)
            ]

        return shaped

    def run(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        """Return the outputs ``wanted``, in that order.

        Raises:
            InvalidArgumentError: an element of a BYTES input is not UTF-8.
            InternalError: ONNX Runtime or the model failed, with Triton's text.
        """
        types = self._types
        outputs = types.outputs
        if not types.plain:
            inputs = {name: self._decoded(name, array) for name, array in inputs.items()}
        try:
            run = self._run_bfloat16 if types.bfloat16 else self._run_arrays
            values = run(inputs, wanted)
        except Exception as error:  # its classes have no common parent but Exception
            raise InternalError(reason_of(error), from_model=True) from error
        if types.plain:
            return [Tensor(name, outputs[name], value) for name, value in zip(wanted, values, strict=True)]
        return [
            Tensor(name, outputs[name], _encoded(value) if outputs[name] == "BYTES" else value)
            for name, value in zip(wanted, values, strict=True)
        ]

    @property
    def binds(self) -> bool:
        """True if all tensors can be on a device, which strings cannot."""
        return self._types.binds

    def bound(self, config: ModelConfig, memory: Memory, transfer: Transfer, graphs: GraphPlan | None) -> Bound:
        """Return functions of one instance with tensors on its device (`Binding`)."""
        types = {**self._types.inputs, **self._types.outputs}
        binding = Binding(self._runtime, self._inner, memory, transfer, types, self._entries, graphs)
        if graphs is not None and not binding.replays:
            _log.warning(
                "model '%s' runs without CUDA graphs: some of its inputs are read on the host, or onnxruntime is too "
                "old to list them",
                self._model,
            )

        def run(keep_on_device: bool) -> Run:
            def run(inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
                try:
                    return binding.run(inputs, wanted, keep_on_device=keep_on_device)
                except RemoraError:
                    raise
                except Exception as error:  # its classes have no common parent but Exception
                    raise InternalError(reason_of(error), from_model=True) from error

            return self._shaped(config, run)

        return Bound(run(False), run(True), binding.close)

    def _run_arrays(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Array]:
        return cast("list[Array]", self._call(wanted, inputs, self._options))

    def _decoded(self, name: str, array: Array) -> Array:
        """Return an array of text for BYTES, any other array unchanged. ONNX strings are UTF-8."""
        if name not in self._types.texts:
            return array
        decoded = np.empty(array.size, object)
        decoded[:] = texts(f"input '{name}' of model '{self._model}'", array)
        return decoded.reshape(array.shape)

    def _run_bfloat16(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Array]:
        """Run with ONNX Runtime's own tensor objects, which alone support BF16.

        They borrow the arrays' memory, which ``inputs`` and ``kept`` keep alive until the run ends.
        """
        kept = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        tensors = self._runtime.OrtValue
        feeds = {
            name: tensors.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)
            if self._types.inputs.get(name) == "BF16"
            else tensors.ortvalue_from_numpy(array)
            for name, array in kept.items()
        }
        values = self._inner.run_with_ort_values(wanted, feeds, self._options)
        return [
            _bfloat16_bits(value) if self._types.outputs[name] == "BF16" else value.numpy()
            for name, value in zip(wanted, values, strict=True)
        ]


def _encoded(value: Array) -> Array:
    encoded = np.empty(value.size, object)
    encoded[:] = [text.encode() for text in value.ravel()]
    return encoded.reshape(value.shape)


def _bfloat16_bits(value: Any) -> Array:
    """Return a copy of a BF16 tensor's bits.

    numpy lacks the type, so the object exposes only its address.
    """
    shape = tuple(value.shape())
    if 0 in shape:
        return np.empty(shape, DTYPES["BF16"])
    size = int(np.prod(shape, dtype=np.int64)) * DTYPES["BF16"].itemsize
    bits = ctypes.string_at(value.data_ptr(), size)
    return cast("Array", np.frombuffer(bits, DTYPES["BF16"]).reshape(shape))


_DATATYPES = DATATYPE_BY_NAME | {"float": "FP32", "double": "FP64", "string": "BYTES"}
_TENSOR = re.compile(r"tensor\((\w+)\)")
_OPTIONAL = re.compile(r"optional\((.+)\)")
_WITHOUT_ZIPMAP = "; export it without ZipMap: convert_sklearn(..., options={'zipmap': False})"


class OnnxSignature(NamedTuple):
    """Inputs and outputs of a model in order, with full shapes.

    An empty shape is a scalar or of unknown rank. ``optional`` names the inputs that a request may omit: those of
    ONNX's optional type, and ``defaults``, the inputs with a value in the model. ``axes`` has the names of first axes
    by tensor.
    """

    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]
    defaults: Mapping[str, TensorInfo]
    optional: frozenset[str]
    axes: Mapping[str, str] = {}

    @property
    def datatypes(self) -> dict[str, str]:
        """Datatype of every input by its name."""
        return {name: info.datatype for name, info in {**self.inputs, **self.defaults}.items()}


def read_signature(model: str, inputs: Iterable[Any], outputs: Iterable[Any], defaults: Iterable[Any]) -> OnnxSignature:
    """Return the signature from a session's descriptions of its tensors.

    These are objects with a ``name``, a ``type`` (``"tensor(float)"``) and a ``shape``.

    Raises:
        UnsupportedError: an input or output is not a tensor, or its type has no protocol datatype.
    """
    inputs, outputs, defaults = list(inputs), list(outputs), list(defaults)
    optional = {each.name for each in defaults} | {each.name for each in inputs if _OPTIONAL.fullmatch(each.type)}
    return OnnxSignature(
        {each.name: _info(model, "input", each) for each in inputs},
        {each.name: _info(model, "output", each) for each in outputs},
        {each.name: _info(model, "input", each) for each in defaults},
        frozenset(optional),
        {each.name: each.shape[0] for each in (*inputs, *outputs) if each.shape and isinstance(each.shape[0], str)},
    )


def _info(model: str, role: str, tensor: Any) -> TensorInfo:
    inner = _OPTIONAL.fullmatch(tensor.type) if role == "input" else None
    match = _TENSOR.fullmatch(inner[1] if inner else tensor.type)
    where = f"model '{model}': {role} '{tensor.name}'"
    if match is None:
        hint = _WITHOUT_ZIPMAP if tensor.type.startswith("seq(map(") else ""
        raise UnsupportedError(f"{where} is {tensor.type}, and only tensors can be served{hint}")
    if match[1] not in _DATATYPES:
        raise UnsupportedError(f"{where} has the ONNX type {match[1]}, for which the protocol has no datatype")
    # A dimension that is a name or None is variable.
    shape = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in tensor.shape)
    return TensorInfo(tensor.name, _DATATYPES[match[1]], shape)
