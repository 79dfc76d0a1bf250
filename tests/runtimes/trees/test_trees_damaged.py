"""No damaged file of a forest ends the process: it is refused, or answers something.

The libraries run in a separate process here, because the tests look for its end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.models import parity_models as parity

CORE = Path(__file__).resolve().parents[3] / "core"
FORMS = [form for form in parity.FORMATS if isinstance(form, parity.Trees)]
ROUNDS = 150
DAMAGE = """
import random, re, sys
from pathlib import Path
import numpy as np
from remora.backends import Placement, Source
from remora_runtimes.trees import TreesBackend
from remora.errors import RemoraError
from remora.proto.model_config_pb2 import ModelConfig

directory, kind, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
file = next(path for path in (directory / "1").iterdir())
whole = file.read_bytes()
numbers = list(re.finditer(rb"(?<![.\\d])-?\\d+(?![.\\d])", whole))
wrong = (b"-1", b"99999999", b"2147483647", b"-2147483648", b"9223372036854775807", b"nan", b"0", b"7")
rows = (np.random.default_rng(1).random((8, 6), "f4") * 9).astype("f4")
rows[0], rows[1], rows[2] = np.nan, 1e30, -1

def damaged(chance):
    data, how = bytearray(whole), chance.choice(("cut", "byte", "bytes", "big", "number", "twice"))
    if how == "cut":
        return bytes(data[: chance.randrange(len(data))])
    at = chance.randrange(len(data))
    if how in ("byte", "bytes"):
        for _ in range(1 if how == "byte" else 5):
            data[chance.randrange(len(data))] = chance.randrange(256)
    elif how == "big":
        width = chance.choice((2, 4, 8))
        data[at : at + width] = chance.choice((b"\\xff" * width, b"\\x7f" + b"\\xff" * (width - 1), bytes(width)))
    elif how == "number" and numbers:
        found = chance.choice(numbers)
        data[found.start() : found.end()] = chance.choice(wrong)
    else:
        data[at:at] = data[at : at + chance.randrange(1, 64)]
    return bytes(data)

def attempt():
    config = ModelConfig(name="m", backend="fil", max_batch_size=8)
    config.parameters["model_type"].string_value = kind
    model = TreesBackend().open(Source("m", 1, directory, directory / "1", directory.parent), config)
    model.forest.predict(rows)

attempt()
refused = 0
for seed in range(rounds):
    file.write_bytes(damaged(random.Random(seed)))
    print("seed", seed, flush=True)
    try:
        attempt()
    except RemoraError:
        refused += 1
    except Exception as error:  # what a library raises when it is asked is an answer too
        print(type(error).__name__, error)
print("refused", refused)
"""


@pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
@pytest.mark.parametrize("kind", ["regression", "multiclass-probabilities"])
def test_a_damaged_file_never_ends_the_process(form: parity.Trees, kind: str, tmp_path: Path) -> None:
    reason = form.missing()
    if reason:
        pytest.skip(reason)
    form.write(next(model for model in form.models() if model.kind == kind), tmp_path / "m")
    command = [sys.executable, "-W", "ignore", "-c", DAMAGE, str(tmp_path / "m"), form.model_type, str(ROUNDS)]
    child = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(CORE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert child.returncode == 0, f"{child.returncode} after {child.stdout[-200:]}: {child.stderr[-500:]}"
    refused = int(child.stdout.split()[-1])
    assert refused > ROUNDS // 3, "hardly anything was refused: is the damage done at all?"
