"""Validation: one table of what is refused, with Triton's text where Triton has one."""

from __future__ import annotations

import pytest

from remora.config import infer_backend, normalise, parse_config, validate, validate_written
from remora.errors import ConfigError, RemoraError
from remora.proto.model_config_pb2 import ModelConfig

IO = """input { name: "A" data_type: TYPE_FP32 dims: 4 } output { name: "Y" data_type: TYPE_FP32 dims: 4 }"""
CONTROL = "sequence_batching { control_input { name: 'C' control { kind: CONTROL_SEQUENCE_%s } } }"
FLAG = CONTROL % "START %s"
ENSEMBLE = """platform: "ensemble" input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "Z" data_type: TYPE_FP32 dims: 4 } ensemble_scheduling { %s }"""


def step(inputs: dict[str, str], outputs: dict[str, str], model: str = "a") -> str:
    maps = [f"input_map {{ key: '{key}' value: '{value}' }}" for key, value in inputs.items()]
    maps += [f"output_map {{ key: '{key}' value: '{value}' }}" for key, value in outputs.items()]
    return f"step {{ model_name: '{model}' {' '.join(maps)} }}"


def config_of(text: str, *, gpus: int = 0) -> ModelConfig:
    config = parse_config(text, path="test", syntax="pbtxt")
    infer_backend(config, "m", [] if config.backend else ["model.py"])
    normalise(config, "m", gpus=range(gpus))
    return config


