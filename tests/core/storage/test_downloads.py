"""Ranges into files: whole and checked, or not there; and resumed where they were left."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import UnavailableError
from remora.storage import ChangedError, StoredObject
from remora.storage.downloads import (
    DamagedError,
    Downloads,
    Wanted,
    digest_of_file,
    expected_md5,
    journal_of,
    ranges_of,
)
from remora.storage.objects import ObjectStorage
from support.servers.object_store import ObjectStore

Opened = Callable[[str], ObjectStorage]
CONTENT = bytes(range(256)) * 40


@given(st.integers(0, 10_000), st.integers(1, 3000))
def test_ranges_cover_a_file_without_gap_or_overlap(size: int, range_bytes: int) -> None:
    ranges = ranges_of(size, range_bytes)
    assert [byte for start, end in ranges for byte in (start, end)][:: len(ranges) * 2 or 1] == ([0] if size else [])
    assert all(0 < end - start <= range_bytes for start, end in ranges)
    assert all(first[1] == second[0] for first, second in itertools.pairwise(ranges))
    assert sum(end - start for start, end in ranges) == size


@pytest.mark.parametrize(
    ("etag", "md5"),
    [
        (f'"{"a" * 32}"', "a" * 32),
        ("a" * 32, "a" * 32),
        (f'"{"a" * 32}-4"', ""),
        ('"0x8D4BCC2E4835CD0"', ""),
        ("W/abc", ""),
        ("", ""),
    ],
)
def test_only_an_etag_that_looks_like_a_checksum_is_taken_for_one(etag: str, md5: str) -> None:
    assert expected_md5(etag) == md5


@pytest.fixture
def downloads() -> Iterator[Downloads]:
    made = Downloads("boot-1", range_bytes=1000, connections=4)
    yield made
    made.close()


def wanted(storage: ObjectStorage, folder: Path) -> list[Wanted]:
    return [Wanted(item, folder / item.path) for item in storage.listing()]


def test_a_file_arrives_in_ranges_with_its_checksum(
    clouds: ObjectStore, opened: Opened, downloads: Downloads, tmp_path: Path
) -> None:
    clouds.put("bucket", "r/x", CONTENT)
    storage = opened("s3://bucket/r")
    (arrived,) = downloads.fetch(storage, wanted(storage, tmp_path))
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert arrived.digest == f"md5:{hashlib.md5(CONTENT).hexdigest()}"
    assert digest_of_file(tmp_path / "x", arrived.digest) == arrived.digest
    assert (arrived.fetched_bytes, clouds.count("GET")) == (len(CONTENT), 11)
    assert not journal_of(tmp_path / "x").exists()
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o444


def test_an_empty_file_arrives_without_a_request(
    clouds: ObjectStore, opened: Opened, downloads: Downloads, tmp_path: Path
) -> None:
    clouds.put("bucket", "r/x", b"")
    storage = opened("s3://bucket/r")
    assert len(list(downloads.fetch(storage, wanted(storage, tmp_path)))) == 1
    assert (tmp_path / "x").read_bytes() == b""
    assert clouds.count("GET") == 0


def test_more_files_than_descriptors_arrive(
    clouds: ObjectStore, opened: Opened, downloads: Downloads, tmp_path: Path
) -> None:
    for number in range(150):
        clouds.put("bucket", f"r/{number}", b"%d" % number)
    storage = opened("s3://bucket/r")
    assert len(list(downloads.fetch(storage, wanted(storage, tmp_path)))) == 150
    assert all((tmp_path / str(number)).read_text() == str(number) for number in range(150))


def stopped_in_the_middle(clouds: ObjectStore, storage: ObjectStorage, downloads: Downloads, folder: Path) -> None:
    """A download that failed when half of its ranges were there."""
    seen: list[str] = []

    def before(request: object) -> None:
        seen.append("")
        if len(seen) > 5:
            clouds.fail("403")

    clouds.before = before
    with pytest.raises(UnavailableError):
        list(downloads.fetch(storage, wanted(storage, folder)))
    clouds.before = lambda seen: None
    clouds.faults.clear()
    clouds.requests.clear()


def test_what_was_left_in_the_middle_is_gone_on_with(
    clouds: ObjectStore, opened: Opened, downloads: Downloads, tmp_path: Path
) -> None:
    clouds.put("bucket", "r/x", CONTENT)
    storage = opened("s3://bucket/r")
    stopped_in_the_middle(clouds, storage, downloads, tmp_path)
    (arrived,) = downloads.fetch(storage, wanted(storage, tmp_path))
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert 0 < clouds.count("GET") < 11
    assert arrived.fetched_bytes < len(CONTENT)


@pytest.mark.parametrize("case", ["another boot", "another object", "journal cut off", "file cut short"])
def test_what_was_left_is_not_believed_when_it_may_be_wrong(
    clouds: ObjectStore, opened: Opened, downloads: Downloads, tmp_path: Path, case: str
) -> None:
    clouds.put("bucket", "r/x", CONTENT)
    storage = opened("s3://bucket/r")
    stopped_in_the_middle(clouds, storage, downloads, tmp_path)
    content, after = CONTENT, downloads
    if case == "another boot":
        after = Downloads("boot-2", range_bytes=1000)
        (tmp_path / "x").write_bytes(bytes(len(CONTENT)))
    elif case == "another object":
        content = CONTENT[::-1]
        clouds.put("bucket", "r/x", content)
    elif case == "journal cut off":
        journal = journal_of(tmp_path / "x")
        journal.write_bytes(journal.read_bytes()[:-1])
    else:
        os.truncate(tmp_path / "x", 100)
    list(after.fetch(storage, wanted(storage, tmp_path)))
    assert (tmp_path / "x").read_bytes() == content


def test_bytes_that_were_damaged_on_the_way_are_fetched_again(
    clouds: ObjectStore, opened: Opened, downloads: Downloads, tmp_path: Path
) -> None:
    clouds.put("bucket", "r/x", CONTENT)
    storage = opened("s3://bucket/r")
    clouds.fail("damaged")
    list(downloads.fetch(storage, wanted(storage, tmp_path)))
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_bytes_that_are_damaged_each_time_are_refused_and_removed(
    clouds: ObjectStore, opened: Opened, tmp_path: Path
) -> None:
    clouds.put("bucket", "r/x", CONTENT)
    storage = opened("s3://bucket/r")
    clouds.fail("damaged", times=13)  # other ranges each time
    with pytest.raises(DamagedError, match="damaged twice"):
        list(Downloads("boot-1", range_bytes=1000, connections=1).fetch(storage, wanted(storage, tmp_path)))
    assert not (tmp_path / "x").exists()


def test_etags_that_only_look_like_checksums_cost_one_file_twice(
    clouds: ObjectStore, opened: Opened, downloads: Downloads, tmp_path: Path
) -> None:
    clouds.put("bucket", "r/small", b"s", etag=f'"{"0" * 32}"')
    clouds.put("bucket", "r/x", CONTENT, etag=f'"{"1" * 32}"')
    storage = opened("s3://bucket/r")
    list(downloads.fetch(storage, wanted(storage, tmp_path)))
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert clouds.count("GET") == 2 + 11


def test_a_file_whose_etag_is_no_checksum_has_a_cheaper_one(
    clouds: ObjectStore, opened: Opened, downloads: Downloads, tmp_path: Path
) -> None:
    clouds.put("bucket", "r/x", CONTENT, etag='"0x8D4BCC2E4835CD0"')
    storage = opened("s3://bucket/r")
    (arrived,) = downloads.fetch(storage, wanted(storage, tmp_path))
    assert arrived.digest == f"crc32:{zlib.crc32(CONTENT):08x}" == digest_of_file(tmp_path / "x", arrived.digest)


def test_an_object_that_is_replaced_meanwhile_fails_the_download(
    clouds: ObjectStore, opened: Opened, downloads: Downloads, tmp_path: Path
) -> None:
    clouds.put("bucket", "r/x", CONTENT)
    storage = opened("s3://bucket/r")
    items = wanted(storage, tmp_path)
    clouds.put("bucket", "r/x", CONTENT[::-1])
    with pytest.raises(ChangedError):
        list(downloads.fetch(storage, items))


class Full:
    """A storage whose bytes the disk has no room for."""

    location = identity = "s3://full"

    def listing(self, prefix: str = "") -> list[StoredObject]:
        return [StoredObject("x", 2000, "e")]

    def read(self, item: StoredObject, start: int, end: int) -> memoryview:
        raise AssertionError("not reached")


def test_a_full_disk_is_reported_with_the_numbers_and_gives_the_room_back(
    downloads: Downloads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Full()
    monkeypatch.setattr(storage, "read", lambda item, start, end: memoryview(bytes(end - start)), raising=False)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UnavailableError, match=r"no room for 'x' \(2000 bytes\)"):
        list(downloads.fetch(storage, [Wanted(storage.listing()[0], tmp_path / "x")]))
    assert not list(tmp_path.iterdir())
