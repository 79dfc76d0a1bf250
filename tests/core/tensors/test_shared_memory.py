"""Regions of clients: what a key or handle may name, what is mapped, and for how long."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import AlreadyExistsError, InternalError, InvalidArgumentError, NotFoundError, UnsupportedError
from remora.system.cuda import Cuda
from remora.tensors.shared_memory import CudaRegion, Place, Region, SharedMemory, object_name, write
from support.models.cuda_stand_in import DEVICE, OPENED, StandIn

PAGE = mmap.ALLOCATIONGRANULARITY


@pytest.fixture
def memory(tmp_path: Path) -> SharedMemory:
    """One object `/a` of two pages, in a directory that stands for the system's."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "a").write_bytes(bytes(2 * PAGE))
    (tmp_path / "secret").write_bytes(bytes(PAGE))
    (tmp_path / "shm" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "shm" / "folder").mkdir()
    os.mkfifo(tmp_path / "shm" / "pipe")
    return SharedMemory(tmp_path / "shm")


def test_a_place_is_read_and_written_where_its_region_lies(memory: SharedMemory, tmp_path: Path) -> None:
    memory.register(Region("r", "/a", PAGE, 64))
    write("OUT", memory.target(Place("r", 8, 4)), b"abcd")
    assert (tmp_path / "shm" / "a").read_bytes()[PAGE + 8 : PAGE + 12] == b"abcd"
    assert bytes(memory.view(Place("r", 7, 6))) == b"\0abcd\0"


def test_an_object_that_its_client_has_shrunk_is_refused_for_inputs_and_outputs(
    memory: SharedMemory, tmp_path: Path
) -> None:
    memory.register(Region("r", "/a", PAGE, PAGE))
    target = memory.target(Place("r", 0, 64))
    os.truncate(tmp_path / "shm" / "a", PAGE + 63)
    for use in (
        lambda: memory.view(Place("r", 0, 64)),
        lambda: memory.target(Place("r", 0, 64)),
        lambda: write("OUT", target, bytes(64)),  # shrunk while its request ran
    ):
        with pytest.raises(InvalidArgumentError, match="region 'r' has become smaller: its object '/a' ends before"):
            use()
    assert len(memory.view(Place("r", 0, 63))) == 63, "what is left"
    write("OUT", target, bytes(63))
    os.truncate(tmp_path / "shm" / "a", 2 * PAGE)
    assert len(memory.view(Place("r", 0, 64))) == 64


