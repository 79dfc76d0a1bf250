"""`remora tune` against the whole grid: five models, throughput within the objective, and time of the measurements.

python bench/tune.py [MODEL ...]: the result of the search and the best of the grid are measured again in pairs.
The grid leaves out windows that can hardly have its best (`tuning_grid.py`). The search may take a tenth of the
time of the whole grid, which is estimated from the windows left out, and at most the command's default. The ratio to
the measured windows alone is printed, too. It is larger, and has no limit, because a grid that leaves out windows is a
search itself.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from remora.engine import Engine
from remora.options import EngineOptions
from remora.server.startup import with_workers
from remora_tools.deciders.objective import Slo
from remora_tools.tuning import Goal, LoadResult, LoadTrial, Point
from remora_tools.tuning.measuring import TrialEngine, loop_in_thread
from remora_tools.tuning.search import Search, describe
from support.engine.tuning_grid import MARGIN, Grid

WINDOW_S = 0.3
PAIRS = 7
BUDGET_S = 120.0
NOTHING = argparse.Namespace(json=None, npy=[], input=[], random=True, shape=[], output=[], classes=0, batch=0)
SLEEPER = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.005)
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]) for array in inputs]
"""


def weights(name: str, *shape: int) -> Any:
    values = np.random.default_rng(len(name)).standard_normal(shape) / math.sqrt(shape[0])
    return numpy_helper.from_array(values.astype("f4"), name)


def write(root: Path, name: str, nodes: list[Any], tensors: list[Any], inside: list[Any], outside: list[Any]) -> None:
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, ["n", *dims])
            for end, dims in (("x", inside), ("y", outside))]  # fmt: skip
    graph = helper.make_graph(nodes, name, ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (root / name / "1").mkdir(parents=True)
    save(model, root / name / "1" / "model.onnx")


def mlp(root: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "a"], ["h"]), helper.make_node("Relu", ["h"], ["r"]),
             helper.make_node("MatMul", ["r", "bb"], ["y"])]  # fmt: skip
    write(root, "mlp", nodes, [weights("a", 64, 64), weights("bb", 64, 10)], [64], [10])


def cnn(root: Path) -> None:
    nodes, tensors, last = [], [], "x"
    for place, (inside, outside) in enumerate([(3, 16), (16, 32), (32, 32)]):
        tensors.append(weights(f"w{place}", outside, inside, 3, 3))
        nodes.append(helper.make_node("Conv", [last, f"w{place}"], [f"c{place}"], pads=[1, 1, 1, 1], strides=[2, 2]))
        nodes.append(helper.make_node("Relu", [f"c{place}"], [f"r{place}"]))
        last = f"r{place}"
    nodes += [helper.make_node("GlobalAveragePool", [last], ["p"]), helper.make_node("Flatten", ["p"], ["y"])]
    write(root, "cnn", nodes, tensors, [3, 64, 64], [32])


def encoder(root: Path) -> None:
    """Two layers of self-attention (64 tokens of 128 numbers) with a feed-forward network."""
    nodes, tensors, last = [], [], "x"
    for layer in "01":
        for name in "qkv":
            tensors.append(weights(f"{name}{layer}", 128, 128))
            nodes.append(helper.make_node("MatMul", [last, f"{name}{layer}"], [f"{name}{layer}_"]))
        tensors += [weights(f"in{layer}", 128, 512), weights(f"out{layer}", 512, 128)]
        nodes += [
            helper.make_node("Transpose", [f"k{layer}_"], [f"t{layer}"], perm=[0, 2, 1]),
            helper.make_node("MatMul", [f"q{layer}_", f"t{layer}"], [f"s{layer}"]),
            helper.make_node("Softmax", [f"s{layer}"], [f"p{layer}"], axis=-1),
            helper.make_node("MatMul", [f"p{layer}", f"v{layer}_"], [f"m{layer}"]),
            helper.make_node("Add", [f"m{layer}", last], [f"a{layer}"]),
            helper.make_node("MatMul", [f"a{layer}", f"in{layer}"], [f"f{layer}"]),
            helper.make_node("Relu", [f"f{layer}"], [f"r{layer}"]),
            helper.make_node("MatMul", [f"r{layer}", f"out{layer}"], [f"o{layer}"]),
        ]
        last = f"o{layer}"
    nodes.append(helper.make_node("Identity", [last], ["y"]))
    write(root, "encoder", nodes, tensors, [64, 128], [64, 128])


