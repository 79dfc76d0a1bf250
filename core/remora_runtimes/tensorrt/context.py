"""Calls of TensorRT, each with its result checked.

An execution context runs one batch at a time on its stream: inputs to the device, the kernels, outputs back. Memory is
kept between batches.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from remora.api.backends import Block, Cuda, DeviceArray, Memory, Places, Transfer, on_host
from remora.calls import TensorInfo
from remora.errors import InternalError, InvalidArgumentError, UnsupportedError
from remora.messages import DTYPES, Array, Tensor

DATATYPES = {
    "FLOAT": "FP32",
    "HALF": "FP16",
    "BF16": "BF16",
    "INT8": "INT8",
    "UINT8": "UINT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "BOOL": "BOOL",
}


class EngineTensor(NamedTuple):
    """Input or output of an engine.

    ``on_host`` is True if its values decide shapes, because TensorRT reads those on the host.
    """

    info: TensorInfo
    is_input: bool
    on_host: bool = False


class TrtEngine(NamedTuple):
    """Engine with its tensors and number of profiles."""

    inner: Any
    tensors: tuple[EngineTensor, ...]
    profiles: int
    reasons: Reasons

    def most_rows(self, profile: int) -> int:
        """Return the largest batch that a profile was built for.

        0 if the engine's first dimensions are fixed.
        """
        most = [
            int(self.inner.get_tensor_profile_shape(tensor.info.name, profile)[2][0])
            for tensor in self.tensors
            if tensor.is_input and not tensor.on_host and tensor.info.shape[:1] == (-1,)
        ]
        return min(most, default=0)


class Reasons(threading.local):
    """Errors that TensorRT logged on the calling thread, its only report of causes."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=8)  # bounded, because every request with an invalid shape adds lines

    def add(self, severity: Any, text: str) -> None:
        """Keep a line of the log if it is an error."""
        if getattr(severity, "name", "") in ("ERROR", "INTERNAL_ERROR"):
            self._lines.append(text)

    def clear(self) -> None:
        """Drop the errors of earlier calls."""
        self._lines.clear()

    def take(self) -> str:
        """Return and clear the errors, in one line."""
        lines = "; ".join(self._lines)
        self._lines.clear()
        return lines or "TensorRT gives no reason"


@cache
def log_of(trt: Any) -> Any:
    """Return the log with its `Reasons`, one for the process.

    TensorRT and its plugins keep the first log that they receive.
    """

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # the bindings require exactly this call
            self.reasons = Reasons()

        def log(self, severity: Any, msg: str) -> None:
            self.reasons.add(severity, msg)

    log = Log()
    trt.init_libnvinfer_plugins(log, "")
    return log


def describe(trt: Any, plan: bytes, model: str) -> TrtEngine | None:
    """Return the engine of a plan on the thread's device, or None if it cannot be read.

    The log then has the reason.

    Raises:
        UnsupportedError: a tensor has a type without a protocol datatype, or a layout other than row-major.
    """
    log = log_of(trt)
    log.reasons.clear()
    inner = trt.Runtime(log).deserialize_cuda_engine(plan)
    if inner is None:
        return None
    names = [inner.get_tensor_name(index) for index in range(inner.num_io_tensors)]
    tensors = tuple(_tensor(trt, inner, name, model) for name in names)
    return TrtEngine(inner, tensors, int(inner.num_optimization_profiles), log.reasons)


def _tensor(trt: Any, inner: Any, name: str, model: str) -> EngineTensor:
    kind = inner.get_tensor_dtype(name).name
    if kind not in DATATYPES:
        raise UnsupportedError(
            f"model '{model}': tensor '{name}' has the TensorRT type {kind}, which has no protocol datatype"
        )
    for profile in range(inner.num_optimization_profiles):
        layout = inner.get_tensor_format(name, profile)
        if layout != trt.TensorFormat.LINEAR:  # TensorRT pads such tensors and would write beyond their memory
            raise UnsupportedError(
                f"model '{model}': tensor '{name}' has the layout {getattr(layout, 'name', layout)}, which is not "
                "supported: build the engine with linear inputs and outputs"
            )
    is_input = inner.get_tensor_mode(name) == trt.TensorIOMode.INPUT
    shape = tuple(int(dim) for dim in inner.get_tensor_shape(name))
    info = TensorInfo(name, DATATYPES[kind], shape)
    return EngineTensor(info, is_input, bool(inner.is_shape_inference_io(name)))


