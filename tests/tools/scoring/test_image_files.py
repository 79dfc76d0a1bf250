"""Image files of folders and buckets, and reading ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from remora.errors import InvalidArgumentError, UnavailableError
from remora.storage.credentials import settings_for
from remora.storage.location import parse_location
from remora.storage.objects import ObjectStorage
from remora_tools.scoring.image_files import ImageFiles, LocalImages, ReadAhead, StoredImages
from support.servers.object_store import ObjectStore, object_store

FILES = {"b.JPG": b"bb", "a/c.png": b"c", "a/notes.txt": b"no image", "a/b/d.webp": b"", "a.parquet": b"no image"}
NAMES = ["a/b/d.webp", "a/c.png", "b.JPG"]


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with object_store() as double:
        for name, content in FILES.items():
            double.put("bucket", f"photos/{name}", content)
        double.put("bucket", "photos-of-others/x.png", b"x")
        yield double


def _stored(store: ObjectStore, url: str) -> StoredImages:
    place = parse_location(url)
    settings = settings_for(place, store.environment, lambda path: Path(path).read_text())
    storage = ObjectStorage(place, lambda: settings, retries=1)
    return StoredImages(storage, storage.listing())


def _local(folder: Path) -> LocalImages:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return LocalImages(folder)


def _check(files: ImageFiles) -> None:
    assert files.names == NAMES
    assert [files.size(name) for name in NAMES] == [0, 1, 2]
    for name in NAMES:
        with files.open(name) as file:
            assert file.read() == FILES[name]


def test_a_folder_has_the_images_of_its_folders(tmp_path: Path) -> None:
    files = _local(tmp_path)
    _check(files)
    before = files.version("b.JPG")
    (tmp_path / "b.JPG").write_bytes(b"other")
    assert files.version("b.JPG") != before


@pytest.mark.parametrize("url", ["s3://bucket/photos", "gs://bucket/photos/", "az://bucket/photos"])
def test_a_bucket_has_the_images_below_a_path(url: str, store: ObjectStore) -> None:
    files = _stored(store, url)
    _check(files)
    store.put("bucket", "photos/b.JPG", b"xx")
    assert _stored(store, url).version("b.JPG") != files.version("b.JPG")


def test_an_image_that_was_replaced_after_the_listing_is_no_bad_row(store: ObjectStore) -> None:
    files = _stored(store, "s3://bucket/photos")
    store.put("bucket", "photos/b.JPG", b"yy")
    with pytest.raises(UnavailableError, match="replaced"):
        files.open("b.JPG")


def test_a_place_without_images_is_refused(tmp_path: Path, store: ObjectStore) -> None:
    with pytest.raises(InvalidArgumentError, match=r"has no images: expected files that end in \.bmp"):
        LocalImages(tmp_path)
    with pytest.raises(InvalidArgumentError, match="'s3://bucket/other' has no images"):
        _stored(store, "s3://bucket/other")


class Many:
    """Files of a size, without contents; one of them may be gone."""

    def __init__(self, count: int, size: int = 1, readers: int = 2, gone: str = "") -> None:
        self.names = [f"{number:04}.png" for number in range(count)]
        self.readers = readers
        self.bytes = size
        self.gone = gone

    def version(self, name: str) -> str:
        return name

    def size(self, name: str) -> int:
        if name == self.gone:
            raise FileNotFoundError(name)
        return self.bytes

    def open(self, name: str) -> object:
        raise NotImplementedError


def test_files_are_read_ahead_in_order_and_errors_come_with_their_names() -> None:
    def read(name: str) -> str:
        if name == "0003.png":
            raise FileNotFoundError(name)
        return name[:4]

    files = Many(50, gone="0003.png")
    ahead = ReadAhead(files)  # type: ignore[arg-type]
    found = [
        (name, future.result() if future.exception() is None else "lost")
        for name, future in ahead.results(files.names, read)
    ]
    ahead.close()
    assert found == [(name, name[:4] if name != "0003.png" else "lost") for name in files.names]


@pytest.mark.parametrize(("size", "most"), [(1, 4), (40 << 20, 2)])
def test_few_files_and_bytes_are_held_ahead(size: int, most: int) -> None:
    lock, begun = threading.Lock(), set()

    def read(name: str) -> None:
        with lock:
            begun.add(name)

    files = Many(30, size)
    ahead = ReadAhead(files)  # type: ignore[arg-type]
    for number, (_, future) in enumerate(ahead.results(files.names, read)):
        future.result()
        assert len(begun) <= number + most
    ahead.close()
    assert len(begun) == 30


def test_results_that_are_larger_than_their_files_count_in_full() -> None:
    begun: list[str] = []
    files = Many(30)
    ahead = ReadAhead(files)  # type: ignore[arg-type]
    for number, (_, future) in enumerate(ahead.results(files.names, begun.append, lambda size: size + (40 << 20))):
        future.result()
        assert len(begun) <= number + 2
    ahead.close()


def test_closing_does_not_wait_for_a_slow_file() -> None:
    begun, gate, files = threading.Event(), threading.Event(), Many(1)
    ahead = ReadAhead(files)  # type: ignore[arg-type]

    def read(name: str) -> bool:
        begun.set()
        return gate.wait()

    ((_, future),) = ahead.results(files.names, read)
    assert begun.wait(60)
    ahead.close()
    assert not future.done()
    gate.set()
    assert future.result()


def test_files_that_are_not_wanted_any_more_are_not_read() -> None:
    gate, begun = threading.Event(), []

    def read(name: str) -> None:
        begun.append(name)
        gate.wait()

    files = Many(30)
    ahead = ReadAhead(files)  # type: ignore[arg-type]
    results = ahead.results(files.names, read)
    next(results)
    results.close()
    gate.set()
    ahead.close()
    assert len(begun) <= files.readers
