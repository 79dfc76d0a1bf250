"""Cache of TensorRT engines: what distinguishes folders, and the log of a build."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remora.backends.onnxruntime import engine_cache as onnx_engines
from remora.backends.onnxruntime.engine_cache import (
    engine_cache,
    engine_folder,
    gpu_and_tensorrt,
    load_tensorrt,
    log_build_progress,
    needed_tensorrt,
)
from remora.errors import UnavailableError
from remora.system.gpus import Gpu

A100 = Gpu("GPU-1", "NVIDIA A100", 40 << 30, (8, 0))


class FakeGpus:
    def __init__(self, *found: Gpu) -> None:
        self.found = found

    def visible(self) -> tuple[Gpu, ...]:
        return self.found


def nvinfer(version: int, major: int = 10) -> Any:
    def load(name: str) -> Any:
        if name != f"libnvinfer.so.{major}":
            raise OSError(name)
        return SimpleNamespace(getInferLibVersion=lambda: version)

    return load


def folder_for(
    tmp_path: Path, runtime: str = "1.0", machine: str = "A100", content: bytes = b"model", **more: str
) -> str:
    model = tmp_path / "m" / "model.onnx"
    model.parent.mkdir(exist_ok=True)
    model.write_bytes(content)
    return engine_cache(tmp_path / "kept", model, runtime, machine, {"device_id": "0", **more})["trt_engine_cache_path"]


def test_whatever_an_engine_depends_on_gives_it_its_own_folder(tmp_path: Path) -> None:
    plain = folder_for(tmp_path)
    assert Path(plain).is_dir()
    assert folder_for(tmp_path, device_id="3") == plain, "GPUs of a kind share their engines"
    others = [
        folder_for(tmp_path, runtime="1.1"),
        folder_for(tmp_path, machine="H100"),
        folder_for(tmp_path, content=b"other"),
        folder_for(tmp_path, trt_fp16_enable="1"),
        folder_for(tmp_path, trt_profile_max_shapes="x:8x2"),
    ]
    (tmp_path / "m" / "weights.bin").write_bytes(b"beside it")
    others.append(folder_for(tmp_path))
    assert len({plain, *others}) == 7


def test_the_machine_is_named_by_its_gpu_and_tensorrt_version() -> None:
    gpus: Any = FakeGpus(A100)
    assert gpu_and_tensorrt(0, 10, gpus, nvinfer(101300)) == f"NVIDIA A100 8.0 {40 << 30}, TensorRT 101300"
    assert gpu_and_tensorrt(0, 11, gpus, nvinfer(110400, 11)).endswith("TensorRT 110400")
    assert gpu_and_tensorrt(0, 10, gpus, nvinfer(110400, 11)).endswith("unknown TensorRT"), "it builds no engine here"
    assert gpu_and_tensorrt(1, 10, gpus, nvinfer(1, 9)) == "unknown GPU, unknown TensorRT"


def test_the_provider_itself_names_the_tensorrt_that_it_needs(tmp_path: Path) -> None:
    runtime = SimpleNamespace(__file__=str(tmp_path / "__init__.py"))
    assert needed_tensorrt(runtime) == 10, "it cannot be read"
    (tmp_path / "capi").mkdir()
    provider = tmp_path / "capi" / "libonnxruntime_providers_tensorrt.so"
    provider.write_bytes(b"\x7fELF\0libnvonnxparser.so.11\0libnvinfer.so.11\0")
    assert needed_tensorrt(runtime) == 11
    provider.write_bytes(b"linked with nothing")
    assert needed_tensorrt(runtime) == 10
    assert needed_tensorrt(SimpleNamespace()) == 10


def test_tensorrts_libraries_are_loaded_from_its_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[str] = []

    def load(name: str, mode: int) -> object:
        assert mode == ctypes.RTLD_GLOBAL
        loaded.append(Path(name).name)
        if "plugin" in name:
            raise OSError("no such symbol")
        return object()

    load_tensorrt(10, load)
    assert loaded == [], "there are no wheels"
    wheel = tmp_path / "tensorrt_libs"
    wheel.mkdir()
    for name in ("__init__.py", "libnvinfer.so.10", "libnvinfer_plugin.so.10", "libnvonnxparser.so.10"):
        (wheel / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    load_tensorrt(11, load)
    assert loaded == [], "they are of another version"
    load_tensorrt(10, load)
    assert loaded == ["libnvinfer.so.10", "libnvinfer_plugin.so.10", "libnvonnxparser.so.10"]
    assert "TensorRT's libnvinfer_plugin.so.10 cannot be loaded: no such symbol" in caplog.text


def test_engines_are_cached_in_the_set_folder_or_beside_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert engine_folder("/engines") == Path("/engines")
    assert engine_folder("OFF") is None
    kept = engine_folder("")
    assert kept is not None
    assert kept.is_relative_to(tmp_path)


def test_where_nothing_can_be_written_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> Path:
        raise UnavailableError("no place for a cache")

    monkeypatch.setattr(onnx_engines, "cache_directory", refuse)
    assert engine_folder("") is None
    assert "TensorRT's engines are not cached: no place for a cache" in caplog.text


def test_the_progress_of_a_build_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Ready(logging.Handler):
        """Tells when the second line has come."""

        def __init__(self) -> None:
            super().__init__()
            self.lines = 0
            self.enough = onnx_engines.threading.Event()

        def emit(self, record: logging.LogRecord) -> None:
            self.lines += "still building" in record.getMessage()
            if self.lines == 2:
                self.enough.set()

    ready, log = Ready(), logging.getLogger("remora.backends.onnxruntime.engine_cache")
    log.addHandler(ready)
    try:
        with caplog.at_level(logging.INFO), log_build_progress("m", every_s=0.001):
            assert ready.enough.wait(30)
    finally:
        log.removeHandler(ready)
    assert "model 'm': TensorRT is still building its engine (0 s)" in caplog.text
    assert caplog.records[-1].getMessage() == "model 'm': TensorRT has built its engine"
