"""Memory that clients share, mapped; the law: what a client names is opened in one place and nowhere else.

POSIX shared memory is looked for in one directory, a GPU's memory by the handle that its owner has made. A region is
mapped once. Views keep their mapping alive, so that one that is unregistered goes when the last request that uses it
does. A client that shortens an object below a registered region kills whoever reads there (SIGBUS), this server
included: that is why it has to be switched on.
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
"""Each region holds a descriptor, of which many systems give a process 1024."""
_FLAGS = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class SharedMemory:
    """The regions that clients have registered. Thread-safe.

    Args:
        directory: where POSIX shared memory lies.
        runtime: gives the CUDA runtime when the first region of a GPU's memory is registered.
        most: how many regions may be registered at a time.
    """

    def __init__(
        self, directory: Path = DIRECTORY, runtime: Callable[[], Cuda] = cuda, *, most: int = MAX_REGIONS
    ) -> None:
        self._most = most
        self._directory = directory
        self._runtime = runtime
        self._lock = Lock()
        self._regions: dict[str, tuple[AnyRegion, _Mapping]] = {}

    def register(self, region: AnyRegion, /) -> None:
        """Map a region, as `remora.tensors.shared_memory.Regions` says."""
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
                made = self._mapped(region)
            else:
                made = _opened(region, self._runtime)
            self._regions[region.name] = (region, made)

    def _mapped(self, region: Region) -> _Mapping:
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
            return _HostMapping(memoryview(mmap.mmap(descriptor, region.byte_size, offset=region.offset)))
        except (OSError, ValueError):  # the second where the client has just cut it short
            raise unopenable(region.key) from None
        finally:
            os.close(descriptor)

    def status(self, kind: type[R], name: str = "", /) -> Sequence[R]:
        """One region of a kind or all, by name."""
        with self._lock:
            regions = [region for _, (region, _) in sorted(self._regions.items()) if name in ("", region.name)]
        found = [region for region in regions if isinstance(region, kind)]
        if name and not found:
            raise of_another_kind(name, kind) if regions else missing(name, kind)
        return found

    def unregister(self, kind: type[R], name: str = "", /) -> None:
        """Forget one region of a kind or all."""
        with self._lock:
            for key in [name] if name else list(self._regions):
                if key in self._regions and isinstance(self._regions[key][0], kind):
                    del self._regions[key]

    def view(self, place: Place, /) -> memoryview:
        """The bytes of a place: shared with the client, or copied from the device."""
        return self._found(place).view(place.offset, place.byte_size)

    def target(self, place: Place, /) -> Target:
        """A place to write to."""
        return self._found(place).target(place.offset, place.byte_size)

    def _found(self, place: Place) -> _Mapping:
        with self._lock:
            found = self._regions.get(place.region)
        if found is None:
            raise missing(place.region)
        region, mapping = found
        check_within(place, region.byte_size)
        return mapping


class _Mapping(Protocol):
    """A region's memory; offsets and sizes are checked already."""

    def view(self, offset: int, size: int) -> memoryview: ...

    def target(self, offset: int, size: int) -> Target: ...


class _HostMapping(NamedTuple):
    memory: memoryview

    def view(self, offset: int, size: int) -> memoryview:
        return self.memory[offset : offset + size]

    def target(self, offset: int, size: int) -> Target:
        return HostTarget(self.view(offset, size))


class _CudaMapping:
    """Another process's memory on a GPU, closed when nobody refers to this any more."""

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
        return _CudaTarget(self, offset, size)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        given = np.frombuffer(data, np.uint8)
        if given.size:
            with self._runtime.on(self._device):
                self._runtime.copy(self._address + offset, given.ctypes.data, given.size)


class _CudaTarget(NamedTuple):
    mapping: _CudaMapping
    offset: int
    byte_size: int

    def put(self, data: memoryview | bytes) -> None:
        self.mapping.write(self.offset, data)


def _opened(region: CudaRegion, runtime: Callable[[], Cuda]) -> _Mapping:
    """The memory behind a handle. Raises InvalidArgumentError with Triton's texts."""
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
            mapping = _CudaMapping(found, region.device_id, address)
            available = found.bytes_from(address)
    except CudaError as error:
        raise refused(region, f"failed to open CUDA IPC handle: {error.reason}") from None
    check_new(region, available or 0)  # as Triton: what the driver does not tell is not taken at the client's word
    return mapping


def _close(runtime: Cuda, device: int, address: int) -> None:
    try:
        with runtime.on(device):
            runtime.close_handle(address)
    except CudaError:  # its owner has gone, or the driver is being shut down: there is nothing left to close
        pass


SHARED_MEMORY_OFF: Final = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
)
_RESERVED = "triton_python_backend_shm_region_"


class Place(NamedTuple):
    """Part of a region, as a request names it [X04]; offset and size in bytes."""

    region: str
    offset: int
    byte_size: int


class Region(NamedTuple):
    """A registered region: ``byte_size`` bytes of the POSIX shared memory object ``key`` from ``offset`` on."""

    name: str
    key: str
    offset: int
    byte_size: int


class CudaRegion(NamedTuple):
    """A registered region of a GPU's memory [X03], which ``handle``, a cudaIpcMemHandle_t, opens."""

    name: str
    handle: bytes
    device_id: int
    byte_size: int


