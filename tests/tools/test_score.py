"""`remora score` as a command: results, bad rows, kills, full disks and buckets."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow.parquet
import pytest

from remora.cli import main
from remora_tools.score import describe
from remora_tools.scoring.run import Progress
from support.models import onnx_models
from support.process.eventually import eventually
from support.servers.object_store import ObjectStore, Seen, store_of_environment

ROWS = 60_000
WORDS = ("--quiet", "--batch=512", "--segment-secs=0")

PICKY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if (x < 0).any():
                error = pb_utils.TritonError("negative")
                responses.append(pb_utils.InferenceResponse(error=error))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 2)]))
        return responses
"""
PICKY_CONFIG = """
backend: "python" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
"""

SUICIDAL = """
import os, signal, sys
left = [int(sys.argv.pop(1))]
def count(call):
    def counted(*arguments):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)
    return counted
os.fsync, os.replace = count(os.fsync), count(os.replace)
from remora.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""Program that is killed before its n-th synchronisation or renaming of a file."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(onnx_models.identity("FP32", ("n", 2)), path)
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A CSV file of two columns; every 10,000th row has no second value."""
    path = tmp_path / "in.csv"
    lines = [f"{n},{n}.5" if n % 10_000 != 7 else f"{n}," for n in range(ROWS)]
    path.write_text("\n".join(["a,b", *lines]) + "\n")
    return path


def check_output(path: Path, total: int = ROWS) -> None:
    rows = list(csv.reader(path.read_text().splitlines()))
    assert rows[0] == ["row", "y_0", "y_1"]
    good = [n for n in range(total) if n % 10_000 != 7]
    assert [int(row[0]) for row in rows[1:]] == good, "no row is missing or duplicate"
    assert all(float(row[1]) == n and float(row[2]) == n + 0.5 for n, row in zip(good, rows[1:], strict=True))
    bad = [json.loads(line) for line in path.with_name(f"{path.name}.bad.jsonl").read_text().splitlines()]
    assert [(row["row"], row["reason"]) for row in bad] == [
        (n, "column 'b' is empty") for n in range(total) if n % 10_000 == 7
    ]


