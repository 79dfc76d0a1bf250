"""Tools of a chat, the grammar of required calls, and the calls in an answer. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remora_llm.generation.tasks import ParameterError
from remora_llm.generation.tool_calls import PARSERS, ArgumentsPart, CallBegin, TextPart, ToolEvent, ToolParser
from remora_llm.openai.fields import describe

_MAX_TOOLS = 128
_MOST_REFERENCES = 8
_OPENERS = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "$ref"}
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
"""Keywords whose members are schemas under names."""
_DATA = ("const", "enum", "default", "examples", "allOf")
"""Keywords whose values are not schemas, or stay as they are."""
_WHOLE = "-whole"
"""Name of a schema that refers to itself, among its definitions."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a chat and how they may be called.

    Attributes:
        tools: as in the request, for the chat template.
        choice: "auto", "required", or "named" for the only tool in ``schemas``.
        schemas: schema of the arguments of each tool that may be called.
        parallel: several calls are allowed.
        form: JSON schema of an answer without calls; None for any text.
    """

    tools: Sequence[Mapping[str, Any]]
    choice: str
    schemas: Mapping[str, Mapping[str, Any]]
    parallel: bool
    form: Mapping[str, Any] | None = None

    @property
    def must_call(self) -> bool:
        """True if an answer without a call is not possible."""
        return self.choice != "auto"

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """JSON schema of an answer that must be a call, or a call or have a form; else None."""
        if self.choice == "named":
            return next(iter(self.schemas.values()))
        if self.choice == "auto" and self.form is None:
            return None
        definitions: dict[str, Any] = {}
        whole = self._calls_schema(definitions)
        if self.choice == "auto":
            whole = {"anyOf": [whole, _with_own_definitions(self.form or {}, "form_", definitions)]}
        return {**whole, "$defs": definitions} if definitions else whole

    def _calls_schema(self, definitions: dict[str, Any]) -> dict[str, Any]:
        """Return the schema of a list of calls, whose definitions are added to ``definitions``."""
        calls = []
        for number, (name, schema) in enumerate(self.schemas.items()):
            arguments = _with_own_definitions(schema, f"tool{number}_", definitions)
            properties = {"name": {"const": name}, "parameters": arguments}
            calls.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                    "additionalProperties": False,
                }
            )
        whole: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not self.parallel:
            whole["maxItems"] = 1
        return whole

    def parser(self, model_parser: str) -> ToolParser | None:
        """Return a parser for one answer, None if text is only text.

        ``model_parser`` is the model's, for calls that the model decides on.
        """
        if self.choice == "named":
            return _WholeCall(next(iter(self.schemas)))
        if self.choice == "required":
            return _OnlyCalls()
        if self.form is not None:
            return _CallsOrForm()
        made = PARSERS[model_parser]() if model_parser else None
        return made if made is None or self.parallel else _FirstCall(made)


class _WholeCall:
    """Parser of an answer that is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._events: list[ToolEvent] = [CallBegin(0, name)]

    def feed(self, text: str) -> list[ToolEvent]:
        begin, self._events = self._events, []
        return [*begin, ArgumentsPart(0, text)] if text else begin

    def finish(self) -> list[ToolEvent]:
        return self.feed("")


class _OnlyCalls:
    """Parser of an answer that is a list of calls by its grammar.

    An answer that is cut before the arguments of a call has no part of that call.
    """

    def __init__(self) -> None:
        self._inner = PARSERS["json"]()

    def feed(self, text: str) -> list[ToolEvent]:
        return [event for event in self._inner.feed(text) if not isinstance(event, TextPart)]

    def finish(self) -> list[ToolEvent]:
        return [event for event in self._inner.finish() if not isinstance(event, TextPart)]


class _CallsOrForm:
    """Parser of an answer that by its grammar is a list of calls or an object, which is text."""

    def __init__(self) -> None:
        self._calls: _OnlyCalls | None = None
        self._is_text = False

    def feed(self, text: str) -> list[ToolEvent]:
        if self._calls is None and not self._is_text and text.strip():
            if text.lstrip().startswith("["):
                self._calls = _OnlyCalls()
            else:
                self._is_text = True
        if self._calls is not None:
            return self._calls.feed(text)
        return [TextPart(text)] if text and self._is_text else []

    def finish(self) -> list[ToolEvent]:
        return [] if self._calls is None else self._calls.finish()


class _FirstCall:
    """Parser that leaves out all calls but the first."""

    def __init__(self, inner: ToolParser) -> None:
        self._inner = inner

    def feed(self, text: str) -> list[ToolEvent]:
        return _of_first(self._inner.feed(text))

    def finish(self) -> list[ToolEvent]:
        return _of_first(self._inner.finish())


def _of_first(events: list[ToolEvent]) -> list[ToolEvent]:
    return [event for event in events if isinstance(event, TextPart) or event.call == 0]


def read_tools(fields: Mapping[str, Any]) -> ToolUse | None:
    """Return the tools of a chat, None if no tool may be called.

    Raises:
        ParameterError: a tool or the choice is not what it should be.
    """
    tools = fields.get("tools")
    choice = fields.get("tool_choice", "auto" if tools else "none")
    if not tools:
        if choice != "none":
            raise ParameterError("tool_choice", "tool_choice needs tools, but the request has none")
        return None
    if len(tools) > _MAX_TOOLS:
        raise ParameterError("tools", f"there are {len(tools)} tools; at most {_MAX_TOOLS} are allowed")
    schemas: dict[str, Mapping[str, Any]] = {}
    for place, tool in enumerate(tools):
        name, schema = _read_tool(tool, f"tools[{place}]")
        if name in schemas:
            raise ParameterError("tools", f"two tools have the name {name!r}")
        schemas[name] = schema
    if choice == "none":
        return None
    kind, allowed = _read_choice(choice, schemas)
    if kind != "named":  # the model reads of no tool that it may not call
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    return ToolUse(tools, kind, allowed, fields.get("parallel_tool_calls", True))


