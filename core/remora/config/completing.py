"""Completion of a configuration from the model's tensors, and check against them.

Pure; for backends whose models declare inputs and outputs [C13]. Where the two differ, the model is authoritative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from remora.config.batching_choice import VARIABLE, BatchingChoice, Tensor, Trial, choose_batching, has_batch_axis
from remora.config.datatypes import data_type_of
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput

_UNNAMED: Mapping[str, str] = {}


class ModelTensor(Tensor, Protocol):
    """A model's declaration of an input or output, with its datatype."""

    @property
    def datatype(self) -> str: ...


def complete_from_tensors(
    config: ModelConfig,
    inputs: Sequence[ModelTensor],
    outputs: Sequence[ModelTensor],
    *,
    default_max_batch: int = 4,
    axes: Mapping[str, str] = _UNNAMED,
    trial: Callable[[], Trial] = lambda: Trial.UNKNOWN,
    independent: str = "",
) -> BatchingChoice | None:
    """Fill in the inputs, outputs, batch size and batching that ``config`` lacks.

    Checks the rest. Nothing is filled in when both inputs and outputs are declared. Controls and states of sequences
    are internal to the server and do not become inputs and outputs of clients. A configured batch size needs tensors
    whose first dimension varies; without one, `choose_batching` decides.

    Args:
        config: changed in place; must have its name.
        inputs: the model's inputs, batch dimension included.
        outputs: the model's outputs, batch dimension included. An empty shape counts as unknown.
        default_max_batch: the batch size for a model that can batch and has none configured.
        axes: the names that the model's file gives to first axes, by tensor.
        trial: compares two rows together with each alone.
        independent: why rows cannot depend on each other, which needs no trial; "" if they may.

    Returns:
        The choice of batching, None if the configuration already decides it.

    Raises:
        ConfigError: the configuration contradicts the model.
    """
    choice = None
    if not (_expected_inputs(config) and config.output):
        fed, kept = _fed_by_sequences(config), {row.output_name for row in config.sequence_batching.state}
        choice = _complete_batching(config, inputs, outputs, default_max_batch, axes, trial, independent)
        if not _expected_inputs(config):
            _declare(config.input, [row for row in inputs if row.name not in fed], config.max_batch_size)
        if not config.output:
            _declare(config.output, [row for row in outputs if row.name not in kept], config.max_batch_size)
    _check_inputs(config, inputs)
    _check_outputs(config, outputs)
    return choice


def _expected_inputs(config: ModelConfig) -> int:
    """Count the tensors that the configuration feeds, including those made by the batcher."""
    return len(config.input) + sum(len(made.target_name) for made in config.batch_input)


def _complete_batching(
    config: ModelConfig,
    inputs: Sequence[ModelTensor],
    outputs: Sequence[ModelTensor],
    default_max_batch: int,
    axes: Mapping[str, str],
    trial: Callable[[], Trial],
    independent: str,
) -> BatchingChoice | None:
    choice = None
    if config.max_batch_size:
        if not has_batch_axis(inputs, outputs):
            raise ConfigError(
                f"autofill failed for model '{config.name}': model does not support batching while non-zero "
                "max_batch_size is specified"
            )
    elif default_max_batch > 0 and not _declares_whole_shapes(config, inputs, outputs):
        if independent and has_batch_axis(inputs, outputs):
            choice = BatchingChoice(True, independent)
        else:
            choice = choose_batching(inputs, outputs, axes, trial)
        config.max_batch_size = default_max_batch if choice.batched else 0
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()
    return choice


def _declares_whole_shapes(config: ModelConfig, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor]) -> bool:
    """Return True if a declared shape has the model's rank without a batch dimension."""
    ranks = {tensor.name: len(tensor.shape) for tensor in (*inputs, *outputs)}
    rows: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    return any(len(_model_dims(row)) == ranks.get(row.name) for row in rows)


def _declare(rows: Any, tensors: Sequence[ModelTensor], max_batch_size: int) -> None:
    for tensor in tensors:
        dims = tensor.shape[1:] if max_batch_size > 0 else tensor.shape
        row = rows.add(name=tensor.name, data_type=data_type_of(tensor.datatype), dims=dims or (1,))
        if not dims and max_batch_size > 0:
            row.reshape.SetInParent()  # the model takes a batch of scalars, clients send rows of one element


