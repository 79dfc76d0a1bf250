"""Files of results: written whole, and checked before the work."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from remora.cli.output import check_writable, write_whole


def write(path: Path, content: bytes) -> None:
    write_whole(path, lambda file: file.write(content))


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")

    def fail(file: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "out", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "a full disk has its room back"
    assert (tmp_path / "out").read_bytes() == b"old"
    write(tmp_path / "out", b"new")
    assert (tmp_path / "out").read_bytes() == b"new"


def test_a_link_stays_a_link_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/out")
    write(tmp_path / "link", b"first")
    (tmp_path / "folder" / "out").chmod(0o640)
    write(tmp_path / "link", b"second")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "out").read_bytes() == b"second"
    assert (tmp_path / "folder" / "out").stat().st_mode & 0o777 == 0o640
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["folder", "link", "out"]


def test_a_pipe_is_written_directly(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(tmp_path / "pipe", b"rows")
        assert os.read(reader, 10) == b"rows"
    finally:
        os.close(reader)
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_a_file_that_cannot_be_renamed_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(source: object, target: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    (tmp_path / "mounted").write_bytes(b"earlier rows")
    number = (tmp_path / "mounted").stat().st_ino
    monkeypatch.setattr(os, "replace", busy)
    write(tmp_path / "mounted", b"rows")
    assert (tmp_path / "mounted").read_bytes() == b"rows"
    assert (tmp_path / "mounted").stat().st_ino == number
    assert [each.name for each in tmp_path.iterdir()] == ["mounted"]
    with pytest.raises(OSError, match="busy"):
        write(tmp_path / "new", b"rows")
    assert [each.name for each in tmp_path.iterdir()] == ["mounted"]


def test_the_file_of_a_descriptor_is_written_in_place(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+b") as file:
        write(Path(f"/proc/self/fd/{file.fileno()}"), b"rows")
        assert file.read() == b"rows"
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["new", "link", "old", "pipe"])
def test_a_check_changes_no_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("absent")
    (tmp_path / "old").write_bytes(b"old")
    os.mkfifo(tmp_path / "pipe")  # whose opening would block
    check_writable(tmp_path / name)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "old", "pipe"]
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "old").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("folder", "Is a directory"), ("missing/out", "No such file"), ("file/out", "Not a directory")],
)
def test_a_file_that_cannot_be_written_is_refused_with_its_name(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=rf"{reason}.*'{tmp_path / name}'"):
        check_writable(tmp_path / name)
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["file", "folder"]
