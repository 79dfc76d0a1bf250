"""Shared memory regions as the protocols see them: where tensors lie outside of messages; the law: pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from remora.errors import InternalError, InvalidArgumentError, NotFoundError, UnsupportedError

SHARED_MEMORY_OFF: Final = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
)
_RESERVED = "triton_python_backend_shm_region_"


class Place(NamedTuple):
    """Part of a region, as a request names it (spec X04); offset and size in bytes."""

    region: str
    offset: int
    byte_size: int


class Region(NamedTuple):
    """A registered region: ``byte_size`` bytes of the POSIX shared memory object ``key`` from ``offset`` on."""

    name: str
    key: str
    offset: int
    byte_size: int


class Regions(Protocol):
    """The regions that clients have registered (spec X01, X02). Each may raise RemoraError."""

    def register(self, region: Region, /) -> None:
        """Map a region. Raises InternalError, InvalidArgumentError or AlreadyExistsError."""

    def status(self, name: str = "", /) -> Sequence[Region]:
        """One region or, without a name, all. Raises NotFoundError."""

    def unregister(self, name: str = "", /) -> None:
        """Forget one region or all; those that requests use stay mapped until they are answered."""

    def view(self, place: Place, /) -> memoryview:
        """The bytes of a place, writable and shared with the client. Raises NotFoundError, InvalidArgumentError."""


class Disabled:
    """No regions: what a server has that was not told to let clients share memory."""

    def register(self, region: Region, /) -> None:
        """Always refused."""
        raise UnsupportedError(SHARED_MEMORY_OFF)

    def status(self, name: str = "", /) -> Sequence[Region]:
        """There are none."""
        return ()

    def unregister(self, name: str = "", /) -> None:
        """Always refused, though there is nothing to forget: so Triton does."""
        raise UnsupportedError(SHARED_MEMORY_OFF)

    def view(self, place: Place, /) -> memoryview:
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
    """The error for a key under which there is nothing that can be opened (spec X01)."""
    return InternalError(f"Unable to open shared memory region: '{key}'")


def check_new(region: Region, page: int, available: int) -> None:
    """Whether a region can be mapped from an object of ``available`` bytes. Raises InvalidArgumentError."""
    failed = f"failed to register shared memory region '{region.name}'"
    if region.name == "" or region.name.startswith(_RESERVED):
        raise InvalidArgumentError(f"{failed}: names that are empty or begin with '{_RESERVED}' are reserved")
    if region.byte_size <= 0 or region.offset < 0 or region.offset + region.byte_size > available:
        raise InvalidArgumentError(f"{failed}: invalid args")
    if region.offset % page:
        raise InvalidArgumentError(f"{failed}: unable to process address spaceInvalid argument")


def check_within(place: Place, region_bytes: int) -> None:
    """Whether a place is part of its region. Raises InvalidArgumentError with Triton's text."""
    if place.offset < 0 or place.byte_size <= 0 or place.offset + place.byte_size > region_bytes:
        raise InvalidArgumentError(f"Invalid offset + byte size for shared memory region: '{place.region}'")


def missing(name: str, kind: str = "") -> NotFoundError:
    """The error for a region that nobody registered; ``kind`` is "system " or "cuda " where a list was asked for."""
    return NotFoundError(f"Unable to find {kind}shared memory region: '{name}'")


def write(output: str, place: memoryview, data: memoryview | bytes) -> None:
    """Copy an output's bytes to its place. Raises InternalError when it is too small (spec X04)."""
    if len(data) > len(place):
        raise InternalError(
            f"shared memory size specified with the request for output '{output}' ({len(place)} bytes) should be at "
            f"least {len(data)} bytes to hold the results"
        )
    place[: len(data)] = data
