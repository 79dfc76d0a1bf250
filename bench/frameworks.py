"""A convolutional model on each CPU backend against the framework's own loop, with as many threads.

python bench/frameworks.py NAME [ROUNDS]     NAME: onnxruntime, torchscript, torch.export, openvino, tensorflow

Run it in the environment that has the framework (make test-NAME makes them). Each side has a process, and they run in
turn, so that what else the machine does falls on both; the figures are medians of the rounds, the ratios medians of the
rounds' ratios. One client waits for each answer; 64 clients means 64 requests under way through `Engine.infer_async`,
batched up to 32, against a loop over batches of 32. There is no network in this. The ratio by processor time is the one
to look at on a machine that has other work.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "tests")]

from remora.engine import Engine  # noqa: E402
from remora.system.cpus import usable_cpus  # noqa: E402

Array = Any
Loop = Callable[[Array], object]
ROUND_S = 0.5
CLIENTS, BATCH = 64, 32
IMAGE = np.random.default_rng(1).standard_normal((1, 3, 96, 96)).astype("f4")
CONFIG = """
max_batch_size: 32 dynamic_batching {{ }} instance_group {{ count: 1 kind: KIND_CPU }} {0}
input {{ name: "x" data_type: TYPE_FP32 dims: [3, 96, 96] }} output {{ name: "y" data_type: TYPE_FP32 dims: 10 }}
"""


def torch_cnn() -> Any:
    import torch

    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    ).eval()  # fmt: skip


def torchscript(version: Path, threads: int) -> tuple[str, Loop]:
    import warnings

    import torch

    module = torch_cnn()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(module)
        script.save(str(version / "model.pt"))
    return 'backend: "pytorch"', torch_loop(script, threads)


def torch_export(version: Path, threads: int) -> tuple[str, Loop]:
    import torch

    program = torch.export.export(
        torch_cnn(), (torch.zeros(4, 3, 96, 96),), dynamic_shapes=({0: torch.export.Dim.AUTO},)
    )
    torch.export.save(program, version / "model.pt2")
    return 'backend: "pytorch"', torch_loop(program.module(), threads)


def torch_loop(module: Any, threads: int) -> Loop:
    import torch

    torch.set_num_threads(threads)

    def loop(rows: Array) -> object:
        with torch.inference_mode():
            return module(torch.from_numpy(rows)).numpy()

    return loop


def onnx_cnn(path: Path) -> None:
    import onnx
    from onnx import helper, numpy_helper

    random = np.random.default_rng(0)
    shapes = {"a": (32, 3, 3, 3), "b": (64, 32, 3, 3), "c": (64, 64, 3, 3), "d": (64, 10)}
    weights = {name: (random.standard_normal(shape) / 10).astype("f4") for name, shape in shapes.items()}
    conv = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["x1"], **conv), helper.make_node("Relu", ["x1"], ["r1"]),
        helper.make_node("Conv", ["r1", "b"], ["x2"], strides=[2, 2], **conv), helper.make_node("Relu", ["x2"], ["r2"]),
        helper.make_node("Conv", ["r2", "c"], ["x3"], **conv), helper.make_node("Relu", ["x3"], ["r3"]),
        helper.make_node("GlobalAveragePool", ["r3"], ["p"]), helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "d"], ["y"]),
    ]  # fmt: skip
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "cnn",
        [value("x", 1, ["n", 3, 96, 96])],
        [value("y", 1, ["n", 10])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


def onnxruntime(version: Path, threads: int) -> tuple[str, Loop]:
    import onnxruntime as runtime

    onnx_cnn(version / "model.onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = runtime.InferenceSession(str(version / "model.onnx"), options)
    return 'backend: "onnxruntime"', lambda rows: session.run(None, {"x": rows})


def openvino(version: Path, threads: int) -> tuple[str, Loop]:
    import openvino as runtime

    onnx_cnn(version / "model.onnx")
    options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = runtime.Core().compile_model(str(version / "model.onnx"), "CPU", options)
    request = compiled.create_infer_request()
    return 'backend: "openvino"', lambda rows: request.infer([rows], share_inputs=True)[0]


def tensorflow(version: Path, threads: int) -> tuple[str, Loop]:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.random.set_seed(0)
    kernels = [tf.random.normal(shape) / 10 for shape in ((3, 3, 3, 32), (3, 3, 32, 64), (3, 3, 64, 64), (64, 10))]

    def cnn(x: Any) -> dict[str, Any]:
        h = tf.transpose(x, [0, 2, 3, 1])
        for kernel, stride in zip(kernels[:3], (1, 2, 1), strict=True):
            h = tf.nn.relu(tf.nn.conv2d(h, kernel, stride, "SAME"))
        return {"y": tf.reduce_mean(h, [1, 2]) @ kernels[3]}

    module = tf.Module()
    module.cnn = tf.function(cnn, input_signature=[tf.TensorSpec([None, 3, 96, 96], tf.float32, name="x")])
    tf.saved_model.save(module, str(version / "model.savedmodel"), signatures=module.cnn)
    signature = tf.saved_model.load(str(version / "model.savedmodel")).signatures["serving_default"]
    return 'platform: "tensorflow_savedmodel"', lambda rows: signature(x=tf.constant(rows))["y"].numpy()


SUBJECTS = {
    "onnxruntime": onnxruntime,
    "torchscript": torchscript,
    "torch.export": torch_export,
    "openvino": openvino,
    "tensorflow": tensorflow,
}


class Rate(NamedTuple):
    """What one round did: rows for each second, and for each second of this process's processor time."""

    rows_per_s: float
    rows_per_cpu_s: float


