"""Copies between the host and a device's memory, complete on return.

Each object here belongs to one thread at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from remora.messages import Array
from remora.proto.model_config_pb2 import ModelConfig
from remora.tensors.device import HOST, Block, DeviceArray, Memory

if TYPE_CHECKING:
    from remora.system.cuda import Cuda


class Transfer:
    """Copies of many tensors at a time between the host and a device's memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def to_device(self, copies: Sequence[tuple[int, Array]]) -> None:
        """Copy arrays to addresses of the device."""
        for address, array in copies:
            if array.nbytes:
                self._memory.copy(address, array.ctypes.data, array.nbytes)

    def to_host(self, arrays: Sequence[DeviceArray]) -> list[Array]:
        """Return new arrays with the values."""
        return [np.array(array.host()) for array in arrays]

    def close(self) -> None:
        """Do nothing, because plain copies hold no resources."""


class CudaTransfer(Transfer):
    """Copies through pinned memory on a dedicated stream.

    They overlap with other instances' kernels.

    Args:
        memory: memory of the device.
        runtime: CUDA runtime.
        inputs: False copies to the device without pinned memory.
        outputs: False copies to the host without pinned memory.
    """

    def __init__(self, memory: Memory, runtime: Cuda, *, inputs: bool = True, outputs: bool = True) -> None:
        super().__init__(memory)
        self._pins_inputs = inputs
        self._pins_outputs = outputs
        self._cuda = runtime
        self._number = memory.device[1]
        with self._cuda.on(self._number):
            self._stream = self._cuda.stream()
        self._pinned = (0, 0)
        """Address and size."""

    def to_device(self, copies: Sequence[tuple[int, Array]]) -> None:
        """Copy arrays to addresses of the device and wait for completion."""
        if not self._pins_inputs:
            super().to_device(copies)
            return
        at = self._room(sum(array.nbytes for _, array in copies))
        for address, array in copies:
            if array.nbytes:
                view_at(at, array.nbytes)[:] = array.reshape(-1).view(np.uint8)
                self._cuda.copy_soon(address, at, array.nbytes, self._stream)
                at += array.nbytes
        self._cuda.wait(self._stream)

    def to_host(self, arrays: Sequence[DeviceArray]) -> list[Array]:
        """Return new arrays with the values."""
        if not self._pins_outputs:
            return super().to_host(arrays)
        start = at = self._room(sum(array.nbytes for array in arrays))
        for array in arrays:
            if array.nbytes:
                self._cuda.copy_soon(at, array.address, array.nbytes, self._stream)
                at += array.nbytes
        self._cuda.wait(self._stream)
        arrays_on_host = []
        for array in arrays:
            copy = np.empty(array.shape, array.dtype)
            if array.nbytes:
                copy.reshape(-1).view(np.uint8)[:] = view_at(start, array.nbytes)
                start += array.nbytes
            arrays_on_host.append(copy)
        return arrays_on_host

    def close(self) -> None:
        """Release stream and memory, once."""
        if self._stream:
            with self._cuda.on(self._number):
                if self._pinned[0]:
                    self._cuda.free_pinned(self._pinned[0])
                self._cuda.drop(self._stream)
            self._stream, self._pinned = 0, (0, 0)

    def _room(self, size: int) -> int:
        """Return the address of pinned memory, which grows with the largest batch and is kept."""
        self._cuda.use(self._number)
        address, kept_size = self._pinned
        if kept_size < size:
            self._pinned = (0, 0)
            if address:
                self._cuda.free_pinned(address)
            self._pinned = (self._cuda.take_pinned(size), size)
        return self._pinned[0]


class Places:
    """Addresses of an instance's inputs on its device.

    An input that is already on the device keeps its address; others are copied into memory kept by name, which grows
    with the largest.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._kept: dict[str, tuple[int, Block]] = {}
        """Size and block."""

    def of(self, name: str, value: Any, copies: list[tuple[int, Array]]) -> int:
        """Return the address where an array is, or will be after ``copies``.

        May append to ``copies``, which the caller then makes.
        """
        if isinstance(value, DeviceArray):
            if value.nbytes and value.address % self._memory.alignment == 0:  # rows of another tensor may be unaligned
                return value.address
            address = self.reserve(name, value.nbytes)
            if value.nbytes:
                self._memory.copy(address, value.address, value.nbytes)
            return address
        array = np.ascontiguousarray(value)
        address = self.reserve(name, array.nbytes)
        copies.append((address, array))
        return address

    def reserve(self, name: str, size: int) -> int:
        """Return the address of a tensor's kept memory, at least ``size`` bytes."""
        kept_size, block = self._kept.get(name, (-1, Block(0, None)))
        if kept_size < size:
            self._kept.pop(name, None)
            block = self._memory.take(size)
            self._kept[name] = (size, block)
        return block.address

    def close(self) -> None:
        """Release the memory."""
        self._kept.clear()


def view_at(address: int, size: int) -> Array:
    """Return memory of the host as bytes."""
    memory: Any = (ctypes.c_uint8 * size).from_address(address)
    array: Array = np.frombuffer(memory, np.uint8)
    return array


def transfer_for(config: ModelConfig, memory: Memory, runtime: Callable[[], Cuda]) -> Transfer:
    """Return the transfers of an instance.

    On a GPU they use pinned memory, unless the configuration disables it [C17]. Raises UnsupportedError without a CUDA
    runtime.
    """
    inputs, outputs = (
        not config.optimization.HasField(field) or getattr(config.optimization, field).enable
        for field in ("input_pinned_memory", "output_pinned_memory")
    )
    if memory.device == HOST or not (inputs or outputs):
        return Transfer(memory)
    return CudaTransfer(memory, runtime(), inputs=inputs, outputs=outputs)
