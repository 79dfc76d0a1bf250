"""Segments of an interrupted run: what is kept, what is dropped, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remora.errors import InvalidArgumentError, UnavailableError
from remora_tools.scoring import Refusal
from remora_tools.scoring.journal import Journal, excluding_runs, explain_write_error

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


def test_two_runs_with_one_output_exclude_each_other(tmp_path: Path) -> None:
    out, link = tmp_path / "out.csv", tmp_path / "link.csv"
    link.symlink_to(out)
    for first, second in ((out, link), (link, out), (out, tmp_path / "." / "out.csv")):
        with excluding_runs(first):
            with pytest.raises(UnavailableError, match=f"another run writes to '{second}': wait for it"):
                excluding_runs(second).__enter__()
            with excluding_runs(tmp_path / "other.csv"):
                pass
        with pytest.raises(ZeroDivisionError), excluding_runs(second):
            raise ZeroDivisionError
        assert [path.name for path in tmp_path.iterdir()] == ["link.csv"]


def test_the_lock_of_a_killed_run_is_taken_over_and_a_file_of_the_user_stays(tmp_path: Path) -> None:
    lock = tmp_path / ".out.csv.lock"
    for text in ("", "of the user"):
        lock.write_text(text)
        with excluding_runs(tmp_path / "out.csv"):
            assert lock.exists()
        assert lock.exists() == bool(text)


def test_a_place_without_locks_is_not_locked(tmp_path: Path) -> None:
    null = tmp_path / "null.csv"
    null.symlink_to("/dev/null")
    for place in (null, tmp_path, tmp_path / "absent" / "out.csv"):
        with excluding_runs(place), excluding_runs(place):
            assert [path.name for path in tmp_path.iterdir()] == ["null.csv"]


def test_a_file_in_a_read_only_folder_is_locked_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.csv"
    out.write_text("")
    monkeypatch.setattr("remora_tools.scoring.journal.os.access", lambda *_: False)  # root may write everywhere
    with excluding_runs(out), pytest.raises(UnavailableError, match="another run writes to"):
        excluding_runs(out).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_the_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    with_segments(tmp_path / "j", 1)
    with pytest.raises(InvalidArgumentError, match="an unfinished run with another model"):
        Journal(tmp_path / "j", {**IDENTITY, "model": "n"})


def test_a_run_without_segments_makes_room_for_another(tmp_path: Path) -> None:
    with_segments(tmp_path / "j", 0)
    other = {**IDENTITY, "model": "n"}
    journal = Journal(tmp_path / "j", other)
    file = journal.open_segment()
    journal.close_segment(file, 10, 10, [])
    journal.close()
    with pytest.raises(InvalidArgumentError, match="an unfinished run with another model"):
        Journal(tmp_path / "j", IDENTITY)
    journal = Journal(tmp_path / "j", other)
    assert journal.next_row == 10
    journal.remove()
    journal.close()
    assert not (tmp_path / "j").exists()


def test_a_restart_discards_the_segments_and_no_other_file(tmp_path: Path) -> None:
    with_segments(tmp_path / "j", 2)
    (tmp_path / "j" / "notes.txt").write_text("of the user")
    journal = Journal(tmp_path / "j", {**IDENTITY, "model": "n"}, restart=True)
    assert journal.next_row == 0
    assert sorted(path.name for path in (tmp_path / "j").iterdir()) == ["journal.jsonl", "lock", "notes.txt"]
    with pytest.raises(UnavailableError, match="another run writes to"):
        Journal(tmp_path / "j", IDENTITY, restart=True)
    journal.remove()
    journal.close()
    assert [path.name for path in (tmp_path / "j").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", "lock", "bad", "000000.rows", "journal.jsonl"])
def test_a_folder_with_files_that_are_not_of_a_run_is_refused_and_kept(
    tmp_path: Path, name: str, restart: bool
) -> None:
    (tmp_path / name).write_text("of the user")
    with pytest.raises(InvalidArgumentError, match="with --work-directory"):
        Journal(tmp_path, IDENTITY, restart=restart)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "of the user")]


def test_files_that_appear_during_a_run_are_kept(tmp_path: Path) -> None:
    with_segments(tmp_path / "j", 1)
    (tmp_path / "j" / "notes.txt").write_text("of the user")
    (tmp_path / "j" / "000001.rows").mkdir()
    journal = Journal(tmp_path / "j", IDENTITY)
    journal.remove()
    journal.close()
    assert sorted(path.name for path in (tmp_path / "j").iterdir()) == ["000001.rows", "notes.txt"]


def test_a_folder_that_was_there_before_the_run_stays(tmp_path: Path) -> None:
    with_segments(tmp_path, 1)
    journal = Journal(tmp_path, IDENTITY)
    assert journal.next_row == 10
    journal.remove()
    journal.close()
    assert list(tmp_path.iterdir()) == []


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
    path.write_bytes(lines[0][:-3] + b"\n")
    with pytest.raises(UnavailableError, match="is damaged"):
        Journal(tmp_path / "j", IDENTITY)
    Journal(tmp_path / "j", IDENTITY, restart=True).close()
    path.write_bytes(b"nonsense\n")
    with pytest.raises(InvalidArgumentError, match="is damaged, or not a journal of remora score"):
        Journal(tmp_path / "j", IDENTITY)


@pytest.mark.parametrize("count", range(6))
def test_a_run_begins_after_a_kill_amid_the_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    with_segments(tmp_path / "j", 2)
    left, unlink = [count], Path.unlink

    def unlink_or_die(path: Path) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        unlink(path)

    journal = Journal(tmp_path / "j", IDENTITY)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_or_die)
        with pytest.raises(KeyboardInterrupt):
            journal.remove()
    journal.close()
    begun = Journal(tmp_path / "j", IDENTITY)
    assert begun.next_row == 0
    assert sorted(path.name for path in (tmp_path / "j").iterdir()) == ["journal.jsonl", "lock"]
    begun.close()


@pytest.mark.parametrize("length", [0, 1, 9, 12])
def test_a_run_begins_after_a_kill_amid_its_first_line(tmp_path: Path, length: int) -> None:
    with_segments(tmp_path / "j", 0)
    path = tmp_path / "j" / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:length])
    begun = Journal(tmp_path / "j", IDENTITY)
    assert begun.next_row == 0
    begun.close()


def test_a_write_that_fails_for_another_reason_needs_no_room() -> None:
    error = explain_write_error(OSError(13, "Permission denied"), Path("out.csv"), 70)
    assert str(error).startswith(
        "cannot write to 'out.csv': Permission denied. The first 70 rows are kept: correct that"
    )


def test_a_full_disk_is_explained() -> None:
    error = explain_write_error(OSError(28, "No space left on device"), Path("w"), 70)
    assert str(error).endswith(
        "cannot write to 'w': No space left on device. The first 70 rows are kept: make room and run the same command "
        "again"
    )
