"""Tensors in device memory, passed between ensemble steps without a copy to the host.

A `DeviceArray` replaces a numpy array between ensemble steps whose models declare that they accept device memory
(decision 0030). Its producer has synchronized with the device. A consumer that needs the values calls `host`; all
consumers share one copy. Tensors in main memory are not copied.

Invariant: bytes are copied to the host only by `host`, and at most once.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

import numpy as np

from remora.errors import InternalError
from remora.messages import DTYPES, Array

if TYPE_CHECKING:
    from remora.system.cuda import Cuda
    from remora.tensors.dlpack import Capsule

DeviceId = tuple[int, int]
"""DLPack's device type and number: (1, 0) is main memory, (2, 1) is GPU 1."""

HOST: Final[DeviceId] = (1, 0)
CUDA: Final = 2
CUDA_HOST: Final = 3
"""DLPack's device types of GPUs and of pinned host memory."""


class Block(NamedTuple):
    """Newly allocated memory, freed with the last reference to ``owner``."""

    address: int
    owner: object


class Memory(Protocol):
    """The memory of one device. Any thread may call."""

    @property
    def device(self) -> DeviceId: ...

    @property
    def alignment(self) -> int:
        """The alignment of newly allocated addresses in bytes."""

    def take(self, size: int) -> Block:
        """Allocate memory with any content. Raises InternalError when there is not enough."""

    def clear(self, address: int, size: int) -> None:
        """Fill memory with zeros and wait for completion. Raises InternalError."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy bytes from, to or on the device and wait for completion. Raises InternalError."""

    def wait(self) -> None:
        """Wait until the device's default stream is idle. Raises InternalError."""


