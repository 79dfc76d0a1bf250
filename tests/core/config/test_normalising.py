"""Inferring, normalising and printing: the configurations that Triton recorded come out equal, and each rule holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given
from hypothesis import strategies as st

from remora.config import (
    data_type_of,
    dtype_name,
    infer_backend,
    normalise,
    parse_config,
    to_dict,
    to_json,
    validate,
)
from remora.errors import ConfigError
from remora.messages import DTYPES
from remora.proto.model_config_pb2 import TYPE_INVALID, TYPE_STRING, ModelConfig

RECORDED = [json.loads(line) for line in Path(__file__).with_name("recorded.jsonl").read_text().splitlines()]
"""Configurations as written, with what Triton made of them: ``json`` over HTTP, ``message`` over gRPC."""

IGNORED = ("runtime", "model_metrics", "max_inflight_requests")
"""Fields that are younger than the recording."""


def served(row: dict[str, Any]) -> ModelConfig:
    config = parse_config(row["pbtxt"], path=row["model"], syntax="pbtxt")
    infer_backend(config, row["model"], row["files"])
    normalise(config, row["model"])
    validate(config, row["model"])
    return config


def without_ignored(config: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in IGNORED}
    return {key: without_ignored(value) if key == "ensemble_scheduling" else value for key, value in kept.items()}


@pytest.mark.parametrize("row", [row for row in RECORDED if "json" in row], ids=lambda row: str(row["model"]))
def test_a_configuration_is_printed_as_triton_prints_it(row: dict[str, Any]) -> None:
    printed = to_json(served(row))
    # 2 and 2.0 are equal in Python and different on the wire, so the texts are compared.
    ours, theirs = (json.dumps(without_ignored(value), sort_keys=True) for value in (json.loads(printed), row["json"]))
    assert ours == theirs
    assert list(without_ignored(json.loads(printed))) == list(without_ignored(row["json"]))
    assert b": " not in printed.replace(b'": "', b"")


@pytest.mark.parametrize("row", [row for row in RECORDED if "message" in row], ids=lambda row: str(row["model"]))
def test_a_configuration_is_the_message_that_triton_sends(row: dict[str, Any]) -> None:
    assert served(row) == ParseDict(row["message"], ModelConfig())


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: str(row["model"]))
def test_normalising_twice_changes_nothing(row: dict[str, Any]) -> None:
    config = served(row)
    again = ModelConfig()
    again.CopyFrom(config)
    infer_backend(again, row["model"], row["files"])
    normalise(again, row["model"])
    assert again == config


@pytest.mark.parametrize("row", [row for row in RECORDED if "json" in row], ids=lambda row: str(row["model"]))
def test_what_triton_prints_is_read_as_json_and_as_yaml(row: dict[str, Any]) -> None:
    config = served(row)
    assert parse_config(json.dumps(row["json"]), path="recorded", syntax="json") == config
    assert parse_config(json.dumps(row["json"]), path="recorded", syntax="yaml") == config


@pytest.mark.parametrize(
    ("written", "files", "expected"),
    [
        ("", ["model.onnx"], ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ("", ["model.py", "weights.bin"], ("python", "", "model.py")),
        ("", ["model.plan"], ("tensorrt", "tensorrt_plan", "model.plan")),
        ("", ["model.xml", "model.bin"], ("openvino", "", "model.xml")),
        ("", ["model.pt"], ("pytorch", "pytorch_libtorch", "model.pt")),
        ("", ["model.pt2"], ("pytorch", "torch_aoti", "model.pt2")),
        ("", ["model.savedmodel"], ("tensorflow", "tensorflow_savedmodel", "model.savedmodel")),
        ("", ["model.graphdef"], ("tensorflow", "tensorflow_graphdef", "model.graphdef")),
        ("", ["model.py", "model.onnx"], ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ('backend: "python"', ["model.onnx"], ("python", "", "model.py")),
        ('backend: "python"', [], ("python", "", "model.py")),
        ('backend: "pytorch"', ["model.pt2"], ("pytorch", "torch_aoti", "model.pt2")),
        ('backend: "pytorch"', [], ("pytorch", "pytorch_libtorch", "model.pt")),
        ('platform: "onnxruntime_onnx"', [], ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ('platform: "libtorch"', [], ("pytorch", "libtorch", "model.pt")),
        ('platform: "tensorflow_graphdef"', ["model.py"], ("tensorflow", "tensorflow_graphdef", "model.graphdef")),
        ('default_model_filename: "model.plan"', [], ("tensorrt", "tensorrt_plan", "model.plan")),
        (
            'backend: "onnxruntime" default_model_filename: "net.onnx"',
            [],
            ("onnxruntime", "onnxruntime_onnx", "net.onnx"),
        ),
        ('backend: "mine"', ["model.py"], ("mine", "", "")),
        ('platform: "ensemble"', ["model.py"], ("", "ensemble", "")),
    ],
)
def test_the_backend_follows_from_what_is_there(written: str, files: list[str], expected: tuple[str, str, str]) -> None:
    config = parse_config(written, path="test", syntax="pbtxt")
    infer_backend(config, "m", files)
    assert (config.backend, config.platform, config.default_model_filename) == expected


def test_a_model_may_name_its_custom_backend() -> None:
    config = ModelConfig()
    infer_backend(config, "model.identity", ["libtriton_identity.so"])
    assert (config.backend, config.default_model_filename) == ("identity", "model.identity")


def test_a_model_without_any_backend_is_refused_with_the_files_looked_for() -> None:
    with pytest.raises(ConfigError) as caught:
        infer_backend(ModelConfig(), "m", ["resnet.onnx"])
    assert caught.value.message.startswith(
        "Invalid model name: Could not determine backend for model 'm' with no backend in model configuration. "
        "Expected model name of the form 'model.<backend_name>'."
    )
    assert "model.onnx" in caught.value.message
    assert "found resnet.onnx" in caught.value.message


@pytest.mark.parametrize(
    ("written", "gpus", "expected"),
    [
        ("", 0, [("m", "KIND_CPU", 1, [])]),
        ("", 2, [("m", "KIND_GPU", 1, [0, 1])]),
        ('backend: "onnxruntime"', 0, [("m", "KIND_CPU", 2, [])]),
        ('backend: "onnxruntime"', 1, [("m", "KIND_GPU", 1, [0])]),
        ('backend: "tensorflow" instance_group { kind: KIND_CPU }', 1, [("m_0", "KIND_CPU", 2, [])]),
        ('backend: "onnxruntime" instance_group { kind: KIND_CPU count: 1 }', 0, [("m_0", "KIND_CPU", 1, [])]),
        ("instance_group { gpus: [ 0, 3 ] }", 2, [("m_0", "KIND_CPU", 1, [0, 3])]),
        (
            "instance_group { kind: KIND_MODEL } instance_group { count: -1 }",
            0,
            [("m_0", "KIND_MODEL", 1, []), ("m_1", "KIND_CPU", 1, [])],
        ),
        ("ensemble_scheduling { }", 1, []),
    ],
)
def test_instance_groups_get_names_kinds_and_counts(written: str, gpus: int, expected: list[object]) -> None:
    config = parse_config(written, path="test", syntax="pbtxt")
    normalise(config, "m", gpus=range(gpus))
    groups = to_dict(config)["instance_group"]
    assert [(group["name"], group["kind"], group["count"], group["gpus"]) for group in groups] == expected


@pytest.mark.parametrize(
    ("kinds", "gpus", "expected"),
    [
        (("CPU",), 1, "KIND_CPU"),
        (("CPU", "GPU"), 1, "KIND_CPU"),
        (("GPU",), 0, "KIND_CPU"),
        (("MODEL", "CPU"), 1, "KIND_MODEL"),
        (("GPU", "CPU"), 1, "KIND_GPU"),
    ],
)
def test_auto_is_the_first_kind_that_the_backend_prefers_and_the_machine_has(
    kinds: tuple[str, ...], gpus: int, expected: str
) -> None:
    config = parse_config("instance_group { } instance_group { kind: KIND_CPU }", path="test", syntax="pbtxt")
    normalise(config, "m", gpus=range(gpus), kinds=kinds)
    first, second = to_dict(config)["instance_group"]
    assert (first["kind"], second["kind"]) == (expected, "KIND_CPU")


def test_devices_that_are_left_out_leave_the_others_their_numbers() -> None:
    config = parse_config("instance_group { } instance_group { gpus: 0 }", path="test", syntax="pbtxt")
    normalise(config, "m", gpus=(1, 3))
    first, second = to_dict(config)["instance_group"]
    assert (first["kind"], first["gpus"]) == ("KIND_GPU", [1, 3])
    assert second["kind"] == "KIND_CPU"


def test_a_sequence_may_be_silent_for_a_second_by_default() -> None:
    config = parse_config("max_batch_size: 4 sequence_batching { oldest { } }", path="test", syntax="pbtxt")
    normalise(config, "m")
    assert config.sequence_batching.max_sequence_idle_microseconds == 1_000_000
    assert list(config.sequence_batching.oldest.preferred_batch_size) == [4]


def test_a_strategy_that_is_not_chosen_stays_unchosen() -> None:
    config = parse_config("sequence_batching { iterative_sequence: true }", path="test", syntax="pbtxt")
    normalise(config, "m")
    assert config.sequence_batching.WhichOneof("strategy_choice") is None


def test_pinned_memory_that_is_switched_off_stays_off() -> None:
    config = parse_config("optimization { input_pinned_memory { enable: false } }", path="test", syntax="pbtxt")
    normalise(config, "m")
    assert not config.optimization.input_pinned_memory.enable
    assert config.optimization.output_pinned_memory.enable


@given(value=st.floats(width=32))
def test_a_float_is_printed_with_the_digits_it_needs_and_no_point_when_it_is_whole(value: float) -> None:
    config = ModelConfig()
    config.sequence_batching.direct.minimum_slot_utilization = value
    printed = json.loads(to_json(config))["sequence_batching"]["direct"]["minimum_slot_utilization"]
    back = parse_config(to_json(config).decode(), path="printed", syntax="json")
    read = back.sequence_batching.direct.minimum_slot_utilization
    assert read == value or (read != read and value != value)
    assert len(repr(printed)) <= len(repr(value)) or isinstance(printed, str)


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (0.1, "0.1"),
        (1.0, "1"),
        (0.0, "0"),
        (-0.0, "0"),
        (1e-7, "1e-7"),
        (1e-5, "0.00001"),
        (1 / 3, "0.333333343"),
        (1e6, "1000000.0"),
        (3.4e38, "3.4e38"),
        (16777216.0, "16777216"),
        (float("inf"), '"Infinity"'),
    ],
)
def test_floats_look_as_in_triton(value: float, printed: str) -> None:
    config = ModelConfig()
    config.sequence_batching.direct.minimum_slot_utilization = value
    assert f'"minimum_slot_utilization":{printed}}}' in to_json(config).decode()


def test_what_triton_leaves_as_protobuf_prints_it_is_printed_so() -> None:
    printed = to_dict(
        parse_config(
            "instance_group { secondary_devices { device_id: 3 } } "
            "optimization { cuda { graph_spec { input { key: 'x' value { dim: [ 1, -1 ] } } } } } "
            "sequence_batching { state { dims: 2 initial_state { dims: 2 zero_data: true name: 's' } } }",
            path="test",
            syntax="pbtxt",
        )
    )
    assert printed["instance_group"][0]["secondary_devices"][0]["device_id"] == "3"
    assert printed["optimization"]["cuda"]["graph_spec"][0]["input"]["x"]["dim"] == ["1", "-1"]
    (state,) = printed["sequence_batching"]["state"]
    assert (state["dims"], state["initial_state"][0]["dims"]) == ([2], ["2"])
    assert list(state["initial_state"][0]) == ["data_type", "dims", "name", "zero_data"]


def test_escapes_have_capital_digits() -> None:
    tag = r'metric_tags { key: "a\\u00ff\037" value: "\n" }'
    assert r'"metric_tags":{"a\\u00ff\u001F":"\n"}' in to_json(parse_config(tag, path="test", syntax="pbtxt")).decode()


def test_maps_are_printed_in_the_order_of_their_keys() -> None:
    config = parse_config(
        "dynamic_batching { priority_queue_policy { key: 10 } priority_queue_policy { key: 9 } }"
        'metric_tags { key: "b" value: "é" } metric_tags { key: "a" }',
        path="test",
        syntax="pbtxt",
    )
    assert list(to_dict(config)["dynamic_batching"]["priority_queue_policy"]) == ["9", "10"]
    assert '"metric_tags":{"a":"","b":"é"}' in to_json(config).decode()


@pytest.mark.parametrize("name", DTYPES)
def test_each_wire_datatype_has_a_configuration_type_and_back(name: str) -> None:
    assert dtype_name(data_type_of(name)) == name


def test_text_is_bytes_on_the_wire_and_the_unknown_is_refused() -> None:
    assert dtype_name(TYPE_STRING) == "BYTES"
    with pytest.raises(ConfigError, match="data type 0"):
        dtype_name(TYPE_INVALID)
    with pytest.raises(ConfigError, match="'STRING' is not a datatype"):
        data_type_of("STRING")


def test_an_output_that_is_written_twice_is_served_once_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rows = (
        "backend: 'python' "
        + "output { name: 'Y' data_type: TYPE_FP32 dims: 1 }" * 2
        + "output { name: 'Z' data_type: TYPE_FP32 dims: 1 }"
    )
    config = parse_config(rows, path="c", syntax="pbtxt")
    normalise(config, "m")
    assert [row.name for row in config.output] == ["Y", "Z"]
    assert "model 'm': output 'Y' is written more than once" in caplog.text
    other = parse_config(rows + "output { name: 'Z' data_type: TYPE_FP32 dims: 2 }", path="c", syntax="pbtxt")
    normalise(other, "m")
    with pytest.raises(ConfigError, match="model output 'Z' is specified more than once for m"):
        validate(other, "m")


@pytest.mark.parametrize(
    ("platform", "filename", "backend"),
    [
        ("python", "model.py", "python"),
        ("words", "model.py", "python"),
        ("", "model.py", "python"),
        ("python", "", ""),
        ("words", "", ""),
        ("onnxruntime_onnx", "model.py", "onnxruntime"),
    ],
)
def test_a_configured_file_name_selects_python_beside_a_platform_that_triton_does_not_know(
    platform: str, filename: str, backend: str
) -> None:
    config = ModelConfig(platform=platform, default_model_filename=filename)
    infer_backend(config, "m", ["model.py"])
    assert config.backend == backend
