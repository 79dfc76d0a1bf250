"""Real ONNX models, built here and run by the real ONNX Runtime."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from remora.backends import Execution, Instance, Placement, Source
from remora.backends import onnxruntime as backend_module
from remora.backends.onnxruntime import OnnxModel, OnnxRuntimeBackend
from remora.backends.onnxruntime.plan import Device
from remora.config import data_type_of
from remora.errors import ConfigError, InternalError, InvalidArgumentError, NotFoundError, UnsupportedError
from remora.messages import DTYPES, Array, InferForm, InputSpec, Request, Response
from remora.proto.model_config_pb2 import DataType, ModelConfig
from remora.system.install_advice import install_command

onnx = pytest.importorskip("onnx", reason="builds its models with onnx: pip install '.[demo]'")
runtime = pytest.importorskip("onnxruntime", reason="pip install '.[onnx]'")

ELEMENT = {
    "BOOL": "BOOL",
    "UINT8": "UINT8",
    "UINT16": "UINT16",
    "UINT32": "UINT32",
    "UINT64": "UINT64",
    "INT8": "INT8",
    "INT16": "INT16",
    "INT32": "INT32",
    "INT64": "INT64",
    "FP16": "FLOAT16",
    "FP32": "FLOAT",
    "FP64": "DOUBLE",
    "BF16": "BFLOAT16",
    "BYTES": "STRING",
}
Dims = Sequence[int | str] | None


def value(name: str, datatype: str, dims: Dims) -> Any:
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DataType.Value(ELEMENT[datatype]), dims)


def graph(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: Sequence[Any] = ()) -> Any:
    made = onnx.helper.make_graph(nodes, "g", inputs, outputs, weights)
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    return onnx.helper.make_model(made, opset_imports=opsets, ir_version=9)


def identity(datatype: str = "FP32", dims: Dims = ("n", 2), op: str = "Identity") -> Any:
    node = onnx.helper.make_node(op, ["x"], ["y"])
    return graph([node], [value("x", datatype, dims)], [value("y", datatype, dims)])


def two_outputs() -> Any:
    nodes = [
        onnx.helper.make_node("Add", ["a", "b"], ["sum"]),
        onnx.helper.make_node("Sub", ["a", "b"], ["difference"]),
    ]
    names = [[value(name, "FP32", ("n", 2)) for name in group] for group in (("a", "b"), ("sum", "difference"))]
    return graph(nodes, *names)


def layers(*widths: int) -> Any:
    nodes, weights, last = [], [], "x"
    for index, (inside, outside) in enumerate(pairwise(widths)):
        values = np.random.default_rng(index).standard_normal((inside, outside)).astype("f4")
        weights.append(onnx.numpy_helper.from_array(values, f"w{index}"))
        nodes.append(onnx.helper.make_node("MatMul", [last, f"w{index}"], [f"h{index}"]))
        nodes.append(onnx.helper.make_node("Relu", [f"h{index}"], [f"r{index}"]))
        last = f"r{index}"
    nodes.append(onnx.helper.make_node("Identity", [last], ["y"]))
    return graph(nodes, [value("x", "FP32", ("n", widths[0]))], [value("y", "FP32", ("n", widths[-1]))], weights)


def source(tmp_path: Path, model: Any = None, name: str = "model.onnx", **settings: str) -> Source:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True, exist_ok=True)
    if model is not None:
        (version / name).parent.mkdir(exist_ok=True)
        onnx.save(model, version / name)
    named = {key.replace("_", "-"): text for key, text in settings.items()}
    return Source("m", 1, tmp_path / "m", version, tmp_path, named, cpus=2)


def config(text: str = "") -> ModelConfig:
    return text_format.Parse(f'name: "m" backend: "onnxruntime" {text}', ModelConfig())


def open_model(tmp_path: Path, model: Any, text: str = "", **settings: str) -> tuple[OnnxModel, ModelConfig]:
    made = config(text)
    opened = OnnxRuntimeBackend().open(source(tmp_path, model, **settings), made)
    opened.complete(made)
    return opened, made


def instance_of(tmp_path: Path, model: Any, text: str = "", **settings: str) -> Instance:
    opened, made = open_model(tmp_path, model, text, **settings)
    return opened.instance(made, Placement("m_0"))


def request(requested: Sequence[str] = ("y",), **inputs: Array) -> Request:
    specs = tuple(InputSpec(name, "", array.shape) for name, array in inputs.items())
    rows = next((array.shape[0] for array in inputs.values() if array.shape), 1)
    return Request(InferForm(specs), dict(inputs), tuple(requested), rows, None)


def answer(instance: Instance, *requests: Request) -> list[dict[str, Array]]:
    outcomes = instance.execute(Execution(requests))
    assert all(isinstance(outcome, Response) for outcome in outcomes), outcomes
    return [
        {tensor.name: tensor.data for tensor in outcome.outputs}
        for outcome in outcomes
        if isinstance(outcome, Response)
    ]


def sample(datatype: str, rows: int = 2) -> Array:
    if datatype == "BYTES":
        return np.array([["é".encode(), b""], [b"a\0b", b"z"]] * 2, object)[:rows]
    if datatype == "BOOL":
        return np.array([[True, False]] * 4)[:rows]
    return np.arange(rows * 2, dtype=DTYPES[datatype]).reshape(rows, 2)


# -- Values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", ELEMENT)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_every_datatype_comes_back_as_it_went_in(tmp_path: Path, datatype: str, rows: int) -> None:
    instance = instance_of(tmp_path, identity(datatype))
    array = sample(datatype, rows)
    array.flags.writeable = False
    (outputs,) = answer(instance, request(x=array))
    assert outputs["y"].dtype == DTYPES[datatype]
    np.testing.assert_array_equal(outputs["y"], array)


@pytest.mark.parametrize("datatype", ELEMENT)
def test_a_batch_of_every_datatype_gives_everyone_their_rows(tmp_path: Path, datatype: str) -> None:
    instance = instance_of(tmp_path, identity(datatype))
    arrays = [sample(datatype, rows) for rows in (1, 2, 1)]
    outputs = answer(instance, *(request(x=array) for array in arrays))
    for got, array in zip(outputs, arrays, strict=True):
        np.testing.assert_array_equal(got["y"], array)


def test_outputs_carry_the_wires_datatype(tmp_path: Path) -> None:
    (outcome,) = instance_of(tmp_path, identity("BF16")).execute(Execution([request(x=sample("BF16"))]))
    assert isinstance(outcome, Response)
    assert [tensor.datatype for tensor in outcome.outputs] == ["BF16"]


def test_bytes_that_are_no_text_fail_their_own_request_with_the_place(tmp_path: Path) -> None:
    instance = instance_of(tmp_path, identity("BYTES"))
    bad = np.array([[b"good", b"b\xffd"]], object)
    good, refused = instance.execute(Execution([request(x=sample("BYTES")), request(x=bad)]))
    assert isinstance(good, Response)
    assert isinstance(refused, InvalidArgumentError)
    assert "input 'x' of model 'm' takes UTF-8 text, but element 1 has the byte 0xff at 1" in str(refused)


def test_a_model_may_mix_bfloat16_with_other_numbers(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Cast", ["x"], ["y"], to=onnx.TensorProto.BFLOAT16)
    instance = instance_of(tmp_path, graph([node], [value("x", "FP32", ("n",))], [value("y", "BF16", ("n",))]))
    (outputs,) = answer(instance, request(x=np.array([1.0, -2.0], "f4")))
    assert outputs["y"].tolist() == [0x3F80, 0xC000]


def test_only_the_outputs_asked_for_are_given_in_the_models_order(tmp_path: Path) -> None:
    instance = instance_of(tmp_path, two_outputs())
    ones = np.ones((1, 2), "f4")
    first, second = answer(
        instance, request(["difference"], a=ones, b=ones), request(["difference", "sum"], a=ones, b=ones)
    )
    assert list(first) == ["difference"]
    assert list(second) == ["sum", "difference"]


def test_a_scalar_has_one_dimension_of_one_on_the_wire(tmp_path: Path) -> None:
    opened, made = open_model(tmp_path, identity("FP32", ()))
    assert [list(made.input[0].dims), list(made.output[0].dims)] == [[1], [1]]
    (outputs,) = answer(opened.instance(made, Placement("m_0")), request(x=np.array([3], "f4")))
    assert outputs["y"].tolist() == [3.0]


def test_an_output_may_have_its_shape_from_the_values(tmp_path: Path) -> None:
    node = onnx.helper.make_node("NonZero", ["x"], ["y"])
    made = graph([node], [value("x", "FP32", (4,))], [value("y", "INT64", (1, "found"))])
    (outputs,) = answer(instance_of(tmp_path, made), request(x=np.array([0, 1, 0, 1], "f4")))
    assert outputs["y"].tolist() == [[1, 3]]


def test_an_input_with_a_default_may_be_left_out(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Add", ["x", "w"], ["y"])
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [2], [1.0, 2.0])
    inputs = [value("x", "FP32", (1, 2)), value("w", "FP32", (2,))]
    made = graph([node], inputs, [value("y", "FP32", (1, 2))], [weight])
    text = """
        input [{ name: "x" data_type: TYPE_FP32 dims: [1, 2] },
               { name: "w" data_type: TYPE_FP32 dims: [2] optional: true }]
        output [{ name: "y" data_type: TYPE_FP32 dims: [1, 2] }]"""
    instance = instance_of(tmp_path, made, text)
    zeros = np.zeros((1, 2), "f4")
    with_it, without = answer(instance, request(x=zeros, w=np.array([5, 6], "f4")), request(x=zeros))
    assert with_it["y"].tolist() == [[5, 6]]
    assert without["y"].tolist() == [[1, 2]]


def test_onnxs_optional_inputs_are_optional(tmp_path: Path) -> None:
    kind = onnx.helper.make_optional_type_proto(onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, (2,)))
    node = onnx.helper.make_node("OptionalHasElement", ["x"], ["y"])
    made = graph([node], [onnx.helper.make_value_info("x", kind)], [value("y", "BOOL", ())])
    opened, completed = open_model(tmp_path, made)
    assert completed.input[0].optional
    (outputs,) = answer(opened.instance(completed, Placement("m_0")), request())
    assert outputs["y"].tolist() == [False]


def test_a_failing_model_says_what_failed_with_tritons_text(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Gather", ["w", "x"], ["y"])
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [2], [1.0, 2.0])
    made = graph([node], [value("x", "INT64", ("n",))], [value("y", "FP32", ("n",))], [weight])
    instance = instance_of(tmp_path, made)
    good, bad = (request(x=np.array([index])) for index in (1, 7))
    answered, failed = instance.execute(Execution([good, bad]))
    assert isinstance(answered, Response)
    assert isinstance(failed, InternalError)
    assert failed.from_model
    assert str(failed).startswith("onnx runtime error 2: ")
    assert "\n" not in str(failed)
    with pytest.raises(InternalError, match="onnx runtime error 2: "):
        instance.execute(Execution([bad]))


def test_an_output_that_does_not_batch_is_told_by_name(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Unique", ["x"], ["y"])
    made = graph([node], [value("x", "FP32", ("n", 2))], [value("y", "FP32", ("k",))])
    instance = instance_of(tmp_path, made)
    with pytest.raises(InternalError, match=r"output 'y' has shape \[1\] for a batch of 2: expected 2"):
        instance.execute(Execution([request(x=np.ones((1, 2), "f4")) for _ in range(2)]))


# -- Configuration --------------------------------------------------------------------------------------------------


def test_an_empty_configuration_is_completed_from_the_model(tmp_path: Path) -> None:
    _, made = open_model(tmp_path, two_outputs())
    assert made.max_batch_size == 4
    assert made.HasField("dynamic_batching")
    assert [tensor.name for tensor in made.input] == ["a", "b"]
    assert [tensor.name for tensor in made.output] == ["sum", "difference"]
    assert made.input[0].data_type == DataType.TYPE_FP32
    assert list(made.input[0].dims) == [2]


def test_the_default_batch_size_is_the_backends_setting(tmp_path: Path) -> None:
    _, made = open_model(tmp_path, identity(), default_max_batch_size="16")
    assert made.max_batch_size == 16
    with pytest.raises(ConfigError, match="default-max-batch-size is 'many'"):
        open_model(tmp_path, identity(), default_max_batch_size="many")


@pytest.mark.parametrize("datatype", ELEMENT)
def test_every_datatype_is_completed(tmp_path: Path, datatype: str) -> None:
    _, made = open_model(tmp_path, identity(datatype))
    assert made.input[0].data_type == made.output[0].data_type == data_type_of(datatype)


def io(input_type: str = "FP32", output_name: str = "y", dims: str = "2") -> str:
    return (
        f'max_batch_size: 4 input [{{ name: "x" data_type: TYPE_{input_type} dims: [{dims}] }}] '
        f'output [{{ name: "{output_name}" data_type: TYPE_FP32 dims: [2] }}]'
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (io("INT32"), "configuration expects datatype TYPE_INT32 for input 'x', model provides TYPE_FP32"),
        (io(output_name="z"), "unexpected inference output 'z', allowed outputs are: y"),
        (io(dims="3"), r"tensor 'x': the model expects 2 dimensions \(shape \[-1,2\]\)"),
    ],
)
def test_a_configuration_that_is_not_the_models_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    made = config(text)
    opened = OnnxRuntimeBackend().open(source(tmp_path, identity()), made)
    with pytest.raises(ConfigError, match=reason):
        opened.complete(made)
    with pytest.raises(ConfigError, match=reason):
        opened.instance(made, Placement("m_0"))


# -- Loading --------------------------------------------------------------------------------------------------------


def test_a_bare_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "bare.onnx"
    onnx.save(identity(), path)
    made = ModelConfig(name="bare")
    opened = OnnxRuntimeBackend().open(Source("bare", 1, tmp_path, path, tmp_path), made)
    opened.complete(made)
    (outputs,) = answer(opened.instance(made, Placement("bare_0")), request(x=sample("FP32")))
    np.testing.assert_array_equal(outputs["y"], sample("FP32"))


def test_the_file_may_have_another_name(tmp_path: Path) -> None:
    made = config('default_model_filename: "other.onnx"')
    OnnxRuntimeBackend().open(source(tmp_path, identity(), "other.onnx"), made).complete(made)
    assert made.input[0].name == "x"


@pytest.mark.parametrize("inside", ["model.onnx", "graph.onnx"])
def test_a_model_with_its_weights_beside_it_lives_in_a_directory(tmp_path: Path, inside: str) -> None:
    where = source(tmp_path)
    (where.path / "model.onnx").mkdir()
    onnx.save(
        layers(4, 3),
        where.path / "model.onnx" / inside,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    made = config()
    opened = OnnxRuntimeBackend().open(where, made)
    opened.complete(made)
    (outputs,) = answer(opened.instance(made, Placement("m_0")), request(x=np.ones((1, 4), "f4")))
    assert outputs["y"].shape == (1, 3)


def test_lost_weights_are_named_and_explained(tmp_path: Path) -> None:
    where = source(tmp_path)
    onnx.save(
        layers(4, 3), where.path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    (where.path / "weights.bin").unlink()
    with pytest.raises(InternalError) as failure:
        OnnxRuntimeBackend().open(where, config())
    text = str(failure.value)
    assert text.startswith("model 'm': cannot load '1/model.onnx': onnx runtime error 1: ")
    assert "weights.bin" in text
    assert text.endswith("keep the files with the model's weights beside it, under the names they were exported with")
    assert str(tmp_path) not in text


def test_a_missing_file_is_told_with_what_lies_there_instead(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as failure:
        OnnxRuntimeBackend().open(source(tmp_path, identity(), "other.onnx"), config())
    assert str(failure.value) == (
        "unable to find '1/model.onnx' for model 'm', there is other.onnx: rename it or set default_model_filename"
    )


@pytest.mark.parametrize("filename", ["../1/model.onnx", "/etc/passwd", "a/../../b.onnx", "..\\\\model.onnx"])
def test_a_file_name_that_leaves_the_directory_is_refused(tmp_path: Path, filename: str) -> None:
    made = config(f'default_model_filename: "{filename}"')
    with pytest.raises(ConfigError, match="leaves the version's directory"):
        OnnxRuntimeBackend().open(source(tmp_path, identity()), made)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"nonsense", "onnx runtime error 7: Load model from 1/model.onnx failed:Protobuf parsing failed."),
        (b"version https://git-lfs.github.com/spec/v1\noid", "the file is a Git LFS pointer: run git lfs pull"),
        (b"", "onnx runtime error 2: Load model from 1/model.onnx failed:No graph was found in the protobuf."),
    ],
)
def test_a_damaged_file_is_told_in_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
    where = source(tmp_path)
    (where.path / "model.onnx").write_bytes(content)
    with pytest.raises(InternalError) as failure:
        OnnxRuntimeBackend().open(where, config())
    assert reason in str(failure.value)
    assert "\n" not in str(failure.value)
    assert str(tmp_path) not in str(failure.value)


def test_a_model_from_the_future_says_what_to_upgrade(tmp_path: Path) -> None:
    made = identity()
    made.opset_import[0].version = 999
    with pytest.raises(InternalError, match=f"upgrade onnxruntime \\(this is {runtime.__version__}\\)"):
        OnnxRuntimeBackend().open(source(tmp_path, made), config())


def test_a_zipmap_is_refused_with_the_way_to_export_without(tmp_path: Path) -> None:
    helper = onnx.helper
    node = helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    tensor = helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
    kind = helper.make_sequence_type_proto(helper.make_map_type_proto(onnx.TensorProto.INT64, tensor))
    made = graph([node], [value("x", "FP32", ("n", 2))], [helper.make_value_info("y", kind)])
    with pytest.raises(UnsupportedError, match=r"output 'y' is seq\(map.*zipmap': False"):
        OnnxRuntimeBackend().open(source(tmp_path, made), config())


def test_a_gpu_that_is_asked_for_by_name_must_be_there(tmp_path: Path) -> None:
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


def test_parameters_that_mean_nothing_are_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    instance_of(tmp_path, identity(), 'parameters { key: "colour" value { string_value: "red" } }')
    assert [record.message for record in caplog.records] == [
        "model 'm': the onnxruntime backend does not know the parameter 'colour'"
    ]


def test_every_parameter_reaches_the_session(tmp_path: Path) -> None:
    given = {
        "intra_op_thread_count": "2",
        "inter_op_thread_count": "3",
        "execution_mode": "1",
        "enable_mem_arena": "0",
        "enable_mem_pattern": "0",
        "session.set_denormal_as_zero": "1",
    }
    text = "".join(f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }} ' for key, text in given.items())
    opened, made = open_model(tmp_path, identity(), f"{text} optimization {{ graph {{ level: -1 }} }}")
    opened.instance(made, Placement("m_0"))
    (session,) = opened._sessions.values()
    options = session._inner.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 3)
    assert options.execution_mode == runtime.ExecutionMode.ORT_PARALLEL
    assert options.graph_optimization_level == runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert not options.enable_cpu_mem_arena
    assert not options.enable_mem_pattern
    assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_memory_is_given_back_after_each_run_when_asked_to(tmp_path: Path) -> None:
    key = "memory.enable_memory_arena_shrinkage"
    instance = instance_of(tmp_path, layers(4, 3), f'parameters {{ key: "{key}" value {{ string_value: "cpu:0" }} }}')
    (outputs,) = answer(instance, request(x=np.ones((2, 4), "f4")))
    assert outputs["y"].shape == (2, 3)


# -- Sharing --------------------------------------------------------------------------------------------------------


def test_all_instances_share_one_session_and_run_at_once(tmp_path: Path) -> None:
    opened, made = open_model(tmp_path, layers(8, 16, 4))
    instances = [opened.instance(made, Placement(f"m_{index}")) for index in range(4)]
    assert len(opened._sessions) == 1
    assert all(instance.quick for instance in instances)
    arrays = [np.full((1, 8), index, "f4") for index in range(4)]
    expected = [answer(instances[0], request(x=array))[0]["y"] for array in arrays]

    def work(index: int) -> list[Array]:
        return [answer(instances[index], request(x=arrays[index]))[0]["y"] for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        for index, results in enumerate(pool.map(work, range(4))):
            for result in results:
                np.testing.assert_array_equal(result, expected[index])
    opened.close()


def test_onnxruntime_is_not_imported_with_the_backend() -> None:
    assert not hasattr(backend_module, "onnxruntime")


# -- The cache of optimised models ----------------------------------------------------------------------------------


def levels(opened: OnnxModel) -> list[Any]:
    return [each._inner.get_session_options().graph_optimization_level for each in opened._sessions.values()]


def test_an_optimised_model_is_kept_and_loaded_without_optimising_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    array = np.ones((2, 8), "f4")
    first, made = open_model(tmp_path, layers(8, 16, 4), optimized_model_cache=str(folder))
    (kept,) = folder.iterdir()
    second, _ = open_model(tmp_path, layers(8, 16, 4), optimized_model_cache=str(folder))
    assert levels(first) == [runtime.GraphOptimizationLevel.ORT_ENABLE_ALL]
    assert levels(second) == [runtime.GraphOptimizationLevel.ORT_DISABLE_ALL]
    assert list(folder.iterdir()) == [kept]
    assert len(onnx.load(kept).graph.node) < len(layers(8, 16, 4).graph.node)
    (before,) = answer(first.instance(made, Placement("m_0")), request(x=array))
    (after,) = answer(second.instance(made, Placement("m_0")), request(x=array))
    np.testing.assert_array_equal(before["y"], after["y"])


def test_another_model_or_level_is_kept_apart(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    for model, text in ((layers(8, 4), ""), (layers(8, 5), ""), (layers(8, 4), "optimization { graph { level: 1 } }")):
        open_model(tmp_path, model, text, optimized_model_cache=str(folder))
    assert len(list(folder.iterdir())) == 3


def test_a_damaged_cache_file_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    open_model(tmp_path, layers(8, 4), optimized_model_cache=str(folder))
    (kept,) = folder.iterdir()
    kept.write_bytes(b"damaged")
    opened, _ = open_model(tmp_path, layers(8, 4), optimized_model_cache=str(folder))
    assert levels(opened) == [runtime.GraphOptimizationLevel.ORT_ENABLE_ALL]
    assert kept.read_bytes() != b"damaged"


def test_a_cache_that_cannot_be_written_costs_a_line_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    opened, _ = open_model(tmp_path, layers(8, 4), optimized_model_cache=str(blocked))
    assert levels(opened) == [runtime.GraphOptimizationLevel.ORT_ENABLE_ALL]
    assert "cannot be kept" in caplog.text


def test_a_model_with_its_weights_elsewhere_is_not_kept(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    where = source(tmp_path, optimized_model_cache=str(folder))
    onnx.save(
        layers(8, 4), where.path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    OnnxRuntimeBackend().open(where, config())
    assert not folder.exists()
