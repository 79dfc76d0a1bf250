"""Example request of a server's only model, from its OpenAPI document and its metadata.

It stands for the request of a user who passed none: as a V2 request, or as instances of a predict request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from remora.system.json_text import read_json
from remora_deploy.emulate import Failed
from remora_deploy.emulate.asking import HttpReply
from remora_deploy.emulate.stage import Stage

Send = Callable[[Stage, str, str, bytes], HttpReply]
"""Function that sends a request with this method, path and body as the platform does."""
Found = TypeVar("Found")
_INFER = "/infer"
_READY_S = 30.0
_LOOK_S = 0.02


class ModelExample(NamedTuple):
    """Path of a model's inference, and its request as V2 and as predict; empty where unknown."""

    path: str = ""
    v2: bytes = b""
    instances: bytes = b""


def send_to_container(stage: Stage, method: str, path: str, body: bytes) -> HttpReply:
    """Send a request to the container's port."""
    headers = {"Content-Type": "application/json"} if body else {}
    return stage.ask(method, path, body or None, headers)


def find_when_ready(stage: Stage, send: Send, find: Callable[[Stage, Send], Found]) -> Found:
    """Return what ``find`` reads from the server, in vain only once no model is being loaded.

    Cloud Run's probe permits a server that listens before its models are loaded.
    """
    end = time.monotonic() + _READY_S
    while True:
        loading = send is send_to_container and _is_loading(stage)
        found = find(stage, send)
        if found or not loading or time.monotonic() > end:
            return found
        time.sleep(_LOOK_S)


def _is_loading(stage: Stage) -> bool:
    """Return True if V2's probes say that the server is live and not ready."""
    try:
        live, ready = (stage.ask("GET", f"/v2/health/{probe}", None, {}).status for probe in ("live", "ready"))
    except Failed:
        return False
    return live == 200 and ready in (400, 503)


def only_model(stage: Stage, send: Send = send_to_container) -> ModelExample:
    """Return the example of the user's path for inference, or else of the server's only model."""
    known = stage.facts.get("example")
    if not isinstance(known, ModelExample):
        known = stage.facts["example"] = find_when_ready(stage, send, _read) or ModelExample()
    return known


def v2_request(stage: Stage) -> bytes:
    """Return the only model's V2 request, or b""."""
    return only_model(stage).v2


def predict_request(stage: Stage) -> bytes:
    """Return the only model's predict request, or b""."""
    return only_model(stage).instances


def _read(stage: Stage, send: Send) -> ModelExample | None:
    try:
        document = send(stage, "GET", "/v2/openapi.json", b"").body
        found = example_in(document, stage.settings.given.get("path", ""))
        if not found.path:
            return None
        metadata = send(stage, "GET", found.path.removesuffix(_INFER), b"").body
    except Failed:  # a function that answers no HTTP events
        return None
    return found._replace(instances=instances_of(found.v2, metadata))


def example_in(document: bytes, path: str = "") -> ModelExample:
    """Return the example of one path in an OpenAPI document, or of its only route for inference."""
    try:
        routes = {at: row["post"] for at, row in read_json(document)["paths"].items() if at.endswith(_INFER)}
        ((found, operation),) = ((at, row) for at, row in routes.items() if path in ("", at))
        content = operation["requestBody"]["content"]["application/json"]
        example = next((each["value"] for each in content.get("examples", {}).values()), content.get("example"))
    except (ValueError, KeyError, TypeError, AttributeError):  # no such document, or several models
        return ModelExample()
    return ModelExample(str(found), json.dumps(example).encode() if example else b"")


def instances_of(request: bytes, metadata: bytes) -> bytes:
    """Return a V2 request with one row as a predict request with one instance.

    Returns b"" for what is no such request or metadata.
    """
    try:
        tensors = read_json(request)["inputs"]
        shapes = {row["name"]: row["shape"] for row in read_json(metadata)["inputs"]}
        stacked = all(shape and int(shape[0]) < 0 for shape in shapes.values())  # else an instance is a whole tensor
        values = {
            each["name"]: _nested(each["data"], each["shape"][1:] if stacked else each["shape"]) for each in tensors
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return b""
    one: Any = next(iter(values.values())) if len(shapes) == 1 and values else values
    return json.dumps({"instances": [one]}).encode()


def _nested(data: list[Any], shape: list[int]) -> Any:
    """Return a flat list as nested lists of a shape."""
    for size in reversed(shape):
        data = [data[at : at + size] for at in range(0, len(data), size)]
    return data[0]
