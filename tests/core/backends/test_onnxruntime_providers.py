"""Choice of ONNX Runtime's execution providers, and what happens without them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remora.backends import Placement
from remora.backends.onnxruntime import OnnxModel
from remora.backends.onnxruntime.plan import Device
from remora.errors import ConfigError, InternalError
from remora.system.install_advice import install_command
from support.models.onnx_models import (
    answer,
    config,
    identity,
    instance_of,
    open_model,
    request,
    runtime,
    sample,
    source,
)


def test_a_gpu_that_is_requested_by_name_must_exist(tmp_path: Path) -> None:
    if "CUDAExecutionProvider" in runtime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    with pytest.raises(ConfigError, match=rf"asks for a GPU, .*{re.escape(install_command('gpu'))}"):
        open_model(tmp_path, identity(), "instance_group [{ kind: KIND_GPU }]")


def test_a_gpu_that_is_only_liked_is_done_without_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if "CUDAExecutionProvider" in runtime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    opened, made = open_model(tmp_path, identity())
    with caplog.at_level(logging.WARNING):
        instances = [opened.instance(made, Placement(f"m_{index}", "GPU", 0)) for index in range(2)]
    (outputs,) = answer(instances[1], request(x=sample("FP32")))
    assert outputs["y"].shape == (2, 2)
    assert [record.message.endswith("running on the CPU instead") for record in caplog.records] == [True]


def test_a_missing_accelerator_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if "OpenVINOExecutionProvider" in runtime.get_available_providers():
        pytest.skip("this ONNX Runtime has OpenVINO")
    text = 'optimization { execution_accelerators { cpu_execution_accelerator [{ name: "openvino" }] } }'
    instance_of(tmp_path, identity(), text)
    assert "onnxruntime lacks the configured OpenVINOExecutionProvider" in caplog.text


def drop(file: str, options: Any, **_: Any) -> Any:
    """What an ONNX Runtime for CUDA does when it cannot load CUDA's libraries: it goes on without."""
    return runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def fail(file: str, options: Any, providers: Any, **_: Any) -> Any:
    """What it does when there is no GPU."""
    if providers[0][0] == "CUDAExecutionProvider":
        raise RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : CUDA failure 100: no CUDA-capable device")
    return drop(file, options)


@pytest.mark.parametrize(
    ("behaviour", "kind", "reason"),
    [
        (drop, ConfigError, "its libraries or the GPU cannot be used"),
        (fail, InternalError, "onnx runtime error 6: CUDA failure 100"),
    ],
)
def test_a_gpu_that_onnxruntime_offers_and_cannot_use_is_noticed(
    tmp_path: Path, behaviour: Any, kind: type[Exception], reason: str
) -> None:
    gpu_runtime = SimpleNamespace(
        **{name: getattr(runtime, name) for name in dir(runtime) if not name.startswith("__")},
        __version__=runtime.__version__,
    )
    gpu_runtime.get_available_providers = lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    gpu_runtime.preload_dlls = lambda: None
    gpu_runtime.InferenceSession = behaviour
    where = source(tmp_path, identity())
    insisting = config("instance_group [{ kind: KIND_GPU }]")
    with pytest.raises(kind, match=reason):
        OnnxModel(gpu_runtime, where, where.path / "model.onnx", insisting)
    liking = config()
    opened = OnnxModel(gpu_runtime, where, where.path / "model.onnx", liking)
    opened.complete(liking)
    (outputs,) = answer(opened.instance(liking, Placement("m_0", "GPU")), request(x=sample("FP32")))
    assert outputs["y"].shape == (2, 2)


