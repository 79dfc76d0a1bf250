"""Shared memory regions as the protocols see them: where tensors lie outside of messages; the law: pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

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


class CudaRegion(NamedTuple):
    """A registered region of a GPU's memory (spec X03), which ``handle``, a cudaIpcMemHandle_t, opens."""

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
    """The regions that clients have registered (spec X01-X03), all under one set of names. Each may raise RemoraError.

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
    """The error for a key under which there is nothing that can be opened (spec X01)."""
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
    """The error for a region that was asked for as ``kind`` and is of the other one (spec X02)."""
    is_, asked = ("CUDA", "system") if kind is Region else ("system", "CUDA")
    return NotFoundError(f"The region named '{name}' is registered as {is_} shared memory, not {asked} shared memory")


def write(output: str, target: Target, data: memoryview | bytes) -> None:
    """Copy an output's bytes to its place. Raises InternalError when it is too small (spec X04)."""
    if len(data) > target.byte_size:
        raise InternalError(
            f"shared memory size specified with the request for output '{output}' ({target.byte_size} bytes) should be "
            f"at least {len(data)} bytes to hold the results"
        )
    target.put(data)
