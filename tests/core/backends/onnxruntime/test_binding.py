"""ONNX Runtime on device tensors: CPU sessions over memory that simulates a GPU's."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from remora.backends import Execution, Instance, Placement, Source
from remora.backends.onnxruntime import OnnxRuntimeBackend
from remora.backends.onnxruntime.binding import Binding
from remora.backends.onnxruntime.opening import reason_of
from remora.backends.onnxruntime.plan import GraphPlan
from remora.backends.transfers import CudaTransfer
from remora.errors import InternalError
from remora.messages import DTYPES, Array, Response
from remora.tensors.device import HOST, CudaMemory, DeviceArray, HostMemory
from remora.testing.backend import request_of
from support.engine.fakes import config_of
from support.models.cuda_stand_in import DEVICE, PINNED, STREAM, StandIn

onnx = pytest.importorskip("onnx", reason="the models of these tests are made with onnx: pip install '.[dev]'")

X = np.arange(6, dtype="f4").reshape(3, 2)
KINDS = {"FP32": "FLOAT", "BF16": "BFLOAT16", "INT64": "INT64", "BOOL": "BOOL", "FP16": "FLOAT16"}


def model(tmp_path: Path, text: str = "", datatype: str = "FP32", op: str = "Identity", **settings: str) -> Any:
    kind = onnx.TensorProto.DataType.Value(KINDS[datatype])
    ends = [onnx.helper.make_tensor_value_info(name, kind, ["n", 2]) for name in "xy"]
    node = onnx.helper.make_node(op, ["x"] if op == "Identity" else ["x", "x"], ["y"])
    made = onnx.helper.make_model(onnx.helper.make_graph([node], "g", ends[:1], ends[1:]), ir_version=9)
    made.opset_import[0].version = 18
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True, exist_ok=True)
    onnx.save(made, str(version / "model.onnx"))
    config = config_of(f'name: "m" backend: "onnxruntime" {text}')
    given = {"device-tensors": "cpu", **settings}
    opened = OnnxRuntimeBackend().open(Source("m", 1, tmp_path / "m", version, tmp_path, given), config)
    opened.complete(config)
    return opened.instance(config, Placement("m_0"))


def answer(instance: Instance, *arrays: Any, keep_on_device: bool = False) -> list[Any]:
    requests = [request_of({"x": np.empty(array.shape)}, ("y",)) for array in arrays]
    for request, array in zip(requests, arrays, strict=True):
        request.inputs["x"], request.keep_on_device = array, keep_on_device
    found = []
    for outcome in instance.execute(Execution(requests)):
        assert isinstance(outcome, Response), outcome
        found.append(outcome.outputs[0].data)
    return found


def lying(array: Array, datatype: str = "FP32") -> Any:
    """A tensor on the device that main memory stands for."""
    return DeviceArray(datatype, array.shape, HostMemory(), array.ctypes.data, array)


def test_a_model_says_where_it_takes_tensors(tmp_path: Path) -> None:
    assert model(tmp_path).capabilities.devices == {HOST}
    assert model(tmp_path, **{"device-tensors": ""}).capabilities.devices == frozenset()


def test_a_tensor_on_the_device_is_bound_at_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    bind = Binding._bind
    monkeypatch.setattr(
        Binding, "_bind", lambda self, into, *given: (bound.append(given[-1]), bind(self, into, *given))
    )
    (found,) = answer(model(tmp_path, op="Add"), lying(X), keep_on_device=True)
    assert bound == [X.ctypes.data]
    assert isinstance(found, DeviceArray)
    np.testing.assert_array_equal(found.host(), X * 2)


@pytest.mark.parametrize("datatype", sorted(KINDS))
def test_every_datatype_goes_through_and_stays_or_comes_back(tmp_path: Path, datatype: str) -> None:
    instance = model(tmp_path, datatype=datatype)
    values = np.array([[0, 1], [1, 0]]).astype(DTYPES[datatype])
    for given in (values, lying(values, datatype), np.empty((0, 2), values.dtype), np.asfortranarray(values)):
        (kept,), (came,) = answer(instance, given, keep_on_device=True), answer(instance, given)
        expected = given.host() if isinstance(given, DeviceArray) else given
        np.testing.assert_array_equal(kept.host(), expected)
        np.testing.assert_array_equal(came, expected)
        assert type(came) is np.ndarray
        assert came.dtype == DTYPES[datatype]


def test_a_batch_joins_on_the_device_and_gives_everyone_their_rows(tmp_path: Path) -> None:
    instance = model(tmp_path, op="Add")
    for arrays in ((lying(X), lying(X[:1])), (lying(X), X[:1]), (X, lying(X[:1]))):
        for keep_on_device in (True, False):
            one, other = answer(instance, *arrays, keep_on_device=keep_on_device)
            assert isinstance(one, DeviceArray) == keep_on_device
            np.testing.assert_array_equal(one.host() if keep_on_device else one, X * 2)
            np.testing.assert_array_equal(other.host() if keep_on_device else other, X[:1] * 2)


def test_outputs_outlive_the_next_run_and_the_instance(tmp_path: Path) -> None:
    instance = model(tmp_path, op="Add")
    (first,) = answer(instance, X, keep_on_device=True)
    answer(instance, X + 1, keep_on_device=True)
    instance.close()
    del instance
    gc.collect()
    np.testing.assert_array_equal(first.host(), X * 2)


def test_a_failure_keeps_onnx_runtimes_reason(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"^onnx runtime error 2: Got invalid dimensions for input: x"):
        answer(model(tmp_path), np.zeros((2, 3), "f4"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Error in execution: Invalid rank for input: x\n Please fix", "2: Invalid rank for input: x Please fix"),
        (
            "Error in execution: Non-zero status code returned while running Gather node. Status Message: indices",
            "2: Non-zero status code returned while running Gather node. Status Message: indices",
        ),
        ("Error in execution: Status Message: /src/core/cuda_call.cc:129 CUDA failure 700", "1: Status Message:"),
        ("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : no", "6: no"),
    ],
)
def test_a_bound_runs_reason_is_numbered_as_any_others(text: str, expected: str) -> None:
    assert reason_of(RuntimeError(text)).startswith(f"onnx runtime error {expected}")


# -- CUDA graphs: what they ask of memory ---------------------------------------------------------------------------

GRAPHS = "max_batch_size: 8 optimization { cuda { graphs: true %s } }"


def test_with_graphs_the_memory_of_equal_shapes_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    prepare = Binding._prepare

    def noting(self: Binding, *given: Any) -> Any:
        made.append(prepare(self, *given))
        return made[-1]

    monkeypatch.setattr(Binding, "_prepare", noting)
    instance = model(tmp_path, GRAPHS % "", op="Add")
    for array in (X, X[:1], X + 1, X[:1] + 2, lying(X)):
        for keep_on_device in (True, False):
            (found,) = answer(instance, array, keep_on_device=keep_on_device)
            values = array.host() if isinstance(array, DeviceArray) else array
            np.testing.assert_array_equal(found.host() if keep_on_device else found, values * 2)
    assert len(made) == 2, "one for each set of shapes"
    assert [fixed.options.get_run_config_entry("gpu_graph_id") for fixed in made] == ["1", "2"]


def test_what_stays_of_a_graphs_run_is_not_written_over_by_the_next(tmp_path: Path) -> None:
    instance = model(tmp_path, GRAPHS % "", op="Add")
    (first,) = answer(instance, X, keep_on_device=True)
    answer(instance, X + 1, keep_on_device=True)
    np.testing.assert_array_equal(first.host(), X * 2)


def test_only_specified_shapes_get_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    prepare = Binding._prepare
    monkeypatch.setattr(Binding, "_prepare", lambda self, *given: (made.append(1), prepare(self, *given))[1])
    instance = model(tmp_path, GRAPHS % "graph_spec { batch_size: 3 }", op="Add")
    answer(instance, X), answer(instance, X[:2]), answer(instance, X)
    assert made == [1]


def test_instances_with_graphs_have_their_own_sessions(tmp_path: Path) -> None:
    version = tmp_path / "m"
    model(version)
    config = config_of('name: "m" backend: "onnxruntime" ' + GRAPHS % "")
    where = Source("m", 1, version / "m", version / "m" / "1", version, {"device-tensors": "cpu"})
    opened = OnnxRuntimeBackend().open(where, config)
    opened.complete(config)
    sessions = [opened._own_session(config, opened._device) for _ in range(3)]
    assert len(set(map(id, sessions))) == 3
    assert sessions[0] is opened._session(config, opened._device)


def test_instances_that_are_made_again_leave_no_session_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path)
    config = config_of('name: "m" backend: "onnxruntime" ' + GRAPHS % "")
    where = Source("m", 1, tmp_path / "m", tmp_path / "m" / "1", tmp_path, {"device-tensors": "cpu"})
    opened = OnnxRuntimeBackend().open(where, config)
    opened.complete(config)
    sessions: weakref.WeakSet[Any] = weakref.WeakSet(opened._sessions.values())
    create = opened._open
    monkeypatch.setattr(opened, "_open", lambda *given: (made := create(*given), sessions.add(made))[0])
    for _ in range(3):
        instances = [opened.instance(config, Placement(f"m_{number}")) for number in range(2)]
        for instance in instances:
            np.testing.assert_array_equal(answer(instance, X)[0], X)
            instance.close()
        del instance, instances
        gc.collect()
        assert len(sessions) == 0, "a graph of it would replay memory that has gone"


# -- the copies -----------------------------------------------------------------------------------------------------


@pytest.fixture
def transfer(stand_in: StandIn) -> Iterator[CudaTransfer]:
    made = CudaTransfer(CudaMemory(stand_in.runtime, 0), stand_in.runtime)
    yield made
    made.close(), made.close()
    gc.collect()
    assert [stand_in.held(kind) for kind in (PINNED, STREAM)] == [0, 0], "something was left behind"


def test_tensors_travel_through_pinned_memory_on_one_stream(stand_in: StandIn, transfer: CudaTransfer) -> None:
    memory = CudaMemory(stand_in.runtime, 0)
    arrays = [X, np.empty((0, 2), "f4"), X[:1] + 7]
    blocks = [memory.take(array.nbytes) for array in arrays]
    for _ in range(2):  # the second time nothing is taken
        transfer.to_device([(block.address, array) for block, array in zip(blocks, arrays, strict=True)])
        there = [
            DeviceArray("FP32", array.shape, memory, block.address, block.owner)
            for block, array in zip(blocks, arrays, strict=True)
        ]
        for found, array in zip(transfer.to_host(there), arrays, strict=True):
            np.testing.assert_array_equal(found, array)
        assert stand_in.held(PINNED) == 1


def test_a_session_runs_on_memory_of_the_cuda_runtime(
    tmp_path: Path, stand_in: StandIn, transfer: CudaTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of a run on a GPU, but for ONNX Runtime's provider: the CPU's reads the stand-in's memory."""

    class Standing(CudaMemory):
        def __init__(self) -> None:
            super().__init__(stand_in.runtime, 0)
            self.device = HOST  # type: ignore[misc]

    runtime = pytest.importorskip("onnxruntime")
    model(tmp_path, op="Add")
    inner = runtime.InferenceSession(str(tmp_path / "m" / "1" / "model.onnx"), providers=["CPUExecutionProvider"])
    before = stand_in.held(DEVICE)
    binding = Binding(runtime, inner, Standing(), transfer, {"x": "FP32", "y": "FP32"}, {})
    for array in (X[:1], X, X[:2]):
        (out,) = binding.run({"x": array}, ("y",), keep_on_device=False)
        np.testing.assert_array_equal(out.data, array * 2)
    (out,) = binding.run({"x": X}, ("y",), keep_on_device=True)
    (last,) = binding.run({"x": out.data}, ("y",), keep_on_device=False)
    np.testing.assert_array_equal(last.data, X * 4)
    block = binding._memory.take(X.nbytes)
    binding._memory.copy(block.address, X.ctypes.data, X.nbytes)
    rows = DeviceArray("FP32", (2, 2), binding._memory, block.address + 8, block.owner)
    bound: list[int] = []
    bind = binding._bind
    monkeypatch.setattr(binding, "_bind", lambda *given: (bound.append(given[-1]), bind(*given)))
    (last,) = binding.run({"x": rows.as_array()}, ("y",), keep_on_device=False)
    np.testing.assert_array_equal(last.data, X[1:] * 2)
    assert [address % 256 for address in bound] == [0], "rows begin where a tensor may not"
    del block, rows
    assert stand_in.held(DEVICE) == before + 1, "an input's memory is kept, outputs are ONNX Runtime's"
    binding.close()
    del out, last
    gc.collect()
    assert stand_in.held(DEVICE) == before


