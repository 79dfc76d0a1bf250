"""The configuration a Python model completes (spec C14); the law: what is configured is filled in, never changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig as Message

_COMPLETED = ("max_batch_size", "input", "output", "dynamic_batching", "model_transaction_policy")


class ConfigConflictError(ValueError):
    """The model's code contradicts its configuration file."""


class ModelConfig:
    """What ``auto_complete_config`` gets, fills in and gives back. All methods raise ValueError for a contradiction.

    Args:
        model_config: the configuration as JSON text.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """The configuration as it stands."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch; the configuration file may not have asked for a larger one."""
        configured = self._model_config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ConfigConflictError(
                f"{self._model()} sets max_batch_size to {max_batch_size}, but its configuration asks for "
                f"{configured}: set it to {max_batch_size} or less there"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Ask for the dynamic batcher, unless it is configured already."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ConfigConflictError(
                    f"{self._model()} asks for dynamic_batching, but its configuration has {scheduler}: use one of them"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:  # noqa: A002 - models pass it by this name
        """Add an input: ``name``, ``data_type`` ("TYPE_FP32"), ``dims`` and, if it is not needed, ``optional``."""
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output: ``name``, ``data_type`` and ``dims``."""
        self._add("output", output, ("name", "data_type", "dims"))

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Say whether the model is decoupled: ``{"decoupled": True}``."""
        for key in transaction_policy_dict:
            if key != "decoupled":
                raise ConfigConflictError(f"{self._model()} sets '{key}' in its transaction policy; it has 'decoupled'")
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" in transaction_policy_dict:
            wanted = transaction_policy_dict["decoupled"]
            if policy.get("decoupled", wanted) != wanted:
                raise ConfigConflictError(
                    f"{self._model()} sets decoupled to {wanted}, but its configuration says {policy['decoupled']}"
                )
            policy["decoupled"] = wanted

    def _add(self, side: str, tensor: Mapping[str, Any], properties: tuple[str, ...]) -> None:
        name = tensor.get("name")
        label = f"{side} '{name}'" if name is not None else side
        for key in tensor:
            if key not in properties:
                raise ConfigConflictError(
                    f"{self._model()} gives {label} the property '{key}'; it may have {', '.join(properties)}"
                )
        for key in ("name", "data_type", "dims"):
            if key not in tensor:
                raise ConfigConflictError(f"{self._model()} gives {label} no '{key}'")
        added = {**tensor, "dims": list(tensor["dims"])}
        tensors = self._model_config.setdefault(side, [])
        for configured in tensors:
            if configured["name"] == name:
                self._agree(label, configured, added)
                configured.update(added)
                return
        tensors.append(added)

    def _agree(self, label: str, configured: Mapping[str, Any], added: Mapping[str, Any]) -> None:
        for key, unset in (("data_type", "TYPE_INVALID"), ("dims", []), ("optional", added.get("optional"))):
            before = configured.get(key, unset)
            if before != unset and key in added and before != added[key]:
                raise ConfigConflictError(
                    f"{self._model()} gives {label} {key} {added[key]}, but its configuration says {before}: "
                    "make the two agree"
                )

    def _model(self) -> str:
        return f"auto_complete_config of model '{self._model_config.get('name', '')}'"


def take_over(completed: ModelConfig, config: Message) -> None:
    """Put what a model has completed into ``config``; everything else stays as it is.

    Raises:
        ConfigError: a value that the configuration cannot hold.
    """
    from google.protobuf import json_format  # only for models that complete their configuration

    said = {key: value for key, value in completed.as_dict().items() if key in _COMPLETED}
    try:
        filled = json_format.ParseDict(said, Message())
    except json_format.ParseError as error:
        raise ConfigError(f"auto_complete_config of model '{config.name}': {error}") from error
    config.max_batch_size = filled.max_batch_size
    for side in ("input", "output"):
        config.ClearField(side)
        getattr(config, side).extend(getattr(filled, side))
    for choice in ("dynamic_batching", "model_transaction_policy"):
        if filled.HasField(choice):
            getattr(config, choice).CopyFrom(getattr(filled, choice))
