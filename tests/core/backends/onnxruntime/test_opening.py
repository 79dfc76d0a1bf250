"""Tests of ``remora.backends.onnxruntime.opening``, with a runtime that records how sessions are opened."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as runtime
import pytest
from onnx import TensorProto, helper

from remora.backends import Source
from remora.backends.onnxruntime.opening import (
    GpuUnusableError,
    import_onnxruntime,
    open_session,
    require_cuda,
    usable_providers,
)
from remora.backends.onnxruntime.plan import CPU_PROVIDER, CUDA_PROVIDER, SessionPlan
from remora.errors import ConfigError, InternalError, InvalidArgumentError

ROOT = Path(__file__).resolve().parents[4]
OPENING = "core/remora/backends/onnxruntime/opening.py"
BOTH = [(CUDA_PROVIDER, {"device_id": "0"}), (CPU_PROVIDER, {})]


class FakeSession:
    """Session that records its arguments, and has the providers of ``usable`` only."""

    usable: tuple[str, ...] = (CUDA_PROVIDER, CPU_PROVIDER)

    def __init__(self, file: str, options: Any, *, providers: list[Any], enable_fallback: int) -> None:
        self.file, self.options, self.falls_back = file, options, True
        self.asked_at_opening = enable_fallback
        self.names = [name for name, _ in providers if name in self.usable]

    def disable_fallback(self) -> None:
        """Record the call."""
        self.falls_back = False

    def get_providers(self) -> list[str]:
        """Return the providers that opened."""
        return self.names


def fake_runtime(**changes: Any) -> Any:
    """ONNX Runtime with sessions that do not read their file."""
    names = ("SessionOptions", "ExecutionMode", "GraphOptimizationLevel", "get_available_providers", "__version__")
    return SimpleNamespace(
        **{name: getattr(runtime, name) for name in names} | {"InferenceSession": FakeSession} | changes
    )


def source_of(folder: Path) -> Source:
    return Source("m", 1, folder, folder / "1", folder, {}, cpus=1)


def graph_file(folder: Path, location: str | None = None) -> Path:
    """A graph that adds a weight; with ``location`` the weight is in that file."""
    weight = onnx.numpy_helper.from_array(np.ones(2, np.float32), "w")
    if location is not None:
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", tensors[:1], tensors[1:], [weight])
    path = folder / "1" / "model.onnx"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    return path


def test_no_other_module_makes_a_session_or_its_options() -> None:
    makers = {
        str(path.relative_to(ROOT))
        for package in ("core", "adapters")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in ("InferenceSession", "SessionOptions", "preload_dlls"))
        or (isinstance(node, ast.alias) and node.name in ("InferenceSession", "SessionOptions"))
    }
    assert makers == {OPENING}


def test_a_session_never_falls_back_to_the_cpu(tmp_path: Path) -> None:
    session = open_session(fake_runtime(), source_of(tmp_path), graph_file(tmp_path), SessionPlan(1), BOTH)
    assert (session.asked_at_opening, session.falls_back) == (0, False)


def test_a_session_that_opens_without_cuda_is_refused_if_cuda_was_asked_for(tmp_path: Path) -> None:
    class OnCpu(FakeSession):
        usable = (CPU_PROVIDER,)

    lost = fake_runtime(InferenceSession=OnCpu)
    with pytest.raises(GpuUnusableError, match="its libraries or the GPU cannot be used"):
        open_session(lost, source_of(tmp_path), graph_file(tmp_path), SessionPlan(1), BOTH)
    assert open_session(lost, source_of(tmp_path), graph_file(tmp_path), SessionPlan(1), BOTH[1:]).names


def test_options_are_those_of_the_plan_and_its_changes(tmp_path: Path) -> None:
    plan = SessionPlan(3, 2, parallel=True, mem_arena=False, entries={"session.force_spinning_stop": "1"})
    options = open_session(
        fake_runtime(), source_of(tmp_path), graph_file(tmp_path), plan, BOTH, log_severity_level=3
    ).options
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert options.execution_mode == runtime.ExecutionMode.ORT_PARALLEL
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern, options.log_severity_level) == (False, True, 3)
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"


def test_the_weights_of_a_file_lie_in_its_folder(tmp_path: Path) -> None:
    path = graph_file(tmp_path, "../../weights.bin")
    with pytest.raises(InvalidArgumentError, match="outside of the model's folder"):
        open_session(fake_runtime(), source_of(tmp_path), path, SessionPlan(1), BOTH)


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "the file is a Git LFS pointer: run git lfs pull"),
        (b"no graph", "the file is incomplete or of another format: it has 8 bytes"),
    ],
)
def test_a_file_that_is_not_a_graph_is_explained(tmp_path: Path, content: bytes, advice: str) -> None:
    path = graph_file(tmp_path)
    path.write_bytes(content)
    with pytest.raises(InternalError) as failure:
        open_session(runtime, source_of(tmp_path), path, SessionPlan(1), BOTH[1:])
    text = str(failure.value)
    assert text.startswith("model 'm': cannot load '1/model.onnx': onnx runtime error")
    assert text.endswith(f"; {advice}")
    assert str(tmp_path) not in text


def test_cudas_libraries_are_loaded_before_the_providers_are_read_and_only_for_a_gpu() -> None:
    happened: list[str] = []
    made = fake_runtime(
        preload_dlls=lambda: happened.append("loaded"),
        get_available_providers=lambda: [CUDA_PROVIDER] * bool(happened) + [CPU_PROVIDER],
    )
    assert usable_providers(made, on_gpu=False) == {CPU_PROVIDER}
    assert usable_providers(made, on_gpu=True) == {CUDA_PROVIDER, CPU_PROVIDER}
    assert happened == ["loaded"]


def test_a_runtime_that_is_built_without_cuda_is_named() -> None:
    require_cuda(runtime, "m", {CUDA_PROVIDER})
    with pytest.raises(GpuUnusableError, match=f"onnxruntime {runtime.__version__} is built without it"):
        require_cuda(runtime, "m", {CPU_PROVIDER})


def test_a_missing_runtime_is_an_error_with_both_install_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"model 'm' needs ONNX Runtime.*; for CUDA: "):
        import_onnxruntime("m")