class TrtContext:
    """Execution context as a function from arrays to arrays (``arrays.Run``).

    One thread at a time.

    Args:
        runtime: CUDA runtime.
        engine: engine on the device of ``memory``.
        memory: memory of its tensors.
        transfer: copies to and from that memory; closed with the context, or if the context cannot be made.
        profile: number of its optimization profile.
    """

    def __init__(self, runtime: Cuda, engine: TrtEngine, memory: Memory, transfer: Transfer, profile: int) -> None:
        self._cuda = runtime
        self._memory = memory
        self._device = memory.device[1]
        self._profile = profile
        self._engine = engine
        self._tensors = {tensor.info.name: tensor for tensor in engine.tensors}
        self._places = Places(memory)
        self._transfer = transfer
        self._stream = 0
        self._inner: Any = None
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        with self._cuda.on(self._device):
            self._stream = self._cuda.stream()
            self._engine.reasons.clear()
            self._inner = self._engine.inner.create_execution_context()
            if self._inner is None or not self._set_profile():
                raise InternalError(
                    f"TensorRT cannot create an execution context for optimization profile {self._profile}: "
                    f"{self._engine.reasons.take()}"
                )
            self._cuda.wait(self._stream)

    def _set_profile(self) -> bool:
        try:
            return bool(self._inner.set_optimization_profile_async(self._profile, self._stream))
        except RuntimeError:  # the bindings raise it instead of returning False; the log has TensorRT's reason
            return False

    def __call__(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        """Return the outputs ``wanted``, in that order, in main memory.

        Raises:
            InvalidArgumentError: a shape is outside the optimization profile.
            UnsupportedError: the shape of an output depends on values.
            InternalError: TensorRT or CUDA failed.
        """
        outputs = self._run(inputs, frozenset())
        on_device = {name: outputs[name] for name in wanted if isinstance(outputs[name], DeviceArray)}
        copied = dict(zip(on_device, self._transfer.to_host(list(on_device.values())), strict=True))
        return [Tensor(name, self._tensors[name].info.datatype, copied.get(name, outputs[name])) for name in wanted]

    def staying(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        """Return the same outputs on the device, in newly allocated memory."""
        outputs = self._run(inputs, frozenset(wanted))
        return [Tensor(name, self._tensors[name].info.datatype, outputs[name]) for name in wanted]

    def close(self) -> None:
        """Release the context's resources, once."""
        with self._cuda.on(self._device):
            self._inner = None
            self._places.close()
            self._transfer.close()
            if self._stream:
                self._cuda.drop(self._stream)
                self._stream = 0

    def _run(self, inputs: dict[str, Array], new: frozenset[str]) -> dict[str, Any]:
        """Return all outputs, on the host where TensorRT writes them there, else on the device.

        Outputs in ``new`` get new memory, others the kept memory.
        """
        self._cuda.use(self._device)
        self._engine.reasons.clear()
        copies: list[tuple[int, Array]] = []
        host_inputs = [self._bind_input(name, array, copies) for name, array in inputs.items()]
        self._transfer.to_device(copies)
        try:
            unknown = self._inner.infer_shapes()
        except RuntimeError as error:  # the bindings raise it when the call of TensorRT fails
            raise self._failure("could not infer the shapes of the outputs") from error
        if unknown:
            raise InternalError(f"TensorRT needs values for {', '.join(unknown)}", from_model=True)
        names = [name for name, tensor in self._tensors.items() if not tensor.is_input]
        outputs = {name: self._bind_output(name, new=name in new) for name in names}
        started = self._inner.execute_async_v3(self._stream)
        self._cuda.wait(self._stream)  # after a failure too, because the kernels of the batch may still use its memory
        if not started:
            raise self._failure("could not run the batch")
        del host_inputs  # kept alive until TensorRT has read it
        return outputs

    def _bind_input(self, name: str, value: Array, copies: list[tuple[int, Array]]) -> Array | None:
        """Bind an input's address and shape, and add its copies.

        The result must stay alive until the batch is done.
        """
        tensor = self._tensors[name]
        if not self._inner.set_input_shape(name, tuple(value.shape)):
            self._engine.reasons.take()  # cleared, because the error below explains it for the client
            least, _, most = self._engine.inner.get_tensor_profile_shape(name, self._profile)
            raise InvalidArgumentError(
                f"input '{name}' has shape {list(value.shape)}; the engine's optimization profile {self._profile} "
                f"takes {list(least)} to {list(most)}"
            )
        if tensor.on_host:
            array: Array = np.array(on_host(value), order="C")
            self._set_address(name, array.ctypes.data)
            return array
        self._set_address(name, self._places.of(name, value, copies))
        return None

    def _bind_output(self, name: str, *, new: bool) -> Any:
        """Allocate and bind an output, on the host where TensorRT requires it, else on the device."""
        shape = tuple(int(dim) for dim in self._inner.get_tensor_shape(name))
        if any(dim < 0 for dim in shape):
            raise UnsupportedError(f"the shape of output '{name}' depends on values, which engines do not support")
        tensor = self._tensors[name]
        datatype = tensor.info.datatype
        if tensor.on_host:
            array = np.empty(shape, DTYPES[datatype])
            self._set_address(name, array.ctypes.data)
            return array
        size = int(np.prod(shape, dtype=np.int64)) * DTYPES[datatype].itemsize
        block = self._memory.take(size) if new else Block(self._places.reserve(name, size), None)
        self._set_address(name, block.address)
        return DeviceArray(datatype, shape, self._memory, block.address, block.owner)

    def _set_address(self, name: str, address: int) -> None:
        if not self._inner.set_tensor_address(name, address):
            raise self._failure(f"does not take the memory of tensor '{name}'")

    def _failure(self, what: str) -> InternalError:
        return InternalError(f"TensorRT {what}: {self._engine.reasons.take()}", from_model=True)