def test_tensorrts_engines_are_kept_by_model_and_options(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, str]] = []

    class FakeSession:
        """A session on a GPU, as far as the CPU's can play it."""

        def __init__(self, file: str, options: Any, *, providers: list[Any], enable_fallback: int) -> None:
            self._names = [name for name, _ in providers]
            self._inner = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
            given.append(dict(providers)["TensorrtExecutionProvider"])

        def get_providers(self) -> list[str]:
            return self._names

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    gpu_runtime = SimpleNamespace(
        **{name: getattr(runtime, name) for name in dir(runtime) if not name.startswith("__")},
        __version__=runtime.__version__,
    )
    names = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    gpu_runtime.get_available_providers = lambda: names
    gpu_runtime.preload_dlls = lambda: None
    gpu_runtime.InferenceSession = FakeSession
    cache = tmp_path / "engines"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    accelerator = "gpu_execution_accelerator {{ name: 'tensorrt' {0} }}"
    precise = accelerator.format("parameters { key: 'precision_mode' value: 'FP16' }")

    def load(model: Any, chosen: str, folder: Path | str = cache, more: str = "") -> dict[str, str]:
        settings = {"tensorrt_engine_cache": str(folder)} if folder else {}
        where = source(tmp_path, model, **settings)
        text = f"instance_group {{ kind: KIND_GPU }} optimization {{ {more} execution_accelerators {{ {chosen} }} }}"
        OnnxModel(gpu_runtime, where, where.path / "model.onnx", config(text))
        return given[-1]

    with caplog.at_level(logging.INFO):
        plain = load(identity(), accelerator.format(""))
    assert "TensorRT builds its engine, which can take minutes" in caplog.text
    folder = Path(plain["trt_engine_cache_path"])
    assert folder.parent == cache
    assert plain["trt_engine_cache_enable"] == plain["trt_timing_cache_enable"] == "1"
    (folder / "graph_sm80.engine").touch()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert load(identity(), accelerator.format("")) == plain
    assert "minutes" not in caplog.text
    others = [load(identity(), precise), load(identity("INT32"), accelerator.format(""))]
    assert len({plain["trt_engine_cache_path"], *(each["trt_engine_cache_path"] for each in others)}) == 3
    assert Path(load(identity(), accelerator.format(""), "")["trt_engine_cache_path"]).is_relative_to(tmp_path / "xdg")
    assert "trt_engine_cache_path" not in load(identity(), accelerator.format(""), "off")
    (tmp_path / "file").touch()
    assert "trt_engine_cache_path" not in load(identity(), accelerator.format(""), tmp_path / "file")
    assert "model 'm': its TensorRT engines are not cached: " in caplog.text
    assert "trt_cuda_graph_enable" not in load(identity(), accelerator.format(""), "off", "cuda { graphs: true }")
    assert "model 'm' runs without cuda.graphs: TensorRT's provider keeps one CUDA graph" in caplog.text


GRAPHS_AND_TENSORRT = (
    "optimization { cuda { graphs: true } execution_accelerators { gpu_execution_accelerator { name: 'tensorrt' } } }"
)


@pytest.mark.parametrize(
    ("text", "available", "fails_with", "lost", "serving", "told"),
    [
        (
            GRAPHS_AND_TENSORRT,
            ("TensorrtExecutionProvider", "CUDAExecutionProvider"),
            (),
            ("TensorrtExecutionProvider",),
            ("CUDAExecutionProvider", "CPUExecutionProvider"),
            "cannot be used here (it needs the libraries of TensorRT 10); continuing without",
        ),
        (
            GRAPHS_AND_TENSORRT,
            ("CUDAExecutionProvider",),
            (),
            (),
            ("CUDAExecutionProvider", "CPUExecutionProvider"),
            "onnxruntime lacks the configured TensorrtExecutionProvider; continuing without",
        ),
        (
            GRAPHS_AND_TENSORRT,
            ("TensorrtExecutionProvider", "CUDAExecutionProvider"),
            ("TensorrtExecutionProvider",),
            (),
            ("CUDAExecutionProvider", "CPUExecutionProvider"),
            "no engine; continuing without the TensorrtExecutionProvider",
        ),
        (
            "optimization { cuda { graphs: true } }",
            ("CUDAExecutionProvider",),
            ("enable_cuda_graph",),
            (),
            ("CUDAExecutionProvider", "CPUExecutionProvider"),
            "no engine; continuing without CUDA graphs",
        ),
    ],
)
def test_one_accelerator_less_is_tried_at_a_time(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    available: tuple[str, ...],
    fails_with: tuple[str, ...],
    lost: tuple[str, ...],
    serving: tuple[str, ...],
    told: str,
) -> None:
    class FakeSession:
        """A session on a GPU, as far as the CPU's can play it; it fails with some providers or options."""

        def __init__(self, file: str, options: Any, *, providers: list[Any], enable_fallback: int) -> None:
            given = {name for name, _ in providers} | {key for _, values in providers for key in values}
            if given & set(fails_with):
                raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : no engine")
            self._names = [name for name, _ in providers if name not in lost]
            self._inner = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

        def get_providers(self) -> list[str]:
            return self._names

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    gpu_runtime = SimpleNamespace(
        **{name: getattr(runtime, name) for name in dir(runtime) if not name.startswith("__")},
        __version__=runtime.__version__,
    )
    gpu_runtime.get_available_providers = lambda: [*available, "CPUExecutionProvider"]
    gpu_runtime.preload_dlls = lambda: None
    gpu_runtime.InferenceSession = FakeSession
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    where = source(tmp_path, identity())
    for kind in ("", "instance_group { kind: KIND_GPU }"):
        caplog.clear()
        opened = OnnxModel(gpu_runtime, where, where.path / "model.onnx", config(f"{text} {kind}"))
        assert opened._sessions[Device("GPU", 0)].providers == serving
        assert opened.preferred_kinds == ("GPU", "CPU")
        assert told in caplog.text


