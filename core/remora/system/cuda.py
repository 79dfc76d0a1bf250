"""The CUDA runtime through ctypes; the law: every call is checked, and without the library there are no devices.

The library is looked for when it is first needed: where pip has put NVIDIA's wheels, then where the system has it.
Addresses are plain numbers; who takes memory gives it back. A thread has one device at a time, which all libraries
in the process see and change.
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
_DEFAULT = 4  # cudaMemcpyDefault: the runtime knows which address lies where
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_LASTING = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721})
"""The errors that every later call of the process returns as well: uncorrectable memory and NVLink errors, and kernels
that failed (illegal address 700, timeout 702, assertion 710, illegal instruction 715, launch failure 719)."""


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t: passed by value."""

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
    "cudaMemcpy": (_POINTER, _POINTER, _SIZE, _INT),
    "cudaMemcpyAsync": (_POINTER, _POINTER, _SIZE, _INT, _POINTER),
    "cudaStreamCreateWithFlags": (_OUT, ctypes.c_uint),
    "cudaStreamSynchronize": (_POINTER,),
    "cudaStreamDestroy": (_POINTER,),
    "cudaIpcGetMemHandle": (ctypes.POINTER(IpcHandle), _POINTER),
    "cudaIpcOpenMemHandle": (_OUT, IpcHandle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (_POINTER,),
    "cudaThreadExchangeStreamCaptureMode": (ctypes.POINTER(_INT),),
}
"""The functions that are called, and what each takes; all of them give a cudaError_t."""


class CudaError(InternalError):
    """A call that failed; ``reason`` is the runtime's own text."""

    def __init__(self, function: str, reason: str) -> None:
        super().__init__(f"{function} failed: {reason}", from_model=True)
        self.reason = reason


class Cuda:
    """The runtime's calls. Any thread may call; `use` chooses the calling thread's device.

    Args:
        library: the runtime, as ctypes has loaded it.
        driver: the driver's library; None where what only it knows cannot be asked.

    Attributes:
        lost: why the process can use no GPU until it is restarted; empty while it can.
    """

    def __init__(self, library: Any, driver: Any = None) -> None:
        self.lost = ""
        self._thread = threading.local()
        self._functions: dict[str, Callable[..., int]] = {}
        for name, arguments in SIGNATURES.items():
            function = library[name]  # of its own: attributes of a library are shared with everybody else
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
        """How many GPUs there are; 0 where the driver is missing as well."""
        count = _INT()
        try:
            self._call("cudaGetDeviceCount", ctypes.byref(count))
        except CudaError:
            return 0
        return count.value

    def relax(self) -> None:
        """Let the calling thread take and free memory while another captures a CUDA graph.

        ONNX Runtime captures in the global mode, in which such a call of any other thread fails and ends the capture.
        Failures are left to the call that follows.
        """
        if not getattr(self._thread, "relaxed", False):
            exchange = self._functions["cudaThreadExchangeStreamCaptureMode"]
            self._thread.relaxed = exchange(ctypes.byref(_INT(_RELAXED))) == 0
            if not self._thread.relaxed:
                self._forget()

    def use(self, device: int) -> None:
        """Make a device the calling thread's."""
        self.relax()
        self._call("cudaSetDevice", device)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make a device the calling thread's for a while: wherever others may count on theirs, finalizers above all."""
        before = self._chosen()
        self.use(device)
        try:
            yield
        finally:
            if before not in (None, device):
                self.use(before)

    def _chosen(self) -> int | None:
        """The calling thread's device; None where it has used none yet, or nobody knows."""
        context, device = _POINTER(), _INT()
        if self._context is None or self._context(ctypes.byref(context)) != 0 or not context.value:
            return None  # to go back to what the runtime calls its device would make a context there
        self._call("cudaGetDevice", ctypes.byref(device))
        return device.value

    def take(self, size: int) -> int:
        """The address of new device memory."""
        return self._made("cudaMalloc", max(size, 1))

    def free(self, address: int) -> None:
        """Give device memory back."""
        self._call("cudaFree", address)

    def take_pinned(self, size: int) -> int:
        """The address of new memory of the host that devices copy from and to without a detour."""
        return self._made("cudaMallocHost", max(size, 1))

    def free_pinned(self, address: int) -> None:
        """Give such memory back."""
        self._call("cudaFreeHost", address)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy bytes, wherever they lie, and wait until they are there."""
        self._call("cudaMemcpy", to, source, size, _DEFAULT)
        self.wait()  # a copy from device to device has only begun, one to a device may be under way

    def copy_soon(self, to: int, source: int, size: int, stream: int) -> None:
        """Put a copy on a stream."""
        self._call("cudaMemcpyAsync", to, source, size, _DEFAULT, stream)

    def stream(self) -> int:
        """A new stream, which waits for no other."""
        return self._made("cudaStreamCreateWithFlags", _NON_BLOCKING)

    def wait(self, stream: int = 0) -> None:
        """Until all that was put on a stream is done; on the default one of the thread's device when none is named."""
        self._call("cudaStreamSynchronize", stream)

    def drop(self, stream: int) -> None:
        """Give a stream back."""
        self._call("cudaStreamDestroy", stream)

    def handle_of(self, address: int) -> bytes:
        """What another process opens this device memory by."""
        handle = IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(memoryview(handle))

    def open_handle(self, handle: bytes) -> int:
        """The address of another process's device memory, on the thread's device."""
        return self._made("cudaIpcOpenMemHandle", IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)

    def close_handle(self, address: int) -> None:
        """The other process's memory is no longer used."""
        self._call("cudaIpcCloseMemHandle", address)

    def bytes_from(self, address: int) -> int | None:
        """How many bytes of device memory there are from an address on; None where nobody knows."""
        if self._range is None:
            return None
        start, size = ctypes.c_uint64(), _SIZE()
        if self._range(ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address)) != 0:
            return None
        return start.value + size.value - address

    def probe(self, device: int) -> None:
        """Find out whether the process can still use a device, without waiting for its work; see ``lost``."""
        with suppress(CudaError), self.on(device):
            stream = self.stream()
            self.wait(stream)
            self.drop(stream)

    def _made(self, function: str, *arguments: Any) -> int:
        made = _POINTER()
        self._call(function, ctypes.byref(made), *arguments)
        return made.value or 0

    def _call(self, function: str, *arguments: Any) -> None:
        status = self._functions[function](*arguments)
        if status != 0:
            self._forget()  # who shares the runtime asks it what failed last, after calls that have not
            text = self._text(status)
            error = CudaError(function, text.decode() if text else f"error {status}")
            if status in _LASTING and not self.lost:
                self.lost = f"{error.message}: this process can use no GPU any more; restart the server"
                _log.error("CUDA error %d: %s", status, self.lost)
            raise error


@cache
def cuda() -> Cuda:
    """The machine's CUDA runtime. Raises UnsupportedError where there is none.

    Of several it is the first that finds GPUs: one of a later CUDA than the driver's finds none.
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
    """A library; None where there is none of the name."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _candidates() -> Iterator[str]:
    for version in _VERSIONS:  # where the loader looks first: an operator's LD_LIBRARY_PATH wins
        yield f"libcudart.so.{version}"
    for package in _WHEELS:
        try:
            found = importlib.util.find_spec(package)
        except ImportError:
            continue
        for place in (found.submodule_search_locations or ()) if found else ():
            yield from map(str, sorted(Path(place).glob("lib/libcudart.so.*"), reverse=True))