ACCEPTED = [
    IO,
    "backend: 'python' platform: 'onnxruntime_onnx'",
    "backend: 'python' platform: 'mine'",
    "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 4, 1 ] preserve_ordering: true priority_levels: 1 "
    "default_priority_level: 1 }",
    "dynamic_batching { priority_levels: 18446744073709551615 default_priority_level: 18446744073709551615 "
    "priority_queue_policy { key: 18446744073709551615 value { max_queue_size: 3 } } }",
    "max_batch_size: 4 dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }",
    "input { name: 'A' data_type: TYPE_FP32 dims: [ 2, 4, -1, 6 ] reshape { shape: [ 8, -1, 1, 6 ] } }",
    "max_batch_size: 1 input { name: 'A' data_type: TYPE_FP32 dims: 1 reshape { } }",
    "input { name: 'A' data_type: TYPE_FP32 dims: [ 3, 9, 9 ] format: FORMAT_NCHW }",
    "platform: 'tensorrt_plan' backend: 'tensorrt' instance_group { profile: '0' } "
    "input { name: 'A' data_type: TYPE_INT32 dims: 4 is_shape_tensor: true }",
    "backend: 'mine' platform: 'anything'",
    "response_cache { enable: true }",
    "max_batch_size: 2 sequence_batching { direct { minimum_slot_utilization: 1.0 } }",
    CONTROL % "CORRID data_type: TYPE_STRING",
    FLAG % "bool_false_true: [ false, true ]",
    IO + " batch_input { kind: BATCH_ITEM_SHAPE target_name: 'N' data_type: TYPE_FP32 source_input: 'A' }"
    " batch_output { target_name: 'Y' source_input: 'A' }",
    ENSEMBLE % step({"A": "X"}, {"Y": "Z"}),
    ENSEMBLE % (step({"A": "X"}, {"Y": "t"}) + step({"A": "t", "B": "X"}, {"Y": "Z"})),
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_a_good_configuration_is_accepted(text: str) -> None:
    validate(config_of(text), "m")


REFUSED = [
    ("name: 'n'", "unexpected directory name 'm' for model 'n', directory name must equal model name"),
    ("max_batch_size: -1", "'max_batch_size' must be non-negative value for m"),
    (
        "backend: 'pytorch' platform: 'onnxruntime_onnx'",
        "unexpected 'platform' and 'backend' pair, got:onnxruntime_onnx, pytorch",
    ),
    ("backend: 'onnxruntime' platform: 'mine'", "unexpected 'platform' and 'backend' pair, got:mine, onnxruntime"),
    ("platform: 'mine'", "unexpected platform type 'mine' for m"),
    (
        "platform: 'ensemble' backend: 'python'",
        "Ensemble model 'm' must have platform type 'ensemble' and empty backend type",
    ),
    ("platform: 'ensemble'", "ensemble scheduling must be set for ensemble m whose platform is ensemble"),
    ("ensemble_scheduling { }", "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble"),
    (
        "max_batch_size: 4 dynamic_batching { preferred_batch_size: 8 }",
        "dynamic batching preferred size must be <= max batch size for m",
    ),
    (
        "max_batch_size: 4 dynamic_batching { preferred_batch_size: 0 }",
        "dynamic batching preferred size must be positive for m",
    ),
    ("dynamic_batching { priority_levels: 2 }", "default priority level must be in range [1, 2] for m"),
    (
        "dynamic_batching { priority_levels: 2 default_priority_level: 3 }",
        "default priority level must be in range [1, 2] for m",
    ),
    (
        "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 } }",
        "priority queue policy must have priority level in range [1, 2] for m",
    ),
    (
        "dynamic_batching { priority_levels: 2 default_priority_level: 1 preserve_ordering: true }",
        "Only one priority level is allowed when 'preserve_ordering' is true for m",
    ),
    (
        "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY "
        "default_timeout_microseconds: 1 } }",
        "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
    ),
    (
        "sequence_batching { } response_cache { enable: true }",
        "Response Cache does not currently support model m with sequence batching scheduler. Please "
        "disable the response cache.",
    ),
    (
        "model_transaction_policy { decoupled: true } response_cache { enable: true }",
        "Response Cache does not currently support model m with 'decoupled' transaction policy. Please disable the "
        "response cache.",
    ),
    ("sequence_batching { control_input { } }", "sequence batching control tensor must have a name for m"),
    (
        "sequence_batching { control_input { name: 'C' } control_input { name: 'C' } }",
        "sequence batching control tensor 'C' is specified for multiple control kinds for m",
    ),
    (
        CONTROL
        % "START int32_false_true: [ 0, 1 ] } control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ]",
        "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
    ),
    (
        FLAG % "",
        "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
        "CONTROL_SEQUENCE_START for m",
    ),
    (
        FLAG % "int32_false_true: [ 0, 1 ] fp32_false_true: [ 0, 1 ]",
        "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
        "'bool_false_true' for "
        "CONTROL_SEQUENCE_START for m",
    ),
    (
        FLAG % "fp32_false_true: [ 0 ]",
        "sequence batching control 'fp32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
    ),
    (
        CONTROL % "CORRID int32_false_true: [ 0, 1 ]",
        "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
        "CONTROL_SEQUENCE_CORRID for m",
    ),
    (
        CONTROL % "CORRID data_type: TYPE_FP32",
        "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are "
        "TYPE_UINT64, TYPE_INT64, "
        "TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
    ),
    (
        "max_batch_size: 2 sequence_batching { oldest { preferred_batch_size: 3 } }",
        "sequence batching preferred batch size must be <= max batch size for m",
    ),
    (
        "max_batch_size: 2 sequence_batching { oldest { preferred_batch_size: -3 } }",
        "sequence batching preferred batch size must be positive for m",
    ),
    (
        "sequence_batching { direct { minimum_slot_utilization: 1.5 } }",
        "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
    ),
    ("model_metrics { metric_control { } }", "metric control must specify 'metric_identifier'"),
    (
        "model_metrics { metric_control { metric_identifier { } } }",
        "metric identifier must specify non-empty 'family'",
    ),
    (
        "model_metrics { metric_control { metric_identifier { family: 'f' } } }",
        "metric control must specify 'histogram_options'",
    ),
    (
        "model_metrics { metric_control { metric_identifier { family: 'f' } histogram_options { } } }",
        "histogram options must specify non-empty 'buckets'",
    ),
    (ENSEMBLE % "", "must specify 'step' for ensemble 'm'"),
    (ENSEMBLE % "step { }", "must specify 'model_name' in step 0 of ensemble 'm'"),
    (ENSEMBLE % step({}, {"Y": "Z"}), "must specify 'input_map' in step 0 of ensemble 'm'"),
    (ENSEMBLE % step({"A": "X"}, {}), "must specify 'output_map' in step 0 of ensemble 'm'"),
    (
        ENSEMBLE % (step({"A": "X"}, {"Y": "Z"}) + step({"A": "X"}, {"Y": "Z"})),
        "ensemble tensor 'Z' can appear in an output map only once for ensemble 'm' step 1",
    ),
    (ENSEMBLE % step({"A": "W"}, {"Y": "Z"}), "ensemble input 'X' for ensemble m is not used"),
    (ENSEMBLE % step({"A": "X"}, {"Y": "W"}), "ensemble output 'Z' for ensemble m is not used"),
    (
        ENSEMBLE % step({"A": "X", "B": "lost"}, {"Y": "Z"}),
        "output 'Z' for ensemble 'm' is not written: at least one of its depending tensors, 'lost', is not connected",
    ),
    (
        ENSEMBLE % (step({"A": "X", "B": "Z"}, {"Y": "t"}) + step({"A": "t"}, {"Y": "Z"})),
        "output 'Z' for ensemble 'm' is not written",
    ),
    (ENSEMBLE % step({"A": "X"}, {"Y": "Z", "Q": "spare"}), "ensemble tensor 'spare' is unused in ensemble 'm'"),
    (
        ENSEMBLE % step({"A": "X"}, {"Y": "Z"}) + " instance_group { }",
        "instance group should not be specified for ensemble 'm'",
    ),
    (
        ENSEMBLE % step({"A": "X"}, {"Y": "Z"}) + " optimization { }",
        "optimization should not be specified for ensemble 'm'",
    ),
    (
        ENSEMBLE % step({"A": "X"}, {"Y": "Z"}) + " model_warmup { }",
        "model_warmup can not be specified for ensemble 'm'",
    ),
    (
        IO + " parameters { key: 'TRITON_BATCH_STRATEGY_PATH' value { string_value: 'a.so' } }",
        "parameters 'TRITON_BATCH_STRATEGY_PATH' of m names a custom batching library, which is not offered: take the "
        "parameter out, and bound batches by max_batch_size and preferred_batch_size",
    ),
]


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_what_cannot_be_served_is_refused_before_the_model_is_opened(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_written(config_of(text), "m")
    assert caught.value.message == said


REFUSED_AT_LOAD = [
    ("input { }", "model input must specify 'name' for m"),
    ("input { name: 'A' }", "model input 'A' must specify 'data_type' for m"),
    ("output { name: 'A' data_type: TYPE_BOOL }", "model output 'A' must specify 'dims' for m"),
    (
        "input { name: 'A' data_type: TYPE_FP32 dims: 0 }",
        "model input 'A' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    (
        "input { name: 'A' data_type: TYPE_FP32 dims: 1 reshape { shape: -2 } }",
        "model input 'A' reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    (
        "input { name: 'A' data_type: TYPE_FP32 dims: 1 reshape { } }",
        "model input 'A' cannot have empty reshape for non-batching model as scalar tensors are not supported for m",
    ),
    (
        "max_batch_size: 1 input { name: 'A' data_type: TYPE_FP32 dims: 2 reshape { } }",
        "model input 'A' has different size for dims and reshape for m",
    ),
    (
        "input { name: 'A' data_type: TYPE_FP32 dims: [ 2, -1 ] reshape { shape: [ -1, 2 ] } }",
        "model input 'A' has different size for dims and reshape for m",
    ),
    (
        "input { name: 'A' data_type: TYPE_FP32 dims: [ -1 ] reshape { shape: [ 4 ] } }",
        "model input 'A' has different size for dims and reshape for m",
    ),
    (
        "input { name: 'A' data_type: TYPE_FP32 dims: [ -1, -1 ] reshape { shape: [ -1 ] } }",
        "model input 'A' has different number of variable-size dimensions for dims and reshape for m",
    ),
    (
        "input { name: 'A' data_type: TYPE_FP32 dims: 4 format: FORMAT_NHWC }",
        "model input NHWC/NCHW require 3 dims for m",
    ),
    (
        "output { name: 'A' data_type: TYPE_FP32 dims: 4 is_shape_tensor: true }",
        "shape tensors are only supported for TensorRT platform for m",
    ),
    (
        "input { name: 'A' data_type: TYPE_FP32 dims: 4 is_non_linear_format_io: true }",
        "Non-linear IO format is only supported for the TensorRT platform for m",
    ),
    (
        "backend: 'tensorrt' input { name: 'A' data_type: TYPE_FP32 dims: 4 is_non_linear_format_io: true }",
        "Non-linear IO format input requires 3 dims for m",
    ),
    (IO + IO, "model input 'A' is specified more than once for m"),
    (IO + " batch_input { }", "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0 for m"),
    (
        IO + " batch_input { source_input: 'A' data_type: TYPE_INT8 }",
        "batch input data type must be TYPE_INT32 or TYPE_FP32 for m",
    ),
    (IO + " batch_input { source_input: 'B' data_type: TYPE_INT32 }", "unknown source input name 'B' for m"),
    (
        IO + " batch_output { source_input: ['A', 'A'] }",
        "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 2 for m",
    ),
    (IO + " batch_output { source_input: 'B' }", "unknown source input name 'B' for m"),
    (IO + " batch_output { source_input: 'A' target_name: 'Q' }", "unknown target output name 'Q' for m"),
    (
        IO + " batch_output { source_input: 'A' target_name: [ 'Y', 'Y' ] }",
        "target output name 'Y' can only be specified once for m",
    ),
    (
        "instance_group { kind: KIND_CPU gpus: 0 }",
        "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
    ),
    (
        "instance_group { kind: KIND_MODEL gpus: 0 }",
        "instance group m_0 of model m has kind KIND_MODEL but specifies one or more GPUs",
    ),
    ("instance_group { kind: KIND_GPU }", "instance group m_0 of model m has kind KIND_GPU but no GPUs are available"),
    (
        "instance_group { kind: KIND_GPU gpus: 3 }",
        "instance group m_0 of model m specifies invalid or unsupported gpu id 3. GPUs with at least the minimum "
        "required CUDA compute compatibility of 6.000000 are: ",
    ),
    (
        "instance_group { name: 'g' count: 2000000000 }",
        "instance group g of model m has count 2000000000; at most 1024 instances are made",
    ),
    (
        "backend: 'tensorrt' instance_group { profile: '-1' }",
        "instance group m_0 of model m and platform tensorrt_plan specifies invalid profile -1. The field "
        "should contain "
        "the string representation of a non-negative integer.",
    ),
    (
        "instance_group { profile: '1' }",
        "instance group m_0 of model m and platform specifies profile field which is only supported for "
        "TensorRT models",
    ),
]


@pytest.mark.parametrize(("text", "said"), REFUSED_AT_LOAD)
def test_tensors_and_instances_are_refused_when_the_model_is_loaded(text: str, said: str) -> None:
    config = config_of(text)
    validate_written(config, "m")
    with pytest.raises(ConfigError) as caught:
        validate(config, "m")
    assert caught.value.message == said


@pytest.mark.parametrize("name", ["", "a/b", "..", "../a"])
def test_a_model_name_that_is_a_path_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="must not contain"):
        validate(config_of(""), name)


def test_a_server_that_completes_nothing_wants_inputs_and_outputs() -> None:
    with pytest.raises(ConfigError, match="must specify 'input' for m"):
        validate(config_of(""), "m", strict=True)
    validate(config_of(IO), "m", strict=True)


def test_a_configuration_that_was_not_normalised_is_refused() -> None:
    config = parse_config("name: 'm' backend: 'python'", path="test", syntax="pbtxt")
    with pytest.raises(RemoraError, match="must specify 'version policy'"):
        validate(config, "m")
    config.version_policy.latest.num_versions = 1
    with pytest.raises(RemoraError, match="must specify one or more 'instance group's"):
        validate(config, "m")
    config.instance_group.add(name="g")
    with pytest.raises(RemoraError, match="unexpected kind KIND_AUTO"):
        validate(config, "m")