def test_an_object_that_shrinks_while_it_is_read_is_refused(
    memory: SharedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.register(Region("r", "/a", 0, 2 * PAGE))
    ask = os.fstat

    def cutting(descriptor: int) -> os.stat_result:
        found = ask(descriptor)
        os.truncate(tmp_path / "shm" / "a", PAGE)
        return found

    monkeypatch.setattr(os, "fstat", cutting)
    with pytest.raises(InvalidArgumentError, match="region 'r' has become smaller"):
        memory.view(Place("r", 0, 2 * PAGE))


def test_an_unregistered_region_is_closed_after_its_last_use(memory: SharedMemory, tmp_path: Path) -> None:
    memory.register(Region("r", "/a", 0, 16))
    target = memory.target(Place("r", 0, 16))
    memory.unregister(Region, "r")
    write("OUT", target, bytes(16))
    assert _open_objects(tmp_path) == 1
    del target
    gc.collect()
    assert _open_objects(tmp_path) == 0


def _open_objects(folder: Path) -> int:
    """Count the descriptors of this process on files in a folder."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing
            count += os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/")
    return count


@pytest.mark.parametrize(
    "key", ["", "/", "..", "/..", "/.", "/../secret", "a/b", "//a", "/link", "/folder", "/pipe", "/nothing", "/a\0"]
)
def test_a_key_names_an_object_and_never_a_path(memory: SharedMemory, key: str) -> None:
    with pytest.raises(InternalError) as caught:
        memory.register(Region("r", key, 0, 4))
    assert caught.value.message == f"Unable to open shared memory region: '{key}'"
    assert memory.status(Region) == []


@given(key=st.text() | st.text("./a"))
def test_no_key_leads_out_of_the_directory(key: str) -> None:
    try:
        name = object_name(key)
    except InternalError:
        return
    assert (Path("/d") / name).parent == Path("/d")
    assert name not in (".", "..")


@pytest.mark.parametrize(
    ("offset", "size", "why"),
    [
        (0, 2 * PAGE + 1, "invalid args"),
        (PAGE, PAGE + 1, "invalid args"),
        (0, -1, "invalid args"),
        (0, 0, "unable to process address spaceInvalid argument"),
        (2**64 - 1, 2, "invalid args"),
        (16, 16, "unable to process address spaceInvalid argument"),
    ],
)
def test_a_region_beyond_its_object_is_refused(memory: SharedMemory, offset: int, size: int, why: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        memory.register(Region("r", "/a", offset, size))
    assert caught.value.message == f"failed to register shared memory region 'r': {why}"


def test_a_name_is_taken_until_it_is_given_back(memory: SharedMemory) -> None:
    region = Region("r", "/a", 0, 16)
    memory.register(region)
    with pytest.raises(AlreadyExistsError, match="shared memory region 'r' already in manager"):
        memory.register(region)
    assert memory.status(Region, "r") == [region]
    memory.unregister(Region, "r")
    memory.unregister(Region, "r")
    memory.register(region)
    memory.unregister(Region)
    with pytest.raises(NotFoundError, match="Unable to find system shared memory region: 'r'"):
        memory.status(Region, "r")


def test_a_key_is_registered_under_one_name_at_a_time(memory: SharedMemory) -> None:
    memory.register(Region("r", "/a", 0, 8))
    for offset, size in ((0, 8), (PAGE, 8), (0, 9 * PAGE)):
        with pytest.raises(InternalError, match=r"^Invalid shared memory region: '/a'$"):
            memory.register(Region("other", "/a", offset, size))
    memory.register(Region("without its slash", "a", 0, 8))
    memory.unregister(Region, "r")
    memory.register(Region("other", "/a", 0, 8))


def test_a_view_outlives_its_region(memory: SharedMemory) -> None:
    memory.register(Region("r", "/a", 0, 16))
    view = memory.view(Place("r", 0, 16))
    memory.unregister(Region, "r")
    view[:] = b"0123456789abcdef"
    assert bytes(view) == b"0123456789abcdef"
    with pytest.raises(NotFoundError, match="Unable to find shared memory region: 'r'"):
        memory.view(Place("r", 0, 16))


@given(offset=st.integers(-4, 80) | st.integers(), size=st.integers(-4, 80) | st.integers())
def test_a_view_lies_within_its_region_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, offset: int, size: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "object").write_bytes(bytes(PAGE))
    memory = SharedMemory(folder)
    memory.register(Region("r", "/object", 0, 64))
    if offset >= 0 and size > 0 and offset + size <= 64:
        assert len(memory.view(Place("r", offset, size))) == size
    else:
        what = "offset \\+ byte size" if 0 <= offset < 64 else "offset"
        with pytest.raises(InvalidArgumentError, match=f"Invalid {what} for shared memory region: 'r'"):
            memory.view(Place("r", offset, size))


# -- a GPU's memory -------------------------------------------------------------------------------------------------

ROWS = np.arange(8, dtype="f4")


class Lent:
    """A client's device memory: it stands for another process, which made a handle."""

    def __init__(self, stand_in: StandIn) -> None:
        self.runtime = stand_in.runtime
        self.address = stand_in.runtime.take(ROWS.nbytes)
        self.runtime.copy(self.address, ROWS.ctypes.data, ROWS.nbytes)
        self.region = CudaRegion("g", stand_in.runtime.handle_of(self.address), 0, ROWS.nbytes)

    def contents(self) -> list[float]:
        found = np.zeros_like(ROWS)
        self.runtime.copy(found.ctypes.data, self.address, found.nbytes)
        return found.tolist()  # type: ignore[no-any-return]


@pytest.fixture
def lent(stand_in: StandIn) -> Iterator[Lent]:
    before = stand_in.held(DEVICE)
    made = Lent(stand_in)
    yield made
    made.runtime.free(made.address)
    assert stand_in.held(DEVICE) == before, "memory was left behind"


@pytest.fixture
def gpu(stand_in: StandIn, tmp_path: Path) -> Iterator[SharedMemory]:
    made = SharedMemory(tmp_path, lambda: stand_in.runtime)
    yield made
    made.unregister(CudaRegion)
    gc.collect()
    assert stand_in.held(OPENED) == 0, "handles were left open"


def test_a_gpus_memory_is_read_and_written_through_its_handle(gpu: SharedMemory, lent: Lent) -> None:
    gpu.register(lent.region)
    assert gpu.view(Place("g", 8, 8)).tobytes() == ROWS[2:4].tobytes()
    write("y", gpu.target(Place("g", 16, 8)), ROWS[:2].tobytes())
    assert lent.contents() == [0, 1, 2, 3, 0, 1, 6, 7]
    with pytest.raises(InternalError, match=r"request for output 'y' \(4 bytes\) should be at least 8 bytes"):
        write("y", gpu.target(Place("g", 0, 4)), ROWS[:2].tobytes())


def test_both_kinds_of_regions_share_their_names_and_are_listed_separately(
    gpu: SharedMemory, lent: Lent, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(bytes(PAGE))
    gpu.register(Region("h", "/a", 0, 16))
    gpu.register(lent.region)
    with pytest.raises(AlreadyExistsError, match="shared memory region 'g' already in manager"):
        gpu.register(Region("g", "/a", 0, 16))
    assert gpu.status(CudaRegion) == [lent.region]
    assert [region.name for region in gpu.status(Region)] == ["h"]
    with pytest.raises(NotFoundError, match="'h' is registered as system shared memory, not CUDA shared memory"):
        gpu.status(CudaRegion, "h")
    with pytest.raises(NotFoundError, match="'g' is registered as CUDA shared memory, not system shared memory"):
        gpu.status(Region, "g")
    gpu.unregister(Region, "g")
    gpu.unregister(Region)
    assert gpu.status(CudaRegion, "g") == [lent.region]
    gpu.unregister(CudaRegion)
    assert gpu.status(CudaRegion) == []


def test_a_handle_is_closed_when_its_last_user_has_gone(gpu: SharedMemory, lent: Lent, stand_in: StandIn) -> None:
    gpu.register(lent.region)
    target = gpu.target(Place("g", 0, 4))
    gpu.unregister(CudaRegion, "g")
    assert stand_in.held(OPENED) == 1
    target.put(ROWS[5:6].tobytes())
    assert lent.contents()[0] == 5
    del target
    gc.collect()
    assert stand_in.held(OPENED) == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"byte_size": ROWS.nbytes + mmap.PAGESIZE}, "invalid args"),
        ({"byte_size": 0}, "invalid args"),
        ({"device_id": 5}, "failed to open CUDA IPC handle: invalid device ordinal"),
        ({"handle": b"/nobody".ljust(64, b"\0")}, "failed to open CUDA IPC handle: invalid resource handle"),
        ({"handle": b"/" * 64}, "failed to open CUDA IPC handle: invalid resource handle"),
        ({"name": ""}, "names that are empty or begin with 'triton_python_backend_shm_region_' are reserved"),
    ],
)
def test_a_region_that_no_handle_opens_is_refused(
    gpu: SharedMemory, lent: Lent, change: dict[str, object], why: str
) -> None:
    region = lent.region._replace(**change)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError) as caught:
        gpu.register(region)
    assert caught.value.message == f"failed to register CUDA shared memory region '{region.name}': {why}"
    assert gpu.status(CudaRegion) == []


