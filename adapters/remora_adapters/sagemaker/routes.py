"""What a SageMaker request asks for, and the V2 request that it stands for; the law: pure, and worked out once a head.

An invocation becomes a V2 request: the head is rewritten here, the body is what it was. So whatever V2 has, limits,
restrictions, deadlines, streams, an invocation has too. What Triton's own front end answers to other paths and methods
[N02] is answered here: its refusals have no body.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from remora.protocols.http1 import Head
from remora.protocols.rest.answer import PLAIN, Headers, HttpAnswer, Refusal, failure

BINARY = b"application/vnd.sagemaker-triton.binary+json;json-header-size="
"""The content type of a V2 body with raw tensors; the JSON part's length in decimal digits follows."""

ATTRIBUTES = b"X-Amzn-SageMaker-Custom-Attributes"
TARGET_MODEL = b"x-amzn-sagemaker-target-model"
SESSION = b"x-amzn-sagemaker-session-id"
_ATTRIBUTES = ATTRIBUTES.lower()
_ATTRIBUTE_LIMIT = 1024
_OWN_HEADERS = frozenset(
    # What V2 reads in them is said otherwise here, or not at all: SageMaker has no compressed bodies [N04].
    (b"content-type", b"content-length", b"content-encoding", b"accept-encoding", b"inference-header-content-length")
)
_TRACE = re.compile(rb"(?:^|[;,\s])(traceparent|tracestate)=([!-+\--:<-~]{1,512})")
_VISIBLE = re.compile(rb"[ -~]*")
_EVENTS = b"text/event-stream"
_NOTHING = HttpAnswer(400, (PLAIN,), [])


class Route(NamedTuple):
    """What is asked for: an action, and for those of a multi-model endpoint the model's name."""

    action: str
    model: str = ""


def route(method: str, path: str) -> Route:
    """The route of a request. Raises Refusal (405), or NotAsked for what has no route."""
    match path.split("/")[1:]:
        case ["ping"]:
            return _only("GET", method, Route("ping"))
        case ["invocations"]:
            return _only("POST", method, Route("invoke"))
        case ["execution-parameters"] if method == "GET":
            return Route("execution-parameters")
        case ["models"] | ["models", ""] if method in ("GET", "POST"):
            return Route("list" if method == "GET" else "load")
        case ["models"] | ["models", ""] if method == "DELETE":
            return Route("unload")  # of no model: Triton says 404
        case ["models", name] if name and method == "POST":
            return Route("load")  # the body says which
        case ["models", name] if name and method in ("GET", "DELETE"):
            return Route("get" if method == "GET" else "unload", name)
        case ["models", name, "invoke"] if name and method == "POST":
            return Route("invoke-model", name)
    raise NotAskedError


def _only(right: str, method: str, found: Route) -> Route:
    if method != right:
        raise Refusal(405, "Method Not Allowed")
    return found


class NotAskedError(Exception):
    """A path and method that the platform never sends."""


def refusal_of(error: Refusal | NotAskedError) -> HttpAnswer:
    """The answer to a request without a route."""
    return error.answer if isinstance(error, Refusal) else _NOTHING


# -- the request ----------------------------------------------------------------------------------------------------


def media_type(head: Head) -> bytes:
    """The body's type in lower case, without parameters; empty without one."""
    return (head.get(b"content-type") or b"").partition(b";")[0].strip().lower()


def header_length(head: Head) -> bytes | None:
    """The length of the JSON part that the content type names, as it is written; None for a body that is all JSON.

    Raises Refusal when the type is not at the very beginning of the header's value, as Triton does.
    """
    value = head.get(b"content-type") or b""
    at = value.find(BINARY)
    if at > 0:
        expected, got = BINARY.decode(), value.decode("latin-1")
        raise Refusal(400, f"expect MIME type for binary data starts with '{expected}', got: {got}")
    return None if at else value[len(BINARY) :]


def wants_events(head: Head) -> bool:
    """Whether the client of a streaming invocation asks for events."""
    return _EVENTS in (head.get(b"accept") or b"").lower()


def attributes(head: Head) -> bytes:
    """The custom attributes to send back; empty when there are none, or none that the platform would let through."""
    value = head.get(_ATTRIBUTES) or b""
    return value if len(value) <= _ATTRIBUTE_LIMIT and _VISIBLE.fullmatch(value) else b""


def v2_head(head: Head, path: str, json_length: bytes | None, timeout_ms: int = 0) -> Head:
    """The head of the V2 request to ``path`` that ``head`` stands for.

    The trace context, which the platform would not carry in headers, is taken out of the custom attributes.
    ``timeout_ms`` is the longest it may take, 0 for any time.
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
    """The headers of an answer with raw tensors: the content type holds the JSON part's length."""
    return ((b"Content-Type", b"%b%d" % (BINARY, json_length)),)


_OUT_OF_MEMORY = re.compile(
    rb"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|CUDNN_STATUS_ALLOC_FAILED|MemoryError|"
    rb"\bOOM\b|[Ff]ailed to allocate memory|Unable to allocate|Cannot allocate memory|std::bad_alloc|"
    rb"No space left on device|[Oo]ut of memory"
)


def is_out_of_memory(text: bytes) -> bool:
    """Whether an error is about memory or room on disk: the platform then unloads other models and comes back."""
    return _OUT_OF_MEMORY.search(text) is not None


def memory_aware(answer: HttpAnswer) -> HttpAnswer:
    """The answer, with 507 in the place of another error when memory was what was missing."""
    if answer.status >= 400 and any(is_out_of_memory(bytes(piece)) for piece in answer.body):
        return answer._replace(status=507, wire=None)
    return answer


def refused(status: int, text: str = "") -> HttpAnswer:
    """A refusal of the multi-model API: ``{"error": text}``, or nothing, as text/plain [N05, N06]."""
    return failure(status, text, plain=True) if text else HttpAnswer(status, (PLAIN,), [])
