"""Validation rules for implicit state and its initial values [S13]."""

from __future__ import annotations

from remora.errors import ConfigError
from remora.proto.model_config_pb2 import TYPE_INVALID, ModelConfig, ModelSequenceBatching

State = ModelSequenceBatching.State
InitialState = ModelSequenceBatching.InitialState

_VARIABLE = -1


def check_states(config: ModelConfig) -> None:
    """Check ``sequence_batching { state }`` of a configuration.

    The error texts are Triton's where it has any. Does not read files.

    Raises:
        ConfigError: the first violated rule.
    """
    initialised: set[str] = set()
    for state in config.sequence_batching.state:
        _check_state(state, config.name)
        if len(state.initial_state) > 1:
            raise ConfigError(
                f"initial_state field for state input '{state.input_name}' must contain exactly one or zero element. "
                f"Found '{len(state.initial_state)}' elements."
            )
        for initial in state.initial_state:
            _check_initial(initial, state, initialised)
            initialised.add(state.input_name)


def _check_state(state: State, model: str) -> None:
    if not (state.input_name and state.output_name) or state.data_type == TYPE_INVALID:
        raise ConfigError(
            f"a state of model '{model}' lacks its input_name, output_name or data_type: name the tensor that the "
            "model reads its state from, the one that it writes it to, and their type"
        )
    if any(dim < _VARIABLE or dim == 0 for dim in state.dims):
        raise ConfigError(
            f"state '{state.input_name}' of model '{model}' has dims {list(state.dims)}: each must be a number of "
            "elements, or -1 where it varies"
        )
    if state.use_growable_memory and not state.use_same_buffer_for_input_output:
        raise ConfigError(
            "In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state input name "
            f"'{state.input_name}'."
        )


def _check_initial(initial: InitialState, state: State, initialised: set[str]) -> None:
    name = state.input_name
    if initial.data_type != state.data_type:
        raise ConfigError(
            f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
        )
    if not initial.name:
        raise ConfigError(f"Field 'name' must be set when using initial_state for state input '{name}'.")
    if name in initialised:
        raise ConfigError(f"State input name '{name}' specified more than once.")
    if len(initial.dims) != len(state.dims):
        raise ConfigError(
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{name}'. {len(initial.dims)} != {len(state.dims)}"
        )
    for ours, theirs in zip(initial.dims, state.dims, strict=True):
        if ours == _VARIABLE:
            raise ConfigError(f"'initial_state' field for state input name '{name}' contains variable dimensions.")
        if ours <= 0:
            raise ConfigError(
                f"'initial_state' for state input '{name}' has a dim of {ours}: give a number of elements"
            )
        if theirs not in (_VARIABLE, ours):
            raise ConfigError(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. {ours} != {theirs}"
            )
    if initial.WhichOneof("state_data") is None:
        raise ConfigError(f"initial_state setting expects state'{name}' to have state_data set")
