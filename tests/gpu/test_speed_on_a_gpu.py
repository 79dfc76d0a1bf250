"""Throughput against a bare loop with its data on the host, and copies beside kernels. Prints figures; run alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.engine import Engine
from remora.system.cuda import cuda

BATCH, ROUNDS, SECONDS = 32, 5, 2.0
SIDE, WIDTH = 96, 64


def network() -> Any:
    """A convolutional network with an image of 3 x 96 x 96 for its input."""
    onnx = pytest.importorskip("onnx", reason="the model is made with onnx: pip install '.[dev]'")
    helper, random = onnx.helper, np.random.default_rng(1)
    nodes, weights, last, channels = [], [], "x", 3
    for index in range(6):
        shape = (WIDTH, channels, 3, 3)
        weights.append(onnx.numpy_helper.from_array((random.standard_normal(shape) / 30).astype("f4"), f"w{index}"))
        nodes.append(helper.make_node("Conv", [last, f"w{index}"], [f"c{index}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{index}"], [f"r{index}"]))
        last, channels = f"r{index}", WIDTH
    nodes += [helper.make_node("GlobalAveragePool", [last], ["p"]), helper.make_node("Flatten", ["p"], ["y"])]
    kind = onnx.TensorProto.FLOAT
    ends = [
        helper.make_tensor_value_info("x", kind, ["n", 3, SIDE, SIDE]),
        helper.make_tensor_value_info("y", kind, ["n", WIDTH]),
    ]
    made = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], weights), ir_version=9)
    made.opset_import[0].version = 18
    return made


def write(models: Path, count: int) -> Path:
    (models / "cnn" / "1").mkdir(parents=True)
    (models / "cnn" / "1" / "model.onnx").write_bytes(network().SerializeToString())
    (models / "cnn" / "config.pbtxt").write_text(
        f'backend: "onnxruntime" max_batch_size: {BATCH} dynamic_batching {{ }} '
        f"instance_group {{ kind: KIND_GPU gpus: 0 count: {count} }}"
    )
    return models / "cnn" / "1" / "model.onnx"


def rate_of(step: Callable[[], int]) -> float:
    """Images a second."""
    end, done, start = time.monotonic() + SECONDS, 0, time.monotonic()
    while time.monotonic() < end:
        done += step()
    return done / (time.monotonic() - start)


def served(engine: Engine) -> Callable[[], int]:
    image = np.random.default_rng(2).standard_normal((1, 3, SIDE, SIDE)).astype("f4")
    waiting: deque[Future[Any]] = deque(engine.infer_async("cnn", {"x": image}) for _ in range(4 * BATCH))

    def step() -> int:
        waiting.popleft().result()
        waiting.append(engine.infer_async("cnn", {"x": image}))
        return 1

    return step


def test_the_engine_keeps_up_with_a_bare_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runtime: Any = pytest.importorskip("onnxruntime")
    runtime.preload_dlls()  # without it CUDA's wheels are not found, and the bare loop would run on the CPU
    session = runtime.InferenceSession(str(write(tmp_path, 2)), providers=["CUDAExecutionProvider"])
    assert session.get_providers()[0] == "CUDAExecutionProvider"
    batch = np.random.default_rng(2).standard_normal((BATCH, 3, SIDE, SIDE)).astype("f4")

    def bare() -> int:
        session.run(None, {"x": batch})
        return BATCH

    with Engine(tmp_path) as engine:
        step = served(engine)
        rate_of(bare), rate_of(step)  # once to warm up
        pairs = [(rate_of(bare), rate_of(step)) for _ in range(ROUNDS)]
    ratio = float(np.median([mine / theirs for theirs, mine in pairs]))
    with capsys.disabled():
        print(f"\nbare loop {np.median([a for a, _ in pairs]):.0f} images/s, engine at batches of {BATCH} "
              f"{np.median([b for _, b in pairs]):.0f}, ratio {ratio:.3f} (wanted: 0.95)")  # fmt: skip
    assert ratio >= 0.95


def test_copies_run_beside_other_instances_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = {}
    for count in (1, 2):
        models = tmp_path / str(count)
        write(models, count)
        with Engine(models) as engine:
            step = served(engine)
            rate_of(step)
            rates[count] = float(np.median([rate_of(step) for _ in range(3)]))
    runtime, size = cuda(), BATCH * 3 * SIDE * SIDE * 4
    runtime.use(0)
    there, here = runtime.take(size), runtime.take_pinned(size)
    start = time.monotonic()
    for _ in range(100):
        runtime.copy(there, here, size)
    copy_ms = (time.monotonic() - start) * 10
    runtime.free(there), runtime.free_pinned(here)
    batch_ms = {count: BATCH / rate * 1000 for count, rate in rates.items()}
    hidden = batch_ms[1] - batch_ms[2]
    with capsys.disabled():
        print(f"\na batch of {BATCH} every {batch_ms[1]:.2f} ms with one instance, {batch_ms[2]:.2f} ms with two: "
              f"{hidden:.2f} ms hidden; one input's copy alone takes {copy_ms:.2f} ms")  # fmt: skip
    assert rates[2] >= rates[1] * 0.98
