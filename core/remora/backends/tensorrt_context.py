"""All that is asked of TensorRT and the CUDA runtime; the law: every call is checked, memory is kept.

An execution context runs one batch at a time on its own stream: inputs to the device, the kernels, outputs back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from remora.errors import InternalError, InvalidArgumentError, UnsupportedError
from remora.messages import DTYPES, Array, Tensor, TensorInfo

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


class Engine(NamedTuple):
    """An engine and what is known of it."""

    inner: Any
    tensors: tuple[EngineTensor, ...]
    profiles: int

    def most_rows(self, profile: int) -> int:
        """The largest batch that a profile was built for; 0 where the engine's first dimensions do not vary."""
        most = [
            int(self.inner.get_tensor_profile_shape(tensor.info.name, profile)[2][0])
            for tensor in self.tensors
            if tensor.is_input and not tensor.on_host and tensor.info.shape[:1] == (-1,)
        ]
        return min(most, default=0)


class Reasons:
    """What TensorRT logged while an engine was read: its only way to say why it could not."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, severity: Any, text: str) -> None:
        """Called with each line of the log; keeps errors."""
        if getattr(severity, "name", "") in ("ERROR", "INTERNAL_ERROR"):
            self._lines.append(text)

    def told(self) -> str:
        """The errors in one line."""
        return "; ".join(self._lines)


class Cuda:
    """The calls of ``cuda.bindings.runtime`` that are needed; each gives its status first. Raises InternalError."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def device_count(self) -> int:
        """How many GPUs there are; 0 where the driver is missing as well."""
        status, *found = self._runtime.cudaGetDeviceCount()
        return int(found[0]) if int(status) == 0 else 0

    def use(self, device: int) -> None:
        """Make a device the calling thread's."""
        self._call("cudaSetDevice", device)

    def stream(self) -> Any:
        """A new stream."""
        return self._call("cudaStreamCreate")

    def wait(self, stream: Any) -> None:
        """Until all that was put on a stream is done."""
        self._call("cudaStreamSynchronize", stream)

    def drop(self, stream: Any) -> None:
        """Give a stream back."""
        self._call("cudaStreamDestroy", stream)

    def take(self, size: int) -> int:
        """The address of new device memory."""
        return int(self._call("cudaMalloc", size))

    def free(self, address: int) -> None:
        """Give device memory back."""
        self._call("cudaFree", address)

    def to_device(self, address: int, array: Array, stream: Any) -> None:
        """Copy an array's bytes onto the device."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", address, array.ctypes.data, array.nbytes, kind, stream)

    def to_host(self, array: Array, address: int, stream: Any) -> None:
        """Copy bytes from the device into an array."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", array.ctypes.data, address, array.nbytes, kind, stream)

    def _call(self, function: str, *arguments: Any) -> Any:
        status, *found = getattr(self._runtime, function)(*arguments)
        if int(status) != 0:
            raise InternalError(f"{function} failed: {getattr(status, 'name', status)}", from_model=True)
        return found[0] if found else None


def describe(trt: Any, plan: bytes, model: str, reasons: Reasons) -> Engine | None:
    """The engine of a plan on the thread's device; None when it cannot be read, ``reasons`` then tell why.

    Raises:
        UnsupportedError: a tensor of a type that the protocol does not have.
    """

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # the bindings ask for just this call

        def log(self, severity: Any, msg: str) -> None:
            reasons.add(severity, msg)

    log = Log()
    trt.init_libnvinfer_plugins(log, "")
    inner = trt.Runtime(log).deserialize_cuda_engine(plan)
    if inner is None:
        return None
    names = [inner.get_tensor_name(index) for index in range(inner.num_io_tensors)]
    tensors = tuple(_tensor(trt, inner, name, model) for name in names)
    return Engine(inner, tensors, int(inner.num_optimization_profiles))


def _tensor(trt: Any, inner: Any, name: str, model: str) -> EngineTensor:
    kind = inner.get_tensor_dtype(name).name
    if kind not in _DATATYPES:
        raise UnsupportedError(f"model '{model}': tensor '{name}' has the TensorRT type {kind}, which has no name here")
    is_input = inner.get_tensor_mode(name) == trt.TensorIOMode.INPUT
    shape = tuple(int(dim) for dim in inner.get_tensor_shape(name))
    info = TensorInfo(name, _DATATYPES[kind], shape)
    return EngineTensor(info, is_input, bool(inner.is_shape_inference_io(name)))


