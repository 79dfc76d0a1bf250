"""The CUDA runtime through ctypes.

The library is loaded on first use: from NVIDIA's pip wheels or from the system. Without it there are no devices.
Addresses are plain integers; the caller that allocates memory frees it. Each thread has one current device, which all
libraries of the process see and change.

The status of every call is checked.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from remora.errors import InternalError, UnsupportedError

_log = logging.getLogger(__name__)

HANDLE_BYTES: Final = 64
"""The size of a cudaIpcMemHandle_t."""

_VERSIONS = ("13", "12", "11.0")
_WHEELS = ("nvidia.cu13", "nvidia.cuda_runtime")
_INT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
_DEFAULT = 4  # cudaMemcpyDefault: the runtime derives the direction from the addresses
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_LASTING = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721})
"""Sticky errors, which every later call of the process returns as well: uncorrectable memory and NVLink errors, and
failed kernels (illegal address 700, timeout 702, assertion 710, illegal instruction 715, launch failure 719)."""


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_OUT = ctypes.POINTER(_POINTER)
SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cudaGetDeviceCount": (ctypes.POINTER(_INT),),
    "cudaGetDevice": (ctypes.POINTER(_INT),),
    "cudaSetDevice": (_INT,),
    "cudaMalloc": (_OUT, _SIZE),
    "cudaFree": (_POINTER,),
    "cudaMallocHost": (_OUT, _SIZE),
    "cudaFreeHost": (_POINTER,),
    "cudaMemset": (_POINTER, _INT, _SIZE),
    "cudaMemcpy": (_POINTER, _POINTER, _SIZE, _INT),
    "cudaMemcpyAsync": (_POINTER, _POINTER, _SIZE, _INT, _POINTER),
    "cudaStreamCreateWithFlags": (_OUT, ctypes.c_uint),
    "cudaStreamSynchronize": (_POINTER,),
    "cudaStreamDestroy": (_POINTER,),
    "cudaIpcGetMemHandle": (ctypes.POINTER(IpcHandle), _POINTER),
    "cudaIpcOpenMemHandle": (_OUT, IpcHandle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (_POINTER,),
    "cudaMemGetInfo": (ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)),
    "cudaThreadExchangeStreamCaptureMode": (ctypes.POINTER(_INT),),
}
"""The argument types of the functions in use; each returns a cudaError_t."""


class CudaError(InternalError):
    """A failed CUDA call. ``reason`` is the runtime's error text."""

    def __init__(self, function: str, reason: str) -> None:
        super().__init__(f"{function} failed: {reason}", from_model=True)
        self.reason = reason


