"""Parameters of a PyTorch model, and the mapping of its tensors to arguments and results.

``plan_run`` reads the parameters [C16]. ``bind_inputs`` and ``bind_outputs`` apply Triton's rules for names [C15].
Pure, without torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from remora.backends.model_files import get_bool, get_int, get_parameter
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig
from remora.system.json_text import read_json

_INDEXED = re.compile(r".*__(\d{1,4})", re.DOTALL)
_ARGUMENT = re.compile(r"ARGS\[(\d{1,4})\]")
_KEYWORD = re.compile(r"KWARGS\[[\"']?(\w+)[\"']?\]")
_RESULT = re.compile(r"RESULT(?:\[(?:(\d{1,4})|[\"']?(\w+)[\"']?)\])?")
_COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
_KNOWN = frozenset(
    {
        "DISABLE_OPTIMIZED_EXECUTION",
        "INFERENCE_MODE",
        "DISABLE_CUDNN",
        "ENABLE_WEIGHT_SHARING",
        "ENABLE_CACHE_CLEANING",
        "INTER_OP_THREAD_COUNT",
        "INTRA_OP_THREAD_COUNT",
        _COMPILE,
    }
)
_MIXED_PRECISION = "auto_mixed_precision"


class RunPlan(NamedTuple):
    """Options of a model's runs.

    ``intra_op_threads`` is 0 if unset; ``compiling`` are the keyword arguments of ``torch.compile``, None for no
    compilation. ``ignored`` names the parameters that this backend does not use.
    """

    inference_mode: bool
    optimized: bool
    cudnn: bool
    share_weights: bool
    clean_cache: bool
    intra_op_threads: int
    inter_op_threads: int
    mixed_precision: bool
    compiling: Mapping[str, Any] | None
    ignored: tuple[str, ...]


class Bound(NamedTuple):
    """Mapping of inputs to arguments.

    They are passed by position, by keyword, or in one dictionary.
    """

    places: tuple[str, ...] = ()
    keywords: tuple[tuple[str, str], ...] = ()
    """Pairs of keyword and input."""
    as_dictionary: bool = False


def plan_run(config: ModelConfig, settings: Mapping[str, str]) -> RunPlan:
    """Return the plan for a model's parameters, with the backend's settings as defaults.

    Raises ConfigError.
    """
    accelerators = config.optimization.execution_accelerators
    named = [each.name for each in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator)]
    unknown = [name for name in named if name != _MIXED_PRECISION]
    if unknown:
        raise ConfigError(f"unknown Execution Accelerator '{unknown[0]}' is requested")
    return RunPlan(
        inference_mode=get_bool(config, settings, "INFERENCE_MODE", default=True),
        optimized=not get_bool(config, settings, "DISABLE_OPTIMIZED_EXECUTION", default=False),
        cudnn=not get_bool(config, settings, "DISABLE_CUDNN", default=False),
        share_weights=get_bool(config, settings, "ENABLE_WEIGHT_SHARING", default=False),
        clean_cache=get_bool(config, settings, "ENABLE_CACHE_CLEANING", default=False),
        intra_op_threads=get_int(config, settings, "INTRA_OP_THREAD_COUNT"),
        inter_op_threads=get_int(config, settings, "INTER_OP_THREAD_COUNT"),
        mixed_precision=_MIXED_PRECISION in named,
        compiling=_compile_options(config, get_parameter(config, settings, _COMPILE)),
        ignored=tuple(key for key in sorted(config.parameters) if key not in _KNOWN),
    )


def _compile_options(config: ModelConfig, text: str) -> Mapping[str, Any] | None:
    if not text:
        return None
    try:
        options = read_json(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError(f"model '{config.name}': parameter '{_COMPILE}' must be a JSON object, such as {{}}")
    return None if options.get("disable") is True else options


def bind_inputs(model: str, inputs: Sequence[str], arguments: Sequence[str], *, dictionary: bool = False) -> Bound:
    """Return the mapping of a model's inputs to the arguments of its program.

    Inputs whose names are all argument names are these arguments. Otherwise names such as ``x__1`` or ``ARGS[1]`` give
    the position, and ``KWARGS[mask]`` a keyword. Otherwise the order in the configuration counts.

    Args:
        model: name of the model, for errors.
        inputs: the configured names in order.
        arguments: names of the program's arguments, empty if unknown.
        dictionary: the program takes one dictionary of tensors.

    Raises:
        ConfigError: a position is missing or repeated.
    """
    if dictionary:
        return Bound(tuple(inputs), as_dictionary=True)
    if inputs and all(name in arguments for name in inputs):
        first = [name for name in arguments if name in inputs]
        if first == list(arguments[: len(first)]):
            return Bound(tuple(first))
        return Bound(keywords=tuple((name, name) for name in first))
    keywords = {name: match[1] for name in inputs if (match := _KEYWORD.fullmatch(name))}
    placed = {name: match[1] for name in inputs if (match := _ARGUMENT.fullmatch(name) or _INDEXED.fullmatch(name))}
    if len(keywords) + len(placed) != len(inputs):
        return Bound(tuple(inputs))
    at = {int(index): name for name, index in placed.items()}
    if sorted(at) != list(range(len(placed))):
        raise ConfigError(
            f"model '{model}': the inputs {', '.join(placed)} must give each of the places 0 to {len(placed) - 1} once"
        )
    return Bound(tuple(at[place] for place in range(len(at))), tuple((word, name) for name, word in keywords.items()))


def bind_outputs(model: str, outputs: Sequence[str]) -> dict[str, int | str]:
    """Return the position of each output in the program's result, or its key in a dictionary.

    Names such as ``y__0``, ``RESULT`` or ``RESULT[0]`` give the position; otherwise the order in the configuration
    counts, and a dictionary is searched by the output's name. Raises ConfigError for a repeated position.
    """
    places: dict[str, int | str] = {}
    for name in outputs:
        match = _INDEXED.fullmatch(name)
        result = _RESULT.fullmatch(name)
        if match:
            places[name] = int(match[1])
        elif result:
            places[name] = result[2] or int(result[1] or 0)
    if len(places) != len(outputs):
        return dict(zip(outputs, range(len(outputs)), strict=True))
    if len(set(places.values())) != len(places):
        raise ConfigError(f"model '{model}': two of the outputs {', '.join(outputs)} are the same result")
    return places
