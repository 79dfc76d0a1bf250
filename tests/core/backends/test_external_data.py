"""ONNX files whose tensors lie in other files: which are read, and that no tensor escapes the check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from remora.backends.external_data import ExternalFile, check_external_data, external_files
from remora.engine import Engine
from remora.errors import InvalidArgumentError, RemoraError
from support.models import onnx_models

OUTSIDE = "../secret.bin"


def external(name: str, location: str = OUTSIDE) -> TensorProto:
    tensor = numpy_helper.from_array(np.zeros(2, np.float32), name)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def plain() -> Any:
    return onnx_models.identity("FP32", ("n", 2))


def in_weights(model: Any, tensor: TensorProto) -> None:
    model.graph.initializer.append(tensor)


def in_sparse_weights(model: Any, tensor: TensorProto) -> None:
    model.graph.sparse_initializer.add().values.CopyFrom(tensor)


def in_sparse_indices(model: Any, tensor: TensorProto) -> None:
    model.graph.sparse_initializer.add().indices.CopyFrom(tensor)


def in_attribute(model: Any, tensor: TensorProto) -> None:
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=tensor))


def in_attributes(model: Any, tensor: TensorProto) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("tensors", [tensor]))


def in_sparse_attribute(model: Any, tensor: TensorProto) -> None:
    attribute = model.graph.node[0].attribute.add(name="sparse", type=onnx.AttributeProto.SPARSE_TENSOR)
    attribute.sparse_tensor.values.CopyFrom(tensor)


def in_sparse_attributes(model: Any, tensor: TensorProto) -> None:
    attribute = model.graph.node[0].attribute.add(name="sparse", type=onnx.AttributeProto.SPARSE_TENSORS)
    attribute.sparse_tensors.add().indices.CopyFrom(tensor)


def in_subgraph(model: Any, tensor: TensorProto) -> None:
    inner = plain()
    in_weights(inner, tensor)
    outer = plain()
    outer.graph.node[0].attribute.append(helper.make_attribute("then_branch", inner.graph))
    model.graph.node[0].attribute.append(helper.make_attribute("branches", [outer.graph]))


def in_function(model: Any, tensor: TensorProto) -> None:
    node = helper.make_node("Constant", [], ["y"], value=tensor)
    function = helper.make_function("own", "F", ["x"], ["y"], [node], [helper.make_opsetid("", 17)])
    model.functions.append(function)


def in_training(model: Any, tensor: TensorProto) -> None:
    model.training_info.add().algorithm.initializer.append(tensor)


def with_unknown_fields(model: Any, tensor: TensorProto) -> None:
    raw = model.SerializeToString() + b"\x9b\x3f\x08\x01\x9c\x3f" + b"\xf8\x3f\x05"  # a group and a number
    model.ParseFromString(raw)
    in_weights(model, tensor)


PLACES: list[Callable[[Any, TensorProto], None]] = [
    in_weights, in_sparse_weights, in_sparse_indices, in_attribute, in_attributes, in_sparse_attribute,
    in_sparse_attributes, in_subgraph, in_function, in_training, with_unknown_fields,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: str(place.__name__))
def test_a_tensor_outside_of_the_folder_is_refused_wherever_it_is(
    place: Callable[[Any, TensorProto], None], tmp_path: Path
) -> None:
    model = plain()
    place(model, external("w"))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(
        InvalidArgumentError, match=rf"^tensor 'w' of 'model.onnx' has its values in '{OUTSIDE}', which"
    ):
        check_external_data(tmp_path / "model.onnx")


REFUSED = ["/etc/passwd", "..", "a/../../b", "a\\..\\b", "C:\\x", "\\x", "*/_ORT_MEM_ADDR_/*", "a\0b", "link", "dir/x"]


@pytest.mark.parametrize("location", REFUSED)
def test_a_path_out_of_the_folder_is_refused_however_it_is_written(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_bytes(bytes(8))
    (folder / "link").symlink_to("../outside/x")
    (folder / "dir").symlink_to("../outside")
    model = plain()
    in_weights(model, external("w", location))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InvalidArgumentError, match=r"^tensor 'w' of 'model.onnx'"):
        check_external_data(folder / "model.onnx")


@pytest.mark.parametrize("location", ["w.bin", "./w.bin", "data/w.bin", "missing.bin", "a..b"])
def test_a_path_in_the_folder_is_left_to_the_runtime(location: str, tmp_path: Path) -> None:
    model = plain()
    in_weights(model, external("w", location))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    check_external_data(tmp_path / "model.onnx")


def test_a_model_and_its_data_may_be_links_into_one_folder(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    model = plain()
    in_weights(model, external("w", "w.bin"))
    (blobs / "1").write_bytes(model.SerializeToString())
    (blobs / "2").write_bytes(bytes(8))
    (snapshot / "model.onnx").symlink_to(blobs / "1")
    (snapshot / "w.bin").symlink_to(blobs / "2")
    check_external_data(snapshot / "model.onnx")


@pytest.mark.parametrize("content", [b"", b"location", b"not ONNX: location" * 100, b"\x0b" * 1000 + b"location"])
def test_a_file_that_is_not_onnx_is_left_to_its_runtime(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    check_external_data(tmp_path / "model.onnx")


def test_graphs_in_graphs_without_end_are_refused() -> None:
    data = b"\x0a\x08location"
    for _ in range(400):
        for tag in (b"\x32", b"\x2a", b"\x0a"):  # graph of an attribute of a node
            size, length = len(data), b""
            while size > 0x7F:
                length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
            data = tag + length + bytes([size]) + data
    wrapped = b"\x3a" + bytes([len(data) & 0x7F | 0x80, len(data) >> 7 & 0x7F | 0x80, len(data) >> 14]) + data
    with pytest.raises(InvalidArgumentError, match="in each other"):
        list(external_files(wrapped))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_to_their_end(content: bytes) -> None:
    list(external_files(content + b"location"))


def test_the_name_of_a_tensor_may_stand_behind_its_location() -> None:
    tensor = TensorProto(name="late")
    raw = external("").SerializeToString() + tensor.SerializeToString()
    graph = b"\x2a" + bytes([len(raw)]) + raw
    data = b"\x3a" + bytes([len(graph)]) + graph
    assert list(external_files(data)) == [ExternalFile("tensor 'late'", "values", OUTSIDE)]


def context_node(**attributes: Any) -> Any:
    return helper.make_node("EPContext", ["x"], ["c"], name="c", domain="com.microsoft", **attributes)


def write_with_node(path: Path, node: Any, *, in_function: bool = False) -> None:
    model = plain()
    if in_function:
        function = helper.make_function("own", "F", ["x"], ["c"], [node], [helper.make_opsetid("com.microsoft", 1)])
        model.functions.append(function)
    else:
        model.graph.node.append(node)
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize(
    ("attributes", "content"),
    [
        ({"embed_mode": 0, "ep_cache_context": OUTSIDE}, "compiled graph"),
        ({"embed_mode": 2, "ep_cache_context": OUTSIDE}, "compiled graph"),
        ({"ep_cache_context": "graph.bin", "onnx_model_filename": OUTSIDE}, "model"),
    ],
)
def test_a_compiled_graph_outside_of_the_folder_is_refused(
    attributes: Any, content: str, in_function: bool, tmp_path: Path
) -> None:
    write_with_node(tmp_path / "model.onnx", context_node(**attributes), in_function=in_function)
    with pytest.raises(InvalidArgumentError, match=rf"^node 'c' of 'model.onnx' has its {content} in '{OUTSIDE}'"):
        check_external_data(tmp_path / "model.onnx")


def test_a_path_of_a_compiled_graph_that_a_function_takes_from_its_caller_is_refused(tmp_path: Path) -> None:
    node = context_node(embed_mode=0)
    node.attribute.add(name="ep_cache_context", ref_attr_name="path", type=onnx.AttributeProto.STRING)
    write_with_node(tmp_path / "model.onnx", node, in_function=True)
    with pytest.raises(InvalidArgumentError, match=r"node 'c' .* takes its ep_cache_context from an attribute"):
        check_external_data(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "attributes",
    [
        {"embed_mode": 0, "ep_cache_context": "graph.bin"},
        {"embed_mode": 1, "ep_cache_context": b"/\0..compiled"},
        {"ep_cache_context": b"/\0..compiled"},
    ],
)
def test_a_compiled_graph_in_the_folder_or_the_file_is_left_to_the_runtime(attributes: Any, tmp_path: Path) -> None:
    write_with_node(tmp_path / "model.onnx", context_node(**attributes))
    check_external_data(tmp_path / "model.onnx")


def test_a_server_refuses_such_a_model_and_reads_nothing(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")
    folder = tmp_path / "models" / "m" / "1"
    folder.mkdir(parents=True)
    (tmp_path / "models" / "m" / "secret.bin").write_bytes(np.array([4, 2], np.float32).tobytes())
    model = onnx_models.graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [onnx_models.value("x", "FP32", ("n", 2))],
        [onnx_models.value("y", "FP32", ("n", 2))],
    )
    in_weights(model, external("w"))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with (
        pytest.raises(RemoraError, match=r"tensor 'w' of 'model.onnx' has its values in '../secret.bin'"),
        Engine(model_repository=[tmp_path / "models"], strict_readiness=True),
    ):
        pass
