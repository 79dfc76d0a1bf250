"""Regions of clients: what a key may name, what is mapped, and for how long."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import AlreadyExistsError, InternalError, InvalidArgumentError, NotFoundError
from remora.regions import Place, Region, object_name
from remora.system.shared_memory import SharedMemory

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


def test_a_view_is_the_memory_itself(memory: SharedMemory, tmp_path: Path) -> None:
    memory.register(Region("r", "/a", PAGE, 64))
    memory.view(Place("r", 8, 4))[:] = b"abcd"
    assert (tmp_path / "shm" / "a").read_bytes()[PAGE + 8 : PAGE + 12] == b"abcd"


@pytest.mark.parametrize(
    "key", ["", "/", "..", "/..", "/.", "/../secret", "a/b", "//a", "/link", "/folder", "/pipe", "/nothing", "/a\0"]
)
def test_a_key_names_an_object_and_never_a_path(memory: SharedMemory, key: str) -> None:
    with pytest.raises(InternalError) as caught:
        memory.register(Region("r", key, 0, 4))
    assert caught.value.message == f"Unable to open shared memory region: '{key}'"
    assert memory.status() == []


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
        (0, 0, "invalid args"),
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
    assert memory.status("r") == [region]
    memory.unregister("r")
    memory.unregister("r")
    memory.register(region)
    memory.unregister()
    with pytest.raises(NotFoundError, match="Unable to find system shared memory region: 'r'"):
        memory.status("r")


def test_a_view_outlives_its_region(memory: SharedMemory) -> None:
    memory.register(Region("r", "/a", 0, 16))
    view = memory.view(Place("r", 0, 16))
    memory.unregister("r")
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
        with pytest.raises(InvalidArgumentError, match="Invalid offset \\+ byte size for shared memory region: 'r'"):
            memory.view(Place("r", offset, size))
