"""Application for browsers, HTML documentation, OpenAPI document and status page.

The pages load no external resources, for servers without internet access, and escape all text that models provide.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from remora._version import __version__
from remora.calls import IndexEntry, RepositoryIndex, ServerMetadata, ServerReady, TensorInfo
from remora.config.function_arguments import FunctionArguments, function_arguments
from remora.engine import Engine
from remora.management.explanation import Explanation
from remora.messages import DTYPES
from remora.models.example_requests import find_example
from remora.models.served_model import ServedModel
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer, failure
from remora.protocols.rest.routes import HOME, METRICS_PATH
from remora.protocols.rest.typed import Field
from remora.server.http.predict import interface_of
from remora.server.http.route_groups import task_of

Json = dict[str, Any]

_HTML = (b"Content-Type", b"text/html; charset=utf-8")
_JSON = (b"Content-Type", b"application/json")
_VARY = (b"Vary", b"Accept")
_POLICY = b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
_HEADERS = (
    (b"Cache-Control", b"no-store"),
    (b"Content-Security-Policy", _POLICY),
    (b"X-Content-Type-Options", b"nosniff"),
)
_SCRIPTS = ("document", "key", "live", "form", "answers", "code", "reports", "openai", "main")
"""Files of the application's script in their order; main.js starts it."""
_HOST = re.compile(r"[A-Za-z0-9.:\[\]-]+")
_PATH_NAME = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@-]+")
"""Names that fit into a path of V2. It does not reach other models, because it is not percent-decoded [H02]."""
_INLINE_ELEMENTS = 1024
"""Elements of the longest example request in JSON; longer examples carry zero bytes instead."""
_NOT_IN_JSON = ("FP16", "BF16")
_JSON_KIND = {
    "b": ("boolean", False),
    "i": ("integer", 0),
    "u": ("integer", 0),
    "f": ("number", 0.5),
    "O": ("string", ""),
}


def render(engine: Engine, head: Head, *, metrics: bool = True) -> HttpAnswer:
    """Return the page at ``head.path``, one of `PAGES`.

    It is rendered from the engine's current state. Rendering is slow for repositories with many models. ``metrics`` is
    True if `METRICS_PATH` is served.
    """
    if head.path == HOME:
        accepts = prefers_html((head.get(b"accept") or b"").decode("latin-1"))
        if head.method not in ("GET", "HEAD") or not accepts:
            return failure(404, "Not Found", plain=True)  # Triton's answer, for clients that are not browsers
        return home_page()
    if head.method not in ("GET", "HEAD"):
        return failure(405, "Method Not Allowed", plain=True, headers=((b"Allow", b"GET, HEAD"),))
    if head.path == "/v2/docs":
        return _page_answer(docs_page(engine, _origin(head) + head.root), _HTML)
    if head.path == "/v2/openapi.json":
        return _page_answer(json.dumps(openapi(engine, head.root, metrics=metrics)), _JSON)
    found = status(engine)
    if prefers_html((head.get(b"accept") or b"").decode("latin-1")):
        return _page_answer(status_page(found), _HTML, _VARY)
    return _page_answer(json.dumps(found), _JSON, _VARY)


