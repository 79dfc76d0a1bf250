"""`remora score` and the user's files: what a run replaces, what it refuses, and what it leaves alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pyarrow.parquet
import pytest

from remora.cli import main
from support.models import onnx_models
from support.servers.object_store import ObjectStore, store_of_environment

ROWS = np.arange(20, dtype="f4").reshape(10, 2)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a model, rows as .npy and CSV, and bad rows as CSV."""
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx_models.identity("FP32", ("n", 2)), "model.onnx")
    np.save("in.npy", ROWS)
    Path("in.csv").write_text("a,b\n" + "".join(f"{a},{b}\n" for a, b in ROWS.tolist()))
    Path("bad.csv").write_text("a,b\n,\n,\n")
    Path("none.csv").write_text("a,b\n")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def score(*words: str) -> int:
    return main(["score", "model.onnx", *words, "--quiet"])


@pytest.mark.parametrize("restart", [[], ["--restart"]])
@pytest.mark.parametrize("place", [".", "notes"])
def test_a_folder_with_files_of_the_user_is_no_work_directory(
    folder: Path, place: str, restart: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "notes.txt").write_text("of the user")
    before = contents(folder)
    assert score("in.npy", "out.csv", "--work-directory", place, *restart) == 1
    shown = capsys.readouterr().err
    assert f"'{place}' cannot keep the unfinished results, because it holds files that are not of a run" in shown
    assert "Choose a new or empty folder with --work-directory" in shown
    assert contents(folder) == before


def test_the_output_in_the_work_directory_stays(folder: Path) -> None:
    Path("work").mkdir()
    assert score("in.npy", "work/out.npy", "--work-directory", "work") == 0
    assert np.array_equal(np.load("work/out.npy"), ROWS)
    assert [path.name for path in Path("work").iterdir()] == ["out.npy"]


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("in.npy", "./in.npy"),
        ("in.npy", "{folder}/in.npy"),
        ("in.npy", "sub/../in.npy"),
        ("in.npy", "link.npy"),
        ("in.npy", "hard.npy"),
        ("link.npy", "in.npy"),
        ("in.csv.bad.jsonl", "in.csv"),
        ("./in.csv.bad.jsonl", "{folder}/in.csv"),
    ],
)
def test_the_input_is_never_replaced(
    folder: Path, source: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "sub").mkdir()
    (folder / "link.npy").symlink_to("in.npy")
    os.link("in.npy", "hard.npy")
    Path("in.csv.bad.jsonl").write_text('{"a": 1, "b": 2}\n')
    before = contents(folder)
    assert score(source, output.format(folder=folder)) == 2
    shown = capsys.readouterr().err
    assert "INPUT and OUTPUT are the same file" in shown or "that OUTPUT's bad rows are written to" in shown
    assert contents(folder) == before


def test_the_journal_is_no_input_and_no_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("work").mkdir()
    Path("work/journal.jsonl").write_text('{"input": [1, 2]}\n')
    before = contents(folder)
    assert score("work/journal.jsonl", "out.csv", "--work-directory", "work", "--restart") == 2
    assert "INPUT is the journal of the unfinished results in 'work'" in capsys.readouterr().err
    assert score("in.npy", "./work/journal.jsonl", "--work-directory", "work") == 2
    assert "OUTPUT is the journal of the unfinished results in 'work'" in capsys.readouterr().err
    assert contents(folder) == before


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with store_of_environment(monkeypatch) as store:
        yield store


@pytest.mark.parametrize("output", ["s3://bucket/in.npy", "s3://bucket//in.npy", "S3://bucket/in.npy"])
def test_the_input_in_a_bucket_is_never_replaced(
    output: str, bucket: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.put("bucket", "in.npy", Path("in.npy").read_bytes())
    assert score("s3://bucket/in.npy", output) == 2
    assert "INPUT and OUTPUT are the same file" in capsys.readouterr().err
    assert bucket.buckets["bucket"]["in.npy"] == Path("in.npy").read_bytes()


def test_outputs_that_differ_in_their_suffix_have_bad_rows_each(folder: Path) -> None:
    columns = ["--column", "x=a,b"]
    assert score("bad.csv", "s.csv", *columns) == 0
    assert score("in.npy", "s.npy") == 0
    assert score("in.csv", "s.jsonl", *columns) == 0
    bad = [json.loads(line) for line in Path("s.csv.bad.jsonl").read_text().splitlines()]
    assert [row["row"] for row in bad] == [0, 1]
    assert [path.name for path in folder.glob("*.bad.jsonl")] == ["s.csv.bad.jsonl"]
    assert score("in.csv", "s.csv", *columns) == 0
    assert not list(folder.glob("*.bad.jsonl")), "the new s.csv has no bad rows"


@pytest.mark.parametrize("source", ["bad.csv", "none.csv"])
def test_an_output_without_rows_is_a_valid_file(source: str) -> None:
    for form in ("csv", "parquet", "jsonl"):
        assert score(source, f"out.{form}", "--column", "x=a,b", "--keep", "b") == 0
    assert score(source, "out.npy", "--column", "x=a,b") == 0
    assert Path("out.csv").read_text() == "row,b,y_0,y_1\n"
    table = pyarrow.parquet.read_table("out.parquet")
    assert (table.num_rows, table.column_names) == (0, ["row", "b", "y"])
    assert str(table.schema.field("y").type) == "fixed_size_list<element: float>[2]"
    assert Path("out.jsonl").read_bytes() == b""
    array = np.load("out.npy")
    assert (array.shape, array.dtype) == ((0, 2), np.float32)


def test_the_header_stays_if_the_first_segment_has_no_results() -> None:
    Path("late.csv").write_text("a,b\n" + ",\n" * 20_000 + "1,2\n")
    words = ["--column", "x=a,b", "--segment-secs=0", "--most-bad-rows=30000", "--batch=1"]
    assert score("late.csv", "out.csv", *words) == 0
    assert Path("out.csv").read_text() == "row,y_0,y_1\n20000,1.0,2.0\n"


def test_an_output_that_is_chosen_twice_is_written_once() -> None:
    assert score("in.npy", "out.npy", "--output=y", "--output=y") == 0
    assert np.array_equal(np.load("out.npy"), ROWS)


def test_a_corrected_command_runs_after_one_that_scored_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score("in.csv", "out.csv", "--column", "x=a") == 1
    assert "does not hold the 1 values" in capsys.readouterr().err
    assert score("in.csv", "out.csv", "--keep", "a", "--column", "x=a,b") == 0
    assert Path("out.csv").read_text().startswith("row,a,y_0,y_1\n0,0.0,0.0,1.0\n")
    assert not list(folder.glob("*.unfinished"))


def test_an_output_that_cannot_be_written_is_refused_before_the_rows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "out.csv").mkdir()
    for output in ("out.csv", "absent/out.csv"):
        assert score("in.csv", output, "--column", "x=a,b", "--work-directory", "work") == 1
        assert f"cannot write to '{output}': " in capsys.readouterr().err
        assert not list((folder / "work").glob("*.rows"))


def test_a_failure_at_the_end_names_the_file_and_the_next_run_finishes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "out.csv.bad.jsonl").mkdir()
    words = ["bad.csv", "out.csv", "--column", "x=a,b"]
    assert score(*words) == 1
    shown = capsys.readouterr().err
    assert "cannot write to 'out.csv.bad.jsonl': Is a directory. The first 2 rows are kept: correct that" in shown
    (folder / "out.csv.bad.jsonl").rmdir()
    assert score(*words) == 0
    assert len((folder / "out.csv.bad.jsonl").read_text().splitlines()) == 2
