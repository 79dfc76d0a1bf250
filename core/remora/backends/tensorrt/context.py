"""All that is asked of TensorRT; the law: every call is checked, memory is kept.

An execution context runs one batch at a time on its own stream: inputs to the device, the kernels, outputs back.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from remora.backends.transfers import Places, Transfer
from remora.calls import TensorInfo
from remora.errors import InternalError, InvalidArgumentError, UnsupportedError
from remora.messages import DTYPES, Array, Tensor
from remora.system.cuda import Cuda
from remora.tensors.device import Block, DeviceArray, Memory, on_host

_DATATYPES = {
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
    """An input or output of an engine. ``on_host``: its values decide shapes, so TensorRT reads them on the host."""

    info: TensorInfo
    is_input: bool
    on_host: bool = False


class TrtEngine(NamedTuple):
    """An engine and what is known of it."""

    inner: Any
    tensors: tuple[EngineTensor, ...]
    profiles: int
    reasons: Reasons

    def most_rows(self, profile: int) -> int:
        """The largest batch that a profile was built for; 0 where the engine's first dimensions do not vary."""
        most = [
            int(self.inner.get_tensor_profile_shape(tensor.info.name, profile)[2][0])
            for tensor in self.tensors
            if tensor.is_input and not tensor.on_host and tensor.info.shape[:1] == (-1,)
        ]
        return min(most, default=0)


class Reasons(threading.local):
    """What TensorRT logged on the calling thread: its only way to say why something failed."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=8)  # requests whose shapes do not fit add lines as long as they come

    def add(self, severity: Any, text: str) -> None:
        """Called with each line of the log; keeps errors."""
        if getattr(severity, "name", "") in ("ERROR", "INTERNAL_ERROR"):
            self._lines.append(text)

    def clear(self) -> None:
        """Forget the errors of what went before, which a caller had no use for."""
        self._lines.clear()

    def told(self) -> str:
        """The errors since it was asked last, in one line."""
        lines = "; ".join(self._lines)
        self._lines.clear()
        return lines or "TensorRT gives no reason"


@cache
def log_of(trt: Any) -> Any:
    """The log with its `Reasons`; one for the process: TensorRT and its plugins keep the first that they are given."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # the bindings ask for just this call
            self.reasons = Reasons()

        def log(self, severity: Any, msg: str) -> None:
            self.reasons.add(severity, msg)

    log = Log()
    trt.init_libnvinfer_plugins(log, "")
    return log