def test_memory_that_is_not_there_fails_the_run_and_nothing_else(
    stand_in: StandIn, transfer: CudaTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    binding = Binding(SimpleNamespace(RunOptions=lambda: None), _NoSession(), CudaMemory(stand_in.runtime, 0), transfer,
                      {"x": "FP32"}, {})  # fmt: skip
    monkeypatch.setenv("STAND_IN_BYTES", "8")
    with pytest.raises(InternalError, match="cudaMalloc failed: out of memory"):
        binding.run({"x": X}, (), keep_on_device=False)


# -- a session that reads its inputs when they are bound ------------------------------------------------------------


class ReadingBinding:
    """ONNX Runtime's binding for a model whose nodes read every input on another device: it reads at once."""

    def __init__(self) -> None:
        self.read: dict[str, tuple[str, Array]] = {}
        self.outputs: list[Any] = []
        self.made: list[Any] = []

    def bind_input(self, name: str, device: str, number: int, kind: Any, shape: list[int], address: int) -> None:
        size = int(np.prod(shape)) * 4
        values = np.frombuffer(ctypes.string_at(address, size), "f4").reshape(shape)
        self.read[name] = (device, values)

    def bind_output(self, name: str, device: str, number: int, *fixed: Any) -> None:
        self.outputs.append(fixed)

    def get_outputs(self) -> list[Any]:
        return self.made

    def synchronize_outputs(self) -> None:
        raise AssertionError("this waits for the whole device, with the interpreter's lock")


class ReadingSession:
    """Doubles ``x``. ``places``: the names of the memory that it reads its inputs in; None: it cannot list them."""

    def __init__(self, memory: CudaMemory, places: tuple[str, ...] | None) -> None:
        self.memory = memory
        self.graphs: list[str] = []
        self.bindings: list[ReadingBinding] = []
        if places is not None:
            self.get_input_memory_infos = lambda: [SimpleNamespace(name=place) for place in places]

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name="x")]

    def io_binding(self) -> ReadingBinding:
        self.bindings.append(ReadingBinding())
        return self.bindings[-1]

    def run_with_iobinding(self, binding: ReadingBinding, options: Any) -> None:
        self.graphs.append(options.entries.get("gpu_graph_id", ""))
        values = binding.read["x"][1] * 2
        (fixed,) = binding.outputs
        block = self.memory.take(values.nbytes)
        address = fixed[-1] if fixed else block.address
        self.memory.copy(address, values.ctypes.data, values.nbytes)
        binding.made = [SimpleNamespace(shape=lambda: list(values.shape), data_ptr=lambda: address, block=block)]


