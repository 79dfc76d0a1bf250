"""Configuration object that a Python model completes in ``auto_complete_config`` [C14].

Invariant: configured values are completed, never changed. A contradiction raises an error with Triton's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig as Message
from remora.system.json_text import read_json

_COMPLETED = ("max_batch_size", "input", "output", "dynamic_batching", "model_transaction_policy")


class ModelConfig:
    """Configuration that ``auto_complete_config`` receives, completes and returns.

    All methods raise ValueError for a contradiction.

    Args:
        model_config: the configuration as JSON text.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = read_json(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the current configuration."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch, which must not be below the configured value."""
        configured = self._model_config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in {self._function()} specified "
                f"max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable the dynamic batcher unless it is configured already."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but {self._function()} tries to set "
                    "scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:  # noqa: A002 - models pass it by this name
        """Add an input.

        Its keys are ``name``, ``data_type`` ("TYPE_FP32"), ``dims`` and ``optional`` if it may be omitted.
        """
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output with the keys ``name``, ``data_type`` and ``dims``."""
        self._add("output", output, ("name", "data_type", "dims"))

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set whether the model is decoupled, as ``{"decoupled": True}``."""
        for key in transaction_policy_dict:
            if key != "decoupled":
                raise ValueError(
                    f"model transaction property in {self._function()} contains property other than 'decoupled'."
                )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" in transaction_policy_dict:
            wanted = transaction_policy_dict["decoupled"]
            if policy.get("decoupled", wanted) != wanted:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model '{self._name()}', which is "
                    f"already set to '{policy['decoupled']}'."
                )
            policy["decoupled"] = wanted

    def _add(self, side: str, tensor: Mapping[str, Any], properties: tuple[str, ...]) -> None:
        name = tensor.get("name")
        label = f"{side} '{name}'" if name is not None else side
        if not set(tensor) <= set(properties):
            *others, last = (f"'{key}'" for key in properties)
            raise ValueError(
                f"{label} in {self._function()} contains property other than {', '.join(others)} and {last}."
            )
        for key in ("name", "data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{label} in {self._function()} is missing '{key}' property.")
        added = {**tensor, "dims": list(tensor["dims"])}
        tensors = self._model_config.setdefault(side, [])
        for configured in tensors:
            if configured["name"] == name:
                self._agree(side, configured, added)
                configured.update(added)
                return
        tensors.append(added)

    def _agree(self, side: str, configured: Mapping[str, Any], added: Mapping[str, Any]) -> None:
        name, before = added["name"], configured["data_type"]
        if before not in ("TYPE_INVALID", added["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name()}', configuration expects datatype {before} for {side} '{name}', "
                f"model provides {added['data_type']}"
            )
        for key in ("dims", "optional"):
            before = configured.get(key)
            if key in added and before not in (None, [], added[key]):
                raise ValueError(
                    f"model '{self._name()}', tensor '{name}': the model expects {key} {added[key]} but the model "
                    f"configuration specifies {key} {before}"
                )

    def _function(self) -> str:
        return f"auto-complete-config function for model '{self._name()}'"

    def _name(self) -> str:
        return str(self._model_config.get("name", ""))


def take_over(completed: ModelConfig, config: Message) -> None:
    """Copy only the fields that a model may complete into ``config``.

    Raises:
        ConfigError: the configuration cannot hold a value.
    """
    from google.protobuf import json_format  # lazy: only completing models need it

    values = {key: value for key, value in completed.as_dict().items() if key in _COMPLETED}
    try:
        filled = json_format.ParseDict(values, Message())
    except json_format.ParseError as error:
        raise ConfigError(f"auto_complete_config of model '{config.name}': {error}") from error
    config.max_batch_size = filled.max_batch_size
    for side in ("input", "output"):
        config.ClearField(side)
        getattr(config, side).extend(getattr(filled, side))
    for choice in ("dynamic_batching", "model_transaction_policy"):
        if filled.HasField(choice):
            getattr(config, choice).CopyFrom(getattr(filled, choice))
