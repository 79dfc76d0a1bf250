"""Tables of the fields of OpenAI's requests, and strict reading of their values. Pure.

Invariant: no field is accepted without effect, except those whose `Field.why` states that they have no meaning here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import orjson

from remora.api.http import loads
from remora.errors import InvalidArgumentError
from remora.messages import Buffer
from remora_llm.generation.tasks import ParameterError


class Field(NamedTuple):
    """Use of a field.

    Attributes:
        kind: key of `_KINDS`.
        least, most: range of a number.
        only: values that are accepted besides null; empty for all.
        why: reason for ``only``, or for having no meaning.
        meaning: False if a value has no effect, because it concerns OpenAI's own platform.
        members: the known members of an object; None if others check them.
    """

    kind: str
    least: float | None = None
    most: float | None = None
    only: tuple[Any, ...] = ()
    why: str = ""
    meaning: bool = True
    members: Mapping[str, Field] | None = None


def _only(kind: str, *values: Any, why: str) -> Field:
    return Field(kind, only=values, why=why)


def _refused(why: str) -> Field:
    return Field("nothing", why=why)


_PLATFORM = "concerns OpenAI's own platform"
STREAM_OPTIONS: Mapping[str, Field] = {
    "include_usage": Field("boolean"),
    "continuous_usage_stats": Field("boolean"),
    "include_obfuscation": _only("boolean", False, why="events are not padded"),
}
RESPONSE_STREAM_OPTIONS: Mapping[str, Field] = {"include_obfuscation": STREAM_OPTIONS["include_obfuscation"]}
_SAMPLING = {
    "temperature": Field("number", 0, 2),
    "top_p": Field("number"),
    "frequency_penalty": Field("number", -2, 2),
    "presence_penalty": Field("number", -2, 2),
    "logit_bias": Field("object"),
    "seed": Field("integer"),
    "n": Field("integer", 1),
    "stop": Field("texts"),
    "stream": Field("boolean"),
    "stream_options": Field("object", members=STREAM_OPTIONS),
    "max_tokens": Field("integer", 0),
    "user": Field("text"),
    "model": Field("text"),
}
_VLLM = {
    "top_k": Field("integer", -1),
    "min_p": Field("number"),
    "repetition_penalty": Field("number"),
    "stop_token_ids": Field("integers"),
    "ignore_eos": Field("boolean"),
    "min_tokens": Field("integer", 0),
    "skip_special_tokens": Field("boolean"),
    "include_stop_str_in_output": _only("boolean", False, why="stop strings are never part of an answer"),
    "spaces_between_special_tokens": _only("boolean", True, why="special tokens are separated as they are"),
    "priority": Field("integer"),
    "return_token_ids": Field("boolean"),
    "add_special_tokens": Field("boolean"),
    "structured_outputs": Field("object"),
    "response_format": Field("object"),
    "prompt_logprobs": Field("integer", 0),
}
"""Parameters of vLLM that OpenAI's types lack."""
_CHAT_TEMPLATE = {
    "messages": Field("list"),
    "tools": Field("list"),
    "add_generation_prompt": Field("boolean"),
    "continue_final_message": Field("boolean"),
    "chat_template_kwargs": Field("object"),
    "chat_template": _refused("a template comes from the model only"),
}
CHAT: Mapping[str, Field] = {
    **_SAMPLING,
    **_VLLM,
    **_CHAT_TEMPLATE,
    "echo": Field("boolean"),
    "max_completion_tokens": Field("integer", 0),
    "logprobs": Field("boolean"),
    "top_logprobs": Field("integer", 0),
    "tool_choice": Field("any"),
    "parallel_tool_calls": Field("boolean"),
    "reasoning_effort": Field("text"),
    "metadata": Field("object", meaning=False, why=_PLATFORM),
    "prompt_cache_key": Field("text", meaning=False, why="equal beginnings of prompts are found without a key"),
    "safety_identifier": Field("text"),
    "store": _only("boolean", False, why="nothing is stored"),
    "service_tier": _only("text", "auto", "default", why="there is one tier"),
    "modalities": _only("any", ["text"], why="only text is generated"),
    "verbosity": _only("text", "medium", why="a prompt is the way to another length"),
    "audio": _refused("only text is generated"),
    "moderation": _refused("there is no moderation"),
    "prediction": _refused("predicted outputs are not supported"),
    "prompt_cache_options": _refused("equal beginnings of prompts are always reused"),
    "prompt_cache_retention": _only("text", "in_memory", why="prompts are kept in memory only"),
    "web_search_options": _refused("there is no web search"),
    "function_call": _refused("use tool_choice"),
    "functions": _refused("use tools"),
}
COMPLETION: Mapping[str, Field] = {
    **_SAMPLING,
    **_VLLM,
    "prompt": Field("any"),
    "echo": Field("boolean"),
    "logprobs": Field("integer", 0),
    "best_of": Field("integer", 1),
    "suffix": _only("text", "", why="text cannot be inserted before a suffix"),
}
_UNSTORED = "responses are not stored: send all items of the conversation as input"
_AS_IN_CHATS = (
    *("model", "temperature", "top_p", "stream", "user", "seed", "stop", "stop_token_ids"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "top_k", "min_p", "min_tokens"),
    *("ignore_eos", "skip_special_tokens", "priority", "tools", "tool_choice", "parallel_tool_calls"),
    *("safety_identifier", "service_tier", "moderation", "chat_template_kwargs", "chat_template"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
RESPONSE_TEXT: Mapping[str, Field] = {"format": Field("object"), "verbosity": CHAT["verbosity"]}
RESPONSE_FORMATS = ("text", "json_object", "json_schema")
RESPONSE_REASONING: Mapping[str, Field] = {
    "effort": Field("text"),
    "summary": _refused("reasoning is not summarized"),
    "generate_summary": _refused("reasoning is not summarized"),
    "mode": _refused("the chat template knows only an effort"),
    "context": _refused(_UNSTORED),
}
RESPONSE: Mapping[str, Field] = {
    **{name: CHAT[name] for name in _AS_IN_CHATS},
    "stream_options": Field("object", members=RESPONSE_STREAM_OPTIONS),
    "input": Field("items"),
    "instructions": Field("text"),
    "max_output_tokens": Field("integer", 1),
    "text": Field("object", members=RESPONSE_TEXT),
    "include": Field("list"),
    "top_logprobs": Field("integer", 0, 20),
    "reasoning": Field("object", members=RESPONSE_REASONING),
    "metadata": Field("object"),
    "store": _only("boolean", False, why="responses are not stored"),
    "background": _only("boolean", False, why="responses are not stored"),
    "truncation": _only("text", "disabled", why="items are never left out"),
    "max_tool_calls": Field("integer", 1, meaning=False, why="it limits tools of the platform, and none run here"),
    "previous_response_id": _refused(_UNSTORED),
    "conversation": _refused(_UNSTORED),
    "prompt": _refused("prompts are not stored"),
    "context_management": _refused("the input is never shortened"),
    "background_options": _refused("responses are not stored"),
    "access_programs": _refused(_PLATFORM),
    "image": _refused("only text is generated"),
}
TOKENIZE: Mapping[str, Field] = {
    **_CHAT_TEMPLATE,
    "model": Field("text"),
    "prompt": Field("text"),
    "add_special_tokens": Field("boolean"),
    "return_token_strs": Field("boolean"),
}
DETOKENIZE: Mapping[str, Field] = {"model": Field("text"), "tokens": Field("integers")}
_WAY_OUT = " (a server with --openai-unknown=ignore ignores unknown parameters)"


def read_body(body: Buffer, table: Mapping[str, Field], *, ignore_unknown: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a body; see `read_fields`.

    Raises:
        ParameterError: as `read_fields`.
        InvalidArgumentError: the body is not JSON.
    """
    try:
        document = loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"the body is not JSON: {error}") from None
    return read_fields(document, table, ignore_unknown=ignore_unknown)


def read_fields(
    document: Any, table: Mapping[str, Field], *, within: str = "", ignore_unknown: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a request that are not null, and the names of ignored unknown ones.

    Args:
        document: the parsed body, or the object in it.
        table: the known fields.
        within: name of the field that holds the object, for errors.
        ignore_unknown: unknown fields are accepted.

    Raises:
        ParameterError: a field is unknown, refused or of the wrong type, or the document is not an object.
    """
    if not isinstance(document, dict):
        raise ParameterError(within, f"{within or 'the body'} must be a JSON object, not {describe(document)}")
    found, ignored = {}, []
    for name, value in document.items():
        field = table.get(name)
        if field is None:
            if not ignore_unknown:
                near = difflib.get_close_matches(name, table, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                text = f"the parameter {_path(within, name)} is not known{hint}"
                raise ParameterError(within or name, text + _WAY_OUT)
            ignored.append(_path(within, name))
        elif value is not None:
            _check(_path(within, name), within or name, field, value)
            if field.members is not None:
                value, others = read_fields(value, field.members, within=name, ignore_unknown=ignore_unknown)
                ignored += others
            if field.meaning:
                found[name] = value
    return found, ignored


def describe(value: Any) -> str:
    """Return what a JSON value is, for errors."""
    if value is None:
        return "null"
    text = repr(value)
    names = {bool: "a boolean", dict: "an object", list: "a list", str: "a text"}
    name = names.get(type(value), "a number")
    return name if len(text) > 40 else f"{name}: {text}"


def is_ids(value: Any) -> bool:
    """Return True for a list of token ids that is not empty."""
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _path(within: str, name: str) -> str:
    return f"{within}.{name[:80]}" if within else name[:80]


def _check(path: str, parameter: str, field: Field, value: Any) -> None:
    if field.kind == "nothing":
        raise ParameterError(parameter, f"{path} is not supported: {field.why}")
    fits, expected = _KINDS[field.kind]
    if not fits(value):
        raise ParameterError(parameter, f"{path} must be {expected}, not {describe(value)}")
    if field.only and value not in field.only:
        values = " or ".join(repr(each) for each in field.only)
        raise ParameterError(parameter, f"{path} is {describe(value)}; only {values} is supported: {field.why}")
    if (field.least is not None and value < field.least) or (field.most is not None and value > field.most):
        bound = f"at least {field.least}" if field.most is None else f"between {field.least} and {field.most}"
        raise ParameterError(parameter, f"{path} is {value}; it must be {bound}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return _is_number(value) and float(value).is_integer()


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "any": (lambda _value: True, "anything"),
    "number": (_is_number, "a number"),
    "integer": (_is_integer, "a whole number"),
    "boolean": (lambda value: isinstance(value, bool), "true or false"),
    "text": (lambda value: isinstance(value, str), "a text"),
    "texts": (
        lambda value: (
            isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))
        ),
        "a text or a list of texts",
    ),
    "integers": (
        lambda value: isinstance(value, list) and all(isinstance(one, int) and _is_number(one) for one in value),
        "a list of whole numbers",
    ),
    "object": (lambda value: isinstance(value, dict), "an object"),
    "list": (lambda value: isinstance(value, list), "a list"),
    "items": (lambda value: isinstance(value, str | list), "a text or a list of items"),
}
