"""Tests of ``remora_llm.openai.responses``: items become messages, and nothing is accepted and dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remora.errors import InvalidArgumentError
from remora_llm.generation.tasks import ParameterError
from remora_llm.openai.fields import RESPONSE
from remora_llm.openai.requests import Chat, Query
from remora_llm.openai.responses import decode_response

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}


def response(**fields: Any) -> Query:
    return decode_response(json.dumps({"model": "m", "input": "Hi", **fields}).encode())


def chat_of(**fields: Any) -> Chat:
    found = response(**fields).chat
    assert found is not None
    return found


def test_a_text_is_a_message_of_the_user_after_the_instructions() -> None:
    assert chat_of(instructions="Be brief").messages == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
    ]


def test_items_become_the_messages_of_a_chat() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": []}, {"type": "refusal", "refusal": "c"}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
    ]  # fmt: skip
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert chat_of(input=items).messages == [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": parts, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "two"}]},
    ]


def test_a_call_without_a_message_before_it_gets_one() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    (message,) = chat_of(input=[call]).messages
    assert (message["role"], len(message["tool_calls"])) == ("assistant", 1)


def test_tools_formats_and_limits_are_those_of_a_chat() -> None:
    query = response(tools=[TOOL], tool_choice={"type": "function", "name": "f"}, max_output_tokens=7, temperature=0)
    assert query.chat is not None
    assert query.chat.tools is not None
    assert query.chat.tools.choice == "named"
    assert query.chat.tools.tools[0]["function"] == {"name": "f", "parameters": SCHEMA, "strict": True}
    assert (query.parameters["max_tokens"], query.parameters["temperature"]) == (7, 0)
    assert query.is_constrained
    formed = response(text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}})
    assert formed.parameters["structured_outputs"] == {"json": {**SCHEMA, "additionalProperties": False}}
    assert response(text={"format": {"type": "text"}}).is_constrained is False
    assert response(tool_choice="auto").chat == response().chat
    assert chat_of(reasoning={"effort": "low"}).arguments == {"reasoning_effort": "low"}
    assert response(top_logprobs=2).parameters["logprobs"] == 2
    assert response(include=["message.output_text.logprobs"]).parameters["logprobs"] == 0


def test_what_a_response_repeats_is_the_request_and_that_nothing_is_stored() -> None:
    repeated = response(instructions="i", metadata={"k": "v"}, tools=[TOOL], store=False).response
    assert (repeated["instructions"], repeated["metadata"], repeated["tools"]) == ("i", {"k": "v"}, [TOOL])
    assert (repeated["store"], repeated["previous_response_id"], repeated["truncation"]) == (False, None, "disabled")


@pytest.mark.parametrize(
    ("fields", "parameter", "words"),
    [
        ({"input": []}, "input", "input is empty"),
        ({"input": 1}, "input", "a text or a list of items"),
        ({"input": ["a"]}, "input", r"input\[0\] must be an object"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input", r"input\[0\]\.role must be one of user"),
        ({"input": [{"role": "user"}]}, "input", r"input\[0\]\.content must be a text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "only texts are supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input", "must have a text"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "responses are not stored"),
        ({"input": [{"type": "reasoning"}]}, "input", "items are texts and calls of functions"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", r"input\[0\]\.arguments must be a text"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]},
            "input",
            r"input\[0\]\.tool_calls\[0\]\.arguments is not JSON",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send all items of the conversation as input"),
        ({"conversation": "c"}, "conversation", "not stored"),
        ({"store": True}, "store", "only False is supported"),
        ({"background": True}, "background", "only False is supported"),
        ({"truncation": "auto"}, "truncation", "never left out"),
        ({"tools": [{"type": "web_search"}]}, "tools", r"tools\[0\]\.type is a text: 'web_search'; only 'function'"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools", r"tools\[0\]\.name must be a text"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", "only 'function' and 'allowed_tools' are"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"text": {"format": {"type": "xml"}}}, "text", r"text\.format\.type must be one of"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "must be a JSON schema"),
        ({"text": {"verbosity": "low"}}, "text", "only 'medium' is supported"),
        ({"include": ["file_search_call.results"]}, "include", "only 'message.output_text.logprobs'"),
        ({"reasoning": {"summary": "auto"}}, "reasoning", "not summarized"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options", "include_usage is not known"),
        ({"stream_options": {}}, "stream_options", "needs stream to be true"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"messages": []}, "messages", "the parameter messages is not known"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], parameter: str, words: str) -> None:
    with pytest.raises(ParameterError, match=words) as caught:
        response(**fields)
    assert caught.value.parameter == parameter


def test_a_body_without_input_and_one_that_is_not_json_are_refused() -> None:
    with pytest.raises(ParameterError, match="input is missing"):
        decode_response(b'{"model": "m"}')
    with pytest.raises(InvalidArgumentError, match="not JSON"):
        decode_response(b"{")


def test_errors_of_the_engine_name_the_parameters_of_this_api() -> None:
    renamed = response(max_output_tokens=7).renamed
    assert (renamed["max_tokens"], renamed["prompt"], renamed["response_format"]) == (
        "max_output_tokens",
        "input",
        "text",
    )
    assert set(renamed.values()) <= set(RESPONSE)


def test_allowed_tools_of_a_response_are_the_only_ones() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": TOOL["name"]}]}
    other = {**TOOL, "name": "other"}
    body = {"model": "m", "input": "a", "tools": [other, TOOL], "tool_choice": choice}
    query = decode_response(json.dumps(body).encode())
    assert query.chat is not None
    assert query.chat.tools is not None
    assert (query.chat.tools.choice, list(query.chat.tools.schemas)) == ("required", [TOOL["name"]])
    assert query.response["tool_choice"] == choice