def sleeper(root: Path) -> None:
    (root / "sleeper" / "1").mkdir(parents=True)
    (root / "sleeper" / "1" / "model.py").write_text(SLEEPER)
    (root / "sleeper" / "config.pbtxt").write_text(
        'backend: "python" max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 10 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 10 } instance_group { count: 1 kind: KIND_CPU }'
    )


def ensemble(root: Path) -> None:
    mlp(root)
    (root / "mlp" / "config.pbtxt").write_text("max_batch_size: 8")
    sleeper(root)
    (root / "both" / "1").mkdir(parents=True)
    (root / "both" / "config.pbtxt").write_text("""platform: "ensemble" max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: 64 } output { name: "y" data_type: TYPE_FP32 dims: 10 }
        ensemble_scheduling {
          step { model_name: "mlp" model_version: -1 input_map { key: "x" value: "x" }
                 output_map { key: "y" value: "h" } }
          step { model_name: "sleeper" model_version: -1 input_map { key: "x" value: "h" }
                 output_map { key: "y" value: "y" } } }""")


MODELS: dict[str, tuple[Callable[[Path], None], float]] = {
    "mlp": (mlp, 20.0), "cnn": (cnn, 50.0), "encoder": (encoder, 100.0), "sleeper": (sleeper, 40.0),
    "ensemble": (ensemble, 50.0),
}  # fmt: skip
"""Models with the limit of their p99 in milliseconds."""


def compare(trials: TrialEngine, one: Point, other: Point, slo: Slo, window_s: float) -> tuple[float, float, float]:
    """Return the median ratio of throughput in pairs, and the median latency of both in milliseconds."""
    rates, latencies = [], ([], [])  # type: ignore[var-annotated]
    for number in range(PAIRS):
        found = {}
        for which in (0, 1) if number % 2 else (1, 0):
            point = (one, other)[which]
            found[which] = trials.run(LoadTrial(point.plan, point.load, 3 * window_s, slo.percent))
        first, second = found[0], found[1]
        if isinstance(first, LoadResult) and isinstance(second, LoadResult):
            rates.append(first.rate_per_s / second.rate_per_s)
            latencies[0].append(first.latency_ns / 1e6)
            latencies[1].append(second.latency_ns / 1e6)
    return median(rates), median(latencies[0]), median(latencies[1])


def measure(name: str, window_s: float) -> str:
    make, limit_ms = MODELS[name]
    slo = Slo(99.0, round(limit_ms * 1e6))
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        options = EngineOptions(paths=(folder,), model_control_mode="explicit", load_model=("*",))
        with loop_in_thread() as loop, Engine(options=with_workers(options)) as engine:
            trials = TrialEngine(engine, loop, NOTHING)
            found = Grid(trials.system, slo, window_s, trials.run).measure()
            search = Search(trials.system, Goal(slo, budget_s=min(found.whole_s / 10, BUDGET_S), window_s=window_s))
            spent = 0.0
            while (trial := search.next_trial()) is not None:
                result = trials.run(trial)
                spent += result.spent_s
                search.record(result)
            decision = search.decision()
            best = found.best
            if best is None or decision.best is None or not decision.holds:
                return f"{name}: grid {best and best.rate_per_s}, search {decision.why}"
            ratio, own_ms, grid_ms = compare(trials, decision.best, best, slo, window_s)
    return (
        f"{name} ({slo.text()}), load {os.getloadavg()[0]:.1f}\n"
        f"  grid: {found.plans} plans, {found.windows} windows in {found.spent_s:.0f} s; with the {found.skipped} that "
        f"the bounds exclude {found.whole_s:.0f} s; largest rate {found.exceeded:.2f} of its bound (margin {MARGIN})\n"
        f"  best of the grid: {text(best)}\n"
        f"  best of the search: {text(decision.best)}\n"
        f"  in {PAIRS} pairs: {ratio:.3f} of the grid's throughput, p99 {own_ms:.1f} and {grid_ms:.1f} ms\n"
        f"  time of the search: {spent:.0f} s, {spent / found.spent_s:.3f} of the measured windows, "
        f"{spent / found.whole_s:.3f} of the whole grid"
    )


def text(point: Point) -> str:
    plan = "; ".join(map(describe, point.plan))
    return f"{plan} at {point.load.text()}: {point.rate_per_s:.0f}/s, p99 {point.latency_ns / 1e6:.1f} ms"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--window", type=float, default=WINDOW_S)
    options = parser.parse_args()
    for name in options.models:
        print(measure(name, options.window), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
