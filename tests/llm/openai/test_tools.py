"""Tests of ``remora_llm.openai.tools``."""

from __future__ import annotations

from typing import Any

import pytest

from remora_llm.generation.tasks import ParameterError
from remora_llm.generation.tool_calls import ArgumentsPart, CallBegin, TextPart
from remora_llm.openai.tools import ToolUse, closed, read_tools, with_form

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = CITY) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def tools(choice: Any = None, *given: dict[str, Any], **more: Any) -> ToolUse | None:
    fields = {"tools": list(given or (tool("weather"), tool("time"))), **more}
    return read_tools(fields if choice is None else {**fields, "tool_choice": choice})


def test_tools_without_a_choice_leave_the_decision_to_the_model() -> None:
    use = tools()
    assert use is not None
    assert use.choice == "auto"
    assert use.schema is None


def test_no_tool_is_offered_with_the_choice_none() -> None:
    assert tools("none") is None
    assert read_tools({}) is None
    assert read_tools({"tool_choice": "none"}) is None


def test_a_named_function_makes_the_answer_its_arguments() -> None:
    use = tools({"type": "function", "function": {"name": "time"}})
    assert use is not None
    assert use.schema == CITY
    parser = use.parser("hermes")
    assert parser is not None
    assert parser.feed('{"city"') == [CallBegin(0, "time"), ArgumentsPart(0, '{"city"')]
    assert [*parser.feed(": 1}"), *parser.finish()] == [ArgumentsPart(0, ": 1}")]


def test_a_required_call_is_a_list_of_calls_of_the_tools() -> None:
    use = tools("required")
    assert use is not None
    assert use.schema is not None
    names = [each["properties"]["name"]["const"] for each in use.schema["items"]["anyOf"]]
    assert names == ["weather", "time"]
    parser = use.parser("")
    assert parser is not None
    events = [*parser.feed('[{"name": "time", "parameters": {"city": "x"}}]'), *parser.finish()]
    assert events == [CallBegin(0, "time"), ArgumentsPart(0, '{"city": "x"}')]


def test_definitions_of_several_tools_do_not_collide() -> None:
    schemas = [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": kind}}}
        for kind in ("string", "integer")
    ]
    use = tools("required", tool("one", schemas[0]), tool("two", schemas[1]))
    assert use is not None
    assert use.schema is not None
    assert use.schema["$defs"] == {"tool0_A": {"type": "string"}, "tool1_A": {"type": "integer"}}
    second = use.schema["items"]["anyOf"][1]["properties"]["parameters"]
    assert second["properties"]["a"] == {"$ref": "#/$defs/tool1_A"}


def test_objects_have_no_properties_but_those_that_a_schema_names() -> None:
    inner = {"type": "object", "properties": {"properties": {"type": "string"}}}
    schema = {"properties": {"a": inner, "b": {"enum": [{"properties": {}}]}}, "$defs": {"properties": inner}}
    done = {**inner, "additionalProperties": False}
    assert closed(schema) == {
        "properties": {"a": done, "b": {"enum": [{"properties": {}}]}},
        "$defs": {"properties": done},
        "additionalProperties": False,
    }
    for kept in ({"properties": {}, "additionalProperties": True}, {"allOf": [inner]}, {"type": "object"}):
        assert closed(kept) == kept


def test_without_parallel_calls_only_the_first_one_counts() -> None:
    use = tools(None, parallel_tool_calls=False)
    assert use is not None
    parser = use.parser("hermes")
    assert parser is not None
    call = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    events = [*parser.feed(f"Well: {call}{call}"), *parser.finish()]
    assert events == [TextPart("Well: "), CallBegin(0, "time"), ArgumentsPart(0, "{}")]
    required = tools("required", parallel_tool_calls=False)
    assert required is not None
    assert required.schema is not None
    assert required.schema["maxItems"] == 1


def test_a_model_without_a_format_for_calls_answers_with_text() -> None:
    use = tools()
    assert use is not None
    assert use.parser("") is None


