"""Decoder of the Responses API, which reads a request as the chat that it means. Pure.

Responses are not stored: a request has all items of its conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from remora.messages import Buffer
from remora_llm.generation.tasks import ParameterError
from remora_llm.openai.fields import (
    RESPONSE,
    RESPONSE_FORMATS,
    describe,
    read_body,
)
from remora_llm.openai.requests import Query, chat_query

_LOGPROBS = "message.output_text.logprobs"
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
_AS_CHAT = {"max_output_tokens": "max_completion_tokens"}
"""Fields of a chat with another name than here."""
_SHARED = (
    *("model", "temperature", "top_p", "top_logprobs", "stream", "stream_options", "user"),
    *("safety_identifier", "parallel_tool_calls"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "skip_special_tokens", "priority", "chat_template_kwargs"),
)
_RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "logprobs": "top_logprobs",
    "prompt": "input",
}
"""Parameters here, by those of a chat, for errors."""


def decode_response(body: Buffer, *, action: str = "responses", ignore_unknown: bool = False) -> Query:
    """Return the query of a body for an action.

    Raises:
        ParameterError: a parameter is wrong.
        InvalidArgumentError: the body is not JSON.
    """
    fields, ignored = read_body(body, RESPONSE, ignore_unknown=ignore_unknown)
    if "input" not in fields:
        raise ParameterError("input", "the parameter input is missing")
    chat = {name: fields[name] for name in _SHARED if name in fields}
    chat |= {there: fields[here] for here, there in _AS_CHAT.items() if here in fields}
    chat["messages"] = _messages(fields)
    chat |= _tools(fields) | _text(fields) | _logprobs(fields)
    reasoning = fields.get("reasoning", {})
    if "effort" in reasoning:
        chat["reasoning_effort"] = reasoning["effort"]
    try:
        query = chat_query(action, chat, ignored)
    except ParameterError as error:
        name = _RENAMED.get(error.parameter, error.parameter)
        message = error.message.replace(error.parameter, name).replace(".function.", ".")
        raise ParameterError(name, message) from None
    renamed = {there: _RENAMED.get(here, here) for there, here in query.renamed.items()}
    return replace(query, renamed={**_RENAMED, **renamed}, response=_repeated(fields))


def _repeated(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a response that repeat the request."""
    return {
        "background": False,
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": fields.get("metadata", {}),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": fields.get("reasoning", {}).get("effort"), "summary": None},
        "service_tier": "default",
        "store": False,
        "text": {"format": fields.get("text", {}).get("format") or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools", []),
        "top_logprobs": fields.get("top_logprobs", 0),
        "truncation": "disabled",
        "user": fields.get("user"),
    }


def _messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat: the instructions, then the items of the input."""
    instructions, given = fields.get("instructions"), fields["input"]
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    items: Sequence[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not items:
        raise ParameterError("input", "input is empty: give a text or at least one item")
    for place, item in enumerate(items):
        _add_item(messages, item, f"input[{place}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Any, path: str) -> None:
    """Add an item to the messages. Calls join the message of the assistant before them."""
    if not isinstance(item, dict):
        raise ParameterError("input", f"{path} must be an object, not {describe(item)}")
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise ParameterError("input", f"{path}.role must be one of {', '.join(_ROLES)}, not {describe(role)}")
        messages.append({"role": role, "content": _content(item.get("content"), f"{path}.content")})
    elif kind == "function_call":
        function = {name: _text_of(item, name, path) for name in ("name", "arguments")}
        call = {"id": _text_of(item, "call_id", path), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{path}.output")
        messages.append({"role": "tool", "tool_call_id": _text_of(item, "call_id", path), "content": content})
    else:
        why = "responses are not stored" if kind == "item_reference" else "items are texts and calls of functions"
        raise ParameterError("input", f"{path}.type is {describe(kind)}, which is not supported: {why}")


def _text_of(item: Mapping[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ParameterError("input", f"{path}.{name} must be a text, not {describe(value)}")
    return value


def _content(content: Any, path: str) -> Any:
    """Return the content of a chat's message: a text, or parts of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ParameterError("input", f"{path} must be a text or a list of parts, not {describe(content)}")
    parts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in (*_TEXT_PARTS, "refusal"):
            raise ParameterError("input", f"{path}[{place}].type is {describe(kind)}; only texts are supported")
        if not isinstance(text, str):
            raise ParameterError("input", f"{path}[{place}] must have a text, not {describe(text)}")
        parts.append({"type": "text", "text": text})
    return parts


def _tools(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tools and their choice in a chat's form."""
    found: dict[str, Any] = {}
    if "tools" in fields:
        found["tools"] = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(fields["tools"])]
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "allowed_tools":
            given = choice.get("tools")
            allowed = [_choice(each) for each in given] if isinstance(given, list) else given
            choice = {"type": kind, kind: {"mode": choice.get("mode", "auto"), "tools": allowed}}
        elif kind == "function":
            choice = _choice(choice)
        else:
            raise ParameterError(
                "tool_choice", f"tool_choice.type is {describe(kind)}; only 'function' and 'allowed_tools' are possible"
            )
    if choice is not None and (choice != "auto" or found.get("tools")):
        found["tool_choice"] = choice
    return found


def _choice(tool: Any) -> Any:
    """Return a tool that a choice names, in a chat's form."""
    if not isinstance(tool, dict):
        return tool
    return {"type": tool.get("type"), "function": {"name": tool.get("name")}}


def _tool(tool: Any, path: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise ParameterError(
            "tools", f"{path}.type is {describe(kind)}; only 'function' is supported: no tools run here"
        )
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _text(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of the answer in a chat's form."""
    text = fields.get("text", {})
    given = text.get("format")
    if given is None:
        return {}
    kind = given.get("type")
    if kind not in RESPONSE_FORMATS:
        names = ", ".join(RESPONSE_FORMATS)
        raise ParameterError("text", f"text.format.type must be one of {names}, not {describe(kind)}")
    if kind == "json_schema":
        return {"response_format": {"type": kind, "json_schema": {"schema": given.get("schema")}}}
    return {"response_format": {"type": kind}}


def _logprobs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether a chat has log probabilities."""
    unknown = [each for each in fields.get("include", []) if each != _LOGPROBS]
    if unknown:
        raise ParameterError("include", f"include has {describe(unknown[0])}; only {_LOGPROBS!r} is supported")
    return {"logprobs": True} if "top_logprobs" in fields or fields.get("include") else {}
