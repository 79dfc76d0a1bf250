"""What a configuration asks of PyTorch, and which of its tensors is which argument; the law: pure, no torch in here.

``plan_run`` reads the parameters [C16]. ``bind_inputs`` and ``bind_outputs`` apply Triton's rules for names (spec
C15).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from remora.backends.model_files import get_bool, get_int, get_parameter
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig

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
    """How a model is run.

    ``intra_op_threads`` is 0 where nobody chose; ``compiling`` are the keyword arguments of ``torch.compile``, None for
    not compiling. ``ignored`` names the parameters that mean nothing to this backend.
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
    """Which input is which argument: by place, by keyword, or all of them as one dictionary."""

    places: tuple[str, ...] = ()
    keywords: tuple[tuple[str, str], ...] = ()
    """Pairs of keyword and input."""
    as_dictionary: bool = False


def plan_run(config: ModelConfig, settings: Mapping[str, str]) -> RunPlan:
    """The parameters of a model, the backend's settings of the same names where it has none. Raises ConfigError."""
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
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError(f"model '{config.name}': parameter '{_COMPILE}' must be a JSON object, such as {{}}")
    return None if options.get("disable") is True else options


def bind_inputs(model: str, inputs: Sequence[str], arguments: Sequence[str], *, dictionary: bool = False) -> Bound:
    """Which of a model's inputs is which argument of its program.

    Names that are all arguments' names stand for these. Else names such as ``x__1`` or ``ARGS[1]`` give the place, and
    ``KWARGS[mask]`` a keyword. Otherwise the order in the configuration counts.

    Args:
        model: the model's name, for errors.
        inputs: the configuration's names, in its order.
        arguments: the names of the program's arguments, empty when nobody knows them.
        dictionary: the program takes one dictionary of tensors.

    Raises:
        ConfigError: a place is given twice or left out.
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
    """Where each output is found in what the program returns: its place, and for a dictionary its key.

    Names such as ``y__0``, ``RESULT`` or ``RESULT[0]`` give the place; otherwise the order in the configuration counts,
    and a dictionary is asked by the output's own name. Raises ConfigError: a place is given twice.
    """
    found: dict[str, int | str] = {}
    for name in outputs:
        match = _INDEXED.fullmatch(name)
        result = _RESULT.fullmatch(name)
        if match:
            found[name] = int(match[1])
        elif result:
            found[name] = result[2] or int(result[1] or 0)
    if len(found) != len(outputs):
        return dict(zip(outputs, range(len(outputs)), strict=True))
    if len(set(found.values())) != len(found):
        raise ConfigError(f"model '{model}': two of the outputs {', '.join(outputs)} are the same result")
    return found
