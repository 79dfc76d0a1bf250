"""POSIX shared memory of clients, mapped; the law: a key names an object in one directory and nothing else.

A region is mapped once. Views keep their mapping alive, so that one that is unregistered goes when the last request
that uses it does. A client that shortens an object below a registered region kills whoever reads there (SIGBUS), this
server included: that is why it has to be switched on.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from remora.errors import AlreadyExistsError, InvalidArgumentError
from remora.regions import Place, Region, check_new, check_within, missing, object_name, unopenable

DIRECTORY = Path("/dev/shm")
MAX_REGIONS = 4096
_FLAGS = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class SharedMemory:
    """The regions that clients have registered. Thread-safe."""

    def __init__(self, directory: Path = DIRECTORY) -> None:
        self._directory = directory
        self._lock = Lock()
        self._regions: dict[str, tuple[Region, memoryview]] = {}

    def register(self, region: Region, /) -> None:
        """Map a region, as `remora.regions.Regions` says."""
        with self._lock:
            if region.name in self._regions:
                raise AlreadyExistsError(f"shared memory region '{region.name}' already in manager")
            if len(self._regions) >= MAX_REGIONS:
                raise InvalidArgumentError(
                    f"failed to register shared memory region '{region.name}': there are {MAX_REGIONS} already, "
                    "unregister some"
                )
            self._regions[region.name] = (region, self._mapped(region))

    def _mapped(self, region: Region) -> memoryview:
        path = self._directory / object_name(region.key)
        try:
            descriptor = os.open(path, _FLAGS)
        except (OSError, ValueError):
            raise unopenable(region.key) from None
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise unopenable(region.key)
            check_new(region, mmap.ALLOCATIONGRANULARITY, state.st_size)
            return memoryview(mmap.mmap(descriptor, region.byte_size, offset=region.offset))
        except OSError:
            raise unopenable(region.key) from None
        finally:
            os.close(descriptor)

    def status(self, name: str = "", /) -> Sequence[Region]:
        """One region or all, by name."""
        with self._lock:
            if not name:
                return [region for _, (region, _) in sorted(self._regions.items())]
            if name not in self._regions:
                raise missing(name, "system ")
            return [self._regions[name][0]]

    def unregister(self, name: str = "", /) -> None:
        """Forget one region or all."""
        with self._lock:
            if name:
                self._regions.pop(name, None)
            else:
                self._regions.clear()

    def view(self, place: Place, /) -> memoryview:
        """The bytes of a place, shared with the client."""
        with self._lock:
            found = self._regions.get(place.region)
        if found is None:
            raise missing(place.region)
        region, mapped = found
        check_within(place, region.byte_size)
        return mapped[place.offset : place.offset + place.byte_size]
