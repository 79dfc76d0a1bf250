"""What the loader makes of a backend's preferences for devices, with GPUs that are named and not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import FakeClock
from remora.config import ANY_KIND
from remora.models.loader import ModelLoader
from remora.options import EngineOptions
from remora.proto.model_config_pb2 import ModelInstanceGroup
from remora.repository.local import scan

BACKEND = """
from types import SimpleNamespace

class Model:
    {model}

    def complete(self, config):
        pass

    def instance(self, config, placement):
        if placement.kind == "GPU" and {on_cpu}:
            raise ValueError("these models run on the CPU")
        return SimpleNamespace(name=placement.name, quick=False, close=lambda: None)

    def close(self):
        pass

class Backend:
    name = "mine"
    {backend}

    def open(self, source, config):
        return Model()
"""
TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: 2 } output { name: "y" data_type: TYPE_FP32 dims: 2 }'
GPU, CPU = ModelInstanceGroup.KIND_GPU, ModelInstanceGroup.KIND_CPU


def kinds(tmp_path: Path, more: str = "", *, model: str = "", backend: str = "", gpus: int = 1) -> list[int]:
    """The kinds of the instance groups that a model of such a backend is served with."""
    code = tmp_path / "backends" / "mine" / "backend.py"
    code.parent.mkdir(parents=True)
    on_cpu = '"CPU" in ' + repr(model or backend) + ' and "GPU" not in ' + repr(model or backend)
    code.write_text(BACKEND.format(model=model or "pass", backend=backend or "pass", on_cpu=on_cpu))
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(f'backend: "mine" {TENSORS} {more}')
    options = EngineOptions(backend_directory=str(tmp_path / "backends"))
    loader = ModelLoader(options, FakeClock(), gpus=range(gpus))
    (folder,) = scan([tmp_path / "models"])["m"]
    plan = loader.plan(folder, {})
    served = loader.open(plan, 1)
    try:
        assert served.kinds == ANY_KIND or "CPU" in served.kinds
        loader.adjust(served, plan)
        return [group.kind for group in served.config.instance_group]
    finally:
        served.close()


@pytest.mark.parametrize("where", ["model", "backend"])
@pytest.mark.parametrize("written", ["", "instance_group { }", "instance_group { kind: KIND_AUTO }"])
def test_a_model_that_says_nothing_loads_on_the_cpu_where_its_backend_has_no_use_for_a_gpu(
    tmp_path: Path, where: str, written: str
) -> None:
    assert kinds(tmp_path, written, **{where: 'preferred_kinds = ("CPU",)'}) == [CPU]


def test_without_a_preference_gpus_come_first(tmp_path: Path) -> None:
    assert kinds(tmp_path) == [GPU]


def test_a_preferred_gpu_that_is_not_there_gives_way(tmp_path: Path) -> None:
    assert kinds(tmp_path, backend='preferred_kinds = ("GPU", "CPU")', gpus=0) == [CPU]


def test_an_opened_model_knows_better_than_its_backend(tmp_path: Path) -> None:
    preferences = {"model": 'preferred_kinds = ("CPU",)', "backend": 'preferred_kinds = ("GPU",)'}
    assert kinds(tmp_path, **preferences) == [CPU]
