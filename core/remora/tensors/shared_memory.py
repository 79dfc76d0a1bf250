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
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np

from remora.errors import AlreadyExistsError, InvalidArgumentError, UnsupportedError
from remora.system.cuda import Cuda, CudaError, cuda
from remora.tensors.regions import (
    AnyRegion,
    CudaRegion,
    HostTarget,
    Place,
    R,
    Region,
    Target,
    check_key,
    check_name,
    check_new,
    check_within,
    missing,
    object_name,
    of_another_kind,
    refused,
    unopenable,
)

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
        """Map a region, as `remora.tensors.regions.Regions` says."""
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
