"""Tools of a chat, the grammar of required calls, and the calls in an answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remora.generation.tasks import ParameterError
from remora.generation.tool_calls import PARSERS, ArgumentsPart, CallBegin, TextPart, ToolEvent, ToolParser
from remora.protocols.openai.fields import describe

_MAX_TOOLS = 128
_OPENERS = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "$ref"}
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
"""Keywords whose members are schemas under names."""
_DATA = ("const", "enum", "default", "examples", "allOf")
"""Keywords whose values are not schemas, or stay as they are."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a chat and how they may be called.

    Attributes:
        tools: as in the request, for the chat template.
        choice: "auto", "required", or "named" for the only tool in ``schemas``.
        schemas: schema of the arguments of each tool that may be called.
        parallel: several calls are allowed.
    """

    tools: Sequence[Mapping[str, Any]]
    choice: str
    schemas: Mapping[str, Mapping[str, Any]]
    parallel: bool

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """JSON schema of an answer that must be a call, else None."""
        if self.choice == "auto":
            return None
        if self.choice == "named":
            return next(iter(self.schemas.values()))
        definitions: dict[str, Any] = {}
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
        whole = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not self.parallel:
            whole["maxItems"] = 1
        return {**whole, "$defs": definitions} if definitions else whole

    def parser(self, model_parser: str) -> ToolParser | None:
        """Return a parser for one answer, None if text is only text.

        ``model_parser`` is the model's, for calls that the model decides on.
        """
        if self.choice == "named":
            return _WholeCall(next(iter(self.schemas)))
        name = "json" if self.choice == "required" else model_parser
        made = PARSERS[name]() if name else None
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
    kind, schemas = _read_choice(choice, schemas)
    return ToolUse(tools, kind, schemas, fields.get("parallel_tool_calls", True))


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
        if name not in schemas:
            raise ParameterError("tool_choice", f"tool_choice names {describe(name)}, which is not among the tools")
        return "named", {name: schemas[name]}
    raise ParameterError(
        "tool_choice",
        f"tool_choice must be 'none', 'auto', 'required' or an object with the type 'function' and the name of a "
        f"function, not {describe(choice)}",
    )


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

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: _prefixed(each, prefix) if key == "$ref" else moved(each) for key, each in value.items()}
        return [moved(each) for each in value] if isinstance(value, list) else value

    own = {key: each for key, each in schema.items() if key not in ("$defs", "definitions", "$schema")}
    for holder in ("$defs", "definitions"):
        for name, each in (schema.get(holder) or {}).items():
            definitions[prefix + name] = moved(each)
    return moved(own)


def _prefixed(reference: Any, prefix: str) -> Any:
    if not isinstance(reference, str):
        return reference
    for holder in ("#/$defs/", "#/definitions/"):
        if reference.startswith(holder):
            return f"#/$defs/{prefix}{reference.removeprefix(holder)}"
    return reference