@pytest.mark.parametrize(
    ("fields", "parameter", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [tool("a")], "tool_choice": "sometimes"}, "tool_choice", "must be 'none', 'auto'"),
        (
            {"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tool_choice",
            "not among the tools",
        ),
        ({"tools": [tool("a"), tool("a")]}, "tools", "two tools"),
        ({"tools": ["a"]}, "tools", r"tools\[0\] must be an object"),
        ({"tools": [{"type": "custom"}]}, "tools", "the type 'function'"),
        ({"tools": [tool("")]}, "tools", "must be a text that is not empty"),
        ({"tools": [tool("a", "x")]}, "tools", "must be a JSON schema"),
        ({"tools": [tool(f"t{number}") for number in range(129)]}, "tools", "at most 128"),
    ],
)
def test_a_wrong_tool_or_choice_is_refused_by_name(fields: dict[str, Any], parameter: str, words: str) -> None:
    with pytest.raises(ParameterError, match=words) as caught:
        read_tools(fields)
    assert caught.value.parameter == parameter


CALLS = '[{"name": "time", "parameters": {"city": "x"}}]'


@pytest.mark.parametrize("size", range(len(CALLS)))
def test_a_required_call_that_is_cut_leaves_no_text(size: int) -> None:
    free = tools()
    assert free is not None
    for use in (tools("required"), with_form(free, {"json": CITY}, "response_format")):
        assert use is not None
        parser = use.parser("hermes")
        assert parser is not None
        events = [event for letter in CALLS[:size] for event in parser.feed(letter)] + parser.finish()
        assert not [event for event in events if isinstance(event, TextPart)]
        arguments = "".join(event.text for event in events if isinstance(event, ArgumentsPart))
        assert '{"city": "x"}'.startswith(arguments)


@pytest.mark.parametrize("parts", [['{"city": "x"}'], list(' {"city": "x"}'), ["", "{", '"city": "x"}']])
def test_an_answer_in_the_form_is_text_though_it_may_look_like_a_call(parts: list[str]) -> None:
    use = tools()
    assert use is not None
    parser = with_form(use, {"json": CITY}, "response_format").parser("hermes")
    assert parser is not None
    events = [event for part in parts for event in parser.feed(part)] + parser.finish()
    assert "".join(event.text for event in events if isinstance(event, TextPart)).strip() == '{"city": "x"}'
    assert not [event for event in events if not isinstance(event, TextPart)]


@pytest.mark.parametrize(
    ("constraint", "possible"),
    [
        ({"json_object": True}, True),
        ({"json": CITY}, True),
        ({"json": '{"type": "object"}'}, True),
        ({"json": {"properties": {}}}, True),
        ({"json": {"$ref": "#/$defs/A", "$defs": {"A": CITY}}}, True),
        ({"json": {"anyOf": [CITY, {"type": "object"}]}}, True),
        ({"json": {"anyOf": [CITY, {"type": "array"}]}}, False),
        ({"json": {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}}, False),
        ({"json": {"type": "array"}}, False),
        ({"json": "{"}, False),
        ({"json": {}}, False),
        ({"regex": "a"}, False),
        ({"choice": ["a"]}, False),
    ],
)
def test_a_form_beside_tools_must_differ_from_calls(constraint: dict[str, Any], possible: bool) -> None:
    use = tools()
    assert use is not None
    if possible:
        schema = with_form(use, constraint, "response_format").schema
        assert schema is not None
        assert len(schema["anyOf"]) == 2
    else:
        with pytest.raises(ParameterError, match="must be a JSON schema of an object"):
            with_form(use, constraint, "response_format")


def test_a_form_that_refers_to_itself_keeps_its_meaning_beside_calls() -> None:
    use = tools()
    assert use is not None
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}}
    schema = with_form(use, {"json": tree}, "response_format").schema
    assert schema is not None
    assert schema["anyOf"][1] == {"$ref": "#/$defs/form_-whole"}
    assert schema["$defs"]["form_-whole"]["properties"]["child"] == {"$ref": "#/$defs/form_-whole"}


def allowed(mode: Any, *names: Any) -> dict[str, Any]:
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_the_only_ones(mode: str) -> None:
    use = tools(allowed(mode, "time"))
    assert use is not None
    assert (use.choice, list(use.schemas)) == (mode, ["time"])
    assert [tool["function"]["name"] for tool in use.tools] == ["time"]


@pytest.mark.parametrize(
    "choice",
    [
        allowed("auto", "other"),
        allowed("all", "time"),
        allowed("auto"),
        allowed("auto", 7),
        {"type": "allowed_tools"},
    ],
)
def test_wrong_allowed_tools_are_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="allowed_tools") as caught:
        tools(choice)
    assert caught.value.parameter == "tool_choice"
