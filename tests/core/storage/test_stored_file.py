"""Objects of a storage as streams, and the upload of files."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from remora.errors import NotFoundError
from remora.storage import ChangedError
from remora.storage.objects import ObjectStorage
from remora.storage.stored_file import open_stored
from support.servers.object_store import ObjectStore

Opened = Callable[[str], ObjectStorage]
CONTENT = bytes(range(256)) * 100


def test_a_stream_reads_like_a_file(clouds: ObjectStore, opened: Opened) -> None:
    clouds.put("bucket", "a/in.npy", CONTENT)
    storage = opened("s3://bucket/a/in.npy")
    with open_stored(storage, storage.find()) as file:
        assert file.read(3) == CONTENT[:3]
        assert file.seek(-5, io.SEEK_END) == len(CONTENT) - 5
        assert file.read() == CONTENT[-5:]
        assert file.read(1) == b""
        assert (file.seek(1000), file.tell(), file.read(2)) == (1000, 1000, CONTENT[1000:1002])
        assert file.seek(len(CONTENT) + 10) == len(CONTENT) + 10
        assert file.read(1) == b""
    assert clouds.count("LIST") == 0


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(clouds: ObjectStore, opened: Opened) -> None:
    clouds.put("bucket", "in.npy", CONTENT, '"one"')
    storage = opened("s3://bucket/in.npy")
    item = storage.find()
    clouds.put("bucket", "in.npy", CONTENT[::-1], '"two"')
    with open_stored(storage, item) as file, pytest.raises(ChangedError, match="was replaced"):
        file.read(1)


def test_a_folder_is_not_an_object(clouds: ObjectStore, opened: Opened) -> None:
    clouds.put("bucket", "folder/a", b"1")
    with pytest.raises(NotFoundError, match="there is no file 's3://bucket/folder'"):
        opened("s3://bucket/folder").find()


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("copies", [1, 500])
def test_a_file_is_uploaded_whole(
    clouds: ObjectStore, opened: Opened, tmp_path: Path, scheme: str, copies: int
) -> None:
    """The larger one, of 12.8 MB, is sent in parts."""
    (tmp_path / "out.csv").write_bytes(CONTENT * copies)
    opened(f"{scheme}://bucket/results/out.csv").upload(tmp_path / "out.csv")
    assert clouds.buckets["bucket"]["results/out.csv"] == CONTENT * copies
    assert (clouds.count("PUT") > 1) == (copies > 1)
    with pytest.raises(OSError, match="absent"):
        opened(f"{scheme}://bucket/results/out.csv").upload(tmp_path / "absent")
