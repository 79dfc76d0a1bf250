"""Tensors that stay on a device: what is copied, how often, and who keeps the memory."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from remora.messages import DTYPES, Array
from remora.tensors.device import (
    HOST,
    Block,
    CudaMemory,
    DeviceArray,
    HostMemory,
    capsule_of,
    concatenated,
    joined,
    memory_of,
    on_host,
)
from remora.tensors.dlpack import TYPES, Capsule, DLPackError
from support.engine.fakes import UntouchableMemory
from support.models.cuda_stand_in import DEVICE, StandIn


def on_device(array: Array, datatype: str = "FP32") -> DeviceArray:
    """An array as a tensor on a device that main memory stands for."""
    return DeviceArray(datatype, array.shape, HostMemory(), array.ctypes.data, array)


def untouchable(*shape: int, **settings: Any) -> DeviceArray:
    return DeviceArray("FP32", shape, UntouchableMemory(**settings), 4096, None)


def test_shapes_rows_and_hands_never_touch_the_bytes() -> None:
    tensor = untouchable(4, 6)
    rows = tensor.reshape(4, 2, 3).rows(1, 3)
    assert (rows.shape, rows.address, rows.nbytes, rows.size, rows.ndim) == ((2, 2, 3), 4096 + 24, 48, 12, 3)
    assert tensor.reshape((-1,)).shape == (24,)
    assert (tensor.as_shared().shared, tensor.shared) == (True, False)
    assert DeviceArray.of(_There(tensor)).address == 4096
    with pytest.raises(ValueError, match="cannot reshape a tensor of shape"):
        tensor.reshape(5, -1)
    with pytest.raises(AssertionError, match="the bytes of a device were read"):
        tensor.host()


class _There:
    """A tensor whose memory is looked up in the fake, not in CUDA."""

    def __init__(self, tensor: DeviceArray) -> None:
        self._tensor = tensor

    def __dlpack__(self) -> Any:
        return DeviceArray("FP32", self._tensor.shape, HostMemory(), self._tensor.address, self._tensor).__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return HOST


def test_the_host_gets_one_copy_however_many_ask() -> None:
    tensor = untouchable(2, 2, readable=1)
    found: list[Array] = []
    threads = [threading.Thread(target=lambda: found.append(tensor.host())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(array) for array in found}) == 1
    assert not found[0].flags.writeable
    assert len(tensor.memory.copied) == 1  # type: ignore[attr-defined]


def test_what_lies_in_main_memory_is_not_copied_at_all() -> None:
    array = np.arange(6, dtype="f4").reshape(2, 3)
    tensor = on_device(array)
    assert np.shares_memory(tensor.host(), array)
    assert np.shares_memory(tensor.rows(1, 2).view(), array)
    assert not tensor.as_shared().view().flags.writeable


def test_a_tensor_is_itself_for_numpy_through_dlpack() -> None:
    array = np.arange(6, dtype="f4").reshape(2, 3)
    taken = np.from_dlpack(on_device(array))
    assert np.shares_memory(taken, array)
    back = DeviceArray.of(array)
    assert (back.address, back.shape, back.datatype) == (array.ctypes.data, (2, 3), "FP32")


@pytest.mark.parametrize("datatype", sorted(TYPES))
def test_every_datatype_travels(datatype: str) -> None:
    array = np.zeros((2, 3), DTYPES[datatype])
    back = DeviceArray.of(on_device(array, datatype))
    assert (back.datatype, back.dtype, back.nbytes) == (datatype, array.dtype, array.nbytes)


def test_the_memory_lives_as_long_as_anyone_reads_it() -> None:
    array = np.arange(4, dtype="f4")
    gone = weakref.ref(array)
    view: Any = on_device(array).rows(2, 4).host()
    del array
    gc.collect()
    assert view.tolist() == [2, 3]
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_only_types_of_the_wire_are_taken() -> None:
    with pytest.raises(DLPackError, match="no Triton datatype"):
        DeviceArray.of(np.zeros(2, "c8"))


def test_rows_join_on_their_device_and_meet_on_the_host_elsewhere() -> None:
    one, other = untouchable(2, 3), untouchable(1, 3)
    other.memory = one.memory
    whole = joined([one, other])
    assert (whole.shape, whole.device) == ((3, 3), (2, 0))
    assert one.memory.copied == [(1 << 20, 4096, 24), ((1 << 20) + 24, 4096, 12)]  # type: ignore[attr-defined]
    near = np.ones((1, 3), "f4")
    mixed = concatenated([on_device(near), near])
    np.testing.assert_array_equal(mixed, np.ones((2, 3)))
    assert isinstance(concatenated([on_device(near), on_device(near)]), DeviceArray)
    assert on_host(near) is near


def test_a_gpus_memory_is_taken_copied_and_given_back(stand_in: StandIn) -> None:
    before = stand_in.held(DEVICE)
    memory = CudaMemory(stand_in.runtime, 0)
    rows = np.arange(6, dtype="f4").reshape(2, 3)
    block = memory.take(rows.nbytes)
    memory.copy(block.address, rows.ctypes.data, rows.nbytes)
    tensor = DeviceArray("FP32", rows.shape, memory, block.address, block.owner)
    both = joined([tensor, tensor.rows(0, 1)])
    np.testing.assert_array_equal(both.host(), rows[[0, 1, 0]])
    np.testing.assert_array_equal(tensor.as_shared().apart().host(), rows)
    assert tensor.apart() is tensor
    del block, tensor, both
    gc.collect()
    assert stand_in.held(DEVICE) == before


class _Busy:
    """A tensor on GPU 1 that its framework has only begun to write: two floats out of other memory of the device."""

    def __init__(self, stand_in: StandIn, memory: CudaMemory, given: Block, values: Block) -> None:
        self._stand_in = stand_in
        self._memory = memory
        self._given = given
        self._values = values
        self.stream = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._memory.device

    def __dlpack__(self, *, stream: int = -1) -> Any:
        if self._stand_in.device() != 1:
            raise BufferError("Can't export tensors on a different CUDA device index")
        self.stream = stream
        ends = map(ctypes.c_void_p, (self._given.address, self._values.address))
        assert self._stand_in.library.cudaMemcpy(*ends, ctypes.c_size_t(8), 4) == 0
        return DeviceArray("FP32", (2,), self._memory, self._given.address, self._given.owner).__dlpack__()


def test_a_frameworks_tensor_is_complete_when_it_has_been_taken(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_DEVICES", "2")
    memory = CudaMemory(stand_in.runtime, 1)
    monkeypatch.setattr("remora.tensors.device._cuda_memory", lambda number: memory)
    given, values = memory.take(8), memory.take(8)
    memory.copy(values.address, np.array([1, 2], "f4").ctypes.data, 8)
    for take in (DeviceArray.of, lambda busy: DeviceArray.taken(Capsule(capsule_of(busy)))):
        memory.copy(given.address, np.zeros(2, "f4").ctypes.data, 8)
        busy = _Busy(stand_in, memory, given, values)
        array = take(busy)
        assert np.frombuffer(ctypes.string_at(array.address, 8), "f4").tolist() == [1, 2]
        assert busy.stream == 1, "the default stream, by its name in DLPack"
        assert stand_in.device() == 0


def test_memory_of_another_gpu_comes_and_goes_beside_a_threads_own(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_DEVICES", "2")
    memory = CudaMemory(stand_in.runtime, 0)
    stand_in.runtime.use(1)
    try:
        block = memory.take(24)
        tensor = DeviceArray("FP32", (2, 3), memory, block.address, block.owner)
        tensor.host()
        before = stand_in.held(DEVICE)
        del block, tensor
        assert stand_in.held(DEVICE) == before - 1
        assert stand_in.device() == 1, "what a finalizer does must not move the thread's next work to another GPU"
    finally:
        stand_in.runtime.use(0)


def test_main_memory_is_a_separate_device() -> None:
    assert memory_of((1, 0)) is memory_of((3, 0))