class Options:
    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def add_run_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value


def reading(stand_in: StandIn, transfer: CudaTransfer, places: tuple[str, ...] | None, *, graphs: bool) -> Binding:
    memory = CudaMemory(stand_in.runtime, 0)
    session = ReadingSession(memory, places)
    plan = GraphPlan() if graphs else None
    runtime = SimpleNamespace(RunOptions=Options)
    return Binding(runtime, session, memory, transfer, {"x": "FP32", "y": "FP32"}, {}, plan)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("places", [("Cuda",), ("Cpu",), ("CudaPinned",), None])
def test_an_input_is_bound_once_its_bytes_are_there(
    stand_in: StandIn, transfer: CudaTransfer, places: tuple[str, ...] | None, graphs: bool
) -> None:
    binding = reading(stand_in, transfer, places, graphs=graphs)
    session = binding._inner
    for values in (X, X + 1, X[:1] + 7):
        (found,) = binding.run({"x": values}, ("y",), keep_on_device=False)
        if not session.graphs or session.graphs[-1] in ("-1", ""):  # a replay reads its fixed memory itself
            np.testing.assert_array_equal(found.data, values * 2)
    device = "cuda" if places in (("Cuda",), None) else "cpu"
    assert {each.read["x"][0] for each in session.bindings} == {device}
    np.testing.assert_array_equal(session.bindings[0].read["x"][1], X)
    binding.close()


