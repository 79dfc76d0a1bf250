"""Parameters of a language model in its configuration. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from remora.backends.model_files import get_bool, get_int, get_parameter, warn_of_unused
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig

TOOL_PARSERS = ("hermes", "llama3", "mistral", "json")
_NUMBERS = {
    "max_sequences": (16, 1, 256),
    "context_length": (0, 0, 999_999),
    "kv_cache_tokens": (0, 0, 999_999),
    "prefill_chunk": (128, 16, 8192),
    "step_tokens": (256, 16, 16384),
    "default_max_tokens": (0, 0, 999_999),
    "intra_op_thread_count": (0, 0, 4096),
}
"""Default, least and greatest value of each number."""
_OTHERS = ("prefix_cache", "served_names", "chat_template", "tool_parser")


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Parameters of a language model.

    Attributes:
        max_sequences: maximum number of answers that are written at once.
        context_length: maximum number of tokens of prompt and answer; 0 for the model's.
        kv_cache_tokens: maximum number of tokens in memory; 0 for all that the rows hold.
        prefill_chunk: maximum number of tokens of one prompt in a step.
        step_tokens: maximum number of tokens of a step.
        prefix_cache: prompts are kept for reuse.
        default_max_tokens: limit of an answer where the request sets none; 0 for the rest of the context.
        intra_op_threads: threads of ONNX Runtime; 0 for all processors.
        served_names: additional names of the model.
        chat_template: file with a chat template in the version's directory.
        tool_parser: one of `TOOL_PARSERS`, or empty to detect it.
    """

    max_sequences: int
    context_length: int
    kv_cache_tokens: int
    prefill_chunk: int
    step_tokens: int
    prefix_cache: bool
    default_max_tokens: int
    intra_op_threads: int
    served_names: tuple[str, ...]
    chat_template: str
    tool_parser: str


def parse_settings(config: ModelConfig, settings: Mapping[str, str]) -> GenerationSettings:
    """Return the settings of a configuration; ``settings`` are the backend's defaults.

    Raises:
        ConfigError: a value is out of its range.
    """
    warn_of_unused(config, {*_NUMBERS, *_OTHERS}, "generation")
    numbers = {}
    for key, (default, least, most) in _NUMBERS.items():
        value = get_int(config, settings, key) or default
        if not least <= value <= most:
            raise ConfigError(f"model '{config.name}': parameter '{key}' is {value}; it must be {least} to {most}")
        numbers[key] = value
    parser = get_parameter(config, settings, "tool_parser")
    if parser and parser not in TOOL_PARSERS:
        raise ConfigError(
            f"model '{config.name}': parameter 'tool_parser' is '{parser}'; it must be one of {', '.join(TOOL_PARSERS)}"
        )
    names = get_parameter(config, settings, "served_names").split(",")
    return GenerationSettings(
        max_sequences=numbers["max_sequences"],
        context_length=numbers["context_length"],
        kv_cache_tokens=numbers["kv_cache_tokens"],
        prefill_chunk=numbers["prefill_chunk"],
        step_tokens=numbers["step_tokens"],
        prefix_cache=get_bool(config, settings, "prefix_cache", default=True),
        default_max_tokens=numbers["default_max_tokens"],
        intra_op_threads=numbers["intra_op_thread_count"],
        served_names=tuple(name.strip() for name in names if name.strip()),
        chat_template=get_parameter(config, settings, "chat_template"),
        tool_parser=parser,
    )
