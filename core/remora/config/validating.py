"""Validation of complete configurations with Triton's texts [C06, C08, C20, E03, M17].

The configuration must be inferred, completed and normalised. `tensor_rules` and `ensemble_rules` contain the rules for
inputs, outputs and ensembles.
"""

from __future__ import annotations

from collections.abc import Sequence

from remora.config.ensemble_rules import check_ensemble
from remora.config.inferring import ENSEMBLE, PLATFORMS, SINGULAR
from remora.config.sequence_rules import check_sequences
from remora.config.state_rules import check_states
from remora.config.tensor_rules import check_tensors
from remora.errors import ConfigError, InternalError
from remora.proto.model_config_pb2 import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInstanceGroup,
    ModelMetrics,
    ModelQueuePolicy,
)

MAX_INSTANCES = 1024
"""Maximum count of an instance group. Each instance costs a thread or a process; a larger count is a typo."""

_BATCH_STRATEGY = "TRITON_BATCH_STRATEGY_PATH"
"""Parameter that names a batching library built for Triton's process [D14]."""


def validate(
    config: ModelConfig, name: str, *, gpus: Sequence[int] = (), least: float = 6.0, strict: bool = False
) -> None:
    """Check that the configuration of the model ``name`` can be served.

    Args:
        config: complete and normalised.
        name: the name of the model's directory, which the configuration must repeat [M17].
        gpus: the ids of the GPUs that the engine may use.
        least: their minimum compute capability.
        strict: require declared inputs and outputs, for servers without auto-completion [C02].

    Raises:
        ConfigError: the first violated rule.
    """
    validate_written(config, name)
    check_tensors(config, strict=strict)
    check_states(config)
    if not config.HasField("ensemble_scheduling"):
        _check_instance_groups(config, gpus, least)


def validate_written(config: ModelConfig, name: str) -> None:
    """Check what must be valid before a model is opened.

    This is everything except tensors and instance groups. Triton refuses these errors when it polls the repository, and
    the rest when it loads a version [M09].

    Args:
        config: normalised; inputs and outputs may still be missing.
        name: as for `validate`.

    Raises:
        ConfigError: the first violated rule.
    """
    check_names(config, name)
    _check_backend(config)
    if config.max_batch_size < 0:
        raise ConfigError(f"'max_batch_size' must be non-negative value for {config.name}")
    if not config.HasField("version_policy"):
        raise ConfigError(f"must specify 'version policy' for {config.name}")
    if _BATCH_STRATEGY in config.parameters:
        raise ConfigError(
            f"parameters '{_BATCH_STRATEGY}' of {config.name} names a custom batching library, which is not offered: "
            "take the parameter out, and bound batches by max_batch_size and preferred_batch_size"
        )
    if config.HasField("dynamic_batching"):
        _check_dynamic_batching(config.dynamic_batching, config)
    if config.HasField("sequence_batching"):
        check_sequences(config)
    if config.HasField("ensemble_scheduling"):
        check_ensemble(config)
    elif config.platform == ENSEMBLE:
        raise ConfigError(f"ensemble scheduling must be set for ensemble {config.name} whose platform is {ENSEMBLE}")
    if config.model_transaction_policy.decoupled and config.response_cache.enable:
        raise ConfigError(
            f"Response Cache does not currently support model {config.name} with 'decoupled' transaction policy. "
            "Please disable the response cache."
        )
    _check_metrics(config.model_metrics)


def check_names(config: ModelConfig, name: str) -> None:
    """Check the model's name against its directory, and that it is not a path [M17].

    Raises:
        ConfigError: the names differ, or the name is empty or not a plain name.
    """
    if not name or "/" in name or ".." in name:
        raise ConfigError(f"the model name '{name}' must not be empty and must not contain '/' or '..'")
    if not config.name:
        raise ConfigError("model configuration must specify 'name'")
    if config.name != name:
        raise ConfigError(
            f"unexpected directory name '{name}' for model '{config.name}', directory name must equal model name"
        )


