"""Swagger documents at /swagger.json, generated from a script's decorators.

A document in the script's folder takes precedence. Azure's studio generates its sample requests from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Document = dict[str, Any]

_FILES = {"2": ("swagger.json", "swagger2.json"), "3": ("swagger3.json",), "3.1": ("swagger3.1.json",)}
_WHOLE = {"2.0": "2", "3.0": "3"}
_JSON, _TEXT = "application/json", "text/plain"
_SECURITY = {
    "Bearer": {
        "type": "apiKey",
        "name": "Authorization",
        "in": "header",
        "description": "Bearer and the endpoint's key",
    }
}
_LOCKED: list[Document] = [{"Bearer": []}]


class Named(NamedTuple):
    """Name, version and path prefix of a deployment, from the ``SERVICE_*`` variables."""

    name: str = "ML service"
    version: str = "1.0"
    prefix: str = ""


class Schemas(NamedTuple):
    """Input and output schemas of a script, and the document versions that can express them."""

    input: Document
    output: Document
    versions: frozenset[str] = frozenset(_FILES)


ANYTHING = Schemas({"type": "object", "example": {}}, {"type": "object", "example": {}})
"""Schemas of a script that declares none."""


class NoDocumentError(Exception):
    """Unknown document version, with the available ones in the text."""


def schemas_of(run: Callable[..., Any], schema_util: Any) -> Schemas:
    """Return the schemas of a decorated ``run`` from inference_schema's ``schema_util``."""
    versions = frozenset(_WHOLE.get(version, version) for version in schema_util.get_supported_versions(run))
    return Schemas(schema_util.get_input_schema(run), schema_util.get_output_schema(run), versions)


def find_document(version: str, root: Path, named: Named, schemas: Schemas) -> bytes:
    """Return the document of version 2, 3 or 3.1. Raises NoDocumentError."""
    version = _WHOLE.get(version, version)
    for name in _FILES.get(version, ()):
        if (root / name).is_file():
            return (root / name).read_bytes()
    if version in schemas.versions:
        return json.dumps(_describe(version, named, schemas)).encode()
    available = [
        one for one in _FILES if one in schemas.versions or any((root / name).is_file() for name in _FILES[one])
    ]
    if version in _FILES:
        raise NoDocumentError(
            f"Swagger version [{version}] is not supported for the scoring script. "
            f"Supported swagger versions: [{', '.join(available)}]."
        )
    raise NoDocumentError(
        f"Swagger version [{version[:20]}] is not valid. Supported versions: [{', '.join(available)}]."
    )


def _describe(version: str, named: Named, schemas: Schemas) -> Document:
    old = version == "2"
    place = "#/definitions/" if old else "#/components/schemas/"

    def answer(text: str, schema: Document, media: str = _JSON) -> Document:
        return {"description": text, **({"schema": schema} if old else {"content": {media: {"schema": schema}}})}

    def route(operation: str, text: str, good: Document, **more: Any) -> Document:
        bad = answer("What went wrong", {"$ref": f"{place}ErrorResponse"})
        return {"operationId": operation, "description": text, "responses": {"200": good, "default": bad}, **more}

    text, takes = {"type": "string"}, {"$ref": f"{place}ServiceInput"}
    which = {"type": "integer", "enum": [2, 3]}
    wanted = {"name": "version", "in": "query", "required": False, **(which if old else {"schema": which})}
    body: Document = {"requestBody": {"description": "What run() is given", "content": {_JSON: {"schema": takes}}}}
    healthy = answer("It does", text if old else {**text, "example": "Healthy"}, _TEXT)
    if old:
        payload = {"name": "serviceInputPayload", "in": "body", "description": "What run() is given", "schema": takes}
        body = {"parameters": [payload]}
        healthy["examples"] = {_JSON: "Healthy"}
    gives = answer("What run() returned", {"$ref": f"{place}ServiceOutput"})
    prefix = f"/{named.prefix.strip('/')}" if named.prefix else ""
    paths = {
        f"{prefix}/": {"get": route("ServiceHealthCheck", "Whether scoring works", healthy)},
        f"{prefix}/score": {"post": route("RunMLService", "Score", gives, security=_LOCKED, **body)},
        f"{prefix}/swagger.json": {
            "get": route("GetSwaggerSpec", "This document", answer("It", text, _TEXT), parameters=[wanted])
        },
    }
    error = {"type": "object", "properties": {"message": text}}
    kinds = {"ServiceInput": schemas.input, "ServiceOutput": schemas.output, "ErrorResponse": error}
    info = {"title": named.name, "description": f"The service {named.name}", "version": named.version}
    if old:
        both = {"schemes": ["https"], "consumes": [_JSON], "produces": [_JSON], "securityDefinitions": _SECURITY}
        return {"swagger": "2.0", "info": info, **both, "paths": paths, "definitions": kinds}
    components = {"schemas": kinds, "securitySchemes": _SECURITY}
    number = "3.0.3" if version == "3" else "3.1.0"
    return {"openapi": number, "info": info, "security": _LOCKED, "paths": paths, "components": components}
