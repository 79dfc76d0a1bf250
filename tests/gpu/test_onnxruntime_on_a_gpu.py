"""ONNX Runtime's CUDA provider with bound tensors and CUDA graphs, against the CPU's answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.backends import Execution, Instance, Placement, Source, capabilities_of
from remora.backends.onnxruntime import OnnxRuntimeBackend
from remora.messages import Array, Response
from remora.tensors.device import DeviceArray
from remora.testing.backend import request_of
from support.engine.fakes import config_of
from support.models.device_models import double

ROWS = np.random.default_rng(1).standard_normal((8, 2)).astype("f4")
GRAPHS = "optimization { cuda { graphs: true } }"


def instances(tmp_path: Path, text: str = "", count: int = 1) -> list[Instance]:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(double().SerializeToString())
    config = config_of(
        f'name: "m" backend: "onnxruntime" max_batch_size: 8 instance_group {{ kind: KIND_GPU gpus: 0 }} {text}'
    )
    opened = OnnxRuntimeBackend().open(Source("m", 1, tmp_path / "m", version, tmp_path), config)
    opened.complete(config)
    return [opened.instance(config, Placement(f"m_{index}", "GPU", 0)) for index in range(count)]


def answer(instance: Instance, array: Any, *, keep_on_device: bool = False) -> Any:
    request = request_of({"x": np.empty(array.shape)}, ("y",))
    request.inputs["x"], request.keep_on_device = array, keep_on_device
    (outcome,) = instance.execute(Execution([request]))
    assert isinstance(outcome, Response), outcome
    return outcome.outputs[0].data


@pytest.mark.parametrize("text", ["", GRAPHS], ids=["plain", "graphs"])
def test_answers_are_the_cpus_whatever_comes(tmp_path: Path, text: str) -> None:
    (instance,) = instances(tmp_path, text)
    assert capabilities_of(instance).devices == {(2, 0)}
    for turn in range(50):
        rows: Array = ROWS[: 1 + turn % 8] + turn
        np.testing.assert_allclose(answer(instance, rows), rows * 2, rtol=1e-6)
    instance.close()


@pytest.mark.parametrize("text", ["", GRAPHS], ids=["plain", "graphs"])
def test_outputs_that_stay_are_the_next_models_inputs(tmp_path: Path, text: str) -> None:
    (instance,) = instances(tmp_path, text)
    for turn in range(10):
        kept = answer(instance, ROWS + turn, keep_on_device=True)
        assert isinstance(kept, DeviceArray)
        assert kept.device == (2, 0)
        np.testing.assert_allclose(answer(instance, kept), (ROWS + turn) * 4, rtol=1e-6)
        np.testing.assert_allclose(kept.host(), (ROWS + turn) * 2, rtol=1e-6)
    instance.close()


@pytest.mark.parametrize("text", ["", GRAPHS], ids=["plain", "graphs"])
def test_instances_run_beside_each_other(tmp_path: Path, text: str) -> None:
    several = instances(tmp_path, text, 4)

    def work(place: int) -> None:
        for turn in range(50):
            np.testing.assert_allclose(
                answer(several[place], ROWS + turn * place), (ROWS + turn * place) * 2, rtol=1e-6
            )

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    for instance in several:
        instance.close()