def describe(trt: Any, plan: bytes, model: str) -> TrtEngine | None:
    """The engine of a plan on the thread's device; None when it cannot be read, the log then tells why.

    Raises:
        UnsupportedError: a tensor of a type that the protocol does not have, or in another layout than row by row.
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
    if kind not in _DATATYPES:
        raise UnsupportedError(f"model '{model}': tensor '{name}' has the TensorRT type {kind}, which has no name here")
    for profile in range(inner.num_optimization_profiles):
        layout = inner.get_tensor_format(name, profile)
        if layout != trt.TensorFormat.LINEAR:  # TensorRT pads such tensors and would write beyond their memory
            raise UnsupportedError(
                f"model '{model}': tensor '{name}' has the layout {getattr(layout, 'name', layout)}, which is not "
                "offered: build the engine with linear inputs and outputs"
            )
    is_input = inner.get_tensor_mode(name) == trt.TensorIOMode.INPUT
    shape = tuple(int(dim) for dim in inner.get_tensor_shape(name))
    info = TensorInfo(name, _DATATYPES[kind], shape)
    return EngineTensor(info, is_input, bool(inner.is_shape_inference_io(name)))


class TrtContext:
    """An execution context as a function from arrays to arrays; see ``arrays.Run``. One thread at a time.

    Args:
        runtime: CUDA's.
        engine: on the device of ``memory``.
        memory: where its tensors lie.
        transfer: to and from there; closed with the context, or when it cannot be made.
        profile: the number of its optimization profile.
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
                    f"TensorRT makes no execution context for optimization profile {self._profile}: "
                    f"{self._engine.reasons.told()}"
                )
            self._cuda.wait(self._stream)

    def _set_profile(self) -> bool:
        try:
            return bool(self._inner.set_optimization_profile_async(self._profile, self._stream))
        except RuntimeError:  # the bindings raise it in the place of False; the log has TensorRT's reason
            return False

    def __call__(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        """The outputs ``wanted``, in that order, in main memory.

        Raises:
            InvalidArgumentError: a shape outside the optimization profile.
            UnsupportedError: an output whose shape depends on values.
            InternalError: TensorRT or CUDA failed.
        """
        found = self._run(inputs, frozenset())
        there = {name: found[name] for name in wanted if isinstance(found[name], DeviceArray)}
        came = dict(zip(there, self._transfer.to_host(list(there.values())), strict=True))
        return [Tensor(name, self._tensors[name].info.datatype, came.get(name, found[name])) for name in wanted]

    def staying(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        """The same, with outputs that stay on the device, in memory of their own."""
        found = self._run(inputs, frozenset(wanted))
        return [Tensor(name, self._tensors[name].info.datatype, found[name]) for name in wanted]

    def close(self) -> None:
        """Free what the context took, once."""
        with self._cuda.on(self._device):
            self._inner = None
            self._places.close()
            self._transfer.close()
            if self._stream:
                self._cuda.drop(self._stream)
                self._stream = 0

    def _run(self, inputs: dict[str, Array], new: frozenset[str]) -> dict[str, Any]:
        """All outputs: on the device, or on the host where TensorRT wants them there. ``new``: not in kept memory."""
        self._cuda.use(self._device)
        self._engine.reasons.clear()
        copies: list[tuple[int, Array]] = []
        read_here = [self._give(name, array, copies) for name, array in inputs.items()]
        self._transfer.to_device(copies)
        try:
            unknown = self._inner.infer_shapes()
        except RuntimeError as error:  # the bindings raise it where TensorRT's call fails
            raise self._failure("could not infer the shapes of the outputs") from error
        if unknown:
            raise InternalError(f"TensorRT needs values for {', '.join(unknown)}", from_model=True)
        names = [name for name, tensor in self._tensors.items() if not tensor.is_input]
        found = {name: self._expect(name, new=name in new) for name in names}
        begun = self._inner.execute_async_v3(self._stream)
        self._cuda.wait(self._stream)  # for what was begun of a batch that failed, too: its memory is used again
        if not begun:
            raise self._failure("could not run the batch")
        del read_here  # has been read now
        return found

    def _give(self, name: str, given: Array, copies: list[tuple[int, Array]]) -> Array | None:
        """Say where an input lies and what is to be copied there; what comes back must live until the batch is done."""
        tensor = self._tensors[name]
        if not self._inner.set_input_shape(name, tuple(given.shape)):
            self._engine.reasons.told()  # it is said below, in words for who sent it
            least, _, most = self._engine.inner.get_tensor_profile_shape(name, self._profile)
            raise InvalidArgumentError(
                f"input '{name}' has shape {list(given.shape)}; the engine's optimization profile {self._profile} "
                f"takes {list(least)} to {list(most)}"
            )
        if tensor.on_host:
            array: Array = np.array(on_host(given), order="C")
            self._point(name, array.ctypes.data)
            return array
        self._point(name, self._places.of(name, given, copies))
        return None

    def _expect(self, name: str, *, new: bool) -> Any:
        """Make room for an output: here where TensorRT wants it, else on the device."""
        shape = tuple(int(dim) for dim in self._inner.get_tensor_shape(name))
        if any(dim < 0 for dim in shape):
            raise UnsupportedError(f"the shape of output '{name}' depends on values, which is not offered for engines")
        tensor = self._tensors[name]
        datatype = tensor.info.datatype
        if tensor.on_host:
            array = np.empty(shape, DTYPES[datatype])
            self._point(name, array.ctypes.data)
            return array
        size = int(np.prod(shape, dtype=np.int64)) * DTYPES[datatype].itemsize
        block = self._memory.take(size) if new else Block(self._places.room(name, size), None)
        self._point(name, block.address)
        return DeviceArray(datatype, shape, self._memory, block.address, block.owner)

    def _point(self, name: str, address: int) -> None:
        if not self._inner.set_tensor_address(name, address):
            raise self._failure(f"does not take the memory of tensor '{name}'")

    def _failure(self, what: str) -> InternalError:
        return InternalError(f"TensorRT {what}: {self._engine.reasons.told()}", from_model=True)