class DeviceArray:
    """A contiguous tensor of ``datatype`` in device memory, which ``owner`` keeps alive.

    ``shared`` is True if it has other readers and must not be written to.
    """

    __slots__ = ("_copied", "_copying", "address", "datatype", "dtype", "memory", "nbytes", "owner", "shape", "shared")

    def __init__(
        self, datatype: str, shape: Sequence[int], memory: Memory, address: int, owner: object, *, shared: bool = False
    ) -> None:
        self.datatype = datatype
        self.shape = tuple(shape)
        self.dtype = DTYPES[datatype]
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self.memory = memory
        self.address = address
        self.owner = owner
        self.shared = shared
        self._copied: Array | None = None
        self._copying = threading.Lock()

    @staticmethod
    def of(source: Any) -> DeviceArray:
        """Wrap a framework's tensor through ``__dlpack__``, once it is complete. Raises DLPackError."""
        from remora.tensors import dlpack

        return DeviceArray.taken(dlpack.Capsule(capsule_of(source)))

    @staticmethod
    def taken(capsule: Capsule) -> DeviceArray:
        """Take the tensor of a capsule, after the default stream is idle. Raises DLPackError."""
        from remora.tensors.dlpack import DLPackError

        if not capsule.datatype:
            raise DLPackError("the tensor's type has no Triton datatype; convert it first")
        memory = memory_of(capsule.device)
        memory.wait()
        lent = capsule.take()
        return DeviceArray(lent.datatype, lent.shape, memory, lent.address, lent.owner)

    @property
    def device(self) -> DeviceId:
        """The device that holds the tensor."""
        return self.memory.device

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def host(self) -> Array:
        """Return the values in main memory, read-only.

        The first call copies them. Raises InternalError.
        """
        with self._copying:
            if self._copied is None:
                self._copied = self.view() if self.device == HOST else self._copy()
                self._copied.flags.writeable = False
            return self._copied

    def view(self) -> Array:
        """Return an array over this memory, which must be host memory, read-only if it is shared."""
        assert self.device == HOST, self
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)
        buffer: Any = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        buffer.owner = self.owner  # the array keeps the buffer alive, and with it the memory
        array = np.frombuffer(buffer, self.dtype).reshape(self.shape)
        array.flags.writeable = not self.shared
        return array

    def _copy(self) -> Array:
        copied = np.empty(self.shape, self.dtype)
        if self.nbytes:
            self.memory.copy(copied.ctypes.data, self.address, self.nbytes)
        return copied

    def reshape(self, *shape: Any) -> DeviceArray:
        """Return the same memory in another shape, of which one dimension may be -1.

        Raises ValueError.
        """
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        rest = math.prod(dim for dim in wanted if dim != -1)
        if -1 in wanted and rest:
            wanted = tuple(self.size // rest if dim == -1 else dim for dim in wanted)
        if math.prod(wanted) != self.size or any(dim < 0 for dim in wanted):
            raise ValueError(f"cannot reshape a tensor of shape {self.shape} into shape {tuple(wanted)}")
        return DeviceArray(self.datatype, wanted, self.memory, self.address, self.owner, shared=self.shared)

    def rows(self, begin: int, end: int) -> DeviceArray:
        """Return a range of the first dimension, over the same memory."""
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        shape = (end - begin, *self.shape[1:])
        return DeviceArray(
            self.datatype, shape, self.memory, self.address + begin * row, self.owner, shared=self.shared
        )

    def as_array(self) -> Array:
        """Return this object, typed as the numpy array that it replaces."""
        return cast("Array", self)

    def apart(self) -> DeviceArray:
        """Return an array without other readers: this one, or a copy on the device.

        Raises InternalError.
        """
        return joined([self]) if self.shared else self

    def as_shared(self) -> DeviceArray:
        """Return the same memory, marked as shared with other readers."""
        return DeviceArray(self.datatype, self.shape, self.memory, self.address, self.owner, shared=True)

    def __dlpack__(self, *, stream: object = None, **_: object) -> Any:
        """Return a capsule over the same memory. No stream has to wait for it."""
        from remora.tensors import dlpack

        return dlpack.export(dlpack.Memory(self.datatype, self.shape, self.device, self.address, self.owner))

    def __dlpack_device__(self) -> DeviceId:
        return self.device

    def __repr__(self) -> str:
        return f"<DeviceArray {self.datatype} {list(self.shape)} on {self.device}>"


def joined(arrays: Sequence[DeviceArray]) -> DeviceArray:
    """Concatenate the rows of arrays on one device, on that device. Raises InternalError."""
    first = arrays[0]
    shape = (sum(array.shape[0] for array in arrays), *first.shape[1:]) if len(arrays) > 1 else first.shape
    block = first.memory.take(sum(array.nbytes for array in arrays))
    at = block.address
    for array in arrays:
        if array.nbytes:
            first.memory.copy(at, array.address, array.nbytes)
        at += array.nbytes
    return DeviceArray(first.datatype, shape, first.memory, block.address, block.owner)


def concatenated(arrays: Sequence[Any]) -> Any:
    """Concatenate rows, on the device if all arrays are on the same one, else in main memory."""
    devices = {array.device if type(array) is DeviceArray else None for array in arrays}
    if len(devices) == 1 and None not in devices:
        return joined(arrays)
    return np.concatenate([array.host() if type(array) is DeviceArray else array for array in arrays])


def on_host(array: Any) -> Any:
    """Return the values of any array in main memory."""
    return array.host() if type(array) is DeviceArray else array


class HostMemory:
    """Main memory in the role of a device, where there is no GPU."""

    device: Final = HOST
    alignment: Final = 1

    def take(self, size: int) -> Block:
        """Allocate memory."""
        array = np.empty(max(size, 1), np.uint8)
        return Block(array.ctypes.data, array)

    def clear(self, address: int, size: int) -> None:
        """Fill memory with zeros."""
        ctypes.memset(address, 0, size)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy bytes."""
        ctypes.memmove(to, source, size)

    def wait(self) -> None:
        """Return at once, because host copies are synchronous."""


class CudaMemory:
    """The memory of a GPU."""

    alignment: Final = 256

    def __init__(self, runtime: Cuda, number: int) -> None:
        self.device: Final[DeviceId] = (CUDA, number)
        self._runtime = runtime
        self._number = number

    def take(self, size: int) -> Block:
        """Allocate memory. Raises InternalError when there is not enough."""
        with self.on():
            address = self._runtime.take(size)
        owner = _Owner()
        weakref.finalize(owner, _free, self._runtime, self._number, address)
        return Block(address, owner)

    def clear(self, address: int, size: int) -> None:
        """Fill memory with zeros and wait for completion."""
        with self.on():
            self._runtime.clear(address, size)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy bytes and wait for completion."""
        with self.on():
            self._runtime.copy(to, source, size)

    def wait(self) -> None:
        """Wait until the default stream is idle."""
        with self.on():
            self._runtime.wait()

    def on(self) -> AbstractContextManager[None]:
        """Make this GPU the calling thread's for the duration of the context."""
        return self._runtime.on(self._number)


class _Owner:
    """An object that supports weak references."""


def _free(runtime: Cuda, number: int, address: int) -> None:
    try:
        with runtime.on(number):
            runtime.free(address)
    except InternalError:  # the runtime is shutting down and frees everything
        pass


_HOST_MEMORY: Final = HostMemory()
_DLPACK_DEFAULT_STREAM: Final = 1


def capsule_of(source: Any) -> Any:
    """Return the capsule of a framework's tensor, readable on its device's default stream.

    Raises what it raises.
    """
    kind, number = source.__dlpack_device__()
    if kind != CUDA:
        return source.__dlpack__()
    with _cuda_memory(number).on():  # frameworks export tensors of the thread's current GPU
        return source.__dlpack__(stream=_DLPACK_DEFAULT_STREAM)  # without it some frameworks do not synchronize


def memory_of(device: DeviceId) -> Memory:
    """Return the memory of a device. Raises UnsupportedError for a CUDA device without CUDA."""
    return _HOST_MEMORY if device[0] in (HOST[0], CUDA_HOST) else _cuda_memory(device[1])


@cache
def _cuda_memory(number: int) -> CudaMemory:
    from remora.system.cuda import cuda  # imported here because most machines have no GPU

    return CudaMemory(cuda(), number)
