"""Tests of ``remora_llm.openai.routes``: paths, and errors as OpenAI's clients expect them."""

from __future__ import annotations

import json

import pytest

from remora.errors import InternalError, InvalidArgumentError, NotFoundError, QueueFullError, UnavailableError
from remora.plugins import ROUTES
from remora.protocols.rest.answer import JSON, HttpAnswer, failure
from remora_llm.generation.tasks import ContextError, ParameterError
from remora_llm.openai.routes import (
    BARE,
    PREFIXES,
    ApiError,
    Route,
    context_exceeded,
    denied,
    error_answer,
    find_route,
    refused,
)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/chat/completions", Route("chat", "POST")),
        ("/v1/responses/input_tokens", Route("input_tokens", "POST")),
        ("/v1/models/a%20b/load", Route("load", "POST", "a b")),
        ("/v1/models/a%2Fb/load", None),
        ("/openai/v1/models/m/unload", Route("unload", "POST", "m")),
        ("/v1/models/load", Route("model", "GET", "load")),
        ("/openai/v1/chat/completions", Route("chat", "POST")),
        ("/v1/completions", Route("completions", "POST")),
        ("/v1/models", Route("models", "GET")),
        ("/openai/v1/models/org%2Fname", Route("model", "GET", "org/name")),
        ("/tokenize", Route("tokenize", "POST")),
        ("/v1/detokenize", Route("detokenize", "POST")),
        ("/v1/models/m:tuned", Route("model", "GET", "m:tuned")),
        ("/v1/models/m:predict", None),
        ("/v1/models/m/versions/2:classify", None),
        ("/v1/models/", None),
        ("/v1/", None),
        ("/v1/chat/completions/", None),
        ("/v2/models/m/generate", None),
        ("/completions", None),
    ],
)
def test_a_path_has_a_route_or_none(path: str, route: Route | None) -> None:
    assert find_route(path) == route


def test_reading_models_is_restricted_as_metadata_and_all_else_as_inference() -> None:
    actions = {
        path: route.v2_action for path in ("/v1/models", "/v1/completions", "/tokenize") if (route := find_route(path))
    }
    assert actions == {"/v1/models": "server_metadata", "/v1/completions": "generate", "/tokenize": "generate"}


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (ParameterError("top_p", "wrong"), 400, "invalid_request_error", "top_p", None),
        (InvalidArgumentError("wrong"), 400, "invalid_request_error", None, None),
        (NotFoundError("gone"), 404, "not_found_error", None, None),
        (QueueFullError("full"), 429, "rate_limit_error", None, None),
        (UnavailableError("stopping"), 503, "server_error", None, None),
        (InternalError("broken"), 500, "server_error", None, None),
        (
            ApiError(404, "no", param="model", reason="model_not_found"),
            404,
            "not_found_error",
            "model",
            "model_not_found",
        ),
    ],
)
def test_an_error_has_openais_object(error: Exception, status: int, kind: str, param: str, code: str) -> None:
    answer = error_answer(error)
    assert answer.status == status
    assert json.loads(bytes(answer.body[0])) == {
        "error": {"message": str(error), "type": kind, "param": param, "code": code}
    }


def test_a_full_queue_names_the_time_of_the_next_attempt() -> None:
    assert (b"Retry-After", b"7") in error_answer(QueueFullError("full", retry_after_s=7)).headers


def test_a_server_that_cannot_answer_now_names_a_time_too() -> None:
    assert (b"Retry-After", b"1") in error_answer(UnavailableError("the model is being unloaded")).headers
    assert error_answer(InternalError("broken")).headers == (JSON,)


def test_the_text_of_an_unexpected_error_stays_in_the_log() -> None:
    answer = error_answer(RuntimeError("/secret/path"))
    assert answer.status == 500
    assert b"secret" not in bytes(answer.body[0])


def test_a_refusal_of_v2_takes_openais_form() -> None:
    answer = refused(failure(403, "expecting header 'key'", plain=True))
    assert answer.status == 403
    assert json.loads(bytes(answer.body[0]))["error"] == {
        "message": "expecting header 'key'",
        "type": "permission_error",
        "param": None,
        "code": None,
    }
    fine = HttpAnswer(200, (), [b"{}"])
    assert refused(fine) is fine


def test_a_refusal_in_json_takes_openais_form_with_its_code_once() -> None:
    answer = refused(failure(429, "too many", plain=False, headers=((b"Retry-After", b"3"),)))
    assert json.loads(bytes(answer.body[0]))["error"]["code"] == "rate_limit_exceeded"
    assert answer.headers.count((b"Content-Type", b"application/json")) == 1
    assert (b"Retry-After", b"3") in answer.headers
    assert refused(answer) is answer


def test_a_missing_secret_asks_for_a_bearer_key_in_openais_form() -> None:
    answer = denied(failure(403, "no", plain=True), "authorization")
    error = json.loads(bytes(answer.body[0]))["error"]
    assert (answer.status, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
    assert dict(answer.headers)[b"WWW-Authenticate"].startswith(b"Bearer")
    assert "'authorization'" in error["message"]


@pytest.mark.parametrize(
    ("error", "is_chat", "sentence"),
    [
        (
            ContextError("prompt", "own words", 512, 600, exact=True),
            True,
            "However, your messages resulted in 600 tokens. Please reduce the length of the messages.",
        ),
        (
            ContextError("prompt", "own words", 512, 513),
            False,
            "However, your prompt resulted in at least 513 tokens. Please reduce the length of the prompt.",
        ),
        (
            ContextError("max_tokens", "own words", 512, 500, 100, exact=True),
            True,
            "However, you requested 600 tokens (500 in the messages, 100 in the completion). "
            "Please reduce the length of the messages or completion.",
        ),
    ],
)
def test_a_request_beyond_the_context_has_openais_sentence_and_code(
    error: ContextError, is_chat: bool, sentence: str
) -> None:
    answer = error_answer(context_exceeded(error, "messages", is_chat=is_chat))
    assert answer.status == 400
    assert json.loads(bytes(answer.body[0]))["error"] == {
        "message": f"This model's maximum context length is 512 tokens. {sentence}",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


def test_the_table_of_plug_ins_has_the_beginnings_of_all_routes() -> None:
    (row,) = (row for row in ROUTES if row.target == "remora_llm.routes.group")
    assert row.prefixes == (*PREFIXES, *BARE)
