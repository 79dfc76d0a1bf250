"""The models that the benchmarks serve: made here, of no use but to be measured."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

CONFIG = """max_batch_size: 32
dynamic_batching { }
instance_group [ { count: 1 kind: KIND_CPU } ]
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
"""

ROWS, FIXED_S, EACH_S = 8, 0.004, 0.0005
"""What a batch of `sleeper` may have, and how long it takes: besides its rows, and for each."""

SLEEPER = f"""
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep({FIXED_S} + {EACH_S} * len(requests))
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in inputs]
"""
SLEEPER_CONFIG = f"""
backend: "python" max_batch_size: {ROWS} dynamic_batching {{ }}
input {{ name: "IN" data_type: TYPE_INT32 dims: 1 }} output {{ name: "OUT" data_type: TYPE_INT32 dims: 1 }}
parameters {{ key: "ISOLATION" value: {{ string_value: "thread" }} }}
"""


def sleeper(repository: Path, *names: str) -> Path:
    """Python models in threads that sleep as long as a device would compute; the repository that holds them."""
    for name in names:
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(SLEEPER)
        (repository / name / "config.pbtxt").write_text(SLEEPER_CONFIG)
    return repository


def mlp(repository: Path, width: int = 256) -> Path:
    """A 64-256-256-10 network, about 10 us at batch 1; the repository that holds it, as `mlp`.

    A ``width`` of 7160 makes it 207 MB.
    """
    random = np.random.default_rng(0)
    nodes, weights, name = [], [], "input"
    for number, shape in enumerate(((64, width), (width, width), (width, 10))):
        weights.append(numpy_helper.from_array(random.standard_normal(shape, dtype=np.float32), f"w{number}"))
        out = "output" if number == 2 else f"h{number}"
        nodes.append(helper.make_node("MatMul", [name, f"w{number}"], [out]))
        if number < 2:
            nodes.append(helper.make_node("Relu", [out], [f"r{number}"]))
        name = f"r{number}"
    ends = [
        helper.make_tensor_value_info(end, TensorProto.FLOAT, ["batch", size])
        for end, size in (("input", 64), ("output", 10))
    ]
    graph = helper.make_graph(nodes, "mlp", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    add(repository, "mlp", model.SerializeToString())
    return repository


def add(repository: Path, name: str, model: bytes | Path) -> None:
    """Put an ONNX model, its bytes or its file, into the repository with the configuration of the benchmarks."""
    folder = repository / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    target = folder / "1" / "model.onnx"
    if isinstance(model, Path):
        shutil.copyfile(model, target)
    else:
        target.write_bytes(model)
    (folder / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
