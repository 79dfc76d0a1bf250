"""Copies between the host and a device's memory, and where to, for backends; the law: one thread at a time, and done on
return."""

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
        """Put arrays at addresses of the device."""
        for address, array in copies:
            if array.nbytes:
                self._memory.copy(address, array.ctypes.data, array.nbytes)

    def to_host(self, arrays: Sequence[DeviceArray]) -> list[Array]:
        """New arrays with the values."""
        return [np.array(array.host()) for array in arrays]

    def close(self) -> None:
        """Nothing to give back."""


class CudaTransfer(Transfer):
    """Copies through pinned memory on a stream of its own, so that they run beside other instances' kernels.

    Args:
        memory: the device's.
        runtime: CUDA's.
        inputs: False has copies to the device go without pinned memory.
        outputs: the same for copies to the host.
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
        """Put arrays at addresses of the device, and wait for them."""
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
        """New arrays with the values."""
        if not self._pins_outputs:
            return super().to_host(arrays)
        start = at = self._room(sum(array.nbytes for array in arrays))
        for array in arrays:
            if array.nbytes:
                self._cuda.copy_soon(at, array.address, array.nbytes, self._stream)
                at += array.nbytes
        self._cuda.wait(self._stream)
        found = []
        for array in arrays:
            made = np.empty(array.shape, array.dtype)
            if array.nbytes:
                made.reshape(-1).view(np.uint8)[:] = view_at(start, array.nbytes)
                start += array.nbytes
            found.append(made)
        return found

    def close(self) -> None:
        """Give stream and memory back, once."""
        if self._stream:
            with self._cuda.on(self._number):
                if self._pinned[0]:
                    self._cuda.free_pinned(self._pinned[0])
                self._cuda.drop(self._stream)
            self._stream, self._pinned = 0, (0, 0)

    def _room(self, size: int) -> int:
        """Pinned memory, which grows with the largest batch and is kept."""
        self._cuda.use(self._number)
        address, there = self._pinned
        if there < size:
            self._pinned = (0, 0)
            if address:
                self._cuda.free_pinned(address)
            self._pinned = (self._cuda.take_pinned(size), size)
        return self._pinned[0]


class Places:
    """Where the inputs of an instance lie on its device: where they are, or in memory kept for them by name.

    The memory grows with the largest of each name.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._kept: dict[str, tuple[int, Block]] = {}
        """Size and block."""

    def of(self, name: str, given: Any, copies: list[tuple[int, Array]]) -> int:
        """Where an array is, or will be once ``copies``, to which this may add, are made."""
        if isinstance(given, DeviceArray):
            if given.nbytes and given.address % self._memory.alignment == 0:  # rows of another tensor begin anywhere
                return given.address
            address = self.room(name, given.nbytes)
            if given.nbytes:
                self._memory.copy(address, given.address, given.nbytes)
            return address
        array = np.ascontiguousarray(given)
        address = self.room(name, array.nbytes)
        copies.append((address, array))
        return address

    def room(self, name: str, size: int) -> int:
        """The address of a tensor's kept memory, at least ``size`` bytes of it."""
        there, block = self._kept.get(name, (-1, Block(0, None)))
        if there < size:
            self._kept.pop(name, None)
            block = self._memory.take(size)
            self._kept[name] = (size, block)
        return block.address

    def close(self) -> None:
        """Let the memory go."""
        self._kept.clear()


def view_at(address: int, size: int) -> Array:
    """Memory of the host as bytes."""
    memory: Any = (ctypes.c_uint8 * size).from_address(address)
    array: Array = np.frombuffer(memory, np.uint8)
    return array


def transfer_for(config: ModelConfig, memory: Memory, runtime: Callable[[], Cuda]) -> Transfer:
    """An instance's transfers: through pinned memory on a GPU, unless its configuration wants none [C17].

    Raises UnsupportedError where there is no CUDA runtime.
    """
    inputs, outputs = (
        not config.optimization.HasField(field) or getattr(config.optimization, field).enable
        for field in ("input_pinned_memory", "output_pinned_memory")
    )
    if memory.device == HOST or not (inputs or outputs):
        return Transfer(memory)
    return CudaTransfer(memory, runtime(), inputs=inputs, outputs=outputs)