def test_memory_of_unknown_size_is_not_taken_at_the_clients_word(stand_in: StandIn, lent: Lent, tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path, lambda: Cuda(stand_in.library))
    with pytest.raises(InvalidArgumentError, match="region 'g': invalid args"):
        memory.register(lent.region)
    gc.collect()
    assert stand_in.held(OPENED) == 0


def test_without_cuda_there_are_no_gpus_to_share(tmp_path: Path) -> None:
    def absent() -> None:
        raise UnsupportedError("there is no CUDA runtime")

    with pytest.raises(InvalidArgumentError) as caught:
        SharedMemory(tmp_path, absent).register(CudaRegion("g", bytes(64), 0, 4))  # type: ignore[arg-type]
    assert caught.value.message == "failed to register CUDA shared memory region: 'g', GPUs not supported"


def test_no_more_regions_are_registered_than_the_operator_allows(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(bytes(PAGE))
    memory = SharedMemory(tmp_path, most=2)
    for name in "ab":
        memory.register(Region(name, f"/{name}", 0, 8))
    with pytest.raises(InvalidArgumentError, match=r"there are 2 already.*--max-client-shm-regions"):
        memory.register(Region("c", "/c", 0, 8))
    memory.unregister(Region, "a")
    memory.register(Region("c", "/c", 0, 8))
