"""Validation rules for an ensemble's own configuration [E03].

Every tensor is produced once and used. Rules that depend on the step models (shapes, datatypes, batch sizes) are in
`step_rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from remora.config.inferring import ENSEMBLE
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig


@dataclass(slots=True)
class _Tensor:
    """A tensor of the ensemble.

    It holds the tensors that this one is computed from, and whether a step makes or reads it.
    """

    sources: list[str] = field(default_factory=list)
    made: bool = False
    used: bool = False


def check_ensemble(config: ModelConfig) -> None:
    """Check an ensemble's steps and the flow of its tensors.

    Raises:
        ConfigError: the first violated rule.
    """
    name = config.name
    if config.platform != ENSEMBLE:
        raise ConfigError(f"ensemble scheduling cannot be set for model '{name}' whose platform is not {ENSEMBLE}")
    if config.instance_group:
        raise ConfigError(f"instance group should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        raise ConfigError(f"optimization should not be specified for ensemble '{name}'")
    if config.model_warmup:
        raise ConfigError(f"model_warmup can not be specified for ensemble '{name}'")
    if not config.ensemble_scheduling.step:
        raise ConfigError(f"must specify 'step' for ensemble '{name}'")
    tensors = _tensors(config)
    for row in config.input:
        if row.name not in tensors:
            raise ConfigError(f"ensemble input '{row.name}' for ensemble {name} is not used")
    ready = _reachable(tensors, {row.name for row in config.input})
    for output in config.output:
        if output.name not in tensors:
            raise ConfigError(f"ensemble output '{output.name}' for ensemble {name} is not used")
        if output.name not in ready:
            raise ConfigError(_why_unwritten(output.name, tensors, ready, name))
    outputs = {row.name for row in config.output}
    for tensor, row_of in tensors.items():
        if tensor not in outputs and not (tensor in ready and row_of.used):
            raise ConfigError(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")


def _tensors(config: ModelConfig) -> dict[str, _Tensor]:
    """Return all tensors that the steps name, in that order."""
    name = config.name
    tensors: dict[str, _Tensor] = {}
    for index, step in enumerate(config.ensemble_scheduling.step):
        for key in ("model_name", "input_map", "output_map"):
            if not getattr(step, key):
                raise ConfigError(f"must specify '{key}' in step {index} of ensemble '{name}'")
        inputs = sorted(step.input_map.values())
        for target in sorted(step.output_map.values()):
            tensor = tensors.setdefault(target, _Tensor())
            if tensor.made:
                raise ConfigError(
                    f"ensemble tensor '{target}' can appear in an output map only once for ensemble '{name}' step "
                    f"{index}"
                )
            tensor.made = True
            tensor.sources = inputs
        for source in inputs:
            tensors.setdefault(source, _Tensor()).used = True
    return tensors


def _reachable(tensors: dict[str, _Tensor], inputs: set[str]) -> set[str]:
    """Return the tensors that can be computed from the given ones."""
    waiting = {name: len(set(tensor.sources)) for name, tensor in tensors.items() if tensor.made}
    readers: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        for source in set(tensor.sources):
            readers.setdefault(source, []).append(name)
    ready = set(inputs)
    fresh = list(inputs)
    while fresh:
        for reader in readers.get(fresh.pop(), ()):
            waiting[reader] -= 1
            if not waiting[reader] and reader not in ready:
                ready.add(reader)
                fresh.append(reader)
    return ready


def _why_unwritten(output: str, tensors: dict[str, _Tensor], ready: set[str], name: str) -> str:
    """Return the error text for an unwritten output, with the first missing tensor."""
    seen: set[str] = set()
    last, missing = output, [source for source in tensors[output].sources if source not in ready]
    while missing:
        last = missing[0]
        seen.add(last)
        missing = [source for source in tensors[last].sources if source not in ready and source not in seen]
    because = f": at least one of its depending tensors, '{last}', is not connected" if last != output else ""
    return f"output '{output}' for ensemble '{name}' is not written{because}"
