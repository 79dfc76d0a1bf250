"""Completing a configuration from the model's own tensors: what is filled in, and what contradicts the model."""

from __future__ import annotations

import pytest

from remora.calls import TensorInfo
from remora.config import Trial, complete_from_tensors, normalise, parse_config, to_text, validate
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig

A = TensorInfo("A", "FP32", (-1, 4))
B = TensorInfo("B", "BYTES", (-1,))
Y = TensorInfo("Y", "INT64", (-1, -1, 3))
FIXED = TensorInfo("A", "FP32", (1, 4))


def config_of(text: str) -> ModelConfig:
    return parse_config(
        f'name: "m" backend: "onnxruntime" platform: "onnxruntime_onnx" {text}', path="t", syntax="pbtxt"
    )


def completed(text: str, *, inputs: tuple[TensorInfo, ...] = (A,), outputs: tuple[TensorInfo, ...] = (Y,)) -> str:
    config = config_of(text)
    complete_from_tensors(config, inputs, outputs, trial=lambda: Trial.EQUAL)
    return " ".join(to_text(config).split()).partition('onnxruntime_onnx" ')[2].replace(' backend: "onnxruntime"', "")


def test_a_model_that_can_batch_gets_batches_of_four_and_dynamic_batching() -> None:
    assert completed("") == (
        'max_batch_size: 4 input { name: "A" data_type: TYPE_FP32 dims: 4 } '
        'output { name: "Y" data_type: TYPE_INT64 dims: -1 dims: 3 } dynamic_batching { }'
    )


def test_the_default_batch_size_is_the_operators() -> None:
    config = config_of("")
    complete_from_tensors(config, [A], [Y], default_max_batch=0)
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert list(config.input[0].dims) == [-1, 4]


def test_a_batch_size_of_one_needs_no_dynamic_batching() -> None:
    assert "dynamic_batching" not in completed("max_batch_size: 1")


def test_a_scheduler_that_is_chosen_stays() -> None:
    assert "dynamic_batching" not in completed("sequence_batching { }")
    assert "preferred_batch_size: 2" in completed("max_batch_size: 2 dynamic_batching { preferred_batch_size: 2 }")


def test_a_fixed_first_dimension_means_no_batching() -> None:
    assert completed("", inputs=(FIXED,)).startswith('input { name: "A" data_type: TYPE_FP32 dims: 1 dims: 4 }')


def test_a_batch_of_scalars_is_reshaped_so_that_clients_send_rows_of_one() -> None:
    text = completed("", inputs=(B,))
    assert 'input { name: "B" data_type: TYPE_STRING dims: 1 reshape { } }' in text


@pytest.mark.parametrize("dims", ["1", "[1, 1]", "[1, 1, 1]"])
def test_a_scalar_may_be_declared_with_any_number_of_ones(dims: str) -> None:
    scalar, result = TensorInfo("S", "INT32", ()), TensorInfo("R", "INT32", ())
    text = f'{{ name: "%s" data_type: TYPE_INT32 dims: {dims} }}'
    declared = f"input {text % 'S'} output {text % 'R'}"
    assert completed(declared, inputs=(scalar,), outputs=(result,)).startswith('input { name: "S"')
    with pytest.raises(ConfigError, match="expects 0 dimensions"):
        completed(declared.replace("dims: " + dims, "dims: 2"), inputs=(scalar,), outputs=(result,))


def test_a_scalar_without_batching_becomes_one_element() -> None:
    scalar = TensorInfo("S", "INT32", ())
    assert completed("", inputs=(scalar,)).startswith('input { name: "S" data_type: TYPE_INT32 dims: 1 }')


def test_nothing_is_added_when_inputs_and_outputs_are_written() -> None:
    written = (
        'input { name: "A" data_type: TYPE_FP32 dims: -1 dims: 4 } '
        'output { name: "Y" data_type: TYPE_INT64 dims: -1 dims: -1 dims: 3 }'
    )
    assert completed(written) == written


def test_inputs_written_with_their_whole_shape_leave_the_model_without_batching() -> None:
    text = completed('input { name: "A" data_type: TYPE_FP32 dims: [ -1, 4 ] }')
    assert "max_batch_size" not in text
    assert "dims: -1 dims: -1 dims: 3" in text


def test_what_is_completed_is_valid_and_completes_to_itself() -> None:
    config = config_of("")
    complete_from_tensors(config, [A, B], [Y])
    normalise(config, "m")
    validate(config, "m")
    again = ModelConfig()
    again.CopyFrom(config)
    complete_from_tensors(again, [A, B], [Y])
    assert again == config


