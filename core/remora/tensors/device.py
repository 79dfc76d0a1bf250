"""Tensors in the memory of a device; the law: bytes are copied to the host when `host` is asked, once, and never else.

A `DeviceArray` travels in the place of a numpy array from one step of an ensemble to the next, between models that say
they take it there (decision 0030). It is complete: whoever hands one on has waited for its device. It is an offer:
whoever reads the values calls `host`, and all who do share one copy. What lies in main memory is not copied at all.
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
"""DLPack's device types of GPUs, and of main memory that they copy from and to."""


class Block(NamedTuple):
    """New memory; it goes when the last reference to ``owner`` does."""

    address: int
    owner: object


class Memory(Protocol):
    """The memory of one device. Any thread may call."""

    @property
    def device(self) -> DeviceId: ...

    @property
    def alignment(self) -> int:
        """Of which number all addresses of new memory are multiples, as what runs there may count on."""

    def take(self, size: int) -> Block:
        """New memory. Raises InternalError when there is none."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy bytes from or to the device, or on it, and wait until they are there. Raises InternalError."""

    def wait(self) -> None:
        """Until all is done that the device's default stream was given so far. Raises InternalError."""


class DeviceArray:
    """A tensor of ``datatype`` without gaps, at an address of a device. ``owner`` keeps the memory alive.

    ``shared`` says that others read it as well, so that nobody may write to it.
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
        """The tensor of a framework, through ``__dlpack__``, once it is complete. Raises DLPackError."""
        from remora.tensors import dlpack

        return DeviceArray.taken(dlpack.Capsule(capsule_of(source)))

    @staticmethod
    def taken(capsule: Capsule) -> DeviceArray:
        """The tensor in a capsule, once the default stream is done with it. Raises DLPackError."""
        from remora.tensors.dlpack import DLPackError

        if not capsule.datatype:
            raise DLPackError("the tensor's type has no Triton datatype; convert it first")
        memory = memory_of(capsule.device)
        memory.wait()
        lent = capsule.take()
        return DeviceArray(lent.datatype, lent.shape, memory, lent.address, lent.owner)

    @property
    def device(self) -> DeviceId:
        """Where it lies."""
        return self.memory.device

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """How many dimensions."""
        return len(self.shape)

    def host(self) -> Array:
        """The values in main memory, read-only; copied by the first who asks. Raises InternalError."""
        with self._copying:
            if self._copied is None:
                self._copied = self.view() if self.device == HOST else self._copy()
                self._copied.flags.writeable = False
            return self._copied

    def view(self) -> Array:
        """The memory itself as an array, read-only if it is shared; for what lies in main memory."""
        assert self.device == HOST, self
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)
        buffer: Any = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        buffer.owner = self.owner  # the array keeps the buffer, and so the memory
        array = np.frombuffer(buffer, self.dtype).reshape(self.shape)
        array.flags.writeable = not self.shared
        return array

    def _copy(self) -> Array:
        copied = np.empty(self.shape, self.dtype)
        if self.nbytes:
            self.memory.copy(copied.ctypes.data, self.address, self.nbytes)
        return copied

    def reshape(self, *shape: Any) -> DeviceArray:
        """The same memory in another shape, of which one dimension may be -1. Raises ValueError."""
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        rest = math.prod(dim for dim in wanted if dim != -1)
        if -1 in wanted and rest:
            wanted = tuple(self.size // rest if dim == -1 else dim for dim in wanted)
        if math.prod(wanted) != self.size or any(dim < 0 for dim in wanted):
            raise ValueError(f"cannot reshape a tensor of shape {self.shape} into shape {tuple(wanted)}")
        return DeviceArray(self.datatype, wanted, self.memory, self.address, self.owner, shared=self.shared)

    def rows(self, begin: int, end: int) -> DeviceArray:
        """Some of the first dimension, over the same memory."""
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        shape = (end - begin, *self.shape[1:])
        return DeviceArray(
            self.datatype, shape, self.memory, self.address + begin * row, self.owner, shared=self.shared
        )

    def as_array(self) -> Array:
        """Itself, under the type of what it travels in the place of."""
        return cast("Array", self)

    def apart(self) -> DeviceArray:
        """One that nobody else reads: itself, or a copy on the device. Raises InternalError."""
        return joined([self]) if self.shared else self

    def as_shared(self) -> DeviceArray:
        """The same memory, marked as read by others as well."""
        return DeviceArray(self.datatype, self.shape, self.memory, self.address, self.owner, shared=True)

    def __dlpack__(self, *, stream: object = None, **_: object) -> Any:
        """A capsule over the same memory. Nothing has to be waited for, on any stream."""
        from remora.tensors import dlpack

        return dlpack.export(dlpack.Memory(self.datatype, self.shape, self.device, self.address, self.owner))

    def __dlpack_device__(self) -> DeviceId:
        return self.device

    def __repr__(self) -> str:
        return f"<DeviceArray {self.datatype} {list(self.shape)} on {self.device}>"


def joined(arrays: Sequence[DeviceArray]) -> DeviceArray:
    """The rows of arrays on one device behind each other, copied there. Raises InternalError."""
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
    """Rows behind each other: on the device where all of them lie on the same one, else in main memory."""
    devices = {array.device if type(array) is DeviceArray else None for array in arrays}
    if len(devices) == 1 and None not in devices:
        return joined(arrays)
    return np.concatenate([array.host() if type(array) is DeviceArray else array for array in arrays])


def on_host(array: Any) -> Any:
    """The values in main memory, of any array."""
    return array.host() if type(array) is DeviceArray else array


class HostMemory:
    """Main memory as a device: what stands for one where there is none."""

    device: Final = HOST
    alignment: Final = 1

    def take(self, size: int) -> Block:
        """New memory."""
        made = np.empty(max(size, 1), np.uint8)
        return Block(made.ctypes.data, made)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy bytes."""
        ctypes.memmove(to, source, size)

    def wait(self) -> None:
        """Nothing is ever under way."""


