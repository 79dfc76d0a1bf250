"""What an ensemble's models say of its own tensors: who gives an output, who reads an input; the law: nothing raises.

A model that has gone meanwhile says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from remora.errors import RemoraError
from remora.proto.model_config_pb2 import ModelConfig, ModelEnsembling
from remora.scheduling.ensembles.request import StepModel, StepModels, in_ensemble
from remora.signature import UnreadableError


def labels_of(config: ModelConfig, models: StepModels, output: str) -> Sequence[str]:
    """What the model that gives an output calls its classes (spec C09)."""
    for step in config.ensemble_scheduling.step:
        for inner, tensor in step.output_map.items():
            if tensor == output:
                with _borrowed(models, step) as model:
                    return model.labels_of(inner) if model is not None else ()
    return ()


def unreadable(config: ModelConfig, models: StepModels, error: UnreadableError) -> RemoraError:
    """How a request ends whose input cannot be read: as the first step says that takes it."""
    for step in config.ensemble_scheduling.step:
        for inner, tensor in step.input_map.items():
            if tensor == error.input:
                said: RemoraError = error.of(inner)
                with _borrowed(models, step) as model:
                    if model is not None:
                        said = model.unreadable(error.of(inner))
                return in_ensemble(config.name, said)
    return error


@contextmanager
def _borrowed(models: StepModels, step: ModelEnsembling.Step) -> Iterator[StepModel | None]:
    try:
        model = models.borrow(step.model_name, step.model_version)
    except RemoraError:
        yield None
        return
    try:
        yield model
    finally:
        model.give_back()
