"""Validation rules between an ensemble and the models of its steps [E03].

The texts are Triton's. Needs the complete configurations of all of them. Rules for the ensemble alone are in
`ensemble_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from remora.errors import ConfigError
from remora.proto.model_config_pb2 import DataType, ModelConfig, ModelEnsembling, ModelInput, ModelOutput


class _Tensor(NamedTuple):
    """A tensor of the ensemble as first declared, by ``owner``.

    ``full`` includes the batch dimension.
    """

    owner: str
    data_type: int
    dims: tuple[int, ...]
    full: tuple[int, ...]


def check_steps(config: ModelConfig, models: Mapping[str, ModelConfig]) -> bool:
    """Check an ensemble against the models that it is composed of.

    Args:
        config: the ensemble's, valid by itself.
        models: the complete configuration of each composing model, by name.

    Returns:
        True if the ensemble is decoupled, which it is when one of its models is [E05].

    Raises:
        ConfigError: the first violated rule.
    """
    name = config.name
    batches = config.max_batch_size > 0
    tensors: dict[str, _Tensor] = {}
    declared: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    for row in declared:
        tensors[row.name] = _tensor(name, row.data_type, row.reshape.shape or row.dims, batches=batches)
    for step in config.ensemble_scheduling.step:
        model = models[step.model_name]
        check_batch_size(config, step.model_name, model)
        _check_inputs(name, step, model, tensors)
        _check_outputs(name, step, model, tensors)
    return _check_sources(config, models, tensors)


def check_batch_size(config: ModelConfig, name: str, model: ModelConfig) -> None:
    """Check that a step's model accepts the batches of the ensemble. Raises ConfigError."""
    if 0 < model.max_batch_size < config.max_batch_size:
        raise ConfigError(
            f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model "
            f"{name} which only allows maximum batch size to be {model.max_batch_size}"
        )


def _check_inputs(ensemble: str, step: ModelEnsembling.Step, model: ModelConfig, tensors: dict[str, _Tensor]) -> None:
    declared = {row.name: row for row in model.input}
    for name, tensor in sorted(step.input_map.items()):
        if name not in declared:
            raise ConfigError(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing input {name} in model "
                f"{step.model_name}"
            )
    for row in model.input:
        if row.name in step.input_map:
            here = _tensor(step.model_name, row.data_type, row.dims, batches=model.max_batch_size > 0)
            _match(ensemble, step.input_map[row.name], here, tensors)
        elif not row.optional:
            raise ConfigError(
                f"in ensemble {ensemble}, input {row.name} in model {step.model_name} is not mapped to any ensemble "
                "tensors"
            )


def _check_outputs(ensemble: str, step: ModelEnsembling.Step, model: ModelConfig, tensors: dict[str, _Tensor]) -> None:
    declared = {row.name for row in model.output}
    for name, tensor in sorted(step.output_map.items()):
        if name not in declared:
            raise ConfigError(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapped from non-existing output {name} in model "
                f"{step.model_name}"
            )
    for row in model.output:
        if row.name in step.output_map:
            here = _tensor(step.model_name, row.data_type, row.dims, batches=model.max_batch_size > 0)
            _match(ensemble, step.output_map[row.name], here, tensors)


def _match(ensemble: str, tensor: str, here: _Tensor, tensors: dict[str, _Tensor]) -> None:
    """Check a declaration of a tensor against the first one, or record it if it is the first."""
    there = tensors.setdefault(tensor, here)
    if there.data_type != here.data_type:
        what = "data type"
        shown = [DataType.Name(row.data_type) for row in (there, here)]
    elif not _agree(there.dims, here.dims) and not _agree(there.full, here.full):
        what = "shape"
        shown = [f"[{','.join(map(str, row.full))}]" for row in (there, here)]
    else:
        return
    raise ConfigError(
        f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent {what}: {shown[0]} is inferred from model "
        f"{there.owner} while {shown[1]} is inferred from model {here.owner}"
    )


def _check_sources(config: ModelConfig, models: Mapping[str, ModelConfig], tensors: Mapping[str, _Tensor]) -> bool:
    """Check that the inputs of a step, and the outputs, follow the same decoupled step.

    Values of different decoupled steps could not be paired.
    """
    steps = config.ensemble_scheduling.step
    inputs = {row.name for row in config.input}
    makers = {tensor: index for index, step in enumerate(steps) for tensor in step.output_map.values()}
    sources: dict[str, int] = dict.fromkeys(inputs, -1)
    waiting = list(range(len(steps)))
    while waiting:  # each round finds ready steps, because `ensemble_rules` excludes cycles
        ready = [index for index in waiting if all(name in sources for name in steps[index].input_map.values())]
        if not ready:
            break
        for index in ready:
            step = steps[index]
            source = _one_source(config.name, sources, list(step.input_map.values()), tensors, step)
            if models[step.model_name].model_transaction_policy.decoupled:
                source = index
            for tensor in step.output_map.values():
                sources.setdefault(tensor, source)
        waiting = [index for index in waiting if index not in ready]
    outputs = [row.name for row in config.output if row.name in makers]
    _one_source(config.name, sources, outputs, tensors, None)
    return any(models[step.model_name].model_transaction_policy.decoupled for step in steps)


def _one_source(
    ensemble: str,
    sources: Mapping[str, int],
    names: Sequence[str],
    tensors: Mapping[str, _Tensor],
    step: ModelEnsembling.Step | None,
) -> int:
    found = {sources[name] for name in names}
    if len(found) > 1:
        made = min(step.output_map.values()) if step is not None else ""
        owner = tensors[made].owner if made else ensemble
        raise ConfigError(
            f"in ensemble {ensemble}, step of model '{owner}' receives inputs originated from different decoupled "
            "models"
        )
    return found.pop() if found else -1


def _tensor(owner: str, data_type: int, dims: Sequence[int], *, batches: bool) -> _Tensor:
    own = tuple(dims)
    return _Tensor(owner, data_type, own, (-1, *own) if batches else own)


def _agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return True if the shapes are equal except for variable dims."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))
