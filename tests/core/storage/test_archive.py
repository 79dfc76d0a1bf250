"""Archives: unpacked whole, or refused with nothing outside their folder."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from remora.errors import ConfigError
from remora.storage.archive import ArchiveLimits, is_archive, unpack


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0, mode: int = 0o755
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, size, mode
    return info


def archive(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info in members:
            tar.addfile(info, io.BytesIO(b"x" * info.size) if info.isfile() else None)
    return path


def test_files_folders_and_links_inside_arrive_with_their_modes(tmp_path: Path) -> None:
    packed = archive(
        tmp_path / "env.tar.gz",
        member("bin", tarfile.DIRTYPE),
        member("bin/python3.11", size=3),
        member("bin/python3", tarfile.SYMTYPE, "python3.11"),
        member("lib/libx.so", tarfile.SYMTYPE, "../bin/python3.11"),
        member("bin/python", tarfile.LNKTYPE, "bin/python3.11"),
    )
    unpack(packed, tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python3"
    assert python.read_bytes() == (tmp_path / "env/lib/libx.so").read_bytes() == b"xxx"
    assert python.stat().st_mode & 0o111


BAD = [
    (member("/etc/passwd", size=1), "leaves the archive"),
    (member("../outside", size=1), "leaves the archive"),
    (member("a/../../outside", size=1), "leaves the archive"),
    (member("link", tarfile.SYMTYPE, "/etc/passwd"), "outside the archive"),
    (member("a/link", tarfile.SYMTYPE, "../../outside"), "outside the archive"),
    (member("hard", tarfile.LNKTYPE, "../outside"), "outside the archive"),
    (member("hard", tarfile.LNKTYPE, "/etc/passwd"), "outside the archive"),
    (member("pipe", tarfile.FIFOTYPE), "neither file, directory nor link"),
    (member("device", tarfile.CHRTYPE), "neither file, directory nor link"),
]


@pytest.mark.parametrize(("bad", "why"), BAD, ids=[f"{row.name} {why}" for row, why in BAD])
def test_a_member_that_would_leave_the_folder_is_refused(tmp_path: Path, bad: tarfile.TarInfo, why: str) -> None:
    (tmp_path / "outside").write_text("mine")
    with pytest.raises(ConfigError, match=why):
        unpack(archive(tmp_path / "env.tar", bad), tmp_path / "env")
    assert (tmp_path / "outside").read_text() == "mine"


def test_a_file_behind_links_that_lead_out_only_together_stays_inside(tmp_path: Path) -> None:
    packed = archive(
        tmp_path / "env.tar",
        member("a", tarfile.DIRTYPE),
        member("a/up", tarfile.SYMTYPE, "."),
        member("b", tarfile.SYMTYPE, "a/up/../.."),
        member("b/outside", size=1),
    )
    with pytest.raises(ConfigError):
        unpack(packed, tmp_path / "env")
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("limits", [ArchiveLimits(total_bytes=99), ArchiveLimits(members=1)])
def test_an_archive_beyond_the_limits_is_refused_before_it_is_written(tmp_path: Path, limits: ArchiveLimits) -> None:
    packed = archive(tmp_path / "env.tar", member("one", size=1), member("two", size=99))
    with pytest.raises(ConfigError, match="holds more than"):
        unpack(packed, tmp_path / "env", limits)
    assert not (tmp_path / "env" / "two").exists()


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\0"])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "env.tar.gz").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot unpack archive"):
        unpack(tmp_path / "env.tar.gz", tmp_path / "env")


def test_an_archive_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    whole = archive(tmp_path / "env.tar.gz", member("file", size=100_000)).read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot unpack"):
        unpack(tmp_path / "cut.tar.gz", tmp_path / "env")


def zip_of(path: Path, *members: tuple[str, bytes], mode: int = 0o644, compress: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compress) as packed:
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, compress
            packed.writestr(info, content)
    return path


def test_a_zip_is_recognized_by_its_content_and_keeps_executable_bits(tmp_path: Path) -> None:
    packed = zip_of(tmp_path / "model.tar.gz", ("m/", b""), ("m/1/model.onnx", b"weights"), mode=0o755)
    unpack(packed, tmp_path / "out")
    model = tmp_path / "out" / "m" / "1" / "model.onnx"
    assert model.read_bytes() == b"weights"
    assert model.stat().st_mode & 0o100


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside"])
def test_a_zip_member_that_would_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="leaves the archive"):
        unpack(zip_of(tmp_path / "a.zip", (name, b"x")), tmp_path / "out")
    assert not (tmp_path / "outside").exists()


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    packed = zip_of(tmp_path / "a.zip", ("link", b"/etc/passwd"), mode=stat.S_IFLNK | 0o777)
    with pytest.raises(ConfigError, match="neither file"):
        unpack(packed, tmp_path / "out")


def test_a_zip_member_that_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    packed = zip_of(tmp_path / "a.zip", ("big", b"0" * 5_000_000), compress=zipfile.ZIP_DEFLATED)
    raw = packed.read_bytes().replace((5_000_000).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    packed.write_bytes(raw)
    with pytest.raises(ConfigError, match="cannot unpack"):
        unpack(packed, tmp_path / "out")
    assert not (tmp_path / "out" / "big").exists() or (tmp_path / "out" / "big").stat().st_size <= 10


def test_a_bomb_is_refused_before_it_goes_off(tmp_path: Path) -> None:
    packed = zip_of(tmp_path / "a.zip", ("zeros", bytes(100 << 20)), compress=zipfile.ZIP_DEFLATED)
    with pytest.raises(ConfigError, match="holds more than"):
        unpack(packed, tmp_path / "out")
    assert not (tmp_path / "out" / "zeros").exists()


@pytest.mark.parametrize(
    ("name", "archive_name"),
    [("model.tar.gz", True), ("MODEL.TGZ", True), ("repo.zip", True), ("model.onnx", False), ("tar.gz/x", False)],
)
def test_archives_are_known_by_their_names(name: str, archive_name: bool) -> None:
    assert is_archive(name) is archive_name


def test_a_zip_file_with_a_member_without_a_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("x", b"")
    path.write_bytes(path.read_bytes().replace(b"x", b"\0"))
    with pytest.raises(ConfigError, match="cannot unpack"):
        unpack(path, tmp_path / "out")


def header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("header")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def sparse(entries: bytes) -> bytes:
    info = tarfile.TarInfo("x")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "1"}
    return info.tobuf(tarfile.PAX_FORMAT) + entries


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (header(tarfile.GNUTYPE_LONGNAME, 1 << 40), "headers of more than 1048576 bytes"),
        (header(tarfile.XHDTYPE, 4 << 20) + bytes(4 << 20), "headers of more than 1048576 bytes"),
        (sparse(b"999999999\n" + b"0\n" * (1 << 20)), "headers of more than 1048576 bytes"),
        ((header(tarfile.GNUTYPE_LONGNAME, 1) + bytes(512)) * 1500, "too many headers|headers of more than"),
    ],
    ids=["a long name", "attributes", "a map of holes", "names of names"],
)
def test_headers_that_take_more_memory_than_a_header_needs_are_refused(
    content: bytes, reason: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    (tmp_path / "a.tar").write_bytes(compress(content))
    with pytest.raises(ConfigError, match=f"cannot unpack archive .*: a member has ({reason})"):
        unpack(tmp_path / "a.tar", tmp_path / "out")


@pytest.mark.parametrize("name", ["a/" * 100 + "x", "a/" * 100_000 + "x", "b" * 5000])
def test_a_member_whose_path_is_longer_than_a_path_can_be_is_refused(name: str, tmp_path: Path) -> None:
    made = [archive(tmp_path / "a.tar", member(name))]
    if len(name) < 1 << 16:
        made.append(zip_of(tmp_path / "a.zip", (name, b"")))
    for place, path in enumerate(made):
        with pytest.raises(ConfigError, match="has a path of more than 4096 characters or 64 folders"):
            unpack(path, tmp_path / f"out{place}")


def test_a_member_may_be_longer_than_headers_may(tmp_path: Path) -> None:
    content = bytes(range(256)) * 3 * (1 << 12)
    for mode in ("w", "w:gz", "w:bz2", "w:xz"):
        with tarfile.open(tmp_path / "a.tar", mode) as tar:  # type: ignore[call-overload]
            for name in ("x", "y"):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        unpack(tmp_path / "a.tar", tmp_path / mode)
        assert [(tmp_path / mode / name).read_bytes() == content for name in ("x", "y")] == [True, True]
