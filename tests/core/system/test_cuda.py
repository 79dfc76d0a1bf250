"""The CUDA runtime by ctypes, over a library with its functions' signatures."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from remora.errors import UnsupportedError
from remora.system import cuda as cuda_module
from remora.system.cuda import Cuda, CudaError, IpcHandle
from support.models.cuda_stand_in import DEVICE, PINNED, STREAM, StandIn

ROWS = np.arange(6, dtype="f4")


def test_bytes_go_to_a_device_and_come_back(stand_in: StandIn) -> None:
    runtime, found = stand_in.runtime, np.zeros_like(ROWS)
    runtime.use(0)
    address, pinned, stream = runtime.take(ROWS.nbytes), runtime.take_pinned(ROWS.nbytes), runtime.stream()
    runtime.copy(pinned, ROWS.ctypes.data, ROWS.nbytes)
    runtime.copy_soon(address, pinned, ROWS.nbytes, stream)
    runtime.wait(stream)
    runtime.copy(found.ctypes.data, address, ROWS.nbytes)
    np.testing.assert_array_equal(found, ROWS)
    assert runtime.bytes_from(address + 4) == ROWS.nbytes - 4
    runtime.free(address), runtime.free_pinned(pinned), runtime.drop(stream)
    assert [stand_in.held(kind) for kind in (DEVICE, PINNED, STREAM)] == [0, 0, 0]


def test_a_copy_is_there_when_it_returns(stand_in: StandIn) -> None:
    """Other users of the memory have separate streams, and the runtime synchronizes only some copies."""
    runtime = stand_in.runtime
    one, other = runtime.take(ROWS.nbytes), runtime.take(ROWS.nbytes)
    runtime.copy(one, ROWS.ctypes.data, ROWS.nbytes)
    assert ctypes.string_at(one, ROWS.nbytes) == ROWS.tobytes()
    runtime.copy(other, one, ROWS.nbytes)
    assert ctypes.string_at(other, ROWS.nbytes) == ROWS.tobytes()
    runtime.free(one), runtime.free(other)


def test_a_failing_call_is_reported_with_the_runtimes_text(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CudaError, match="cudaSetDevice failed: invalid device ordinal"):
        stand_in.runtime.use(7)
    with pytest.raises(CudaError, match="cudaFree failed: invalid argument"):
        stand_in.runtime.free(16)
    monkeypatch.setenv("STAND_IN_BYTES", "8")
    with pytest.raises(CudaError, match="cudaMalloc failed: out of memory"):
        stand_in.runtime.take(9)


def test_a_call_that_failed_is_forgotten_by_the_runtime(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks ask for the last error of their thread after a kernel, and would take ours for theirs."""
    with pytest.raises(CudaError):
        stand_in.runtime.use(7)
    monkeypatch.setenv("STAND_IN_DEVICES", "0")
    assert stand_in.runtime.device_count() == 0
    assert stand_in.library.cudaGetLastError() == 0


def test_devices_are_counted_and_zero_devices_are_not_an_error(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_DEVICES", "3")
    assert stand_in.runtime.device_count() == 3
    monkeypatch.setenv("STAND_IN_DEVICES", "0")
    assert stand_in.runtime.device_count() == 0


def test_a_thread_gets_its_device_back(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_DEVICES", "3")
    runtime, seen = stand_in.runtime, []

    def look(device: int) -> None:
        with runtime.on(device):
            seen.append(stand_in.device())
        seen.append(stand_in.device())

    def work() -> None:
        look(2)  # the thread has used no device before, so there is none to restore
        runtime.use(1)
        look(2), look(1)
        with suppress(CudaError), runtime.on(2):
            runtime.free(16)
        seen.append(stand_in.device())

    thread = threading.Thread(target=work)
    thread.start(), thread.join()
    assert seen == [2, 2, 2, 1, 1, 1, 1]


def test_memory_is_taken_and_freed_while_another_thread_captures_a_graph(stand_in: StandIn) -> None:
    """ONNX Runtime captures in the global mode: such a call of an ordinary thread fails, and the capture with it."""
    runtime, failures = Cuda(stand_in.library, stand_in.library), []

    def work() -> None:
        try:
            runtime.use(0)
            address, pinned = runtime.take(4), runtime.take_pinned(4)
            runtime.free(address), runtime.free_pinned(pinned)
        except CudaError as error:
            failures.append(error)

    stand_in.library.stand_in_capture(1)
    try:
        thread = threading.Thread(target=work)
        thread.start(), thread.join()
    finally:
        invalidated = stand_in.library.stand_in_capture(0)
    assert (failures, invalidated) == ([], 0)


def test_a_handle_is_64_bytes_passed_by_value(stand_in: StandIn) -> None:
    assert ctypes.sizeof(IpcHandle) == cuda_module.HANDLE_BYTES
    runtime = stand_in.runtime
    address = runtime.take(4)
    opened = runtime.open_handle(runtime.handle_of(address))
    runtime.copy(address, ROWS[1:].ctypes.data, 4)
    assert ctypes.string_at(opened, 4) == ROWS[1:2].tobytes()
    runtime.close_handle(opened), runtime.free(address)


def test_what_no_driver_tells_is_not_known(stand_in: StandIn) -> None:
    assert Cuda(stand_in.library).bytes_from(16) is None
    assert stand_in.runtime.bytes_from(16) is None


class Later:
    """A runtime of a later CUDA than the driver's, which finds no GPUs."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getitem__(self, name: str) -> Any:
        if name != "cudaGetDeviceCount":
            return self._library[name]
        insufficient: Any = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(lambda count: 35)
        return insufficient


def test_of_several_runtimes_it_is_the_one_that_finds_gpus(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries: dict[str, Any] = {"later": Later(stand_in.library), "fitting": stand_in.library}

    def loaded(name: str) -> Any:
        if name not in libraries:
            raise OSError(name)
        return libraries[name]

    monkeypatch.setattr(cuda_module, "_candidates", lambda: iter(("absent", "later", "fitting")))
    monkeypatch.setattr(cuda_module.ctypes, "CDLL", loaded)
    assert cuda_module.cuda.__wrapped__().device_count() == 1
    monkeypatch.setenv("STAND_IN_DEVICES", "0")
    assert cuda_module.cuda.__wrapped__().device_count() == 0
    libraries.clear()
    with pytest.raises(UnsupportedError, match="there is no CUDA runtime"):
        cuda_module.cuda.__wrapped__()


def test_nvidias_own_runtime_has_every_function_that_is_called() -> None:
    try:
        runtime: Any = cuda_module.cuda()
    except UnsupportedError:
        pytest.skip("NVIDIA's runtime is not here: pip install nvidia-cuda-runtime-cu12")
    assert runtime.device_count() >= 0