@cache
def home_page() -> HttpAnswer:
    """Return the application for browsers: the files of ``home`` as one document.

    Its policy permits this script alone, and connections to this server alone.
    """
    folder = Path(__file__).with_name("home")
    page, style = ((folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    script = "".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    text = page.replace("/* page.css */", style).replace("/* scripts */", script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest())
    policy = (
        _POLICY + b"; script-src 'sha256-" + digest + b"'; connect-src 'self'; img-src data: blob:; media-src blob:"
    )
    headers = tuple((name, policy if name == b"Content-Security-Policy" else value) for name, value in _HEADERS)
    return HttpAnswer(200, (_HTML, _VARY, *headers), [text.encode()])


def _page_answer(text: str, *headers: tuple[bytes, bytes]) -> HttpAnswer:
    return HttpAnswer(200, (*headers, *_HEADERS), [text.encode("utf-8", "replace")])


def _origin(head: Head) -> str:
    """Return the URL of this server from the Host header, if that is valid in a URL."""
    host = (head.get(b"host") or b"").decode("latin-1")
    return f"{head.scheme}://{host if _HOST.fullmatch(host) else 'localhost:8000'}"


def prefers_html(accept: str) -> bool:
    """Return True if an Accept header prefers HTML to JSON.

    ``*/*`` and "", which programs send, prefer JSON.
    """
    weights = {"text/html": 0.0, "application/json": 0.0}
    for part in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        weight = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        if kind in weights:
            try:
                weights[kind] = float(weight)
            except ValueError:
                continue
    return weights["text/html"] > weights["application/json"]


# -- example requests -----------------------------------------------------------------------------------------------


class Example(NamedTuple):
    """Request that a model accepts.

    It holds the JSON and the number of zero bytes after it (0 if all values are JSON). ``file`` in the model's folder
    has the values, "" if they are generated.
    """

    header: Json
    zero_bytes: int
    binary_answer: bool
    file: str = ""


def example_of(model: ServedModel) -> Example:
    """Return a request that fits the model: the one in its folder, or a generated one.

    In the latter variable dimensions are 1, and optional inputs are left out.
    """
    needed = {row.name for row in model.config.input if not row.optional}
    kept = find_example(model.folder, model.signature.inputs, frozenset(needed))
    inputs, zero_bytes = (kept.inputs, 0) if kept is not None else _generated(model, needed)
    header: Json = {"inputs": inputs}
    parameters: Json = {}
    if model.config.HasField("sequence_batching"):
        parameters |= {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
    binary_answer = any(row.datatype in _NOT_IN_JSON for row in model.signature.outputs)
    if binary_answer:
        parameters["binary_data_output"] = True
    if parameters:
        header["parameters"] = parameters
    return Example(header, zero_bytes, binary_answer, "" if kept is None else kept.file)


def _generated(model: ServedModel, needed: set[str]) -> tuple[list[Json], int]:
    """Return generated inputs, and the number of zero bytes that follow their JSON."""
    rows = [row for row in model.signature.inputs if row.name in needed] or list(model.signature.inputs)
    shapes = [[max(dim, 1) if dim < 0 else dim for dim in row.shape] for row in rows]
    counts = [math.prod(shape) for shape in shapes]
    binary = any(row.datatype in _NOT_IN_JSON for row in rows) or sum(counts) > _INLINE_ELEMENTS
    inputs: list[Json] = []
    arguments = function_arguments(model.config)
    zero_bytes = 0
    for row, shape, count in zip(rows, shapes, counts, strict=True):
        tensor: Json = {"name": row.name, "datatype": row.datatype, "shape": shape}
        if binary:
            size = count * (4 if row.datatype == "BYTES" else DTYPES[row.datatype].itemsize)  # 4 zeros: an empty text
            tensor["parameters"] = {"binary_data_size": size}
            zero_bytes += size
        else:
            tensor["data"] = [_example_value(row, arguments)] * count
        inputs.append(tensor)
    return inputs, zero_bytes


def _example_value(row: TensorInfo, arguments: FunctionArguments) -> Any:
    """Return a value of a tensor in V2's JSON; a JSON document is the function's example."""
    element = arguments.element(row.name) if row.name in arguments.documents else None
    return element.decode() if element is not None else _JSON_KIND[DTYPES[row.datatype].kind][1]


def curl_line(example: Example, url: str) -> str:
    """Return a shell command that sends the example.

    All text from models is quoted for the shell.
    """
    text = json.dumps(example.header, separators=(",", ":"))
    answer = " --output answer.bin" if example.binary_answer else ""
    if not example.zero_bytes:
        return f"curl {shlex.quote(url)} -H 'Content-Type: application/json' -d {shlex.quote(text)}{answer}"
    return (
        f"{{ printf %s {shlex.quote(text)}; head -c {example.zero_bytes} /dev/zero; }} | "
        f"curl {shlex.quote(url)} -H 'Content-Type: application/octet-stream' "
        f"-H 'Inference-Header-Content-Length: {len(text)}' --data-binary @-{answer}"
    )


def paths_of(engine: Engine) -> list[tuple[ServedModel, str]]:
    """Return the model versions that HTTP can reach, with their paths.

    The newest version's path has no version.
    """
    served = [model for model in engine.models() if _PATH_NAME.fullmatch(model.name)]
    newest = {model.name: model for model in served}  # versions ascend, so the last is the newest
    found = []
    for model in served:
        if newest[model.name] is model:
            found.append((model, f"/v2/models/{model.name}"))
        else:
            found.append((model, f"/v2/models/{model.name}/versions/{model.version_text}"))
    return found


# -- openapi.json ---------------------------------------------------------------------------------------------------

_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_ERROR_BODY = {"schema": {"$ref": "#/components/schemas/Error"}}
_FAILURES: Json = {
    "default": {
        "description": "What went wrong, as JSON whatever the content type says.",
        "content": {"application/json": _ERROR_BODY, "text/plain": _ERROR_BODY},
    }
}
_EXPLANATION: Json = {"application/json": {"schema": {"$ref": "#/components/schemas/Explanation"}}}
_SERVER_READS = (
    ("/v2", "The server's name, version and extensions"),
    ("/v2/health/live", "Whether the server answers"),
    ("/v2/health/ready", "Whether the server and its models are ready"),
    ("/v2/models/stats", "Statistics of all models"),
    ("/v2/status", "What every model is doing, as JSON or as a page"),
)
_MODEL_READS = (
    ("", "Names, datatypes and shapes of inputs and outputs"),
    ("/ready", "Whether the model is ready"),
    ("/config", "The whole configuration"),
    ("/stats", "Statistics"),
    ("/explain", "Why batches had the size they had, and what would change it"),
)


def openapi(engine: Engine, root_path: str = "", *, metrics: bool = True) -> Json:
    """Return an OpenAPI 3.1 document of the ready models.

    ``root_path`` is the mount path of an ASGI app.
    """
    info = engine.perform(ServerMetadata())
    paths: Json = {path: {"get": _read(summary, "server")} for path, summary in _SERVER_READS}
    if metrics:
        paths[METRICS_PATH] = {"get": _read("Metrics for Prometheus", "server", "text/plain")}
    paths["/v2/repository/index"] = {"post": _read("All models of the repositories, loaded or not", "repository")}
    if engine.options.model_control_mode in ("explicit", "ondemand"):
        name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        for verb, summary in (("load", "Load or reload a model"), ("unload", "Take a model out of service")):
            operation = _read(summary, "repository") | {"parameters": [name]}
            paths[f"/v2/repository/models/{{model}}/{verb}"] = {"post": operation}
    for model, path in paths_of(engine):
        for rest, summary in _MODEL_READS:
            paths[path + rest] = {"get": _read(summary, model.name)}
        if model.config.HasField("sequence_batching"):
            paths[f"{path}/sequences"] = {
                "get": _read("The sequences that live, and what became of others", model.name)
            }
        paths[f"{path}/explain"]["get"]["responses"]["200"]["content"] = _EXPLANATION
        if not model.decoupled:  # this route cannot send any number of responses [H09]
            paths[f"{path}/infer"] = {"post": _infer(model)}
            paths[path.removeprefix("/v2")] = {"post": _typed(model)}
    return {
        "openapi": "3.1.0",
        "info": {"title": info.name, "version": info.version, "summary": f"Models served by remora {__version__}"},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR, "Explanation": schema_of(Explanation)}},
    }


def _read(summary: str, tag: str, media_type: str = "application/json") -> Json:
    content: Json = {} if summary.startswith("Whether") else {"content": {media_type: {}}}
    return {"summary": summary, "tags": [tag], "responses": {"200": {"description": "OK"} | content, **_FAILURES}}


def _infer(model: ServedModel) -> Json:
    """Return the infer operation.

    It has the example if that is all JSON, because a document holds no binary data.
    """
    example = example_of(model)
    body: Json = {"schema": _message(model, sent=True)}
    if example.file:
        body["examples"] = {"recorded": {"summary": example.file, "value": example.header}}
    elif not example.zero_bytes:
        body["example"] = example.header
    answers: Json = {"schema": _message(model, sent=False)}
    binary = "JSON, then the tensors' bytes: Inference-Header-Content-Length says how long the JSON is."
    octets: Json = {"application/octet-stream": {"schema": {"description": binary}}}
    ok = {"description": "The outputs.", "content": {"application/json": answers, **octets}}
    return {
        "summary": f"Run {model.name}, version {model.version_text}",
        "tags": [model.name],
        "requestBody": {"required": True, "content": {"application/json": body, **octets}},
        "responses": {"200": ok, **_FAILURES},
    }


def _typed(model: ServedModel) -> Json:
    """Return the operation that takes and returns plain JSON."""
    interface = interface_of(model)
    body: Json = {"schema": _plain(interface.inputs)}
    answer: Json = {"schema": _plain(interface.outputs)}
    return {
        "summary": f"Run {model.name}, version {model.version_text}, with plain JSON",
        "tags": [model.name],
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {
            "200": {"description": "In the form of the request.", "content": {"application/json": answer}},
            **_FAILURES,
        },
    }


def _plain(fields: Mapping[str, Field]) -> Json:
    """Return the schema of one row, of lists of rows for each name, and of a list of rows."""
    values = {name: _value(field) for name, field in fields.items()}
    wanted = [name for name, field in fields.items() if not field.optional]
    one: Json = {"type": "object", "required": wanted, "properties": values, "additionalProperties": False}
    columns = {name: {"type": "array", "items": value} for name, value in values.items()}
    return {"anyOf": [one, one | {"properties": columns}, {"type": "array", "items": one}]}


def _value(field: Field) -> Json:
    """Return the schema of one row of a tensor."""
    if field.is_document:
        return {"description": "any JSON"}
    datatype = field.tensor.datatype
    schema: Json = {"type": "number" if datatype == "BF16" else _JSON_KIND[DTYPES[datatype].kind][0]}
    for size in () if field.is_scalar else reversed(field.dims):
        schema = {"type": "array", "items": schema}
        if size >= 0:
            schema |= {"minItems": size, "maxItems": size}
    return schema


def _message(model: ServedModel, *, sent: bool) -> Json:
    """Return the schema of a request (``sent``) or an answer."""
    signature = model.signature
    tensors = _tensors(signature.inputs if sent else signature.outputs)
    properties: Json = {"id": {"type": "string"}, "parameters": {"type": "object"}}
    if not sent:
        properties |= {"model_name": {"const": model.name}, "model_version": {"const": model.version_text}}
        properties["outputs"] = tensors
        return {"type": "object", "required": ["model_name", "model_version", "outputs"], "properties": properties}
    tensors["minItems"] = sum(not row.optional for row in model.config.input)
    names = {"enum": [row.name for row in signature.outputs]}
    wanted = {"type": "object", "required": ["name"], "properties": {"name": names, "parameters": {"type": "object"}}}
    properties |= {"inputs": tensors, "outputs": {"type": "array", "items": wanted}}
    return {"type": "object", "required": ["inputs"], "properties": properties}


def _tensors(rows: Iterable[TensorInfo]) -> Json:
    schemas = [_tensor(row) for row in rows]
    return {"type": "array", "maxItems": len(schemas), "items": {"oneOf": schemas} if schemas else {}}


def _tensor(row: TensorInfo) -> Json:
    dims: list[Json] = [{"const": dim} if dim >= 0 else {"type": "integer", "minimum": 0} for dim in row.shape]
    shape: Json = {"type": "array", "minItems": len(dims), "maxItems": len(dims)}
    if dims:
        shape["prefixItems"] = dims
    properties: Json = {"name": {"const": row.name}, "datatype": {"const": row.datatype}, "shape": shape}
    properties["parameters"] = {"type": "object"}
    if row.datatype not in _NOT_IN_JSON:
        kind = _JSON_KIND[DTYPES[row.datatype].kind][0]
        values = {"anyOf": [{"type": kind}, {"type": "array"}]}
        properties["data"] = {"type": "array", "description": "row by row, flat or nested", "items": values}
    return {"title": row.name, "type": "object", "required": ["name", "datatype", "shape"], "properties": properties}


# -- status ---------------------------------------------------------------------------------------------------------


def status(engine: Engine) -> Json:
    """Return the state of every model of the repositories.

    Each key of a time ends with its unit.
    """
    served = {(model.name, model.version_text): model for model in engine.models()}
    info = engine.perform(ServerMetadata())
    entries = engine.perform(RepositoryIndex())
    return {
        "server": {
            "name": info.name,
            "version": info.version,
            "ready": engine.perform(ServerReady()),
            "control": engine.options.model_control_mode,
        },
        "models": [_model_status(entry, served.get((entry.name, entry.version))) for entry in entries],
    }


def _model_status(entry: IndexEntry, model: ServedModel | None) -> Json:
    if model is None:
        return entry._asdict()
    numbers = model.statistics.snapshot(model.name, model.version_text)
    successes = max(numbers.success.count, 1)
    return entry._asdict() | {
        "backend": model.config.backend or model.platform,
        "openai": task_of(model),
        "generates": model.generation is not None,
        "load_ms": round(model.load_record.duration_ns / 1e6, 3),
        "requests": {
            "success": max(numbers.success.count - model.statistics.returned_errors, 0),
            **dict(model.statistics.failures),
        },
        "inferences": numbers.inference_count,
        "executions": numbers.execution_count,
        "mean_us": {
            "request": round(numbers.success.ns / successes / 1e3, 1),
            "queue": round(numbers.queue.ns / successes / 1e3, 1),
            "compute": round(numbers.compute_infer.ns / successes / 1e3, 1),
        },
        "queue": {"waiting": model.scheduler.pending, "running": model.scheduler.running},
        "dispatches": dict(model.statistics.dispatches),
        "batches": {str(batch.batch_size): batch.compute_infer.count for batch in numbers.batches},
        "batch_cost_us": {str(rows): round(ns / 1e3, 1) for rows, ns in model.scheduler.costs.curve().items()},
    }


# -- HTML -----------------------------------------------------------------------------------------------------------

_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto}"
    "table{border-collapse:collapse;margin:.5rem 0}td,th{border:1px solid #8886;padding:.2rem .6rem;text-align:left;"
    "vertical-align:top}pre{background:#8882;padding:.6rem;overflow-x:auto}"
)
_LINKS = '<p><a href="docs">models</a> · <a href="status">status</a> · <a href="openapi.json">openapi.json</a></p>'
_COLUMNS = {
    "name": "model", "version": "version", "state": "state", "backend": "backend", "load_ms": "load ms",
    "requests": "requests", "inferences": "inferences", "executions": "executions", "mean_us": "mean µs",
    "queue": "queue", "dispatches": "why batches ran", "batches": "batches by size",
    "batch_cost_us": "µs by batch size", "reason": "reason",
}  # fmt: skip


