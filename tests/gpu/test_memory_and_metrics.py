"""How full a GPU is, and what the metrics say about it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from remora.calls import Metrics
from remora.engine import Engine
from remora.errors import RemoraError
from remora.system.gpus import Gpus
from support.models.device_models import X, add_onnx

ON_GPU = "instance_group { kind: KIND_GPU }"


def test_metrics_tell_of_every_gpu(tmp_path: Path) -> None:
    add_onnx(tmp_path, "double", ON_GPU)
    with Engine(tmp_path) as engine:
        np.testing.assert_allclose(engine.infer("double", {"x": X})["y"], X * 2)
        text = str(engine.perform(Metrics()))
    readings = Gpus().readings()
    assert readings
    for reading in readings:
        for name in ("nv_gpu_utilization", "nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes"):
            assert f'{name}{{gpu_uuid="{reading.uuid}"}}' in text


def test_a_full_gpu_takes_no_more_instances(tmp_path: Path) -> None:
    add_onnx(tmp_path, "double", ON_GPU)
    with pytest.raises(RemoraError, match=r"of the memory of GPU 0 is taken, and --model-load-gpu-limit is 0%"):
        Engine(tmp_path, model_load_gpu_limit=("0:0.0",)).start()


def test_loading_and_unloading_gives_the_memory_back(tmp_path: Path) -> None:
    add_onnx(tmp_path, "double", ON_GPU)
    used = []
    for _ in range(6):
        with Engine(tmp_path) as engine:
            engine.infer("double", {"x": X})
        used.append(Gpus().readings()[0].memory_used_bytes or 0)
    assert used[-1] - used[1] < 64 << 20, f"bytes in use after each cycle: {used}"