@pytest.mark.parametrize(
    ("text", "inputs", "said"),
    [
        (
            "max_batch_size: 4",
            (FIXED,),
            "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is specified",
        ),
        (
            'input { name: "X" data_type: TYPE_FP32 dims: 4 }',
            (A, B),
            "unexpected inference input 'X', allowed inputs are: A, B",
        ),
        (
            'output { name: "X" data_type: TYPE_FP32 dims: 4 }',
            (A,),
            "unexpected inference output 'X', allowed outputs are: Y",
        ),
        (
            'input { name: "A" data_type: TYPE_INT8 dims: 4 }',
            (A,),
            "unable to load model 'm', configuration expects datatype TYPE_INT8 for input 'A', model "
            "provides TYPE_FP32",
        ),
        (
            'max_batch_size: 2 input { name: "A" data_type: TYPE_FP32 dims: [ 4, 4 ] }',
            (A,),
            "model 'm', tensor 'A': the model expects 2 dimensions (shape [-1,4]) but the model "
            "configuration specifies 3 "
            "dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, "
            "making complete shape [-1,4,4])",
        ),
        (
            'input { name: "A" data_type: TYPE_FP32 dims: [ 1, 5 ] }',
            (FIXED,),
            "model 'm', tensor 'A': the model expects 2 dimensions (shape [1,4]) but the model "
            "configuration specifies 2 "
            "dimensions (shape [1,5])",
        ),
        (
            'max_batch_size: 2 input { name: "A" data_type: TYPE_FP32 dims: 4 }'
            'output { name: "Y" data_type: TYPE_INT64 dims: [ -1, 3 ] }',
            (FIXED,),
            "model 'm', tensor 'A': for the model to support batching the shape should have at least 1 "
            "dimension and the "
            "first dimension must be -1; but shape expected by the model is [1,4]",
        ),
        (
            'max_batch_size: 2 input { name: "A" data_type: TYPE_FP32 dims: 4 }',
            (A, B),
            "unable to load model 'm', configuration expects 1 inputs, model provides 2: B missing from "
            "the configuration",
        ),
    ],
)
def test_what_contradicts_the_model_is_refused(text: str, inputs: tuple[TensorInfo, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        completed(text, inputs=inputs)
    assert caught.value.message == said


def test_a_reshape_is_what_the_model_sees() -> None:
    text = 'max_batch_size: 2 input { name: "B" data_type: TYPE_STRING dims: 1 reshape { } }'
    assert "max_batch_size: 2" in completed(text, inputs=(B,))


def test_inputs_that_the_batcher_makes_need_no_declaration() -> None:
    flag = TensorInfo("START", "INT32", (-1, 1))
    text = """max_batch_size: 2 input { name: "A" data_type: TYPE_FP32 dims: 4 } sequence_batching { control_input {
        name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } }"""
    assert "START" in completed(text, inputs=(A, flag))
    counts = TensorInfo("COUNT", "INT32", (-1,))
    text = """max_batch_size: 2 input { name: "A" data_type: TYPE_FP32 dims: 4 allow_ragged_batch: true } batch_input {
        target_name: "COUNT" data_type: TYPE_INT32 source_input: "A" }"""
    assert "COUNT" in completed(text, inputs=(TensorInfo("A", "FP32", (-1,)), counts))
    with pytest.raises(ConfigError, match=r"shape \[-1\] for ragged input 'A', model provides \[-1,4\]"):
        completed(text, inputs=(A, counts))


STATEFUL = """sequence_batching { control_input { name: "START" control { kind: CONTROL_SEQUENCE_START
    int32_false_true: [ 0, 1 ] } } state { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: %s } }"""
BETWEEN = (A, TensorInfo("START", "INT32", (-1, 1)), TensorInfo("S", "FP32", (-1, 2)))
AFTER = (Y, TensorInfo("T", "FP32", (-1, 2)))


def test_what_passes_between_server_and_model_does_not_become_the_clients() -> None:
    text = completed(STATEFUL % 2, inputs=BETWEEN, outputs=AFTER)
    assert text.startswith(
        'max_batch_size: 4 input { name: "A" data_type: TYPE_FP32 dims: 4 } '
        'output { name: "Y" data_type: TYPE_INT64 dims: -1 dims: 3 } sequence_batching {'
    )


@pytest.mark.parametrize(
    ("state", "inputs", "outputs", "said"),
    [
        (STATEFUL % 3, BETWEEN, AFTER, "tensor 'S': the model expects 2 dimensions"),
        (STATEFUL % 2, BETWEEN[:2], AFTER, "unexpected state input 'S', allowed inputs are: A, START"),
        (STATEFUL % 2, BETWEEN, (Y,), "unexpected state output 'T', allowed outputs are: Y"),
        (STATEFUL % 2, BETWEEN, (Y, TensorInfo("T", "FP64", (-1, 2))), "configuration expects datatype TYPE_FP32"),
    ],
)
def test_a_state_that_the_model_does_not_have_is_refused(
    state: str, inputs: tuple[TensorInfo, ...], outputs: tuple[TensorInfo, ...], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        completed(state, inputs=inputs, outputs=outputs)
    assert said in caught.value.message
