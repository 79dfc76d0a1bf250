"""How long a request takes to a Python model in a worker process and back, against the same model in a thread.

    PYTHONPATH=core python bench/worker.py [--seconds 2] [--transport memory|pipe]

Prints microseconds for each request; asserts nothing. Depth is how many requests run together, in one execution.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from google.protobuf import text_format

from remora.backends import Execution, Instance, Placement, Source
from remora.backends.python import PythonBackend
from remora.messages import InferForm, Request
from remora.proto.model_config_pb2 import ModelConfig

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array + 1)]))
        return answers
"""
CONFIG = """
name: "m" backend: "python" max_batch_size: 64
input [{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }]
"""
CASES = ((64, 1), (64, 16), (1 << 18, 1), (1 << 18, 16))


def measure(instance: Instance, floats: int, depth: int, seconds: float) -> tuple[float, float]:
    """The median and the 99th percentile, in microseconds for each request."""
    form = InferForm(())
    array = np.zeros((1, floats), np.float32)
    times: list[int] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        requests = [Request(form, {"IN": array}, ("OUT",), 1, None) for _ in range(depth)]
        begin = time.perf_counter_ns()
        outcomes = instance.execute(Execution(requests))
        times.append(time.perf_counter_ns() - begin)
        del outcomes
    times.sort()
    return times[len(times) // 2] / depth / 1000, times[len(times) * 99 // 100] / depth / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--transport", default="auto")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "m" / "1" / "model.py"
        file.parent.mkdir(parents=True)
        file.write_text(MODEL)
        config = text_format.Parse(CONFIG, ModelConfig())
        print(f"{'where':8} {'bytes':>8} {'depth':>5} {'median us':>10} {'p99 us':>10}")
        for where in ("thread", "process"):
            settings = {"isolation": where, "transport": arguments.transport}
            source = Source("m", 1, file.parents[1], file.parent, Path(folder), settings)
            model = PythonBackend().open(source, config)
            instance = model.instance(config, Placement("m_0"))
            for floats, depth in CASES:
                measure(instance, floats, depth, arguments.seconds / 10)
                median, p99 = measure(instance, floats, depth, arguments.seconds)
                print(f"{where:8} {floats * 4:8} {depth:5} {median:10.1f} {p99:10.1f}")
            instance.close()
            model.close()


if __name__ == "__main__":
    main()
