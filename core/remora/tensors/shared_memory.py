"""Shared memory regions of clients.

POSIX shared memory is opened in one directory, GPU memory by the IPC handle of its owner. A region is opened once, and
an unregistered one is closed after the last request that uses it. POSIX objects are read and written through their
descriptor and never mapped: a client may shrink its object at any time, and touching a page beyond its end would end
this process (SIGBUS).

Only this module opens names that clients send.
"""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np

from remora.errors import AlreadyExistsError, InternalError, InvalidArgumentError, NotFoundError, UnsupportedError
from remora.system.cuda import Cuda, CudaError, cuda

DIRECTORY = Path("/dev/shm")
MAX_REGIONS = 512
"""Each region holds a descriptor, and many systems limit a process to 1024."""
_FLAGS = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class SharedMemory:
    """The regions that clients have registered. Thread-safe.

    Args:
        directory: directory of POSIX shared memory objects.
        runtime: returns the CUDA runtime; called when the first GPU region is registered.
        most: maximum number of registered regions.
    """

    def __init__(
        self, directory: Path = DIRECTORY, runtime: Callable[[], Cuda] = cuda, *, most: int = MAX_REGIONS
    ) -> None:
        self._most = most
        self._directory = directory
        self._runtime = runtime
        self._lock = Lock()
        self._regions: dict[str, tuple[AnyRegion, _Memory]] = {}

    def register(self, region: AnyRegion, /) -> None:
        with self._lock:
            if region.name in self._regions:
                raise AlreadyExistsError(f"shared memory region '{region.name}' already in manager")
            if len(self._regions) >= self._most:
                raise InvalidArgumentError(
                    f"failed to register shared memory region '{region.name}': there are {self._most} already. "
                    "Unregister some, or start the server with a larger --max-client-shm-regions"
                )
            if isinstance(region, Region):
                check_key(region, [other for other, _ in self._regions.values()])
                memory = self._open(region)
            else:
                memory = _opened(region, self._runtime)
            self._regions[region.name] = (region, memory)

    def _open(self, region: Region) -> _Memory:
        path = self._directory / object_name(region.key)
        try:
            descriptor = os.open(path, _FLAGS)
        except (OSError, ValueError):
            raise unopenable(region.key) from None
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise unopenable(region.key)
            check_name(region)
            check_new(region, state.st_size, mmap.ALLOCATIONGRANULARITY)
        except BaseException:
            os.close(descriptor)
            raise
        return _HostMemory(region, descriptor)

    def status(self, kind: type[R], name: str = "", /) -> Sequence[R]:
        with self._lock:
            regions = [region for _, (region, _) in sorted(self._regions.items()) if name in ("", region.name)]
        found = [region for region in regions if isinstance(region, kind)]
        if name and not found:
            raise of_another_kind(name, kind) if regions else missing(name, kind)
        return found

    def unregister(self, kind: type[R], name: str = "", /) -> None:
        with self._lock:
            for key in [name] if name else list(self._regions):
                if key in self._regions and isinstance(self._regions[key][0], kind):
                    del self._regions[key]

    def view(self, place: Place, /) -> memoryview:
        """Return a copy of the bytes of a place."""
        return self._found(place).view(place.offset, place.byte_size)

    def target(self, place: Place, /) -> Target:
        return self._found(place).target(place.offset, place.byte_size)

    def _found(self, place: Place) -> _Memory:
        with self._lock:
            found = self._regions.get(place.region)
        if found is None:
            raise missing(place.region)
        region, memory = found
        check_within(place, region.byte_size)
        return memory


class _Memory(Protocol):
    """A region's memory. Callers have checked offsets and sizes."""

    def view(self, offset: int, size: int) -> memoryview: ...

    def target(self, offset: int, size: int) -> Target: ...

    def write(self, offset: int, data: memoryview | bytes) -> None: ...


class _Target(NamedTuple):
    memory: _Memory
    offset: int
    byte_size: int

    def put(self, data: memoryview | bytes) -> None:
        self.memory.write(self.offset, data)


