"""Language models on a GPU, with stand-ins for ONNX Runtime's provider and CUDA."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import remora_llm.backends.onnx as generation_backend
from remora.backends import Placement, Source, capabilities_of
from remora.backends.gpu_health import GpuHealth
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup
from remora.tensors.device import HOST, memory_of
from remora_llm.backends.onnx import GenerationBackend
from support.models.generation_models import tiny

runtime: Any = pytest.importorskip("onnxruntime")
CUDA = "CUDAExecutionProvider"


class FakeCuda:
    """CUDA's runtime with some free memory."""

    def __init__(self, free: int = 1 << 33) -> None:
        self.lost = ""
        self._free = free

    def free_bytes(self, number: int) -> int:
        return self._free

    def probe(self, number: int) -> None:
        """Find nothing."""


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Open `tiny` on a GPU whose session is the processor's."""
    folder, happened = tiny(tmp_path), []

    class FakeSession:
        """Session that has the given providers, as far as the processor's can play it."""

        def __init__(self, file: str, options: Any, *, providers: list[Any], enable_fallback: int = 1) -> None:
            assert not enable_fallback
            assert happened == ["preloaded"]
            self._names = [name for name, _ in providers if name not in made.unusable]
            self._inner = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

        def get_providers(self) -> list[str]:
            return self._names

        def disable_fallback(self) -> None:
            """Do nothing."""

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    made = SimpleNamespace(
        **{name: getattr(runtime, name) for name in dir(runtime) if not name.startswith("__")},
        __version__=runtime.__version__,
        unusable=(),
    )
    made.InferenceSession = FakeSession
    made.preload_dlls = lambda: happened.append("preloaded") if not happened else None
    made.get_available_providers = lambda: [CUDA] * bool(happened) + ["CPUExecutionProvider"]
    cuda = FakeCuda()
    health = GpuHealth(0, lambda: cuda)  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(generation_backend, "import_onnxruntime", lambda _: made)
    monkeypatch.setattr(generation_backend, "health_of", lambda _number: health)
    monkeypatch.setattr(generation_backend, "free_gpu_bytes", lambda number: cuda.free_bytes(number))
    monkeypatch.setattr(generation_backend, "memory_of", lambda _device: memory_of(HOST))

    def open_model(free: int = 1 << 33, unusable: tuple[str, ...] = ()) -> Any:
        cuda._free, made.unusable = free, unusable
        config = ModelConfig(name="m")
        config.instance_group.add(kind=ModelInstanceGroup.KIND_GPU)
        source = Source("m", 1, tmp_path, folder, tmp_path, {}, cpus=1)
        model = GenerationBackend().open(source, config)
        return model, cuda, config

    return open_model


def test_a_model_whose_cuda_comes_from_pip_is_opened_on_the_gpu(opened: Any) -> None:
    model, _, _ = opened()
    assert model._session.get_providers() == [CUDA, "CPUExecutionProvider"]
    assert model.preferred_kinds == ("GPU", "CPU")
    model.close()


def test_a_gpu_that_the_runtime_cannot_use_is_refused_with_what_to_do(opened: Any) -> None:
    with pytest.raises(ConfigError, match=r"its libraries or the GPU cannot be used.*KIND_CPU"):
        opened(unusable=(CUDA,))


def test_the_cache_is_fitted_to_the_free_memory_of_the_gpu(opened: Any) -> None:
    model, _, _ = opened()
    whole = model.generation.engine.facts.context
    model.close()
    model, _, _ = opened(free=model._loop._stepper.rows * 300_000)
    assert 64 <= model.generation.engine.facts.context < whole
    model.close()
    with pytest.raises(ConfigError, match="MiB of GPU 0 are free"):
        opened(free=1000)


def test_a_lost_gpu_ends_the_servers_liveness(opened: Any) -> None:
    model, cuda, config = opened()
    instance = model.instance(config, Placement("m_0", "GPU", 0))
    assert (capabilities_of(instance).trouble, capabilities_of(instance).fatal) == ("", False)
    model._loop.trouble = "it cannot be opened again"
    assert (capabilities_of(instance).trouble, capabilities_of(instance).fatal) == ("it cannot be opened again", False)
    cuda.lost = "an illegal address"
    assert (capabilities_of(instance).trouble, capabilities_of(instance).fatal) == ("an illegal address", True)
    model.close()