AnyRegion = Region | CudaRegion
R = TypeVar("R", Region, CudaRegion)


class Target(Protocol):
    """Where an output goes."""

    @property
    def byte_size(self) -> int:
        """How much fits."""

    def put(self, data: memoryview | bytes) -> None:
        """Write from its beginning on; no more than fits."""


class HostTarget(NamedTuple):
    """A place in main memory."""

    place: memoryview

    @property
    def byte_size(self) -> int:
        """How much fits."""
        return len(self.place)

    def put(self, data: memoryview | bytes) -> None:
        """Write from its beginning on."""
        self.place[: len(data)] = data


class Regions(Protocol):
    """The regions that clients have registered [X01-X03], all under one set of names. Each may raise RemoraError.

    Where two kinds of regions have a method in common, the class says which is meant.
    """

    def register(self, region: AnyRegion, /) -> None:
        """Map a region. Raises InternalError, InvalidArgumentError or AlreadyExistsError."""

    def status(self, kind: type[R], name: str = "", /) -> Sequence[R]:
        """One region of a kind or, without a name, all. Raises NotFoundError."""

    def unregister(self, kind: type[R], name: str = "", /) -> None:
        """Forget one region of a kind or all; those that requests use stay mapped until they are answered."""

    def view(self, place: Place, /) -> memoryview:
        """The bytes of a place: the client's own, or a copy where they lie on a device.

        Raises NotFoundError, InvalidArgumentError.
        """

    def target(self, place: Place, /) -> Target:
        """A place to write to. Raises NotFoundError, InvalidArgumentError."""


class Disabled:
    """No regions: what a server has that was not told to let clients share memory."""

    def register(self, region: AnyRegion, /) -> None:
        """Always refused."""
        raise UnsupportedError(SHARED_MEMORY_OFF)

    def status(self, kind: type[R], name: str = "", /) -> Sequence[R]:
        """There are none."""
        if name:
            raise missing(name, kind)
        return ()

    def unregister(self, kind: type[R], name: str = "", /) -> None:
        """Always refused, though there is nothing to forget: so Triton does."""
        raise UnsupportedError(SHARED_MEMORY_OFF)

    def view(self, place: Place, /) -> memoryview:
        """Always refused."""
        raise UnsupportedError(SHARED_MEMORY_OFF)

    def target(self, place: Place, /) -> Target:
        """Always refused."""
        raise UnsupportedError(SHARED_MEMORY_OFF)


DISABLED: Final = Disabled()


def object_name(key: str) -> str:
    """The name of a shared memory object without its slash; keys are no paths. Raises InternalError, as Triton."""
    name = key.removeprefix("/")
    if not name or name in (".", "..") or "/" in name or "\0" in name or len(name.encode("utf-8", "replace")) > 255:
        raise unopenable(key)
    return name


def unopenable(key: str) -> InternalError:
    """The error for a key under which there is nothing that can be opened [X01]."""
    return InternalError(f"Unable to open shared memory region: '{key}'")


def check_key(region: Region, registered: Iterable[AnyRegion]) -> None:
    """Refuse a key that is registered under another name. Raises InternalError, as Triton 2.51."""
    if any(isinstance(other, Region) and other.key == region.key for other in registered):
        raise InternalError(f"Invalid shared memory region: '{region.key}'")


def check_name(region: AnyRegion) -> None:
    """Whether clients may use a name. Raises InvalidArgumentError."""
    if region.name == "" or region.name.startswith(_RESERVED):
        raise refused(region, f"names that are empty or begin with '{_RESERVED}' are reserved")


def check_new(region: AnyRegion, available: int, page: int = 1) -> None:
    """Whether a region lies within the ``available`` bytes that there are. Raises InvalidArgumentError."""
    offset, least = (region.offset, 0) if isinstance(region, Region) else (0, 1)
    if region.byte_size < least or offset < 0 or offset + region.byte_size > available:
        raise refused(region, "invalid args")
    if offset % page or not region.byte_size:  # neither can be mapped
        raise refused(region, "unable to process address spaceInvalid argument")


def refused(region: AnyRegion, why: str) -> InvalidArgumentError:
    """The error for a region that cannot be registered."""
    kind = "" if isinstance(region, Region) else "CUDA "
    return InvalidArgumentError(f"failed to register {kind}shared memory region '{region.name}': {why}")


def check_within(place: Place, region_bytes: int) -> None:
    """Whether a place is part of its region. Raises InvalidArgumentError with Triton's text."""
    if not 0 <= place.offset < region_bytes:
        raise InvalidArgumentError(f"Invalid offset for shared memory region: '{place.region}'")
    if place.byte_size <= 0 or place.offset + place.byte_size > region_bytes:
        raise InvalidArgumentError(f"Invalid offset + byte size for shared memory region: '{place.region}'")


_KINDS: Final[dict[type, str]] = {Region: "system ", CudaRegion: "cuda "}


def missing(name: str, kind: type | None = None) -> NotFoundError:
    """The error for a region that nobody registered; ``kind`` where a list was asked for."""
    return NotFoundError(f"Unable to find {_KINDS[kind] if kind else ''}shared memory region: '{name}'")


def of_another_kind(name: str, kind: type) -> NotFoundError:
    """The error for a region that was asked for as ``kind`` and is of the other one [X02]."""
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
