"""`remora score` beside a loop written by hand over pyarrow and ONNX Runtime, from Parquet to Parquet.

Both read and write the same rows with the same batch, each in a process; their order alternates. On a machine with
other work processor time is the figure to compare, and the time of a whole command the one that people wait for.

python -m bench score [ROWS ...]
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pyarrow
import pyarrow.parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from coldstart import REMORA
from support.models import onnx_models

ROWS, WIDTH, ROUNDS, BATCH = (100_000, 1_000_000), 20, 5, 1024
LOOP = """
import sys
import numpy as np
import onnxruntime
import pyarrow
import pyarrow.parquet as parquet

model, source, target, batch = *sys.argv[1:4], int(sys.argv[4])
options = onnxruntime.SessionOptions()
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
writer, number = None, 0
for table in parquet.ParquetFile(source).iter_batches(batch_size=batch):
    rows = np.stack([column.to_numpy() for column in table.columns], axis=1).astype(np.float32)
    (scores,) = session.run(["y"], {"x": rows})
    values = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(scores.reshape(-1)), scores.shape[1])
    numbers = pyarrow.array(np.arange(number, number + len(rows)))
    number += len(rows)
    out = pyarrow.table({"row": numbers, "y": values})
    writer = writer or parquet.ParquetWriter(target, out.schema)
    writer.write_table(out)
writer.close()
"""


class Spent(NamedTuple):
    """Seconds of processors and of the clock."""

    cpu_s: float
    wall_s: float


def run(*words: object) -> Spent:
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([str(word) for word in words], check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(cpu_s, time.perf_counter() - begin)


def measure(folder: Path, rows: int) -> None:
    model, source, target = folder / "model.onnx", folder / "in.parquet", folder / "out.parquet"
    onnx.save(onnx_models.layers(WIDTH, 64, 64, 3), model)
    values = np.random.default_rng(0).random((rows, WIDTH)).astype("f4")
    columns = {f"c{number:02}": values[:, number] for number in range(WIDTH)}
    pyarrow.parquet.write_table(pyarrow.table(columns), source)
    commands = {
        "loop": (sys.executable, "-c", LOOP, model, source, folder / "loop.parquet", BATCH),
        "score": (REMORA, "score", model, source, target, "--quiet", "--batch", BATCH),
        "score, batch searched": (REMORA, "score", model, source, target, "--quiet"),
    }
    spent: dict[str, list[Spent]] = {name: [] for name in commands}
    for number in range(ROUNDS):
        for name in list(commands)[:: 1 if number % 2 else -1]:
            spent[name].append(run(*commands[name]))
    results = [pyarrow.parquet.read_table(path)["y"].combine_chunks() for path in (target, folder / "loop.parquet")]
    assert np.allclose(*(np.asarray(each.flatten()) for each in results), atol=1e-5)
    print(f"{rows:,} rows")
    for name, rounds in spent.items():
        cpu_s, wall_s = (statistics.median(values) for values in zip(*rounds, strict=True))
        ratio = statistics.median(loop.cpu_s / own.cpu_s for loop, own in zip(spent["loop"], rounds, strict=True))
        print(f"{name:>22}: {cpu_s:.2f} s of processors, {wall_s:.2f} s in all; {ratio:.2f} of the loop's speed")


def main() -> None:
    for rows in map(int, sys.argv[1:] or ROWS):
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), rows)


if __name__ == "__main__":
    main()