class _HostMemory:
    """A POSIX shared memory object, closed with the last reference."""

    def __init__(self, region: Region, descriptor: int) -> None:
        self._region = region
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def view(self, offset: int, size: int) -> memoryview:
        self._check(offset, size)
        copied = np.empty(size, np.uint8).data
        at, rest = self._region.offset + offset, copied
        while rest:
            count = os.preadv(self._descriptor, [rest], at)
            if not count:  # the client has shrunk the object since the check
                self._check(offset, size)
                raise self._shrunk(offset + size)
            at, rest = at + count, rest[count:]
        return copied

    def target(self, offset: int, size: int) -> Target:
        self._check(offset, size)
        return _Target(self, offset, size)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        rest = memoryview(data).cast("B")
        self._check(offset, len(rest))
        at = self._region.offset + offset
        while rest:
            try:
                count = os.pwrite(self._descriptor, rest, at)
            except OSError as error:  # the system has no room for pages that the client has not touched
                name = self._region.name
                raise InternalError(f"shared memory region '{name}' cannot be written: {error.strerror}") from None
            at, rest = at + count, rest[count:]

    def _check(self, offset: int, size: int) -> None:
        """Refuse a range that the object does not have any more."""
        if self._region.offset + offset + size > os.fstat(self._descriptor).st_size:
            raise self._shrunk(offset + size)

    def _shrunk(self, end: int) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"shared memory region '{self._region.name}' has become smaller: its object '{self._region.key}' ends "
            f"before byte {self._region.offset + end}. Register the region again"
        )


class _CudaMemory:
    """Another process's GPU memory, closed with the last reference."""

    def __init__(self, runtime: Cuda, device: int, address: int) -> None:
        self._runtime = runtime
        self._device = device
        self._address = address
        weakref.finalize(self, _close, runtime, device, address)

    def view(self, offset: int, size: int) -> memoryview:
        copied = np.empty(size, np.uint8)
        with self._runtime.on(self._device):
            self._runtime.copy(copied.ctypes.data, self._address + offset, size)
        return copied.data

    def target(self, offset: int, size: int) -> Target:
        return _Target(self, offset, size)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        source = np.frombuffer(data, np.uint8)
        if source.size:
            with self._runtime.on(self._device):
                self._runtime.copy(self._address + offset, source.ctypes.data, source.size)


def _opened(region: CudaRegion, runtime: Callable[[], Cuda]) -> _Memory:
    """Open the memory behind a handle. Raises InvalidArgumentError with Triton's texts."""
    check_name(region)
    try:
        found = runtime()
    except UnsupportedError:
        raise InvalidArgumentError(
            f"failed to register CUDA shared memory region: '{region.name}', GPUs not supported"
        ) from None
    try:
        with found.on(region.device_id):
            address = found.open_handle(region.handle)
            memory = _CudaMemory(found, region.device_id, address)
            available = found.bytes_from(address)
    except CudaError as error:
        raise refused(region, f"failed to open CUDA IPC handle: {error.reason}") from None
    check_new(region, available or 0)  # a size that the driver does not report is refused, as in Triton
    return memory


def _close(runtime: Cuda, device: int, address: int) -> None:
    try:
        with runtime.on(device):
            runtime.close_handle(address)
    except CudaError:  # the owning process has exited, or the driver is shutting down
        pass


SHARED_MEMORY_OFF: Final = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
)
_RESERVED = "triton_python_backend_shm_region_"


class Place(NamedTuple):
    """A part of a region, as a request names it [X04], with offset and size in bytes."""

    region: str
    offset: int
    byte_size: int


class Region(NamedTuple):
    """Registered region.

    It has ``byte_size`` bytes from ``offset`` of the POSIX shared memory object ``key``.
    """

    name: str
    key: str
    offset: int
    byte_size: int


class CudaRegion(NamedTuple):
    """A registered region of GPU memory [X03], opened by ``handle``, a cudaIpcMemHandle_t."""

    name: str
    handle: bytes
    device_id: int
    byte_size: int


AnyRegion = Region | CudaRegion
R = TypeVar("R", Region, CudaRegion)


class Target(Protocol):
    """The destination of an output."""

    @property
    def byte_size(self) -> int:
        """The capacity in bytes."""

    def put(self, data: memoryview | bytes) -> None:
        """Write from the start of the target. ``data`` must fit."""


class Regions(Protocol):
    """The regions that clients have registered [X01-X03], in one namespace.

    Each method may raise RemoraError. Methods that serve both kinds of regions take the class of the kind.
    """

    def register(self, region: AnyRegion, /) -> None:
        """Open a region. Raises InternalError, InvalidArgumentError or AlreadyExistsError."""

    def status(self, kind: type[R], name: str = "", /) -> Sequence[R]:
        """Return one region of a kind or, without a name, all. Raises NotFoundError."""

    def unregister(self, kind: type[R], name: str = "", /) -> None:
        """Unregister one region of a kind or all. Regions stay open while requests use them."""

    def view(self, place: Place, /) -> memoryview:
        """Return a copy of the bytes of a place.

        Raises NotFoundError, InvalidArgumentError.
        """

    def target(self, place: Place, /) -> Target:
        """Return a place to write to. Raises NotFoundError, InvalidArgumentError."""


