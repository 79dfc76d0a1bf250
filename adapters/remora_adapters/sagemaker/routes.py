"""Routes of SageMaker and the conversion of an invocation's head to V2.

The functions are pure. The body of an invocation stays unchanged, so all of V2 (limits, restrictions, deadlines,
streams) applies to it. Other paths and methods get Triton's refusals without a body [N02].
"""

from __future__ import annotations

import re
from typing import NamedTuple

from remora.api.http import decode_name
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import PLAIN, Headers, HttpAnswer, Refusal, failure
from remora.server.host_routes import HostRoute, RouteTable

BINARY = b"application/vnd.sagemaker-triton.binary+json;json-header-size="
"""Content type of a V2 body with raw tensors, followed by the JSON length in decimal digits."""

ATTRIBUTES = b"X-Amzn-SageMaker-Custom-Attributes"
TARGET_MODEL = b"x-amzn-sagemaker-target-model"
SESSION = b"x-amzn-sagemaker-session-id"
_ATTRIBUTES = ATTRIBUTES.lower()
_ATTRIBUTE_LIMIT = 1024
_OWN_HEADERS = frozenset(
    # SageMaker replaces these, or does not support them, such as compressed bodies [N04].
    (b"content-type", b"content-length", b"content-encoding", b"accept-encoding", b"inference-header-content-length")
)
_TRACE = re.compile(rb"(?:^|[;,\s])(traceparent|tracestate)=([!-+\--:<-~]{1,512})")
_VISIBLE = re.compile(rb"[ -~]*")
_EVENTS = b"text/event-stream"
_NOTHING = HttpAnswer(400, (PLAIN,), [])


class Route(NamedTuple):
    """Action of a request, with the model's name on a multi-model endpoint."""

    action: str
    model: str = ""


_OPEN = {("GET", "/ping"): Route("ping"), ("GET", "/execution-parameters"): Route("execution-parameters")}
OPEN_PATHS = frozenset(path for _, path in _OPEN)
"""Paths that need no permission."""
_ACTIONS = {
    HostRoute("POST", "/invocations", "infer"): "invoke",
    HostRoute("POST", "/models/*/invoke", "infer"): "invoke-model",
    HostRoute("GET", "/models", "index"): "list",
    HostRoute("GET", "/models/", "index"): "list",
    HostRoute("GET", "/models/*", "index"): "get",
    HostRoute("POST", "/models", "load"): "load",
    HostRoute("POST", "/models/", "load"): "load",
    HostRoute("POST", "/models/*", "load"): "load",
    HostRoute("DELETE", "/models", "unload"): "unload",  # without a model: Triton answers 404
    HostRoute("DELETE", "/models/", "unload"): "unload",
    HostRoute("DELETE", "/models/*", "unload"): "unload",
}
"""Routes that need a permission, and their actions here."""
HOST_ROUTES = tuple(_ACTIONS)
_TABLE = RouteTable(HOST_ROUTES)
_OF_ONE_METHOD = ("/ping", "/invocations")


def route(method: str, path: str) -> Route:
    """Return the route of a request.

    Raises Refusal (405), or NotAskedError for an unknown route.
    """
    row = _TABLE.find(method, path)
    if row is None:
        if (method, path) in _OPEN:
            return _OPEN[method, path]
        if path in _OF_ONE_METHOD:
            raise Refusal(405, "Method Not Allowed")
        raise NotAskedError
    action = _ACTIONS[row]
    if "*" not in row.path or action == "load":  # the body of a load names the model
        return Route(action)
    name = decode_name(path.split("/")[2])
    if not name:
        raise NotAskedError
    return Route(action, name)


class NotAskedError(Exception):
    """Path and method that the platform never sends."""


def refusal_of(error: Refusal | NotAskedError) -> HttpAnswer:
    """Return the answer to a request without a route."""
    return error.answer if isinstance(error, Refusal) else _NOTHING


# -- the request ----------------------------------------------------------------------------------------------------


def media_type(head: Head) -> bytes:
    """Return the body's media type in lower case without parameters, or empty."""
    return (head.get(b"content-type") or b"").partition(b";")[0].strip().lower()


def header_length(head: Head) -> bytes | None:
    """Return the JSON length in the content type as text, or None for a JSON body.

    Raises Refusal if the type is not at the start of the header's value, as Triton does.
    """
    value = head.get(b"content-type") or b""
    at = value.find(BINARY)
    if at > 0:
        expected, got = BINARY.decode(), value.decode("latin-1")
        raise Refusal(400, f"expect MIME type for binary data starts with '{expected}', got: {got}")
    return None if at else value[len(BINARY) :]


def wants_events(head: Head) -> bool:
    """Return True if the client of a streaming invocation accepts events."""
    return _EVENTS in (head.get(b"accept") or b"").lower()


def attributes(head: Head) -> bytes:
    """Return the custom attributes to send back, or empty if the platform would refuse them."""
    value = head.get(_ATTRIBUTES) or b""
    return value if len(value) <= _ATTRIBUTE_LIMIT and _VISIBLE.fullmatch(value) else b""


def v2_head(head: Head, path: str, json_length: bytes | None, timeout_ms: int = 0) -> Head:
    """Return the head of the V2 request to ``path`` for an invocation.

    The trace context is taken from the custom attributes, because the platform does not forward its headers.
    ``timeout_ms`` is the request's timeout, 0 for none.
    """
    kept = [(name, value) for name, value in head.headers if name.lower() not in _OWN_HEADERS]
    kept += [(match[1], match[2]) for match in _TRACE.finditer(attributes(head))]
    if json_length is not None:
        kept.append((b"Inference-Header-Content-Length", json_length))
    if timeout_ms:
        kept.append((b"X-Request-Timeout-Ms", b"%d" % timeout_ms))
    return head.to(path, method="POST", headers=tuple(kept))


# -- the answer -----------------------------------------------------------------------------------------------------


def binary_headers(json_length: int) -> Headers:
    """Return the headers of an answer with raw tensors, including the JSON length."""
    return ((b"Content-Type", b"%b%d" % (BINARY, json_length)),)


_OUT_OF_MEMORY = re.compile(
    rb"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|CUDNN_STATUS_ALLOC_FAILED|MemoryError|"
    rb"\bOOM\b|[Ff]ailed to allocate memory|Unable to allocate|Cannot allocate memory|std::bad_alloc|"
    rb"No space left on device|[Oo]ut of memory"
)


def is_out_of_memory(text: bytes) -> bool:
    """Return True for an error about memory or disk space, on which the platform unloads models."""
    return _OUT_OF_MEMORY.search(text) is not None


def memory_aware(answer: HttpAnswer) -> HttpAnswer:
    """Return the answer, with status 507 for an error about memory."""
    if answer.status >= 400 and any(is_out_of_memory(bytes(piece)) for piece in answer.body):
        return answer._replace(status=507, wire=None)
    return answer


def refused(status: int, text: str = "") -> HttpAnswer:
    """Return a text/plain refusal of the multi-model API, with or without an error text.

    The body is ``{"error": text}`` or empty [N05, N06].
    """
    return failure(status, text, plain=True) if text else HttpAnswer(status, (PLAIN,), [])