class CudaMemory:
    """The memory of a GPU."""

    alignment: Final = 256

    def __init__(self, runtime: Cuda, number: int) -> None:
        self.device: Final[DeviceId] = (CUDA, number)
        self._runtime = runtime
        self._number = number

    def take(self, size: int) -> Block:
        """New memory. Raises InternalError when there is none."""
        with self.on():
            address = self._runtime.take(size)
        owner = _Owner()
        weakref.finalize(owner, _free, self._runtime, self._number, address)
        return Block(address, owner)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy bytes and wait for them."""
        with self.on():
            self._runtime.copy(to, source, size)

    def wait(self) -> None:
        """Until the default stream is done."""
        with self.on():
            self._runtime.wait()

    def on(self) -> AbstractContextManager[None]:
        """Have the GPU be the calling thread's for a while."""
        return self._runtime.on(self._number)


class _Owner:
    """Something that can be referred to weakly."""


def _free(runtime: Cuda, number: int, address: int) -> None:
    try:
        with runtime.on(number):
            runtime.free(address)
    except InternalError:  # the runtime is being shut down, and everything with it
        pass


_HOST_MEMORY: Final = HostMemory()
_DLPACK_DEFAULT_STREAM: Final = 1


def capsule_of(source: Any) -> Any:
    """The capsule of a framework's tensor, which the default stream of its device may read. Raises what it raises."""
    kind, number = source.__dlpack_device__()
    if kind != CUDA:
        return source.__dlpack__()
    with _cuda_memory(number).on():  # frameworks export what lies on the thread's GPU
        return source.__dlpack__(stream=_DLPACK_DEFAULT_STREAM)  # left out it means anything, nothing included


def memory_of(device: DeviceId) -> Memory:
    """The memory of a device. Raises UnsupportedError where CUDA's is meant and is not there."""
    return _HOST_MEMORY if device[0] in (HOST[0], CUDA_HOST) else _cuda_memory(device[1])


@cache
def _cuda_memory(number: int) -> CudaMemory:
    from remora.system.cuda import cuda  # only where there is a GPU

    return CudaMemory(cuda(), number)