def docs_page(engine: Engine, origin: str) -> str:
    """Return a page with each model's inputs, outputs and example command.

    ``origin`` is this server's URL.
    """
    parts = []
    for model, path in paths_of(engine):
        rows = [("input", *row) for row in model.signature.inputs]
        rows += [("output", *row) for row in model.signature.outputs]
        parts.append(f"<h2>{_escaped(model.name)} <small>version {_escaped(model.version_text)}</small></h2>")
        parts.append(_table(("", "name", "datatype", "shape"), rows))
        if model.decoupled:
            parts.append("<p>Answers any number of times: ask it over gRPC, with ModelStreamInfer.</p>")
        else:
            parts.append(f"<pre>{_escaped(curl_line(example_of(model), f'{origin}{path}/infer'))}</pre>")
    return _page("Models", "".join(parts) or "<p>No model is ready.</p>")


def status_page(found: Json) -> str:
    """Return a page with the result of `status` as a table."""
    server = found["server"]
    ready = "ready" if server["ready"] else "not ready"
    rows = [[model.get(key, "") for key in _COLUMNS] for model in found["models"]]
    first = f"<p>{_escaped(server['name'])} {_escaped(server['version'])}: {ready}</p>"
    return _page("Status", first + _table(_COLUMNS.values(), rows))


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title} - remora</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1>{_LINKS}{body}</html>"
    )


def _table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return an HTML table whose cells are escaped text."""
    lines = ["".join(f"<th>{_escaped(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{_escaped(_cell(cell))}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell(value: object) -> object:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {number}" for key, number in value.items() if number)
    return list(value) if isinstance(value, tuple) else value


def _escaped(value: object) -> str:
    return html.escape(str(value), quote=True)


_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type.

    It may be a plain type, a dataclass, a union, ``tuple[T, ...]`` or ``dict[str, T]``. Raises TypeError for any other
    type.
    """
    if kind in _KINDS:
        return {"type": _KINDS[kind]}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return {"anyOf": [schema_of(each) for each in arguments]}
    if origin is tuple:
        return {"type": "array", "items": schema_of(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    if not is_dataclass(kind):
        raise TypeError(f"there is no JSON schema for {kind}")
    properties = {name: schema_of(each) for name, each in get_type_hints(kind).items()}
    return {"type": "object", "required": list(properties), "properties": properties}
