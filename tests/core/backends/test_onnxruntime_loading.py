"""Files of ONNX models, session options and the cache of optimised models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.backends import Placement, Source
from remora.backends.onnxruntime import OnnxModel, OnnxRuntimeBackend
from remora.errors import ConfigError, InternalError, NotFoundError, UnsupportedError
from remora.proto.model_config_pb2 import ModelConfig
from support.models.onnx_models import (
    answer,
    config,
    graph,
    identity,
    instance_of,
    layers,
    onnx,
    open_model,
    request,
    runtime,
    sample,
    source,
    value,
)

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


def test_a_missing_file_is_reported_with_the_files_that_exist(tmp_path: Path) -> None:
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
def test_a_damaged_file_is_reported_in_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
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


def test_parameters_that_mean_nothing_are_reported_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_memory_is_released_after_each_run_if_configured(tmp_path: Path) -> None:
    key = "memory.enable_memory_arena_shrinkage"
    instance = instance_of(tmp_path, layers(4, 3), f'parameters {{ key: "{key}" value {{ string_value: "cpu:0" }} }}')
    (outputs,) = answer(instance, request(x=np.ones((2, 4), "f4")))
    assert outputs["y"].shape == (2, 3)


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