def _fed_by_sequences(config: ModelConfig) -> set[str]:
    """Return the inputs that the sequence batcher provides: controls and states."""
    sequences = config.sequence_batching
    return {row.name for row in sequences.control_input} | {row.input_name for row in sequences.state}


def _check_inputs(config: ModelConfig, inputs: Sequence[ModelTensor]) -> None:
    known = {tensor.name: tensor for tensor in inputs}
    for row in config.input:
        if row.name not in known and not row.optional:
            raise ConfigError(f"unexpected inference input '{row.name}', allowed inputs are: {_listed(known)}")
        if row.name in known:
            _check_row(config, "input", row, known[row.name])
    for state in config.sequence_batching.state:
        if state.input_name not in known:
            raise ConfigError(f"unexpected state input '{state.input_name}', allowed inputs are: {_listed(known)}")
        row = ModelInput(name=state.input_name, data_type=state.data_type, dims=state.dims)
        _check_row(config, "input", row, known[row.name])
    fed = _fed_by_sequences(config) | {row.name for row in config.input}
    fed.update(name for made in config.batch_input for name in made.target_name)
    missing = [name for name in known if name not in fed]
    if missing:
        raise ConfigError(
            f"unable to load model '{config.name}', configuration expects {len(fed & known.keys())} inputs, model "
            f"provides {len(known)}: {_listed(missing)} missing from the configuration"
        )


def _check_outputs(config: ModelConfig, outputs: Sequence[ModelTensor]) -> None:
    known = {tensor.name: tensor for tensor in outputs}
    for row in config.output:
        if row.name not in known:
            raise ConfigError(f"unexpected inference output '{row.name}', allowed outputs are: {_listed(known)}")
        _check_row(config, "output", row, known[row.name])
    for state in config.sequence_batching.state:
        if state.output_name not in known:
            raise ConfigError(f"unexpected state output '{state.output_name}', allowed outputs are: {_listed(known)}")
        state_row = ModelOutput(name=state.output_name, data_type=state.data_type, dims=state.dims)
        _check_row(config, "output", state_row, known[state_row.name])


def _check_row(config: ModelConfig, kind: str, row: Any, tensor: ModelTensor) -> None:
    if row.data_type != data_type_of(tensor.datatype):
        raise ConfigError(
            f"unable to load model '{config.name}', configuration expects datatype {DataType.Name(row.data_type)} for "
            f"{kind} '{row.name}', model provides {DataType.Name(data_type_of(tensor.datatype))}"
        )
    if not tensor.shape and (kind == "output" or set(row.dims) == {1}):
        return  # a scalar, or a shape that is unknown before the model runs
    if kind == "input" and row.allow_ragged_batch:
        if tuple(tensor.shape) != (VARIABLE,):
            raise ConfigError(
                f"unable to load model '{config.name}', configuration expects model provides input with shape [-1] "
                f"for ragged input '{row.name}', model provides {_shape(tensor.shape)}"
            )
        return
    if kind == "output" and any(row.name in split.target_name for split in config.batch_output):
        return  # split by the shapes of an input, whatever its own shape
    dims = _model_dims(row)
    batched = config.max_batch_size > 0
    where = f"model '{config.name}', tensor '{row.name}'"
    if batched and tensor.shape[:1] != (VARIABLE,):
        raise ConfigError(
            f"{where}: for the model to support batching the shape should have at least 1 dimension and the first "
            f"dimension must be -1; but shape expected by the model is {_shape(tensor.shape)}"
        )
    full = [VARIABLE, *dims] if batched else dims
    fits = len(full) == len(tensor.shape) and all(
        theirs in (VARIABLE, ours) for ours, theirs in zip(full, tensor.shape, strict=True)
    )
    if not fits:
        complete = (
            "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making "
            f"complete shape {_shape(full)}"
            if batched
            else f"shape {_shape(full)}"
        )
        raise ConfigError(
            f"{where}: the model expects {len(tensor.shape)} dimensions (shape {_shape(tensor.shape)}) but the model "
            f"configuration specifies {len(full)} dimensions ({complete})"
        )


def _model_dims(row: Any) -> list[int]:
    return list(row.reshape.shape if row.HasField("reshape") else row.dims)


def _shape(dims: Sequence[int]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))
