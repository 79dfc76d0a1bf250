"""What the state of a sequence is when it begins (spec S13); the law: arrays that nobody can write to."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from remora.config import SequenceState, read_data, sequence_policy
from remora.errors import ConfigError
from remora.messages import DTYPES, Array
from remora.proto.model_config_pb2 import ModelConfig, ModelSequenceBatching

_log = logging.getLogger("remora.models")

LIMIT_BYTES = 1 << 30
"""The most that one initial state may take in memory."""

_REFERENCE_BYTES = 8  # what a BYTES element takes at least


def initial_states(config: ModelConfig, directory: Path) -> Mapping[str, Array]:
    """The state that each sequence of a valid configuration begins with, by the name of the model's input.

    Zeros, or empty text, where nothing else is said; variable dims are then 1. Files lie in ``directory``/initial_state
    and are raw values, or length-prefixed elements of BYTES. The arrays have a batch dimension of 1 where the model
    batches, and are read-only.

    Raises:
        ConfigError: a file that is too short, with Triton's text; an array beyond LIMIT_BYTES.
        InternalError: a file that cannot be read.
    """
    policy = sequence_policy(config)
    if policy is None:
        return {}
    if len(policy.states) < len(config.sequence_batching.state):
        _log.warning(
            "model '%s' names an input or output in two of its states: the first state of each name counts", config.name
        )
    written = {(row.input_name, row.output_name): row for row in reversed(config.sequence_batching.state)}
    batch = (1,) if config.max_batch_size > 0 else ()
    found: dict[str, Array] = {}
    for state in policy.states:
        initial = written[state.input_name, state.output_name].initial_state
        array = _array(state, initial[0] if initial else None, directory / "initial_state")
        array = array.reshape(batch + array.shape)
        array.flags.writeable = False
        found[state.input_name] = array
    return found


def _array(state: SequenceState, initial: ModelSequenceBatching.InitialState | None, folder: Path) -> Array:
    shape = tuple(abs(dim) for dim in state.dims) if initial is None else tuple(initial.dims)
    dtype, count = DTYPES[state.datatype], math.prod(shape)
    if count * max(dtype.itemsize, _REFERENCE_BYTES if dtype.hasobject else 1) > LIMIT_BYTES:
        raise ConfigError(
            f"the initial state '{state.input_name}' has {count} elements of {state.datatype}: it may take at most "
            f"{LIMIT_BYTES} bytes"
        )
    if initial is None or initial.WhichOneof("state_data") == "zero_data":
        return np.full(shape, b"", object) if dtype.hasobject else np.zeros(shape, dtype)
    content = read_data(folder, initial.data_file, "initial_state data_file", LIMIT_BYTES)
    if dtype.hasobject:
        return _elements(content, count, initial.data_file).reshape(shape)
    wanted = count * dtype.itemsize
    if len(content) < wanted:
        # The blank that is missing is Triton's.
        raise ConfigError(
            f"initial_state setting expects {wanted} bytes, but the data provided from {initial.data_file}only has "
            f"{len(content)} bytes."
        )
    return np.frombuffer(content, dtype, count).reshape(shape)


def _elements(content: bytes, count: int, name: str) -> Array:
    """The elements of a BYTES state in the wire's form (spec B02)."""
    elements: list[bytes] = []
    at = 0
    while at < len(content) and len(elements) <= count:
        begin = at + 4
        at = begin + int.from_bytes(content[at:begin], "little")
        elements.append(content[begin:at])
    if len(elements) != count or at != len(content):
        raise ConfigError(
            f"initial_state data_file '{name}' must hold {count} BYTES elements, each with its length in four bytes "
            "before it"
        )
    array = np.empty(count, object)
    array[:] = elements
    return array