def test_what_a_graph_captures_is_in_its_memory_before_it_is_bound(stand_in: StandIn, transfer: CudaTransfer) -> None:
    binding = reading(stand_in, transfer, ("Cuda",), graphs=True)
    (found,) = binding.run({"x": X}, ("y",), keep_on_device=False)
    np.testing.assert_array_equal(found.data, X * 2)
    assert binding._inner.graphs == ["-1", "1"]
    binding.close()


def test_a_capture_that_fails_is_answered_without_a_graph(
    stand_in: StandIn, transfer: CudaTransfer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    binding = reading(stand_in, transfer, ("Cuda",), graphs=True)
    session, run = binding._inner, ReadingSession.run_with_iobinding

    def failing(self: ReadingSession, bound: ReadingBinding, options: Any) -> None:
        run(self, bound, options)
        if options.entries["gpu_graph_id"] != "-1":
            raise RuntimeError("Error in execution: CUDA failure 901: operation failed due to a previous error")

    monkeypatch.setattr(ReadingSession, "run_with_iobinding", failing)
    for values in (X, X + 1):
        (found,) = binding.run({"x": values}, ("y",), keep_on_device=False)
        np.testing.assert_array_equal(found.data, values * 2)
    assert session.graphs == ["-1", "1", "-1"]
    assert not binding.replays
    assert "a CUDA graph cannot be captured, so the instance runs without" in caplog.text
    binding.close()


@pytest.mark.parametrize("places", [("Cpu",), None])
def test_a_session_that_reads_an_input_on_the_host_gets_no_graphs(
    stand_in: StandIn, transfer: CudaTransfer, places: tuple[str, ...] | None
) -> None:
    """A graph replays the kernels with the values that were on the host when it was captured."""
    binding = reading(stand_in, transfer, places, graphs=True)
    assert not binding.replays
    for values in (X, X + 1):
        (found,) = binding.run({"x": values}, ("y",), keep_on_device=False)
        np.testing.assert_array_equal(found.data, values * 2)
    assert binding._inner.graphs == ["-1", "-1"]
    binding.close()


def test_a_tensor_on_the_device_that_is_read_on_the_host_comes_to_the_host(
    stand_in: StandIn, transfer: CudaTransfer
) -> None:
    binding = reading(stand_in, transfer, ("Cpu",), graphs=False)
    block = binding._memory.take(X.nbytes)
    binding._memory.copy(block.address, X.ctypes.data, X.nbytes)
    given = DeviceArray("FP32", X.shape, binding._memory, block.address, block.owner)
    (found,) = binding.run({"x": given.as_array()}, ("y",), keep_on_device=False)
    np.testing.assert_array_equal(found.data, X * 2)
    binding.close()


class _NoSession:
    def io_binding(self) -> Any:
        return SimpleNamespace()

    def get_input_memory_infos(self) -> list[Any]:
        return [SimpleNamespace(name="Cuda")]

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name="x")]
