"""Paths of OpenAI's routes, and OpenAI's error object."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import orjson

from remora.api.http import decode_name
from remora.errors import RemoraError, UnavailableError
from remora.protocols.rest.answer import BEARER, INTERNAL, JSON, PLAIN, Headers, HttpAnswer
from remora_llm.generation.tasks import ContextError, ParameterError

PREFIXES = ("/v1/", "/openai/v1/")
"""Where the routes are; the second one because KServe's own routes take the first."""
_POST = {
    "chat/completions": "chat",
    "completions": "completions",
    "responses": "responses",
    "responses/input_tokens": "input_tokens",
    "embeddings": "embeddings",
    "rerank": "rerank",
    "score": "score",
    "tokenize": "tokenize",
    "detokenize": "detokenize",
}
MANAGES = ("load", "unload")
"""Actions of the routes below a model that change the server, as V2's repository API does."""
_KSERVE_V1 = re.compile(r"/v1/models/.+:(predict|classify|regress|explain)")
"""Paths below the prefix that belong to KServe V1 and TensorFlow Serving."""
BARE = ("/tokenize", "/detokenize", "/rerank", "/score")
"""Routes that vLLM also has without a prefix."""
_STATUS: Mapping[str, int] = {
    "NOT_FOUND": 404,
    "UNAVAILABLE": 503,
    "INTERNAL": 500,
    "UNKNOWN": 500,
    "CANCELLED": 503,
}
_REASONS = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
"""OpenAI's ``code`` of V2's refusals."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Route(NamedTuple):
    """Route of a path; ``model`` is the name in the path of a single model."""

    action: str
    method: str
    model: str = ""

    @property
    def v2_action(self) -> str:
        """V2's action with the same restrictions."""
        if self.action in MANAGES:
            return self.action
        return "server_metadata" if self.method == "GET" else "generate"


class ApiError(RemoraError):
    """A refusal with its HTTP status, and OpenAI's ``param`` and ``code``."""

    code = "INVALID_ARG"

    def __init__(self, status: int, message: str, *, param: str = "", reason: str = "", headers: Headers = ()) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.reason = reason
        self.headers = headers


def speaks_openai(path: str) -> bool:
    """Return True if errors on a path take OpenAI's form, unless the path is a platform's own."""
    return path in BARE or (path.startswith(PREFIXES) and not _KSERVE_V1.fullmatch(path))


def find_route(path: str) -> Route | None:
    """Return the route of a path, None for any other path."""
    if not speaks_openai(path):
        return None
    rest = next((path[len(prefix) :] for prefix in PREFIXES if path.startswith(prefix)), "")
    if path in BARE:
        rest = path[1:]
    if rest in _POST:
        return Route(_POST[rest], "POST")
    if rest in ("models", "openapi.json"):
        return Route("models" if rest == "models" else "schema", "GET")
    name = rest.removeprefix("models/")
    if not name or name == rest:
        return None
    segment, _, verb = name.rpartition("/")
    if segment and verb in MANAGES:
        model = decode_name(segment)
        return Route(verb, "POST", model) if model else None
    return Route("model", "GET", decode_name(name, may_have_slash=True) or name)


def context_exceeded(error: ContextError, parameter: str, *, is_chat: bool) -> ApiError:
    """Return OpenAI's refusal of a request beyond the context.

    Clients look for its sentence and code.

    ``parameter`` is the name in the request of what is too long.
    """
    most, count, holder = error.limit, error.prompt, "messages" if is_chat else "prompt"
    prefix = f"This model's maximum context length is {most} tokens. However, "
    if error.answer:
        text = (
            f"you requested {count + error.answer} tokens ({count} in the {holder}, {error.answer} in the completion). "
            f"Please reduce the length of the {holder} or completion."
        )
    else:
        about = "" if error.exact else "at least "
        text = f"your {holder} resulted in {about}{count} tokens. Please reduce the length of the {holder}."
    return ApiError(400, prefix + text, param=parameter, reason="context_length_exceeded")


def error_object(error: Exception) -> bytes:
    """Return OpenAI's error object as JSON."""
    status = _status_of(error)
    param = error.param if isinstance(error, ApiError) else ""
    if isinstance(error, ParameterError):
        param = error.parameter
    reason = error.reason if isinstance(error, ApiError) else ""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return orjson.dumps(
        {"error": {"message": message_of(error), "type": kind, "param": param or None, "code": reason or None}}
    )


def error_answer(error: Exception) -> HttpAnswer:
    """Return the HTTP answer for an error; errors without a known cause are 500."""
    headers = error.headers if isinstance(error, ApiError) else ()
    if isinstance(error, UnavailableError):  # such as a model that is being unloaded: another replica may answer
        headers = (*headers, (b"Retry-After", b"%d" % (error.retry_after_s or 1)))
    return HttpAnswer(_status_of(error), (JSON, *headers), [error_object(error)])


def unknown_path(path: str) -> HttpAnswer:
    """Return the answer for a path without a route."""
    return error_answer(ApiError(404, f"there is no route {path[:200]}", reason="unknown_url"))


def denied(answer: HttpAnswer, header: str) -> HttpAnswer:
    """Return a refusal by the rules of access in OpenAI's form.

    ``header`` is the one whose secret is missing or wrong, or "". That is 401, because OpenAI's clients take 403 for a
    valid key without the permission.
    """
    if not header:
        return refused(answer)
    text = f"the API key is missing or wrong: the header '{header}' must have the value that this server expects"
    return error_answer(ApiError(401, text, reason=_REASONS[401], headers=(BEARER,)))


def refused(answer: HttpAnswer) -> HttpAnswer:
    """Return a refusal of V2 in OpenAI's form; other answers stay as they are."""
    if answer.status < 400:
        return answer
    try:
        message = orjson.loads(b"".join(answer.body))["error"]
    except (ValueError, KeyError, TypeError):
        return answer
    if not isinstance(message, str):  # it has the form already
        return answer
    headers = tuple(pair for pair in answer.headers if pair not in (PLAIN, JSON))
    return error_answer(ApiError(answer.status, message, reason=_REASONS.get(answer.status, ""), headers=headers))


def _status_of(error: Exception) -> int:
    if isinstance(error, ApiError):
        return error.status
    if not isinstance(error, RemoraError):
        return 500
    if error.code == "UNAVAILABLE" and error.retry_after_s:
        return 429  # the queue is full: the server works, but for others
    return _STATUS.get(error.code, 400)


def message_of(error: Exception) -> str:
    """Return the text of an error for clients, without lone surrogates."""
    message = error.message if isinstance(error, RemoraError) else INTERNAL
    return message.encode("utf-8", "replace").decode()
