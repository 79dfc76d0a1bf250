"""`remora score` on long files: runs that are killed after any time, and memory that the length does not change."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pyarrow
import pyarrow.parquet
import pytest

from support.models import onnx_models

ROWS = {"csv": 40_000, "jsonl": 40_000, "npy": 400_000}
"""Rows by format, so many that a kill comes amid them."""
BAD = range(7, 40_000, 10_000)
MORTAL = """
import signal, sys
from remora.cli import main
from remora_tools.scoring.run import ScoringRun
seconds, score = float(sys.argv.pop(1)), ScoringRun.score
def mortal(*arguments):
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it ends the process as SIGKILL does
    signal.setitimer(signal.ITIMER_PROF, seconds)
    score(*arguments)
ScoringRun.score = mortal
sys.exit(main(sys.argv[1:]))
"""
"""Program that the system ends after some processor time with the rows, wherever it is then."""
MEASURED = """
import sys
from pathlib import Path
from remora.cli import main
code = main(sys.argv[1:])
(peak,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
print(int(peak.split()[1]) * 1024)
sys.exit(code)
"""
"""Program that prints the bytes of memory that it had at most."""
_MIB = 1 << 20
_NOISE_BYTES = 72 * _MIB
"""Difference of two runs' memory that the allocators of the libraries explain; 43 MiB were seen in 16 runs."""


def _write(path: Path, values: np.ndarray, note: str = "", group_rows: int = 20_000) -> Path:
    """Write columns a, b ... in the format of the suffix, with bad rows and a long column in text formats."""
    names = [f"c{number}" for number in range(values.shape[1])]
    if path.suffix == ".npy":
        np.save(path, values)
    elif path.suffix == ".parquet":
        table = pyarrow.table({name: values[:, place] for place, name in enumerate(names)})
        pyarrow.parquet.write_table(table, path, row_group_size=group_rows)
    elif path.suffix == ".csv":
        lines = (
            ",".join([*("" if number in BAD and not note else repr(each) for each in row), note])
            for number, row in enumerate(values.tolist())
        )
        path.write_text("\n".join([",".join([*names, "note"]), *lines]) + "\n")
    else:
        rows = (dict(zip(names, row, strict=True)) | {"note": note} for row in values.tolist())
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("forms", ["csv jsonl", "jsonl csv", "npy parquet"], ids=lambda forms: forms.replace(" ", "-"))
def test_a_run_that_is_killed_again_and_again_gives_the_rows_of_one_that_is_not(
    forms: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    before, after = forms.split()
    onnx.save(onnx_models.identity("FP32", ("n", 2)), tmp_path / "model.onnx")
    _write(tmp_path / f"in.{before}", np.random.default_rng(0).random((ROWS[before], 2)).astype("f4"))
    columns = ["--column=x=c0,c1"] if before != "npy" else []
    words = ["--batch=512", "--segment-secs=0", "--quiet", *columns]

    def score(out: str, *start: str) -> int:
        command = [sys.executable, *start, "score", "model.onnx", f"in.{before}", out, *words]
        return subprocess.run(command, cwd=tmp_path, env=child_environment, check=False).returncode

    assert score(f"whole.{after}", "-m", "remora") == 0
    journal, target = tmp_path / f"out.{after}.unfinished" / "journal.jsonl", tmp_path / f"out.{after}"
    kept = 0
    for step in itertools.count(1):
        code = score(target.name, "-c", MORTAL, str(0.005 * 1.3**step))
        if code == 0:
            break
        assert code == -signal.SIGPROF
        found = journal.read_bytes().count(b'"begin"') if journal.exists() else 0
        assert found >= kept or target.exists(), "no kill costs what an earlier run has secured"
        kept = max(kept, found)
    assert kept > 0, "a kill came amid the rows"
    for suffix in (after, f"{after}.bad.jsonl"):
        whole, out = tmp_path / f"whole.{suffix}", tmp_path / f"out.{suffix}"
        assert whole.exists() == out.exists() == (suffix == after or before == "csv")
        if suffix == "parquet":
            assert pyarrow.parquet.read_table(whole).equals(pyarrow.parquet.read_table(out))
        elif whole.exists():
            assert whole.read_bytes() == out.read_bytes()


@pytest.mark.parametrize(
    ("form", "group_rows"),
    [("csv", 0), ("jsonl", 0), ("npy", 0), ("parquet", 20_000), ("parquet", 1_000_000)],
    ids=["csv", "jsonl", "npy", "parquet", "parquet-of-one-row-group"],
)
def test_a_longer_file_takes_the_same_memory(
    form: str, group_rows: int, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    is_text = form in ("csv", "jsonl")
    width = 2 if is_text else 64
    onnx.save(onnx_models.identity("FP32", ("n", width)), tmp_path / "model.onnx")
    columns = ["--column", f"x={','.join(f'c{number}' for number in range(width))}"] if form != "npy" else []
    environment = {**child_environment, "OMP_NUM_THREADS": "2"}  # pyarrow's threads, each of which keeps free memory
    peaks, sizes = [], []
    for rows in (50_000, 150_000) if is_text else (400_000, 1_000_000):
        values = np.random.default_rng(0).random((rows, width)).astype("f4")
        source = _write(tmp_path / f"{rows}.{form}", values, "n" * 2_000 if is_text else "", group_rows)
        sizes.append(source.stat().st_size)
        command = ["score", "model.onnx", source.name, f"{rows}.out.npy", "--quiet", "--batch=512", *columns]
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *command], cwd=tmp_path, env=environment, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        peaks.append(int(done.stdout))
        assert np.array_equal(np.load(tmp_path / f"{rows}.out.npy"), values)
    assert sizes[1] - sizes[0] > 2 * _NOISE_BYTES
    assert peaks[1] - peaks[0] < _NOISE_BYTES, f"{peaks[0] / _MIB:.0f} MiB, then {peaks[1] / _MIB:.0f} MiB"