class Context:
    """An execution context as a function from arrays to arrays; see ``arrays.Run``. One thread at a time."""

    def __init__(self, cuda: Cuda, engine: Engine, device: int, profile: int) -> None:
        self._cuda = cuda
        self._device = device
        self._profile = profile
        self._engine = engine
        self._tensors = {tensor.info.name: tensor for tensor in engine.tensors}
        self._memory: dict[str, tuple[int, int]] = {}
        """Address and size of each tensor's device memory."""
        cuda.use(device)
        self._stream: Any = cuda.stream()
        self._inner: Any = engine.inner.create_execution_context()
        if self._inner is None or not self._inner.set_optimization_profile_async(profile, self._stream):
            raise InternalError(
                f"TensorRT makes no execution context for optimization profile {profile}: is memory left?"
            )
        cuda.wait(self._stream)

    def __call__(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        """The outputs ``wanted``, in that order.

        Raises:
            InvalidArgumentError: a shape outside the optimization profile.
            UnsupportedError: an output whose shape depends on values.
            InternalError: TensorRT or CUDA failed.
        """
        self._cuda.use(self._device)
        kept = [self._give(name, array) for name, array in inputs.items()]
        unknown = self._inner.infer_shapes()
        if unknown:
            raise InternalError(f"TensorRT needs values for {', '.join(unknown)}", from_model=True)
        found = {name: self._expect(name) for name, tensor in self._tensors.items() if not tensor.is_input}
        if not self._inner.execute_async_v3(self._stream):
            raise InternalError("TensorRT could not run the batch; its log says why", from_model=True)
        for name in wanted:
            if not self._tensors[name].on_host:
                self._cuda.to_host(found[name], self._memory[name][0], self._stream)
        self._cuda.wait(self._stream)
        del kept  # the device has read the inputs now
        return [Tensor(name, self._tensors[name].info.datatype, found[name]) for name in wanted]

    def close(self) -> None:
        """Free what the context took, once."""
        memory, self._memory, self._inner = self._memory, {}, None
        if self._stream is not None:
            self._cuda.use(self._device)
            for address, _ in memory.values():
                self._cuda.free(address)
            self._cuda.drop(self._stream)
            self._stream = None

    def _give(self, name: str, array: Array) -> Array:
        """Put an input on the device; what comes back must live until the batch is done."""
        array = np.ascontiguousarray(array)
        tensor = self._tensors[name]
        if not self._inner.set_input_shape(name, tuple(array.shape)):
            least, _, most = self._engine.inner.get_tensor_profile_shape(name, self._profile)
            raise InvalidArgumentError(
                f"input '{name}' has shape {list(array.shape)}; the engine's optimization profile {self._profile} "
                f"takes {list(least)} to {list(most)}"
            )
        if tensor.on_host:
            array = array.copy()
            self._point(name, array.ctypes.data)
        else:
            self._point(name, self._room(name, array.nbytes))
            self._cuda.to_device(self._memory[name][0], array, self._stream)
        return array

    def _expect(self, name: str) -> Array:
        """Make room for an output, on the device and here."""
        shape = tuple(int(dim) for dim in self._inner.get_tensor_shape(name))
        if any(dim < 0 for dim in shape):
            raise UnsupportedError(f"the shape of output '{name}' depends on values, which is not offered for engines")
        tensor = self._tensors[name]
        array = np.empty(shape, DTYPES[tensor.info.datatype])
        self._point(name, array.ctypes.data if tensor.on_host else self._room(name, array.nbytes))
        return array

    def _room(self, name: str, size: int) -> int:
        """The address of a tensor's device memory, at least ``size`` bytes of it."""
        address, there = self._memory.get(name, (0, -1))
        if there < size or there < 0:
            if there >= 0:
                self._cuda.free(address)
                del self._memory[name]
            address = self._cuda.take(max(size, 1))
            self._memory[name] = (address, max(size, 1))
        return address

    def _point(self, name: str, address: int) -> None:
        if not self._inner.set_tensor_address(name, address):
            raise InternalError(f"TensorRT does not take the memory of tensor '{name}'", from_model=True)
