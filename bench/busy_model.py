"""Effect of a Python model whose thread uses a whole processor on an ONNX model beside it.

One client asks the ONNX model over HTTP, one request at a time. Three servers take turns: without the Python model,
with it in a worker process, and with it in a thread of the server. Prints microseconds; asserts nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from coldstart import REMORA, free_port
from load import levels
from memory import wait
from models import mlp

SECONDS = 1.0
ROUNDS = 7
BURN = """
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.on = True
        threading.Thread(target=self.burn, daemon=True).start()

    def burn(self):
        number = 0
        while self.on:
            number += 1

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]

    def finalize(self):
        self.on = False
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""


def times_us(repository: Path, *flags: str) -> tuple[float, float]:
    """Return the median and the 99th percentile of the latency of a server of this repository."""
    port = free_port()
    command = [REMORA, "serve", str(repository), f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false"]
    server = subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL)
    try:
        wait(f"http://127.0.0.1:{port}/v2/health/ready")
        (level,) = levels(port, "mlp", f"--duration={SECONDS}", f"--warm-up={SECONDS / 5}", "--window=0.2", "--fixed")
    finally:
        server.terminate()
        server.wait()
    assert not level["failures"], level["failures"]
    return level["latency_us"]["p50"], level["latency_us"]["p99"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        alone = mlp(Path(folder) / "alone")
        both = Path(folder) / "both"
        shutil.copytree(alone, both)
        (both / "burn" / "1").mkdir(parents=True)
        (both / "burn" / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
        (both / "burn" / "1" / "model.py").write_text(BURN, encoding="utf-8")
        print(f"{'beside it':28} {'median us':>10} {'p99 us':>10}")
        # One server at a time: the burning models of the others would count as neighbours too.
        samples: dict[str, list[tuple[float, float]]] = {}
        for _ in range(ROUNDS):
            for name, repository, flags in (
                ("nothing", alone, ()),
                ("a busy worker process", both, ()),
                ("a busy thread", both, ("--backend-config=python,isolation=thread",)),
            ):
                samples.setdefault(name, []).append(times_us(repository, *flags))
        for name, found in samples.items():
            medians, p99s = (sorted(each)[len(found) // 2] for each in zip(*found, strict=True))
            print(f"{name:28} {medians:10.0f} {p99s:10.0f}")


if __name__ == "__main__":
    main()