@pytest.mark.parametrize("group", ["", "instance_group { kind: KIND_GPU }", "instance_group { kind: KIND_CPU }"])
def test_cudas_libraries_are_loaded_before_the_providers_are_listed(tmp_path: Path, group: str) -> None:
    """A provider that is a plugin registers when its libraries load; models for the CPU load none."""
    happened: list[str] = []

    class FakeSession:
        def __init__(self, file: str, options: Any, *, providers: list[Any], enable_fallback: int) -> None:
            self._names = [name for name, _ in providers]
            self._inner = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

        def get_providers(self) -> list[str]:
            return self._names

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    gpu_runtime = SimpleNamespace(
        **{name: getattr(runtime, name) for name in dir(runtime) if not name.startswith("__")},
        __version__=runtime.__version__,
    )
    gpu_runtime.preload_dlls = lambda: happened.append("loaded")
    gpu_runtime.get_available_providers = lambda: ["CUDAExecutionProvider"] * bool(happened) + ["CPUExecutionProvider"]
    gpu_runtime.InferenceSession = FakeSession
    where = source(tmp_path, identity())
    opened = OnnxModel(gpu_runtime, where, where.path / "model.onnx", config(group))
    on_cpu = "CPU" in group
    assert [device.kind for device in opened._sessions] == ["CPU" if on_cpu else "GPU"]
    assert bool(happened) is not on_cpu


@pytest.mark.parametrize("group", ["", "instance_group { kind: KIND_MODEL }", "instance_group { kind: KIND_CPU }"])
def test_without_a_gpu_cuda_is_tried_only_for_a_model_that_requires_it(
    tmp_path: Path, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An image for machines with and without GPUs has the runtime for CUDA."""
    happened: list[str] = []

    def open_session(file: str, options: Any, *, providers: list[Any], **_: Any) -> Any:
        happened.extend(name for name, _ in providers)
        return runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    gpu_runtime = SimpleNamespace(
        **{name: getattr(runtime, name) for name in dir(runtime) if not name.startswith("__")},
        __version__=runtime.__version__,
    )
    gpu_runtime.preload_dlls = lambda: happened.append("loaded")
    gpu_runtime.get_available_providers = lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    gpu_runtime.InferenceSession = open_session
    where = source(tmp_path, identity())._replace(gpus=0)
    opened = OnnxModel(gpu_runtime, where, where.path / "model.onnx", made := config(group))
    opened.complete(made)
    kind = "MODEL" if "MODEL" in group else "CPU"
    (outputs,) = answer(opened.instance(made, Placement("m_0", kind, 0)), request(x=sample("FP32")))
    assert outputs["y"].shape == (2, 2)
    assert happened == ["CPUExecutionProvider"]
    assert opened.preferred_kinds == ("CPU",)
    assert caplog.records == []
    insisting = config("instance_group { kind: KIND_GPU }")
    with pytest.raises(ConfigError, match="the GPU cannot be used"):
        OnnxModel(gpu_runtime, where, where.path / "model.onnx", insisting)


def test_auto_means_the_cpu_where_onnxruntime_cannot_use_the_gpu(tmp_path: Path) -> None:
    gpu_runtime = SimpleNamespace(
        **{name: getattr(runtime, name) for name in dir(runtime) if not name.startswith("__")},
        __version__=runtime.__version__,
    )
    gpu_runtime.get_available_providers = lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    gpu_runtime.preload_dlls = lambda: None
    gpu_runtime.InferenceSession = drop
    where = source(tmp_path, identity())
    assert OnnxModel(gpu_runtime, where, where.path / "model.onnx", config()).preferred_kinds == ("CPU",)
    assert OnnxModel(runtime, where, where.path / "model.onnx", config()).preferred_kinds == ("CPU",)
