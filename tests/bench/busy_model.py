"""Effect of a Python model whose thread uses a whole processor on an ONNX model beside it.

One client asks the ONNX model over HTTP, one request at a time. Three servers take turns: without the Python model,
with it in a worker process, and with it in a thread of the server. Prints microseconds; asserts nothing.
"""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from coldstart import REMORA, free_port
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


class Asked:
    """A server, and the times of the requests to it in nanoseconds."""

    def __init__(self, repository: Path, *flags: str) -> None:
        self.port = free_port()
        quiet = ("--allow-grpc=false", "--allow-metrics=false")
        self.process = subprocess.Popen(
            [REMORA, "serve", str(repository), f"--http-port={self.port}", *quiet, *flags], stderr=subprocess.DEVNULL
        )
        wait(f"http://127.0.0.1:{self.port}/v2/health/ready")
        self.times: list[int] = []

    def ask(self, seconds: float) -> None:
        body = np.zeros((1, 64), np.float32).tobytes()
        tensor = {"name": "input", "shape": [1, 64], "datatype": "FP32", "parameters": {"binary_data_size": len(body)}}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        client = http.client.HTTPConnection("127.0.0.1", self.port)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.perf_counter_ns()
            client.request("POST", "/v2/models/mlp/infer", head + body, headers)
            answer = client.getresponse()
            answer.read()
            self.times.append(time.perf_counter_ns() - begin)
            assert answer.status == 200
        client.close()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


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
                server = Asked(repository, *flags)
                server.ask(SECONDS / 5)
                server.times.clear()
                server.ask(SECONDS)
                server.close()
                times = sorted(server.times)
                samples.setdefault(name, []).append((times[len(times) // 2], times[len(times) * 99 // 100]))
        for name, found in samples.items():
            medians, p99s = (sorted(each)[len(found) // 2] / 1000 for each in zip(*found, strict=True))
            print(f"{name:28} {medians:10.0f} {p99s:10.0f}")


if __name__ == "__main__":
    main()
