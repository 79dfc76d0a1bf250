"""Segments of an interrupted run: what is kept, what is dropped, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remora.cli.scoring import Refusal
from remora.cli.scoring.journal import Journal, explain_full_disk
from remora.errors import InvalidArgumentError, UnavailableError

IDENTITY = {"input": "a.csv", "model": "m"}


def with_segments(folder: Path, count: int) -> None:
    """Write segments of ten rows, one of them bad."""
    journal = Journal(folder, IDENTITY)
    for number in range(count):
        file = journal.open_segment()
        file.write(b"%d\n" % number)
        refused = [Refusal(10 * number + 3, "no", None), Refusal(10 * number + 1, "no", {"a": 1})][: 1 + number % 2]
        journal.close_segment(file, 10 * number + 10, 9, refused)
    journal.close()


def test_a_run_continues_after_its_last_segment(tmp_path: Path) -> None:
    with_segments(tmp_path / "j", 2)
    (tmp_path / "j" / "unfinished").write_bytes(b"half")
    (tmp_path / "j" / "000002.rows").write_bytes(b"renamed, but not listed")
    journal = Journal(tmp_path / "j", IDENTITY)
    assert (journal.next_row, [path.read_bytes() for path in journal.rows()]) == (20, [b"0\n", b"1\n"])
    bad = [json.loads(line) for path in journal.bad_rows() for line in path.read_bytes().splitlines()]
    assert [row["row"] for row in bad] == [3, 11, 13], "in order"
    assert sorted(path.name for path in (tmp_path / "j").iterdir() if path.suffix == ".rows") == [
        "000000.rows",
        "000001.rows",
    ]
    journal.remove()
    journal.close()
    assert not (tmp_path / "j").exists()


def test_a_line_that_a_kill_cut_is_dropped_with_its_segment(tmp_path: Path) -> None:
    with_segments(tmp_path / "j", 2)
    path = tmp_path / "j" / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    journal = Journal(tmp_path / "j", IDENTITY)
    assert journal.next_row == 10
    journal.close()
    Journal(tmp_path / "j", IDENTITY).close()  # the cut line is gone


def test_two_runs_exclude_each_other(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", IDENTITY)
    with pytest.raises(UnavailableError, match="another run writes to"):
        Journal(tmp_path / "j", IDENTITY)
    journal.close()
    Journal(tmp_path / "j", IDENTITY).close()


def test_the_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    with_segments(tmp_path / "j", 1)
    with pytest.raises(InvalidArgumentError, match="an unfinished run with another model"):
        Journal(tmp_path / "j", {**IDENTITY, "model": "n"})


@pytest.mark.parametrize("name", ["000001.rows", "000001.bad"])
def test_a_damaged_segment_is_found(tmp_path: Path, name: str) -> None:
    with_segments(tmp_path / "j", 2)
    path = tmp_path / "j" / name
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(UnavailableError, match=r"segment 1 of .* does not match its checksum"):
        Journal(tmp_path / "j", IDENTITY)
    path.unlink()
    with pytest.raises(UnavailableError, match="does not match its checksum"):
        Journal(tmp_path / "j", IDENTITY)


def test_a_damaged_journal_is_found(tmp_path: Path) -> None:
    with_segments(tmp_path / "j", 2)
    path = tmp_path / "j" / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(UnavailableError, match="segment 0 of"):
        Journal(tmp_path / "j", IDENTITY)
    path.write_bytes(b"nonsense\n")
    with pytest.raises(UnavailableError, match="is damaged"):
        Journal(tmp_path / "j", IDENTITY)


def test_a_run_begins_after_a_kill_amid_the_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_segments(tmp_path / "j", 2)

    def kill_amid(folder: Path) -> None:
        (folder / "000000.rows").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", kill_amid)
    journal = Journal(tmp_path / "j", IDENTITY)
    with pytest.raises(KeyboardInterrupt):
        journal.remove()
    journal.close()
    begun = Journal(tmp_path / "j", IDENTITY)
    assert begun.next_row == 0
    begun.close()


def test_a_full_disk_is_explained() -> None:
    error = explain_full_disk(OSError(28, "No space left on device"), Path("w"), 70)
    assert str(error).endswith(
        "cannot write to 'w': No space left on device. The first 70 rows are kept: make room and run the same command "
        "again"
    )