class Disabled:
    """The regions of a server that does not allow clients to share memory."""

    def register(self, region: AnyRegion, /) -> None:
        """Raise UnsupportedError."""
        raise UnsupportedError(SHARED_MEMORY_OFF)

    def status(self, kind: type[R], name: str = "", /) -> Sequence[R]:
        """Return no regions. Raise NotFoundError for a name."""
        if name:
            raise missing(name, kind)
        return ()

    def unregister(self, kind: type[R], name: str = "", /) -> None:
        """Raise UnsupportedError, as Triton does."""
        raise UnsupportedError(SHARED_MEMORY_OFF)

    def view(self, place: Place, /) -> memoryview:
        """Raise UnsupportedError."""
        raise UnsupportedError(SHARED_MEMORY_OFF)

    def target(self, place: Place, /) -> Target:
        """Raise UnsupportedError."""
        raise UnsupportedError(SHARED_MEMORY_OFF)


DISABLED: Final = Disabled()


def object_name(key: str) -> str:
    """Return the object name of a key without its slash.

    Raises InternalError for a path, as Triton does.
    """
    name = key.removeprefix("/")
    if not name or name in (".", "..") or "/" in name or "\0" in name or len(name.encode("utf-8", "replace")) > 255:
        raise unopenable(key)
    return name


def unopenable(key: str) -> InternalError:
    """Return the error for a key whose object cannot be opened [X01]."""
    return InternalError(f"Unable to open shared memory region: '{key}'")


def check_key(region: Region, registered: Iterable[AnyRegion]) -> None:
    """Refuse a key that is registered under another name.

    Raises InternalError, as Triton 2.51 does.
    """
    if any(isinstance(other, Region) and other.key == region.key for other in registered):
        raise InternalError(f"Invalid shared memory region: '{region.key}'")


def check_name(region: AnyRegion) -> None:
    """Refuse a reserved name. Raises InvalidArgumentError."""
    if region.name == "" or region.name.startswith(_RESERVED):
        raise refused(region, f"names that are empty or begin with '{_RESERVED}' are reserved")


def check_new(region: AnyRegion, available: int, page: int = 1) -> None:
    """Refuse a region beyond the ``available`` bytes of its object. Raises InvalidArgumentError."""
    offset, least = (region.offset, 0) if isinstance(region, Region) else (0, 1)
    if region.byte_size < least or offset < 0 or offset + region.byte_size > available:
        raise refused(region, "invalid args")
    if offset % page or not region.byte_size:  # neither can be mapped
        raise refused(region, "unable to process address spaceInvalid argument")


def refused(region: AnyRegion, why: str) -> InvalidArgumentError:
    """Return the error for a region that cannot be registered."""
    kind = "" if isinstance(region, Region) else "CUDA "
    return InvalidArgumentError(f"failed to register {kind}shared memory region '{region.name}': {why}")


def check_within(place: Place, region_bytes: int) -> None:
    """Refuse a place outside its region. Raises InvalidArgumentError with Triton's text."""
    if not 0 <= place.offset < region_bytes:
        raise InvalidArgumentError(f"Invalid offset for shared memory region: '{place.region}'")
    if place.byte_size <= 0 or place.offset + place.byte_size > region_bytes:
        raise InvalidArgumentError(f"Invalid offset + byte size for shared memory region: '{place.region}'")


_KINDS: Final[dict[type, str]] = {Region: "system ", CudaRegion: "cuda "}


def missing(name: str, kind: type | None = None) -> NotFoundError:
    """Return the error for an unregistered region.

    ``kind`` is the kind that a status call named.
    """
    return NotFoundError(f"Unable to find {_KINDS[kind] if kind else ''}shared memory region: '{name}'")


def of_another_kind(name: str, kind: type) -> NotFoundError:
    """Return the error for a region of the other kind than ``kind`` [X02]."""
    is_, asked = ("CUDA", "system") if kind is Region else ("system", "CUDA")
    return NotFoundError(f"The region named '{name}' is registered as {is_} shared memory, not {asked} shared memory")


def write(output: str, target: Target, data: memoryview | bytes) -> None:
    """Copy an output's bytes to its place. Raises InternalError when it is too small [X04]."""
    if len(data) > target.byte_size:
        raise InternalError(
            f"shared memory size specified with the request for output '{output}' ({target.byte_size} bytes) should be "
            f"at least {len(data)} bytes to hold the results"
        )
    target.put(data)