def with_form(use: ToolUse, constraint: Mapping[str, Any], parameter: str) -> ToolUse:
    """Return tools whose answer without calls has the form of vLLM's ``structured_outputs``.

    Raises ParameterError for a form that cannot be told from a list of calls. ``parameter`` has the form.
    """
    schema: Any = {"type": "object"} if constraint.get("json_object") else constraint.get("json")
    form = _as_object(schema)
    if form is None:
        raise ParameterError(
            parameter,
            "with tools that the model may call, the form of its answer must be a JSON schema of an object, so that it "
            "differs from a call: change the form, or set tool_choice to 'none'",
        )
    return replace(use, form=form)


def _as_object(schema: Any) -> Mapping[str, Any] | None:
    """Return a schema that only objects satisfy, None if others may."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return None
    if not isinstance(schema, dict):
        return None
    if "type" not in schema and "properties" in schema:
        return {**schema, "type": "object"}
    return schema if _is_object(schema, schema, 0) else None


def _is_object(schema: Any, root: Mapping[str, Any], depth: int) -> bool:
    """Return True if only objects satisfy a schema within ``root``."""
    if not isinstance(schema, dict) or depth > _MOST_REFERENCES:
        return False
    if schema.get("type") == "object":
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str):
        holder, _, name = reference.removeprefix("#/").partition("/")
        definitions = root.get(holder)
        return isinstance(definitions, dict) and _is_object(definitions.get(name), root, depth + 1)
    for several in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(several, list) and several:
            return all(_is_object(each, root, depth + 1) for each in several)
    return False


def _read_tool(tool: Any, path: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise ParameterError("tools", f"{path} must be an object with the type 'function' and a function")
    function = tool["function"]
    name, schema = function.get("name"), closed(function.get("parameters") or _NO_PARAMETERS)
    if not isinstance(name, str) or not name:
        raise ParameterError("tools", f"{path}.function.name must be a text that is not empty")
    if not isinstance(schema, dict):
        raise ParameterError("tools", f"{path}.function.parameters must be a JSON schema, not {describe(schema)}")
    return name, schema


def _read_choice(choice: Any, schemas: dict[str, Mapping[str, Any]]) -> tuple[str, dict[str, Mapping[str, Any]]]:
    if choice in ("auto", "required"):
        return choice, schemas
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        if not isinstance(name, str) or name not in schemas:
            raise ParameterError("tool_choice", f"tool_choice names {describe(name)}, which is not among the tools")
        return "named", {name: schemas[name]}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools"), schemas)
    raise ParameterError(
        "tool_choice",
        f"tool_choice must be 'none', 'auto', 'required' or an object with the type 'function' and the name of a "
        f"function, or with the type 'allowed_tools', not {describe(choice)}",
    )


def _read_allowed(allowed: Any, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """Return the mode and the tools of an ``allowed_tools``."""
    name = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
        raise ParameterError("tool_choice", f"{name} must be an object with a mode and a list of tools")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise ParameterError("tool_choice", f"{name}.mode must be 'auto' or 'required', not {describe(mode)}")
    found = {}
    for place, tool in enumerate(allowed["tools"]):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        tool_name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(tool_name, str) or tool_name not in schemas:
            raise ParameterError(
                "tool_choice", f"{name}.tools[{place}] names {describe(tool_name)}, which is not among the tools"
            )
        found[tool_name] = schemas[tool_name]
    return mode, found


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it names.

    A schema that leaves others open would let an answer go on with any. Parts of ``allOf`` stay open, because they
    describe one object together.
    """
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: each if key in _DATA else _closed_names(each) if key in _NAMED else closed(each)
        for key, each in schema.items()
    }
    if "properties" in made and not _OPENERS & set(made):
        made["additionalProperties"] = False
    return made


def _closed_names(schemas: Any) -> Any:
    return {name: closed(each) for name, each in schemas.items()} if isinstance(schemas, dict) else schemas


def _with_own_definitions(schema: Any, prefix: str, definitions: dict[str, Any]) -> Any:
    """Return a schema for use inside another one, with its definitions moved to ``definitions``."""

    refers_to_itself = False

    def moved(value: Any) -> Any:
        nonlocal refers_to_itself
        if isinstance(value, dict):
            refers_to_itself = refers_to_itself or value.get("$ref") == "#"
            return {key: _prefixed(each, prefix) if key == "$ref" else moved(each) for key, each in value.items()}
        return [moved(each) for each in value] if isinstance(value, list) else value

    own = {key: each for key, each in schema.items() if key not in ("$defs", "definitions", "$schema")}
    for holder in ("$defs", "definitions"):
        for name, each in (schema.get(holder) or {}).items():
            definitions[prefix + name] = moved(each)
    whole = moved(own)
    if not refers_to_itself:
        return whole
    definitions[f"{prefix}{_WHOLE}"] = whole
    return {"$ref": f"#/$defs/{prefix}{_WHOLE}"}


def _prefixed(reference: Any, prefix: str) -> Any:
    if not isinstance(reference, str):
        return reference
    if reference == "#":
        return f"#/$defs/{prefix}{_WHOLE}"
    for holder in ("#/$defs/", "#/definitions/"):
        if reference.startswith(holder):
            return f"#/$defs/{prefix}{reference.removeprefix(holder)}"
    return reference
