"""What ensembles need of other models, and which need what (spec E03, M12, M14); the law: nothing is loaded here.

Pure: names and configurations in, names or the reason why not out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from remora.config.step_rules import check_steps
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig


def step_models(config: ModelConfig) -> tuple[str, ...]:
    """The names of the models that an ensemble is composed of, each once; none for any other model."""
    return tuple(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


def compose(
    config: ModelConfig, ready: Callable[[str], Mapping[int, ModelConfig]], why: Callable[[str], str]
) -> frozenset[str]:
    """Check that an ensemble can serve with what is ready.

    Args:
        config: the ensemble's, as written.
        ready: a model's name -> the complete configurations of its ready versions.
        why: a model's name -> what its load failed with, if it did.

    Returns:
        The names of the composing models that are decoupled.

    Raises:
        ConfigError: with Triton's text for the first thing that is missing or does not fit.
    """
    models: dict[str, ModelConfig] = {}
    for step in config.ensemble_scheduling.step:
        model = step.model_name
        versions = ready(model)
        if not versions:
            raise ConfigError(no_version(config.name, model, why(model)))
        wanted = step.model_version if step.model_version > 0 else max(versions)
        if wanted not in versions:
            raise ConfigError(
                f"ensemble '{config.name}' depends on '{model}' whose required version {wanted} is not loaded."
            )
        models[model] = versions[wanted]
    check_steps(config, models)
    return frozenset(name for name, model in models.items() if model.model_transaction_policy.decoupled)


def freed_by(name: str, composed: Mapping[str, Collection[str]], implied: Collection[str]) -> list[str]:
    """The models that go with an ensemble: loaded for it, also through other ensembles, and needed by nothing else.

    Args:
        name: the ensemble's.
        composed: the models of each ensemble that is to serve.
        implied: the models that were loaded because an ensemble needed them.
    """
    going = [name]
    for gone in going:
        for model in composed.get(gone, ()):
            users = {ensemble for ensemble, models in composed.items() if model in models}
            if model in implied and model not in going and users <= set(going):
                going.append(model)
    return going[1:]


def no_version(ensemble: str, model: str, failure: str) -> str:
    """What an ensemble fails with when one of its models did not load."""
    failure = failure.removesuffix("\n")
    because = f" Model '{model}' loading failed with error: {failure}" if failure else ""
    return f"ensemble '{ensemble}' depends on '{model}' which has no loaded version.{because}"


def not_valid(ensemble: str, model: str, failure: str) -> str:
    """What an ensemble fails with when one of its models is an ensemble that cannot serve."""
    because = f"Model '{model}' failed with error: {failure}"
    return f"ensemble '{ensemble}' depends on '{model}' which is not valid. {because}"


def not_there(ensemble: str, model: str) -> str:
    """What an ensemble fails with when no repository has one of its models, or more than one do."""
    return f"ensemble {ensemble} contains models that are not available or ambiguous: {model}"


def circle(names: Iterable[str]) -> str:
    """What an ensemble fails with that is composed of itself; ``names`` begin and end with the same one."""
    return f"an ensemble cannot be composed of itself: {' -> '.join(names)}. Take one of these steps out"