def _check_backend(config: ModelConfig) -> None:
    name, backend, platform = config.name, config.backend, config.platform
    if not backend and platform != ENSEMBLE and config.HasField("ensemble_scheduling"):
        raise ConfigError(f"ensemble scheduling cannot be set for model '{name}' whose platform is not {ENSEMBLE}")
    if not backend and platform != ENSEMBLE:
        raise ConfigError(f"unexpected platform type '{platform}' for {name}")
    if backend and platform == ENSEMBLE:
        raise ConfigError(f"Ensemble model '{name}' must have platform type '{platform}' and empty backend type")
    if backend in SINGULAR and PLATFORMS.get(platform) != backend:
        raise ConfigError(f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}")


def _check_dynamic_batching(batching: ModelDynamicBatching, config: ModelConfig) -> None:
    for size in batching.preferred_batch_size:
        if size <= 0:
            raise ConfigError(f"dynamic batching preferred size must be positive for {config.name}")
        if size > config.max_batch_size:
            raise ConfigError(f"dynamic batching preferred size must be <= max batch size for {config.name}")
    levels = batching.priority_levels
    if levels:
        if not 1 <= batching.default_priority_level <= levels:
            raise ConfigError(f"default priority level must be in range [1, {levels}] for {config.name}")
        if any(not 1 <= level <= levels for level in batching.priority_queue_policy):
            raise ConfigError(
                f"priority queue policy must have priority level in range [1, {levels}] for {config.name}"
            )
    if batching.preserve_ordering:
        _check_ordering(batching, config.name)


def _check_ordering(batching: ModelDynamicBatching, name: str) -> None:
    """Refuse priorities and DELAY timeouts [D06].

    Ordered responses exclude overtaking requests.
    """
    if batching.priority_levels > 1:
        raise ConfigError(f"Only one priority level is allowed when 'preserve_ordering' is true for {name}")
    policies = (batching.default_queue_policy, *batching.priority_queue_policy.values())
    if any(
        policy.default_timeout_microseconds and policy.timeout_action == ModelQueuePolicy.DELAY for policy in policies
    ):
        raise ConfigError(
            f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"
        )


def _check_instance_groups(config: ModelConfig, gpus: Sequence[int], least: float) -> None:
    if not config.instance_group:
        raise ConfigError(f"must specify one or more 'instance group's for {config.name}")
    for group in config.instance_group:
        where = f"instance group {group.name} of model {config.name}"
        if group.count > MAX_INSTANCES:
            raise ConfigError(f"{where} has count {group.count}; at most {MAX_INSTANCES} instances are made")
        _check_devices(group, where, gpus, least)
        if group.profile and config.platform != "tensorrt_plan":
            raise ConfigError(
                f"{where} and platform {config.platform}specifies profile field which is only supported for "
                "TensorRT models"
            )
        for profile in group.profile:
            if not (profile.isascii() and profile.isdigit()):
                raise ConfigError(
                    f"{where} and platform {config.platform} specifies invalid profile {profile}. The field should "
                    "contain the string representation of a non-negative integer."
                )


def _check_devices(group: ModelInstanceGroup, where: str, gpus: Sequence[int], least: float) -> None:
    if group.kind == ModelInstanceGroup.KIND_AUTO:
        raise InternalError(f"{where} has unexpected kind KIND_AUTO")
    if group.kind != ModelInstanceGroup.KIND_GPU:
        if group.gpus:
            kind = "KIND_CPU" if group.kind == ModelInstanceGroup.KIND_CPU else "KIND_MODEL"
            raise ConfigError(f"{where} has kind {kind} but specifies one or more GPUs")
        return
    if not group.gpus:
        lack = "specifies no GPUs" if gpus else "no GPUs are available"
        raise ConfigError(f"{where} has kind KIND_GPU but {lack}")
    for gpu in group.gpus:
        if gpu not in gpus:
            raise ConfigError(
                f"{where} specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum required CUDA "
                f"compute compatibility of {least:.6f} are: {', '.join(map(str, gpus))}"
            )


def _check_metrics(metrics: ModelMetrics) -> None:
    for control in metrics.metric_control:
        if not control.HasField("metric_identifier"):
            raise ConfigError("metric control must specify 'metric_identifier'")
        if not control.metric_identifier.family:
            raise ConfigError("metric identifier must specify non-empty 'family'")
        if not control.HasField("histogram_options"):
            raise ConfigError("metric control must specify 'histogram_options'")
        if not control.histogram_options.buckets:
            raise ConfigError("histogram options must specify non-empty 'buckets'")
