"""Conversion of sampling parameters under vLLM's names to a task. Pure.

Every parameter is used or refused; nothing is dropped.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from remora_llm.generation.tasks import Grammar, ParameterError, Sampling, Task

_SEED_MASK = (1 << 64) - 1
_DEFAULT_MAX_TOKENS = 16

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_GRAMMARS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
    "json_object": "json_object",
}
_KNOWN = (
    *_FLOATS,
    *("n", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs"),
    *("prompt_logprobs", "logit_bias", "skip_special_tokens", "structured_outputs", "user", "priority"),
    "lora_name",
)
_ONLY_DEFAULT: Mapping[str, tuple[Any, ...]] = {
    "include_stop_str_in_output": (False,),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "best_of": (None, 1),
    "use_beam_search": (False,),
}


def parse_parameters(parameters: Mapping[str, Any], prompt: tuple[int, ...], *, seed: int, room: int) -> Task:
    """Return the task for a prompt.

    Args:
        parameters: by vLLM's names; numbers may be texts.
        prompt: token ids.
        seed: used where the parameters have none.
        room: number of tokens that fit behind the prompt; limits the default of ``max_tokens``.

    Raises:
        ParameterError: an unknown parameter, or a value of the wrong type. Ranges are checked by `check_task`.
    """
    for name, value in parameters.items():
        if name in _ONLY_DEFAULT:
            if value not in _ONLY_DEFAULT[name]:
                raise ParameterError(name, f"{name} is {value!r}, which is not supported")
        elif name not in _KNOWN:
            near = difflib.get_close_matches(name, _KNOWN, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ParameterError(name, f"the parameter {name} is not known{hint}")
    numbers = {name: _number(parameters, name) for name in _FLOATS if parameters.get(name) is not None}
    top_k = _integer(parameters, "top_k", 0)
    given = _integer(parameters, "seed", None)
    max_tokens = _integer(parameters, "max_tokens", None)
    sampling = Sampling(
        top_k=0 if top_k == -1 else top_k or 0,
        seed=seed if given is None or given == -1 else given & _SEED_MASK,
        logit_bias=_bias(parameters.get("logit_bias")),
        **numbers,
    )
    return Task(
        prompt,
        min(_DEFAULT_MAX_TOKENS, max(room, 0)) if max_tokens is None else max_tokens,
        sampling,
        choices=_integer(parameters, "n", 1) or 0,
        stop=_texts(parameters.get("stop")),
        stop_tokens=frozenset(_integers(parameters.get("stop_token_ids"))),
        ignore_end=_boolean(parameters, "ignore_eos", default=False),
        min_tokens=_integer(parameters, "min_tokens", 0) or 0,
        logprobs=_integer(parameters, "logprobs", None),
        prompt_logprobs=_integer(parameters, "prompt_logprobs", None),
        grammar=parse_grammar(parameters.get("structured_outputs")),
        skip_special=_boolean(parameters, "skip_special_tokens", default=True),
        user=str(parameters.get("user") or ""),
        priority=_integer(parameters, "priority", 0) or 0,
        adapter=str(parameters.get("lora_name") or ""),
    )


def parse_grammar(value: Any) -> Grammar | None:
    """Return the grammar of vLLM's ``structured_outputs``. Raises ParameterError."""
    if value is None:
        return None
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise ParameterError(name, f"{name} must be an object with one of {', '.join(_GRAMMARS)}")
    found = {key: each for key, each in value.items() if each is not None and each is not False}
    if len(found) != 1 or next(iter(found)) not in _GRAMMARS:
        raise ParameterError(name, f"{name} must have exactly one of {', '.join(_GRAMMARS)}; it has {sorted(found)}")
    ((key, content),) = found.items()
    if key == "json_object":
        return Grammar("json_object")
    if key == "choice":
        if not isinstance(content, list) or not content or not all(isinstance(each, str) and each for each in content):
            raise ParameterError(name, "choice must be a list of texts that are not empty")
        return Grammar("choice", json.dumps(content))
    if key == "json" and not isinstance(content, str):
        try:
            return Grammar("json_schema", json.dumps(content))
        except RecursionError:
            raise ParameterError(name, "json is nested too deep") from None
    if not isinstance(content, str):
        raise ParameterError(name, f"{key} must be a text")
    return Grammar("json_schema" if key == "json" else "regex" if key == "regex" else "lark", content)


def _number(parameters: Mapping[str, Any], name: str) -> float:
    value = parameters[name]
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ParameterError(name, f"{name} is {value!r}; it must be a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise ParameterError(name, f"{name} is {value!r}; it must be a number") from None


def _integer(parameters: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = parameters.get(name)
    if value is None:
        return default
    if isinstance(value, str) and len(value) < 24:
        value = int(value) if value.strip().lstrip("+-").isdecimal() else value
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, f"{name} is {value!r}; it must be a whole number")
    return value


def _boolean(parameters: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ParameterError(name, f"{name} is {value!r}; it must be true or false")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(each, str) for each in texts):
        raise ParameterError("stop", "stop must be a text or a list of texts")
    return tuple(texts)


def _integers(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or any(
        isinstance(each, bool) or not isinstance(each, int) for each in value
    ):
        raise ParameterError("stop_token_ids", "stop_token_ids must be a list of whole numbers")
    return tuple(value)


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise ParameterError("logit_bias", "logit_bias must be an object from token ids to numbers")
    pairs = []
    for token, addend in value.items():
        number = str(token)
        if not number.isdecimal() or len(number) > 10:
            raise ParameterError("logit_bias", f"logit_bias has the key {token!r}; keys must be token ids")
        if isinstance(addend, bool) or not isinstance(addend, int | float):
            raise ParameterError("logit_bias", f"logit_bias of token {token} is {addend!r}; it must be a number")
        pairs.append((int(number), float(addend)))
    return tuple(pairs)