def measure(work: Callable[[Callable[[], bool]], int]) -> Rate:
    """Run one round of ``work``, which goes on while the caller lets it; return the number of rows it did."""
    begin, cpu = time.perf_counter(), time.process_time()
    rows = work(lambda: time.perf_counter() - begin < ROUND_S)
    return Rate(rows / (time.perf_counter() - begin), rows / (time.process_time() - cpu))


def looped(step: Callable[[], int]) -> Callable[[Callable[[], bool]], int]:
    """One step after the other, each telling how many rows it did."""

    def work(going_on: Callable[[], bool]) -> int:
        rows = 0
        while going_on():
            rows += step()
        return rows

    return work


def pipelined(engine: Engine, image: Array) -> Callable[[Callable[[], bool]], int]:
    """CLIENTS requests under way all the time, until the last of them are answered."""

    def work(going_on: Callable[[], bool]) -> int:
        under_way: deque[Future[Any]] = deque()
        rows = 0
        while going_on() or under_way:
            while len(under_way) < CLIENTS and going_on():
                under_way.append(engine.infer_async("cnn", {"x": image}))
            if under_way:
                under_way.popleft().result()
                rows += 1
        return rows

    return work


def own_loop(name: str) -> None:
    """The other side, in a separate process: a round for each batch size that standard input names."""
    with tempfile.TemporaryDirectory() as place:
        _, loop = SUBJECTS[name](Path(place), usable_cpus())
        for line in sys.stdin:
            rows = np.repeat(IMAGE, int(line), 0)
            print(json.dumps(measure(looped(lambda rows=rows: len(rows) * (loop(rows) is not None)))), flush=True)


def main(name: str, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        version = Path(place, "cnn", "1")
        version.mkdir(parents=True)
        backend, _ = SUBJECTS[name](version, usable_cpus())
        (version.parent / "config.pbtxt").write_text(CONFIG.format(backend))
        command = [sys.executable, __file__, name, "loop"]
        other = stack.enter_context(subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True))
        stack.callback(other.kill)

        def theirs(rows: int) -> Rate:
            assert other.stdin
            assert other.stdout
            print(rows, file=other.stdin, flush=True)
            return Rate(*json.loads(other.stdout.readline()))

        with Engine(place) as engine:
            one = looped(lambda: len(engine.infer("cnn", {"x": IMAGE})["y"]))
            for label, ours, rows in (("c=1", one, 1), (f"c={CLIENTS}", pipelined(engine, IMAGE), BATCH)):
                measure(ours), theirs(rows)  # both warm
                found = [(measure(ours), theirs(rows)) for _ in range(rounds)]
                mine, own = (statistics.median(rate.rows_per_s for rate in side) for side in zip(*found, strict=True))
                wall, cpu = (statistics.median(a[at] / b[at] for a, b in found) for at in (0, 1))
                print(f"{name:12} {label:5} {mine:6.0f} of {own:6.0f} rows/s: {wall:.2f}, by processor time {cpu:.2f}")


if __name__ == "__main__":
    if sys.argv[2:] == ["loop"]:
        own_loop(sys.argv[1])
    else:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 15)
