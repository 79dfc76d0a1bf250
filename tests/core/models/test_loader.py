"""What the loader makes of a backend's preferences for devices, with GPUs that are named and not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.backends import Source
from remora.config import ANY_KIND, Placement
from remora.errors import InternalError
from remora.models import loader as loading
from remora.models.loader import ModelLoader
from remora.options import EngineOptions
from remora.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup
from remora.repository.local import scan
from support.engine.fakes import FakeBackend, FakeBackendModel, FakeClock, FakeInstance, write_model

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


_PAIR = "data_type: TYPE_INT32 dims: 2"


class Faulty(FakeBackendModel):
    """Model that fails in one stage and records what is closed."""

    closings: list[str]
    stage: str

    def complete(self, config: ModelConfig) -> None:
        if self.stage == "complete":
            raise ValueError("complete fails")
        super().complete(config)

    def instance(self, config: ModelConfig, placement: Placement) -> FakeInstance:
        if self.stage == "instance" and self.instances:
            raise ValueError("instance fails")
        made = super().instance(config, placement)
        label, close = f"instance {len(self.instances)}", made.close

        def closing() -> None:
            self.closings.append(label)
            close()
            if self.stage == "close":
                raise OSError("closing fails too")

        made.close = closing  # type: ignore[method-assign]
        return made

    def close(self) -> None:
        self.closings.append("model")


@pytest.mark.parametrize(
    ("stage", "label", "text", "closings"),
    [
        ("complete", "", "ValueError: complete fails", ["model"]),
        ("instance", "", "ValueError: instance fails", ["instance 1", "model"]),
        ("labels", "label_filename: 'none.txt'", "none.txt", ["instance 2", "instance 1", "model"]),
        ("close", "label_filename: 'none.txt'", "none.txt", ["instance 2", "instance 1", "model"]),
    ],
)
def test_a_load_that_fails_closes_what_it_opened_and_reports_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, label: str, text: str, closings: list[str]
) -> None:
    class FaultyBackend(FakeBackend):
        def open(self, source: Source, config: ModelConfig) -> FakeBackendModel:
            model = Faulty(self, source)
            model.closings, model.stage = closed, stage
            return model

    closed: list[str] = []
    monkeypatch.setattr(loading, "find_backend", lambda name: FaultyBackend())
    tensors = f"input {{ name: 'IN' {_PAIR} }} output {{ name: 'OUT' {_PAIR} {label} }}"
    write_model(tmp_path, "m", config=f"backend: 'fake' instance_group {{ count: 2 kind: KIND_CPU }} {tensors}")
    (folder,) = scan([tmp_path])["m"]
    loader = ModelLoader(EngineOptions(), FakeClock(), gpus=())
    with pytest.raises(InternalError, match=text) as failed:
        loader.open(loader.plan(folder, {}), 1)
    assert closed == closings
    assert "closing fails" not in str(failed.value)


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_backend_knows_the_number_of_gpus_before_it_opens_a_model(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend()
    monkeypatch.setattr(loading, "find_backend", backend.find)
    write_model(tmp_path, "m")
    loader = ModelLoader(EngineOptions(), FakeClock(), gpus=range(gpus))
    (folder,) = scan([tmp_path])["m"]
    loader.open(loader.plan(folder, {}), 1).close()
    assert [model.source.gpus for model in backend.opened] == [gpus]
