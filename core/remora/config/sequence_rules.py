"""Validation rules for sequence batching and its control tensors [C20, S09]."""

from __future__ import annotations

from collections.abc import Iterator

from remora.errors import ConfigError
from remora.proto.model_config_pb2 import (
    TYPE_INT32,
    TYPE_INT64,
    TYPE_STRING,
    TYPE_UINT32,
    TYPE_UINT64,
    ModelConfig,
    ModelSequenceBatching,
)

Control = ModelSequenceBatching.Control

_FLAGS = (Control.CONTROL_SEQUENCE_START, Control.CONTROL_SEQUENCE_END, Control.CONTROL_SEQUENCE_READY)
_CORRID_TYPES = (TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING)
_PAIRS = ("int32_false_true", "fp32_false_true", "bool_false_true")


def check_sequences(config: ModelConfig) -> None:
    """Check ``sequence_batching`` of a configuration that has it.

    Raises:
        ConfigError: the first violated rule.
    """
    name, batching = config.name, config.sequence_batching
    if config.response_cache.enable:
        raise ConfigError(
            f"Response Cache does not currently support model {name} with sequence batching scheduler. Please disable "
            "the response cache."
        )
    _check_control_tensors(batching, name)
    for kind in _FLAGS:
        for control in _controls(batching, kind, name):
            _check_flag(control, name)
    for control in _controls(batching, Control.CONTROL_SEQUENCE_CORRID, name):
        _check_correlation_id(control, name)
    for size in batching.oldest.preferred_batch_size:
        if size <= 0:
            raise ConfigError(f"sequence batching preferred batch size must be positive for {name}")
        if size > config.max_batch_size:
            raise ConfigError(f"sequence batching preferred batch size must be <= max batch size for {name}")
    if not 0.0 <= batching.direct.minimum_slot_utilization <= 1.0:
        raise ConfigError(f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}")


def _check_control_tensors(batching: ModelSequenceBatching, name: str) -> None:
    seen: set[str] = set()
    for row in batching.control_input:
        if not row.name:
            raise ConfigError(f"sequence batching control tensor must have a name for {name}")
        if row.name in seen:
            raise ConfigError(
                f"sequence batching control tensor '{row.name}' is specified for multiple control kinds for {name}"
            )
        seen.add(row.name)


def _controls(
    batching: ModelSequenceBatching, kind: ModelSequenceBatching.Control.Kind, name: str
) -> Iterator[ModelSequenceBatching.Control]:
    """Yield the control of a kind, if configured."""
    found = [control for row in batching.control_input for control in row.control if control.kind == kind]
    yield from found[:1]
    if len(found) > 1:
        raise ConfigError(f"sequence batching specifies multiple {Control.Kind.Name(kind)} tensors for {name}")


def _check_flag(control: ModelSequenceBatching.Control, name: str) -> None:
    whose = f"{Control.Kind.Name(control.kind)} for {name}"
    pairs = [pair for pair in _PAIRS if len(getattr(control, pair))]
    if not pairs:
        raise ConfigError(
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            f"{whose}"
        )
    if len(pairs) > 1:
        raise ConfigError(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' for {whose}"
        )
    if len(getattr(control, pairs[0])) != 2:
        raise ConfigError(f"sequence batching control '{pairs[0]}' must have exactly 2 entries for {whose}")


def _check_correlation_id(control: ModelSequenceBatching.Control, name: str) -> None:
    whose = f"{Control.Kind.Name(control.kind)} for {name}"
    if any(len(getattr(control, pair)) for pair in _PAIRS):
        raise ConfigError(
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
            f"for {whose}"
        )
    if control.data_type not in _CORRID_TYPES:
        raise ConfigError(
            f"unexpected data type for control {whose}. Allowed data types are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, "
            "TYPE_INT32 and TYPE_STRING"
        )
