"""Completion of a configuration with defaults [C10-C12, I01-I03].

The result is what the configuration endpoint shows. A model is normalised when its file is read, and again after its
backend has completed the configuration.

Invariant: normalising is idempotent.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from remora.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup, ModelOutput

_log = logging.getLogger("remora.models")

SEQUENCE_IDLE_US = 1_000_000
"""Idle time after which a sequence loses its slot, in microseconds [C12]."""

_PAIRED_ON_CPU = frozenset({"onnxruntime", "tensorflow"})
"""Backends that get two instances on a CPU by default [I02]."""


ANY_KIND: tuple[str, ...] = ("GPU", "CPU")
"""The kinds that KIND_AUTO stands for, in order of preference, where the backend has none."""

_KINDS = {
    "GPU": ModelInstanceGroup.KIND_GPU,
    "CPU": ModelInstanceGroup.KIND_CPU,
    "MODEL": ModelInstanceGroup.KIND_MODEL,
}


def normalise(config: ModelConfig, name: str, *, gpus: Sequence[int] = (), kinds: Sequence[str] = ANY_KIND) -> None:
    """Fill in every default that does not depend on the model itself.

    Args:
        config: changed in place.
        name: the model's name, for a configuration without one.
        gpus: the ids of the GPUs that the engine may use.
        kinds: the backend's preferred kinds for KIND_AUTO; the first available one is used.
    """
    config.name = config.name or name
    _drop_repeated_outputs(config)
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    _fill_batching(config)
    if config.HasField("ensemble_scheduling"):
        # An ensemble is decoupled if one of its steps is, which is known later; Triton shows the field either way.
        config.model_transaction_policy.SetInParent()
        return
    for pinned in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(pinned):
            getattr(config.optimization, pinned).enable = True
    _fill_instance_groups(config, gpus, kinds)


def _drop_repeated_outputs(config: ModelConfig) -> None:
    """Drop outputs that repeat an earlier one, which Triton serves once.

    Different outputs of one name are refused later.
    """
    kept: list[ModelOutput] = []
    for row in config.output:
        if row in kept:
            _log.warning("model '%s': output '%s' is written more than once and served once", config.name, row.name)
        else:
            kept.append(row)
    if len(kept) < len(config.output):
        del config.output[:]
        config.output.extend(kept)


def _fill_batching(config: ModelConfig) -> None:
    whole = [config.max_batch_size] if config.max_batch_size > 0 else []
    if config.HasField("dynamic_batching") and not config.dynamic_batching.preferred_batch_size:
        config.dynamic_batching.preferred_batch_size.extend(whole)
    if config.HasField("sequence_batching"):
        sequences = config.sequence_batching
        sequences.max_sequence_idle_microseconds = sequences.max_sequence_idle_microseconds or SEQUENCE_IDLE_US
        if sequences.HasField("oldest") and not sequences.oldest.preferred_batch_size:
            sequences.oldest.preferred_batch_size.extend(whole)


def _fill_instance_groups(config: ModelConfig, gpus: Sequence[int], kinds: Sequence[str]) -> None:
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        if group.kind == ModelInstanceGroup.KIND_AUTO:
            there = bool(gpus) and all(gpu in gpus for gpu in group.gpus)
            usable = [kind for kind in kinds if kind != "GPU" or there]
            group.kind = _KINDS[usable[0] if usable else "CPU"]
        if group.count < 1:
            paired = group.kind == ModelInstanceGroup.KIND_CPU and config.backend in _PAIRED_ON_CPU
            group.count = 2 if paired else 1
        if group.kind == ModelInstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(gpus)
