"""OpenAPI document of OpenAI's routes, made of the tables of their fields. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora_llm.openai.answer_schema import ANSWERS, EVENTS, SCHEMAS
from remora_llm.openai.fields import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    RESPONSE,
    TOKENIZE,
    Field,
)
from remora_llm.openai.routes import MANAGES
from remora_llm.openai.vectors import EMBEDDINGS, RERANK, SCORE

Json = dict[str, Any]

_ROUTES: Mapping[str, tuple[str, Mapping[str, Field], tuple[str, ...]]] = {
    "chat/completions": ("Answer a chat", CHAT, ("model", "messages")),
    "completions": ("Continue prompts", COMPLETION, ("model", "prompt")),
    "responses": ("Answer a conversation", RESPONSE, ("model", "input")),
    "responses/input_tokens": ("Count the tokens of a conversation", RESPONSE, ("model", "input")),
    "embeddings": ("Return vectors of texts", EMBEDDINGS, ("model", "input")),
    "rerank": ("Rank documents by a query", RERANK, ("model", "query", "documents")),
    "score": ("Compare pairs of texts", SCORE, ("model", "text_1", "text_2")),
    "tokenize": ("Return the tokens of a text or chat", TOKENIZE, ("model",)),
    "detokenize": ("Return the text of tokens", DETOKENIZE, ("model", "tokens")),
}
_TEXTS: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_KINDS: Mapping[str, Json] = {
    "any": {},
    "number": {"type": "number"},
    "integer": {"type": "integer"},
    "boolean": {"type": "boolean"},
    "text": {"type": "string"},
    "texts": _TEXTS,
    "integers": {"type": "array", "items": {"type": "integer"}},
    "object": {"type": "object"},
    "list": {"type": "array"},
    "items": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
}
_TOKENS: Json = {"type": "array", "items": {"type": "integer"}}
_TEXTS_OR_TOKENS: Json = {"anyOf": [*_TEXTS["anyOf"], _TOKENS, {"type": "array", "items": _TOKENS}]}
_ANY_FIELD: Mapping[str, Json] = {"input": _TEXTS_OR_TOKENS, "prompt": _TEXTS_OR_TOKENS}
"""Schemas of fields whose kind is wider than what the routes accept."""
_MODEL_NAME: Json = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
_ERRORS = {
    "400": "A parameter is wrong",
    "404": "The model does not exist",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "Too many requests wait",
    "500": "The model failed",
    "503": "The model is being loaded or unloaded",
    "504": "The deadline passed before the first token",
}


def openapi_document(version: str, root_path: str = "", *, ignore_unknown: bool = False) -> Json:
    """Return the document.

    Args:
        version: of the server.
        root_path: path before ``/v1``.
        ignore_unknown: unknown fields are allowed.
    """
    paths: Json = {
        f"{root_path}/v1/models": {"get": _operation("List the models", "Models")},
        f"{root_path}/v1/models/{{model}}": {
            "get": {
                **_operation("Return a model", "Model"),
                "parameters": [_MODEL_NAME],
            }
        },
    }
    for verb in MANAGES:
        paths[f"{root_path}/v1/models/{{model}}/{verb}"] = {
            "post": {**_operation(f"{verb.capitalize()} a model", "Managed"), "parameters": [_MODEL_NAME]}
        }
    for name, (summary, table, required) in _ROUTES.items():
        operation = _operation(summary, ANSWERS[name], EVENTS.get(name, ""))
        schema = {**_object(table, open_=ignore_unknown), "required": list(required)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[f"{root_path}/v1/{name}"] = {"post": operation}
    error = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    }
    holder = {"type": "object", "properties": error, "required": list(error)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "remora: OpenAI's routes", "version": version},
        "paths": paths,
        "components": {
            "schemas": {
                **SCHEMAS,
                "Error": {"type": "object", "properties": {"error": holder}, "required": ["error"]},
            }
        },
    }


def _operation(summary: str, answer: str, event: str = "") -> Json:
    """Return an operation.

    Args:
        summary: of the operation.
        answer: name of the schema of a whole answer.
        event: name of the schema of the events' data, empty for a route without streams.
    """
    kinds: Json = {"application/json": {"schema": {"$ref": f"#/components/schemas/{answer}"}}}
    if event:
        description = f"Server-sent events; the data of each is a {event} or an Error"
        kinds["text/event-stream"] = {"schema": {"type": "string", "description": description}}
    failed = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: Json = {"200": {"description": "The answer", "content": kinds}}
    responses |= {status: {"description": text, "content": failed} for status, text in _ERRORS.items()}
    return {"summary": summary, "responses": responses}


def _object(table: Mapping[str, Field], *, open_: bool = False) -> Json:
    properties = {name: _schema(name, field, open_=open_) for name, field in table.items()}
    return {"type": "object", "properties": properties, "additionalProperties": open_}


def _schema(name: str, field: Field, *, open_: bool) -> Json:
    """Return the schema of a field, which may also be null."""
    if field.kind == "nothing":
        return {"type": "null", "description": f"Not supported: {field.why}."}
    made = dict(_ANY_FIELD.get(name, {}) if field.kind == "any" else _KINDS[field.kind])
    if field.only:
        made = {"enum": [*field.only, None]}
    elif made:
        limits = {"minimum": field.least, "maximum": field.most}
        made |= {key: value for key, value in limits.items() if value is not None}
        made = made if field.members is None else _object(field.members, open_=open_)
        made = {"anyOf": [made, {"type": "null"}]}
    if field.why:
        made["description"] = f"No effect: {field.why}." if not field.meaning else f"{field.why.capitalize()}."
    return made