class Cuda:
    """The calls of the CUDA runtime.

    Any thread may call. `use` sets the calling thread's device.

    Args:
        library: the runtime, as loaded by ctypes.
        driver: the driver's library; None disables the queries that only the driver answers.

    Attributes:
        lost: why this process can use no GPU until it is restarted; empty while it can.
    """

    def __init__(self, library: Any, driver: Any = None) -> None:
        self.lost = ""
        self._thread = threading.local()
        self._functions: dict[str, Callable[..., int]] = {}
        for name, arguments in SIGNATURES.items():
            function = library[name]  # indexing returns a private object; attributes are shared by the whole process
            function.argtypes, function.restype = arguments, _INT
            self._functions[name] = function
        self._forget = library["cudaGetLastError"]
        self._text = library["cudaGetErrorString"]
        self._text.argtypes, self._text.restype = (_INT,), ctypes.c_char_p
        self._range: Any = None
        self._context: Any = None
        if driver is not None:
            self._range, self._context = driver["cuMemGetAddressRange_v2"], driver["cuCtxGetCurrent"]

    def device_count(self) -> int:
        """Return the number of GPUs, which is 0 without a driver."""
        count = _INT()
        try:
            self._call("cudaGetDeviceCount", ctypes.byref(count))
        except CudaError:
            return 0
        return count.value

    def relax(self) -> None:
        """Allow the calling thread to allocate and free memory while another captures a CUDA graph.

        ONNX Runtime captures in global mode, in which such a call from any other thread fails and ends the capture.
        Errors are left to the next call.
        """
        if not getattr(self._thread, "relaxed", False):
            exchange = self._functions["cudaThreadExchangeStreamCaptureMode"]
            self._thread.relaxed = exchange(ctypes.byref(_INT(_RELAXED))) == 0
            if not self._thread.relaxed:
                self._forget()

    def use(self, device: int) -> None:
        """Set the calling thread's device."""
        self.relax()
        self._call("cudaSetDevice", device)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Set the calling thread's device and restore the previous one on exit.

        Finalizers in particular must restore it.
        """
        before = self._chosen()
        self.use(device)
        try:
            yield
        finally:
            if before not in (None, device):
                self.use(before)

    def _chosen(self) -> int | None:
        """Return the calling thread's device.

        Returns None if it has used none yet or the driver is not loaded.
        """
        context, device = _POINTER(), _INT()
        if self._context is None or self._context(ctypes.byref(context)) != 0 or not context.value:
            return None  # restoring the runtime's default device would create a context on it
        self._call("cudaGetDevice", ctypes.byref(device))
        return device.value

    def free_bytes(self, device: int) -> int:
        """Return the free memory of a device in bytes. Raises CudaError."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self.on(device):
            self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def take(self, size: int) -> int:
        """Allocate device memory and return its address."""
        return self._call_for_address("cudaMalloc", max(size, 1))

    def free(self, address: int) -> None:
        """Free device memory."""
        self._call("cudaFree", address)

    def take_pinned(self, size: int) -> int:
        """Allocate pinned host memory and return its address."""
        return self._call_for_address("cudaMallocHost", max(size, 1))

    def free_pinned(self, address: int) -> None:
        """Free pinned host memory."""
        self._call("cudaFreeHost", address)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy bytes between any two addresses and wait for completion."""
        self._call("cudaMemcpy", to, source, size, _DEFAULT)
        self.wait()  # device-to-device copies are asynchronous, and copies to a device may still be in flight

    def clear(self, address: int, size: int) -> None:
        """Fill device memory with zeros and wait for completion."""
        self._call("cudaMemset", address, 0, size)
        self.wait()

    def copy_soon(self, to: int, source: int, size: int, stream: int) -> None:
        """Enqueue a copy on a stream."""
        self._call("cudaMemcpyAsync", to, source, size, _DEFAULT, stream)

    def stream(self) -> int:
        """Create a stream that synchronizes with no other."""
        return self._call_for_address("cudaStreamCreateWithFlags", _NON_BLOCKING)

    def wait(self, stream: int = 0) -> None:
        """Wait until a stream, by default that of the thread's device, is idle."""
        self._call("cudaStreamSynchronize", stream)

    def drop(self, stream: int) -> None:
        """Destroy a stream."""
        self._call("cudaStreamDestroy", stream)

    def handle_of(self, address: int) -> bytes:
        """Return the IPC handle with which another process opens this device memory."""
        handle = IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(memoryview(handle))

    def open_handle(self, handle: bytes) -> int:
        """Open another process's device memory and return its address on the thread's device."""
        return self._call_for_address("cudaIpcOpenMemHandle", IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)

    def close_handle(self, address: int) -> None:
        """Close an address returned by `open_handle`."""
        self._call("cudaIpcCloseMemHandle", address)

    def bytes_from(self, address: int) -> int | None:
        """Return the bytes from an address to the end of its allocation.

        Returns None where the driver cannot report it.
        """
        if self._range is None:
            return None
        start, size = ctypes.c_uint64(), _SIZE()
        if self._range(ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address)) != 0:
            return None
        return start.value + size.value - address

    def probe(self, device: int) -> None:
        """Check that the process can still use a device (see ``lost``).

        Does not wait for the device's work.
        """
        with suppress(CudaError), self.on(device):
            stream = self.stream()
            self.wait(stream)
            self.drop(stream)

    def _call_for_address(self, function: str, *arguments: Any) -> int:
        address = _POINTER()
        self._call(function, ctypes.byref(address), *arguments)
        return address.value or 0

    def _call(self, function: str, *arguments: Any) -> None:
        status = self._functions[function](*arguments)
        if status != 0:
            self._forget()  # clear the last error, or the next user of this runtime would read it
            text = self._text(status)
            error = CudaError(function, text.decode() if text else f"error {status}")
            if status in _LASTING and not self.lost:
                self.lost = f"{error.message}: this process can use no GPU any more; restart the server"
                _log.error("CUDA error %d: %s", status, self.lost)
            raise error


@cache
def cuda() -> Cuda:
    """Return the machine's CUDA runtime. Raises UnsupportedError where there is none.

    Of several installed runtimes the first that finds GPUs is used; one newer than the driver finds none.
    """
    driver = _loaded("libcuda.so.1")
    found: Cuda | None = None
    for candidate in _candidates():
        library = _loaded(candidate)
        if library is not None:
            made = Cuda(library, driver)
            if made.device_count():
                return made
            found = found or made
    if found is None:
        raise UnsupportedError(
            "there is no CUDA runtime (libcudart) here: install the driver and pip install nvidia-cuda-runtime-cu12"
        )
    return found


def _loaded(name: str) -> Any:
    """Load a library, or None if it does not exist."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _candidates() -> Iterator[str]:
    for version in _VERSIONS:  # the loader's search path first, so that the operator's LD_LIBRARY_PATH wins
        yield f"libcudart.so.{version}"
    for package in _WHEELS:
        try:
            found = importlib.util.find_spec(package)
        except ImportError:
            continue
        for place in (found.submodule_search_locations or ()) if found else ():
            yield from map(str, sorted(Path(place).glob("lib/libcudart.so.*"), reverse=True))
