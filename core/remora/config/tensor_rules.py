"""Validation rules for inputs, outputs and batch inputs [C06, C08, K07].

Most texts are Triton's. The model's name is appended to the texts. The refusal of repeated names is ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from remora.errors import ConfigError
from remora.proto.model_config_pb2 import (
    TYPE_FP32,
    TYPE_INT32,
    TYPE_INVALID,
    BatchInput,
    BatchOutput,
    ModelConfig,
    ModelInput,
    ModelOutput,
)

VARIABLE = -1
"""A dimension whose size each request chooses."""

_TENSORRT = "tensorrt_plan"


def check_tensors(config: ModelConfig, *, strict: bool) -> None:
    """Check all inputs and outputs of a configuration. ``strict`` requires at least one of each.

    Raises:
        ConfigError: the first violated rule.
    """
    if strict and not (config.input and config.output):
        missing = "output" if config.input else "input"
        raise ConfigError(
            f"must specify '{missing}' for {config.name}: the server was started without completing configurations"
        )
    rows: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    for row in rows:
        wrong = _wrong_with(row, config)
        if wrong:
            raise ConfigError(f"{wrong} for {config.name}")
    wrong = _wrong_with_batch_tensors(config)
    if wrong:
        raise ConfigError(f"{wrong} for {config.name}")
    _check_unique("input", [row.name for row in config.input], config.name)
    _check_unique("output", [row.name for row in config.output], config.name)


def _check_unique(kind: str, names: Sequence[str], model: str) -> None:
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ConfigError(f"model {kind} '{twice}' is specified more than once for {model}")


def _wrong_with(row: ModelInput | ModelOutput, config: ModelConfig) -> str:
    """Return the error of one input or output, or "" if it is valid."""
    is_input = isinstance(row, ModelInput)
    label = "model input" if is_input else "model output"
    wrong = _wrong_with_shape(row, config.max_batch_size, label)
    if wrong:
        return wrong
    if isinstance(row, ModelInput) and row.format != ModelInput.FORMAT_NONE and len(row.dims) != 3:
        return "model input NHWC/NCHW require 3 dims"
    if row.is_shape_tensor and config.platform != _TENSORRT:
        return "shape tensors are only supported for TensorRT platform"
    if row.is_non_linear_format_io and config.platform != _TENSORRT:
        return "Non-linear IO format is only supported for the TensorRT platform"
    if row.is_non_linear_format_io and len(row.dims) != 3:
        return f"Non-linear IO format {'input' if is_input else 'output'} requires 3 dims"
    return ""


def _wrong_with_shape(row: ModelInput | ModelOutput, max_batch_size: int, label: str) -> str:
    if not row.name:
        return f"{label} must specify 'name'"
    named = f"{label} '{row.name}'"
    if row.data_type == TYPE_INVALID:
        return f"{named} must specify 'data_type'"
    if not row.dims:
        return f"{named} must specify 'dims'"
    reshaped = row.HasField("reshape")
    if reshaped and not row.reshape.shape and max_batch_size == 0:
        return f"{named} cannot have empty reshape for non-batching model as scalar tensors are not supported"
    if not _is_shape(row.dims):
        return f"{named} dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
    if reshaped and not _is_shape(row.reshape.shape):
        return f"{named} reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"
    return _wrong_with_reshape(row.dims, row.reshape.shape, named) if reshaped else ""


def _is_shape(dims: Sequence[int]) -> bool:
    return all(dim >= 1 or dim == VARIABLE for dim in dims)


def _wrong_with_reshape(dims: Sequence[int], reshape: Sequence[int], named: str) -> str:
    """Compare the element counts of both shapes.

    They are compared before, between and after the variable dimensions.
    """
    ours, theirs = _runs(dims), _runs(reshape)
    if ours == theirs:
        return ""
    if len(ours) != len(theirs) and len(ours) > 1 and len(theirs) > 1:
        return f"{named} has different number of variable-size dimensions for dims and reshape"
    return f"{named} has different size for dims and reshape"


def _runs(dims: Sequence[int]) -> list[int]:
    """Return element counts of the runs between variable dimensions: [2, 4, -1, 6] gives [8, 6]."""
    ends = [index for index, dim in enumerate(dims) if dim == VARIABLE]
    starts = [0, *(index + 1 for index in ends)]
    return [math.prod(dims[start:end]) for start, end in zip(starts, [*ends, len(dims)], strict=True)]


def _wrong_with_batch_tensors(config: ModelConfig) -> str:
    inputs = {row.name for row in config.input}
    outputs = {row.name for row in config.output}
    for made in config.batch_input:
        if len(made.source_input) != 1:
            kind = BatchInput.Kind.Name(made.kind)
            return f"batch input kind '{kind}' expects 1 source input, got {len(made.source_input)}"
        if made.data_type not in (TYPE_INT32, TYPE_FP32):
            return "batch input data type must be TYPE_INT32 or TYPE_FP32"
        if made.source_input[0] not in inputs:
            return f"unknown source input name '{made.source_input[0]}'"
    for split in config.batch_output:
        wrong = _wrong_with_batch_output(split, inputs, outputs)
        if wrong:
            return wrong
    return ""


def _wrong_with_batch_output(split: BatchOutput, inputs: Collection[str], outputs: Collection[str]) -> str:
    if len(split.source_input) != 1:
        kind = BatchOutput.Kind.Name(split.kind)
        return f"batch output kind '{kind}' expects 1 source input, got {len(split.source_input)}"
    if split.source_input[0] not in inputs:
        return f"unknown source input name '{split.source_input[0]}'"
    seen: set[str] = set()
    for target in split.target_name:
        if target not in outputs:
            return f"unknown target output name '{target}'"
        if target in seen:
            return f"target output name '{target}' can only be specified once"
        seen.add(target)
    return ""
