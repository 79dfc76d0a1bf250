"""Environment archives: unpacked whole, or refused with nothing outside their folder."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from remora.backends.python_archive import Limits, refusal, unpack
from remora.errors import ConfigError


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
    assert why in refusal(bad)
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


@pytest.mark.parametrize("limits", [Limits(total_bytes=99), Limits(members=1)])
def test_an_archive_beyond_the_limits_is_refused_before_it_is_written(tmp_path: Path, limits: Limits) -> None:
    packed = archive(tmp_path / "env.tar", member("one", size=1), member("two", size=99))
    with pytest.raises(ConfigError, match="holds more than"):
        unpack(packed, tmp_path / "env", limits)
    assert not (tmp_path / "env" / "two").exists()


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\0"])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "env.tar.gz").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot unpack environment archive"):
        unpack(tmp_path / "env.tar.gz", tmp_path / "env")


def test_an_archive_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    whole = archive(tmp_path / "env.tar.gz", member("file", size=100_000)).read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot unpack"):
        unpack(tmp_path / "cut.tar.gz", tmp_path / "env")
