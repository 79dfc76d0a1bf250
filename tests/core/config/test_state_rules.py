"""What the states of sequences must keep: Triton's rules in Triton's words."""

from __future__ import annotations

import pytest

from remora.config import SequenceState, sequence_policy
from remora.config.state_rules import check_states
from remora.errors import ConfigError
from support.engine.fakes import config_of

STATE = 'input_name: "IN" output_name: "OUT" data_type: TYPE_FP32 dims: [ 2, -1 ]'


def checked(*states: str) -> None:
    rows = " ".join(f"state {{ {row} }}" for row in states)
    check_states(config_of(f'name: "m" sequence_batching {{ {rows} }}'))


@pytest.mark.parametrize(
    "initial",
    [
        "",
        'initial_state { data_type: TYPE_FP32 dims: [ 2, 3 ] zero_data: true name: "i" }',
        'initial_state { data_type: TYPE_FP32 dims: [ 2, 1 ] data_file: "f" name: "i" }',
        "use_same_buffer_for_input_output: true",
        "use_same_buffer_for_input_output: true use_growable_memory: true",
    ],
)
def test_a_lawful_state_passes(initial: str) -> None:
    checked(f"{STATE} {initial}")


INITIAL = "initial_state { data_type: TYPE_FP32 %s }"
NAMED = INITIAL % 'name: "i" %s'


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            f"{STATE} initial_state {{ }} initial_state {{ }}",
            "initial_state field for state input 'IN' must contain exactly one or zero element. Found '2' elements.",
        ),
        (
            f"{STATE} initial_state {{ data_type: TYPE_INT32 }}",
            "The data type used for 'initial_state' field of state 'IN' does not match the state data type.",
        ),
        (f"{STATE} {INITIAL % ''}", "Field 'name' must be set when using initial_state for state input 'IN'."),
        (
            f"{STATE} {NAMED % 'dims: 2'}",
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            "'IN'. 1 != 2",
        ),
        (
            f"{STATE} {NAMED % 'dims: [ 2, -1 ]'}",
            "'initial_state' field for state input name 'IN' contains variable dimensions.",
        ),
        (
            f"{STATE} {NAMED % 'dims: [ 3, 1 ]'}",
            "'initial_state' dim for input name 'IN' doesn't match 'state' dim description. 3 != 2",
        ),
        (f"{STATE} {NAMED % 'dims: [ 2, 0 ]'}", "has a dim of 0: give a number of elements"),
        (f"{STATE} {NAMED % 'dims: [ 2, 1 ]'}", "initial_state setting expects state'IN' to have state_data set"),
        (
            f"{STATE} use_growable_memory: true",
            "In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state input name 'IN'.",
        ),
        ('input_name: "IN" data_type: TYPE_FP32', "lacks its input_name, output_name or data_type"),
        ('input_name: "IN" output_name: "OUT"', "lacks its input_name, output_name or data_type"),
        (f"{STATE} dims: 0", "each must be a number of elements, or -1 where it varies"),
    ],
)
def test_what_cannot_be_kept_is_refused(state: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(state)
    assert text in str(caught.value)


def test_a_state_input_with_two_beginnings_is_refused_with_tritons_text() -> None:
    state = f"{STATE} {NAMED % 'dims: [ 2, 1 ] zero_data: true'}"
    with pytest.raises(ConfigError, match="State input name 'IN' specified more than once"):
        checked(state, state)


def test_of_two_states_with_the_same_tensor_the_first_counts() -> None:
    text = 'sequence_batching { state { %s } state { input_name: "IN" output_name: "O2" data_type: TYPE_FP32 } }'
    policy = sequence_policy(config_of(text % STATE))
    assert policy is not None
    assert policy.states == (SequenceState("IN", "OUT", "FP32", (2, -1)),)