def test_rows_are_scored_and_bad_ones_reported(
    model: Path, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.csv"
    assert main(["score", str(model), str(table), str(out)]) == 0
    check_output(out)
    shown = capsys.readouterr()
    assert shown.out == "", "results and progress do not mix"
    assert "batch size " in shown.err
    assert "rows     60,000" in shown.err
    assert f"bad      6, see {tmp_path / 'out.csv.bad.jsonl'}" in shown.err
    assert not list(tmp_path.glob("*unfinished*"))


def test_numbers_in_parquet_need_no_pandas(model: Path, tmp_path: Path, child_environment: dict[str, str]) -> None:
    """pyarrow imports pandas in its own conversions, which takes longer than the rows."""
    pytest.importorskip("pandas", reason="pandas is not installed, so that nothing could import it")
    rows = {"id": [5, 6], "a": np.array([1, 2], "f2"), "b": [1.5, 2.5]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "in.parquet")
    program = "import sys; from remora.cli import main; assert not main(sys.argv[1:]); print('pandas' in sys.modules)"
    words = ["score", str(model), "in.parquet", "out.parquet", "--quiet", "--keep=id"]
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=tmp_path, env=child_environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    found = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert found == [{"row": 0, "id": 5, "y": [1.0, 1.5]}, {"row": 1, "id": 6, "y": [2.0, 2.5]}]


@pytest.mark.parametrize("form", ["parquet", "npy", "jsonl"])
def test_formats_give_the_same_results(form: str, model: Path, tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((1000, 2)).astype("f4")
    np.save(tmp_path / "in.npy", values)
    first, out = tmp_path / f"first.{form}", tmp_path / "out.npy"
    assert main(["score", str(model), str(tmp_path / "in.npy"), str(first), "--quiet"]) == 0
    column = ["--column", "x=y"] if form != "npy" else []
    assert main(["score", str(model), str(first), str(out), "--quiet", *column]) == 0
    assert np.array_equal(np.load(out), values)


@pytest.mark.parametrize("form", ["csv", "jsonl", "npy", "parquet"])
def test_numbers_of_another_byte_order_keep_their_values(form: str, model: Path, tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((10, 2)).astype(">f4")
    np.save(tmp_path / "in.npy", values)
    out = tmp_path / f"out.{form}"
    keep = ["--column=x=array", "--keep=array"] if form != "npy" else []
    assert main(["score", str(model), str(tmp_path / "in.npy"), str(out), "--quiet", *keep]) == 0
    if form == "npy":
        assert np.array_equal(np.load(out), values)
        return
    if form == "csv":
        rows = [
            {"array": row["array"].strip("[]").split(), "y": [row["y_0"], row["y_1"]]}
            for row in csv.DictReader(out.read_text().splitlines())
        ]
    else:
        lines = out.read_text().splitlines() if form == "jsonl" else []
        rows = [json.loads(line) for line in lines] or pyarrow.parquet.read_table(out).to_pylist()
    assert np.array_equal(np.array([row["y"] for row in rows], "f4"), values)
    assert np.allclose(np.array([row["array"] for row in rows], "f4"), values)


def test_columns_are_kept_and_mapped(model: Path, tmp_path: Path) -> None:
    table = pyarrow.table({"id": ["p", "q", None], "b": [1.0, 2.0, 3.0], "a": [4, 5, 6]})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    words = ["score", str(model), str(tmp_path / "in.parquet"), str(tmp_path / "out.jsonl"), "--quiet"]
    assert main([*words, "--column", "x=a,b", "--keep", "id"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows[0] == {"row": 0, "id": "p", "y": [4.0, 1.0]}
    assert rows[2] == {"row": 2, "id": None, "y": [6.0, 3.0]}


def test_rows_that_the_model_refuses_are_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "models" / "picky" / "1").mkdir(parents=True)
    (tmp_path / "models" / "picky" / "config.pbtxt").write_text(PICKY_CONFIG)
    (tmp_path / "models" / "picky" / "1" / "model.py").write_text(PICKY)
    values = np.ones((100, 2), "f4")
    values[[3, 4, 77], 0] = -1
    np.save(tmp_path / "in.npy", values)
    out = tmp_path / "out.jsonl"
    words = ["score", str(tmp_path / "models"), str(tmp_path / "in.npy"), str(out), "--quiet"]
    assert main(words) == 0
    rows = [json.loads(line)["row"] for line in out.read_text().splitlines()]
    assert rows == [n for n in range(100) if n not in (3, 4, 77)]
    bad = [json.loads(line) for line in (tmp_path / "out.jsonl.bad.jsonl").read_text().splitlines()]
    assert [(row["row"], row["values"]) for row in bad] == [(n, {"x": [-1.0, 1.0]}) for n in (3, 4, 77)]
    assert all("negative" in row["reason"] for row in bad)
    assert main([*words, "--most-bad-rows", "2"]) == 1


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["model.onnx", "in.csv", "in.csv"], 2, "INPUT and OUTPUT are the same file"),
        (["model.onnx", "in.csv", "out.txt"], 1, "expected a file that ends in .csv, .jsonl"),
        (["model.onnx", "absent.csv", "out.csv"], 1, "there is no file 'absent.csv'"),
        (["model.onnx", "https://h/in.txt", "out.csv"], 1, "expected a file that ends in .csv, .jsonl"),
        (["absent.onnx", "s3://bucket/rows.tsv", "out.csv"], 1, "rows.tsv': expected a file that ends in .csv"),
        (["absent.onnx", "photos", "out.csv"], 1, "or a folder of images, whose URL ends in /"),
        (["absent.onnx", "in.csv", "out.csv"], 1, "absent.onnx"),
        (["model.onnx", "in.csv", "out.csv", "--keep", "a"], 1, "1 values that a row has in b"),
        (["model.onnx", "in.csv", "out.csv", "--column", "z=a"], 1, "has no input 'z'"),
        (["model.onnx", "in.csv", "out.csv", "--output", "z"], 1, "has no output 'z'; it has y"),
        (["model.onnx", "in.csv", "out.csv", "--batch", "5000"], 2, "accepts at most 4096 rows"),
        (["model.onnx", "in.csv", "out.npy", "--keep", "a"], 2, "holds the numbers of one output"),
        (["model.onnx", "in.csv", "out.csv", "--most-bad-rows", "2"], 1, "row 20007: column 'b' is empty"),
    ],
)
def test_a_wrong_call_is_explained(
    words: list[str],
    code: int,
    text: str,
    model: Path,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(model.parent)
    assert main(["score", *words]) == code
    assert text in capsys.readouterr().err


def test_a_run_killed_at_any_point_continues_without_missing_or_duplicate_rows(
    model: Path, table: Path, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    """The first runs are killed one after another, each a few steps later in its life than the one before."""
    out = tmp_path / "out.csv"
    words = ["score", str(model), str(table), str(out), *WORDS]
    codes = []
    for step in (1, 2, 3, 4, 5, 7, 11, 14, 1_000):
        killed = [sys.executable, "-c", SUICIDAL, str(step), *words]
        codes.append(subprocess.run(killed, env=child_environment, stdin=subprocess.DEVNULL).returncode)
        if codes[-1] == 0:
            break
    assert codes == [-signal.SIGKILL] * (len(codes) - 1) + [0]
    assert len(codes) > 5, "the input is long enough for several kills"
    check_output(out)
    assert not (tmp_path / "out.csv.unfinished").exists()


def test_a_run_that_another_process_kills_continues(
    model: Path, table: Path, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    out = tmp_path / "out.csv"
    words = [sys.executable, "-m", "remora", "score", str(model), str(table), str(out), *WORDS]
    journal = tmp_path / "out.csv.unfinished" / "journal.jsonl"
    run = subprocess.Popen(words, env=child_environment)
    while run.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 2):
        os.sched_yield()
    run.kill()
    run.wait()
    assert main(words[3:]) == 0
    check_output(out)


def test_two_runs_with_one_output_and_a_folder_each_exclude_each_other(
    model: Path, table: Path, tmp_path: Path, child_environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["score", str(model), str(table), str(tmp_path / "out.csv"), *WORDS]
    before = set(tmp_path.iterdir())
    run = subprocess.Popen(
        [sys.executable, "-m", "remora", *words, f"--work-directory={tmp_path / 'one'}"], env=child_environment
    )
    try:
        eventually((tmp_path / ".out.csv.lock").exists, process=run)
        run.send_signal(signal.SIGSTOP)
        assert main([*words, f"--work-directory={tmp_path / 'two'}"]) == 1
        assert f"another run writes to '{tmp_path / 'out.csv'}': wait for it, or end it" in capsys.readouterr().err
        assert not (tmp_path / "two").exists()
        run.send_signal(signal.SIGCONT)
        assert run.wait(60.0) == 0
    finally:
        run.kill()
        run.wait()
    check_output(tmp_path / "out.csv")
    assert {path.name for path in set(tmp_path.iterdir()) - before} == {"out.csv", "out.csv.bad.jsonl"}


def test_a_changed_input_does_not_continue_an_old_run(
    model: Path, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["score", str(model), str(table), str(tmp_path / "out.csv"), *WORDS]
    assert main([*words, "--most-bad-rows", "3"]) == 1
    assert (tmp_path / "out.csv.unfinished" / "000000.rows").exists(), "what is done is kept"
    table.write_text(table.read_text() + "1,2\n")
    assert main(words) == 1
    assert "holds an unfinished run with another input" in capsys.readouterr().err
    assert main([*words, "--restart"]) == 0
    assert (tmp_path / "out.csv").read_text().count("\n") == ROWS + 1 - 6 + 1


def _unfinished(words: list[str], environment: dict[str, str]) -> None:
    """Run the command until it is killed with a segment done."""
    killed = [sys.executable, "-c", SUICIDAL, "8", *words]
    assert subprocess.run(killed, env=environment, stdin=subprocess.DEVNULL).returncode == -signal.SIGKILL
    journal = Path(words[3] + ".unfinished") / "journal.jsonl"
    assert journal.read_bytes().count(b"\n") > 1, "a segment is done"


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("batch", ["--batch=512", "--batch=1000"])
def test_a_run_that_was_killed_writes_the_bytes_of_one_that_was_not(
    model: Path, table: Path, tmp_path: Path, child_environment: dict[str, str], form: str, batch: str
) -> None:
    whole = tmp_path / f"whole.{form}"
    assert main(["score", str(model), str(table), str(whole), "--quiet", "--keep=a", "--column=x=a,b", batch]) == 0
    out = tmp_path / f"out.{form}"
    words = ["score", str(model), str(table), str(out), "--quiet", "--keep=a", "--column=x=a,b", batch]
    _unfinished([*words, "--segment-secs=0"], child_environment)
    assert main([*words, "--segment-secs=0"]) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert Path(f"{out}.bad.jsonl").read_bytes() == Path(f"{whole}.bad.jsonl").read_bytes()


def test_the_batch_size_of_a_run_that_goes_on_is_that_of_its_begin(
    model: Path, table: Path, tmp_path: Path, child_environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["score", str(model), str(table), str(tmp_path / "out.csv"), "--segment-secs=0"]
    _unfinished([*words, "--batch=64"], child_environment)
    assert main([*words, "--batch=128"]) == 1
    assert "holds an unfinished run with another batch size" in capsys.readouterr().err
    assert main(words) == 0
    assert "batch size" not in capsys.readouterr().err, "none is searched"
    check_output(tmp_path / "out.csv")


def test_a_model_that_was_replaced_does_not_continue_a_run(
    model: Path, table: Path, tmp_path: Path, child_environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["score", str(model), str(table), str(tmp_path / "out.csv"), *WORDS]
    _unfinished(words, child_environment)
    status = model.stat()
    onnx.save(onnx_models.identity("FP32", ("n", 2), "Neg"), model)
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert main(words) == 1
    assert "holds an unfinished run with another model" in capsys.readouterr().err


def test_a_model_and_an_input_that_were_copied_and_touched_continue_a_run(
    model: Path, table: Path, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    out = str(tmp_path / "out.csv")
    _unfinished(["score", str(model), str(table), out, *WORDS], child_environment)
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(model, tmp_path / "elsewhere" / "model.onnx")
    shutil.copy(table, tmp_path / "elsewhere" / "in.csv")
    places = [str(tmp_path / "elsewhere" / name) for name in ("model.onnx", "in.csv")]
    assert main(["score", *places, out, *WORDS]) == 0
    check_output(tmp_path / "out.csv")


@pytest.mark.parametrize("changed", ["1/model.py", "labels.txt", "requirements.txt", "config.pbtxt"])
def test_each_file_of_a_model_counts(
    tmp_path: Path, child_environment: dict[str, str], capsys: pytest.CaptureFixture[str], changed: str
) -> None:
    table = tmp_path / "in.csv"
    table.write_text("a,b\n" + "1,2\n" * 64)
    folder = tmp_path / "models" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(PICKY)
    (folder / "config.pbtxt").write_text(PICKY_CONFIG)
    words = ["score", str(tmp_path / "models"), str(table), str(tmp_path / "out.csv"), *WORDS[:1], "--segment-secs=0"]
    _unfinished([*words, "--batch=8"], child_environment)
    with (folder / changed).open("a") as file:
        file.write("\n# changed\n" if changed != "config.pbtxt" else "dynamic_batching { }\n")
    assert main([*words, "--batch=8"]) == 1
    assert "holds an unfinished run with another model:" in capsys.readouterr().err


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, 250_000))
from remora.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""Program whose files are limited, so that a write fails in the middle of a segment."""


def test_a_write_that_fails_keeps_what_is_done(
    model: Path, table: Path, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    out = tmp_path / "out.csv"
    words = ["score", str(model), str(table), str(out), *WORDS]
    failed = subprocess.run(
        [sys.executable, "-c", LIMITED, *words], env=child_environment, capture_output=True, text=True
    )
    assert failed.returncode == 1
    assert "File too large. The first 0 rows are kept: make room and run the same command again" in failed.stderr
    assert not out.exists()
    assert main(words) == 0
    check_output(out)


MEASURED = """
import sys
from pathlib import Path
from remora.cli import main
code = main(sys.argv[1:])
(peak,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
print(int(peak.split()[1]) * 1024)
sys.exit(code)
"""
"""Program that prints the bytes of memory that it had at most; getrusage counts those of its parent, too."""

FULL_DISK = """
mount -t tmpfs -o size=700k tmpfs "$1" || exit 77
"$2" -m remora score "$3" "$4" "$1/out.csv" --quiet --batch=512 --segment-secs=0
test $? -eq 1 || exit 78
test ! -e "$1/out.csv" || exit 79
grep -q '"begin": 0' "$1/out.csv.unfinished/journal.jsonl" || exit 80
mount -o remount,size=64m "$1" || exit 81
"$2" -m remora score "$3" "$4" "$1/out.csv" --quiet --batch=512 --segment-secs=0 || exit 82
cp "$1/out.csv" "$1/out.csv.bad.jsonl" "$5"
"""


def test_a_full_disk_keeps_what_is_done(
    model: Path, table: Path, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root and unshare")
    (tmp_path / "disk").mkdir()
    words = ["unshare", "--mount", "sh", "-c", FULL_DISK, "sh", str(tmp_path / "disk")]
    words += [sys.executable, str(model), str(table), str(tmp_path)]
    done = subprocess.run(words, env=child_environment, capture_output=True, text=True)
    if done.returncode in (1, 77):
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert "No space left on device. The first " in done.stderr
    check_output(tmp_path / "out.csv")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with store_of_environment(monkeypatch) as store:
        yield store


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_files_in_buckets_are_read_in_ranges_and_written_whole(
    form: str,
    scheme: str,
    model: Path,
    table: Path,
    tmp_path: Path,
    bucket: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    content = table.read_bytes()
    if form == "parquet":
        rows = {"a": [1.0, 2.0], "b": [1.5, 2.5]}
        pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "in.parquet")
        content = (tmp_path / "in.parquet").read_bytes()
    bucket.put("bucket", f"data/in.{form}", content)
    words = [f"{scheme}://bucket/data/in.{form}", f"{scheme}://bucket/data/out.csv"]
    assert main(["score", str(model), *words, *WORDS]) == 0
    assert not list(tmp_path.glob("*unfinished*"))
    if form == "parquet":
        assert bucket.buckets["bucket"]["data/out.csv"] == b"row,y_0,y_1\n0,1.0,1.5\n1,2.0,2.5\n"
        assert "data/out.csv.bad.jsonl" not in bucket.buckets["bucket"]
    else:
        for name in ("out.csv", "out.csv.bad.jsonl"):
            (tmp_path / name).write_bytes(bucket.buckets["bucket"][f"data/{name}"])
        check_output(tmp_path / "out.csv")


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_images_of_a_bucket_are_scored_and_a_broken_network_is_no_bad_row(
    scheme: str, tmp_path: Path, bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install '.[images]'")
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx_models.identity("UINT8", ("n", 2, 2, 3)), tmp_path / "model.onnx")
    for number in range(40):
        image.new("RGB", (2, 2), (number, 0, 255)).save(tmp_path / "a.png")
        bucket.put("bucket", f"photos/{number % 3}/{number:02}.png", (tmp_path / "a.png").read_bytes())
    bucket.put("bucket", "photos/0/99.png", b"damaged")
    words = ["score", "model.onnx", f"{scheme}://bucket/photos", "out.jsonl", "--keep=path", "--quiet", "--batch=4"]
    bucket.fail("403", key="photos/1/", times=100)
    assert main(words) == 1
    assert "may not be read" in capsys.readouterr().err
    bucket.faults.clear()
    assert main(words) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    paths = sorted(f"{number % 3}/{number:02}.png" for number in range(40))
    assert [row["path"] for row in rows] == paths
    assert [row["y"][0][0][0] for row in rows] == [int(path[2:4]) for path in paths]
    (bad,) = [json.loads(line) for line in (tmp_path / "out.jsonl.bad.jsonl").read_text().splitlines()]
    assert bad["values"] == {"path": "0/99.png"}


def test_a_folder_with_a_suffix_in_a_bucket_ends_in_a_slash(
    tmp_path: Path, bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install '.[images]'")
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx_models.identity("UINT8", ("n", 2, 2, 3)), tmp_path / "model.onnx")
    image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    bucket.put("bucket", "photos.v2/a.png", (tmp_path / "a.png").read_bytes())
    assert main(["score", "model.onnx", "s3://bucket/photos.v2", "out.jsonl", "--quiet"]) == 1
    assert main(["score", "model.onnx", "s3://bucket/photos.v2/", "out.jsonl", "--quiet"]) == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
from remora.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_an_interrupt_does_not_wait_for_downloads(
    tmp_path: Path, bucket: ObjectStore, child_environment: dict[str, str]
) -> None:
    pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install '.[images]'")
    onnx.save(onnx_models.identity("UINT8", ("n", 2, 2, 3)), tmp_path / "model.onnx")
    for number in range(40):
        bucket.put("bucket", f"photos/{number:02}.png", b"an image")
    fetching, gate = threading.Event(), threading.Event()

    def hold(seen: Seen) -> None:
        if seen.key.endswith(".png"):
            fetching.set()
            gate.wait()

    bucket.before = hold
    words = ["score", "model.onnx", "s3://bucket/photos", "out.jsonl", "--quiet"]
    environment = child_environment | {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTIBLE, *words], cwd=tmp_path, env=environment)
    try:
        assert fetching.wait(60.0)
        process.send_signal(signal.SIGINT)
        assert process.wait(60.0) == 130
    finally:
        gate.set()
        process.kill()
        process.wait()


def test_a_missing_object_is_reported(
    model: Path, bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["score", str(model), "s3://bucket/in.csv", "s3://bucket/out.csv"]) == 1
    assert "there is no file 's3://bucket/in.csv'" in capsys.readouterr().err


def test_large_rows_are_read_in_small_chunks(tmp_path: Path, child_environment: dict[str, str]) -> None:
    """Rows of 4 MB, whose size the model leaves open: a chunk of the usual number of rows would take 64 GB."""
    onnx.save(onnx_models.identity("FP32", ("n", "width")), tmp_path / "model.onnx")
    np.save(tmp_path / "in.npy", np.ones((24, 1_000_000), "f4"))
    command = [sys.executable, "-c", MEASURED, "score", "model.onnx", "in.npy", "out.npy", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, env=child_environment, capture_output=True, text=True, check=True)
    assert np.load(tmp_path / "out.npy").shape == (24, 1_000_000)
    assert int(done.stdout) < 1 << 30


def test_progress_shows_rows_speed_and_the_time_left() -> None:
    line = describe(Progress(rows=2000, scored=1000, bad=3, elapsed_ns=2 * 10**9, fraction=0.5))
    assert line == "2,000 rows, 500 rows/s, 50%, 4 s left, 3 bad rows"


def test_a_language_model_or_stream_is_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "models" / "many" / "1").mkdir(parents=True)
    config = PICKY_CONFIG + "model_transaction_policy { decoupled: true }\n"
    (tmp_path / "models" / "many" / "config.pbtxt").write_text(config)
    (tmp_path / "models" / "many" / "1" / "model.py").write_text(PICKY)
    np.save(tmp_path / "in.npy", np.ones((1, 2), "f4"))
    assert main(["score", str(tmp_path / "models"), str(tmp_path / "in.npy"), str(tmp_path / "out.csv")]) == 1
    assert "does not answer each row by itself" in capsys.readouterr().err
