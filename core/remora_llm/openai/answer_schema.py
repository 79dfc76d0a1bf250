"""Schemas of the answers of OpenAI's routes, for the OpenAPI document. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora_llm.openai.requests import ROLES

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_WHOLE: Json = {"type": "integer"}
_NUMBER: Json = {"type": "number"}
_ANY: Json = {}


def _null_or(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _one(*values: str) -> Json:
    return {"enum": list(values)}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(always: Mapping[str, Json], sometimes: Mapping[str, Json] | None = None) -> Json:
    """Return the schema of an object with members that are always there, and others."""
    return {"type": "object", "properties": {**always, **(sometimes or {})}, "required": list(always)}


_SCORED: Json = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list(_WHOLE)}
_CHAT_SCORES = _null_or(
    _object(
        {
            "content": _list(_object({**_SCORED, "top_logprobs": _list(_object(_SCORED))})),
            "refusal": {"type": "null"},
        }
    )
)
_SCORES = _null_or(
    _object(
        {
            "tokens": _list(_TEXT),
            "token_logprobs": _list(_null_or(_NUMBER)),
            "text_offset": _list(_WHOLE),
            "top_logprobs": _list(_null_or({"type": "object", "additionalProperties": _NUMBER})),
        }
    )
)
_PROMPT_SCORE = _object({"logprob": _NUMBER, "rank": _WHOLE, "decoded_token": _TEXT})
_PROMPT_SCORES: Json = _list(_null_or({"type": "object", "additionalProperties": _PROMPT_SCORE}))
_REASON = _null_or(_one("stop", "length", "tool_calls"))
_IDS: Json = {
    "stop_reason": {"anyOf": [_TEXT, _WHOLE]},
    "token_ids": _list(_WHOLE),
    "prompt_token_ids": _list(_WHOLE),
    "prompt_logprobs": _PROMPT_SCORES,
}
"""Members that vLLM adds."""
_FUNCTION: Json = {"name": _TEXT, "arguments": _TEXT}
_CALL = _object({"id": _TEXT, "type": _one("function"), "function": _object(_FUNCTION)})
_CALL_PART = _object(
    {"index": _WHOLE, "function": _object({"arguments": _TEXT}, {"name": _TEXT})},
    {"id": _TEXT, "type": _one("function")},
)
_HEAD: Json = {"id": _TEXT, "created": _WHOLE, "model": _TEXT}
_MORE: Json = {
    "system_fingerprint": _TEXT,
    "prompt_token_ids": _list(_WHOLE),
    "prompt_logprobs": _PROMPT_SCORES,
}


def _answer(name: str, choice: Json, usage: Json) -> Json:
    """Return the schema of an answer with choices, or of a chunk of one."""
    always = {**_HEAD, "object": _one(name), "choices": _list(choice)}
    if usage is _ANY:
        return _object(always, {**_MORE, "usage": _null_or(_ref("Usage"))})
    return _object({**always, "usage": usage}, _MORE)


def _choice(content: Json, scores: Json) -> Json:
    return _object({"index": _WHOLE, **content, "logprobs": scores, "finish_reason": _REASON}, _IDS)


_MESSAGE = _object(
    {"role": _one(*ROLES), "content": _null_or(_TEXT), "refusal": {"type": "null"}}, {"tool_calls": _list(_CALL)}
)
_DELTA = _object({}, {"role": _one(*ROLES), "content": _TEXT, "tool_calls": _list(_CALL_PART)})
_VECTOR_USAGE = _object({"prompt_tokens": _WHOLE, "total_tokens": _WHOLE})
_OUTPUT_TEXT = _object(
    {
        "type": _one("output_text"),
        "text": _TEXT,
        "annotations": _list(_ANY),
        "logprobs": _list(_object({**_SCORED, "top_logprobs": _list(_object(_SCORED))})),
    }
)
_ITEM = _object(
    {"id": _TEXT, "type": _one("message", "function_call"), "status": _one("in_progress", "completed", "incomplete")},
    {"role": _one("assistant"), "content": _list(_OUTPUT_TEXT), "call_id": _TEXT, **_FUNCTION},
)
_RESPONSE_USAGE = _object(
    {
        "input_tokens": _WHOLE,
        "input_tokens_details": _object({"cached_tokens": _WHOLE, "cache_write_tokens": _WHOLE}),
        "output_tokens": _WHOLE,
        "output_tokens_details": _object({"reasoning_tokens": _WHOLE}),
        "total_tokens": _WHOLE,
    }
)
_REPEATED = (
    "background",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "store",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncation",
    "user",
)
"""Members of a response that repeat the request."""

SCHEMAS: Mapping[str, Json] = {
    "Usage": _object(
        {
            "prompt_tokens": _WHOLE,
            "completion_tokens": _WHOLE,
            "total_tokens": _WHOLE,
            "prompt_tokens_details": _object({"cached_tokens": _WHOLE}),
        }
    ),
    "Chat": _answer("chat.completion", _choice({"message": _MESSAGE}, _CHAT_SCORES), _ref("Usage")),
    "ChatChunk": _answer("chat.completion.chunk", _choice({"delta": _DELTA}, _CHAT_SCORES), _ANY),
    "Completion": _answer("text_completion", _choice({"text": _TEXT}, _SCORES), _ref("Usage")),
    "CompletionChunk": _answer("text_completion", _choice({"text": _TEXT}, _SCORES), _ANY),
    "Response": _object(
        {
            "id": _TEXT,
            "object": _one("response"),
            "created_at": _WHOLE,
            "status": _one("in_progress", "completed", "incomplete", "failed"),
            "error": _null_or(_object({"code": _TEXT, "message": _TEXT})),
            "incomplete_details": _null_or(_object({"reason": _TEXT})),
            "model": _TEXT,
            "output": _list(_ITEM),
            "temperature": _NUMBER,
            "top_p": _NUMBER,
            "usage": _null_or(_RESPONSE_USAGE),
        },
        {**dict.fromkeys(_REPEATED, _ANY), "system_fingerprint": _TEXT},
    ),
    "ResponseEvent": _object(
        {"type": _TEXT, "sequence_number": _WHOLE},
        {
            "response": _ref("Response"),
            "item": _ANY,
            "part": _ANY,
            "delta": _TEXT,
            "text": _TEXT,
            "logprobs": _list(_ANY),
            "item_id": _TEXT,
            "output_index": _WHOLE,
            "content_index": _WHOLE,
            "name": _TEXT,
            "arguments": _TEXT,
        },
    ),
    "Embeddings": _object(
        {
            "object": _one("list"),
            "data": _list(
                _object(
                    {
                        "object": _one("embedding"),
                        "index": _WHOLE,
                        "embedding": {"anyOf": [_list(_NUMBER), _TEXT]},
                    }
                )
            ),
            "model": _TEXT,
            "usage": _VECTOR_USAGE,
        }
    ),
    "Ranking": _object(
        {
            "id": _TEXT,
            "model": _TEXT,
            "usage": _VECTOR_USAGE,
            "results": _list(
                _object({"index": _WHOLE, "relevance_score": _NUMBER}, {"document": _object({"text": _TEXT})})
            ),
        }
    ),
    "Scores": _object(
        {
            **_HEAD,
            "object": _one("list"),
            "data": _list(_object({"index": _WHOLE, "object": _one("score"), "score": _NUMBER})),
            "usage": _VECTOR_USAGE,
        }
    ),
    "Tokens": _object(
        {"count": _WHOLE, "max_model_len": _WHOLE, "tokens": _list(_WHOLE)}, {"token_strs": _list(_TEXT)}
    ),
    "Text": _object({"prompt": _TEXT}),
    "Model": _object(
        {"id": _TEXT, "object": _one("model"), "created": _WHOLE, "owned_by": _TEXT, "root": _TEXT},
        {"max_model_len": _WHOLE},
    ),
    "Managed": _object({"id": _TEXT, "object": _one("model"), "status": _TEXT}),
    "InputTokens": _object({"object": _one("response.input_tokens"), "input_tokens": _WHOLE}),
    "Models": _object({"object": _one("list"), "data": _list(_ref("Model"))}),
}
ANSWERS: Mapping[str, str] = {
    "chat/completions": "Chat",
    "completions": "Completion",
    "responses": "Response",
    "responses/input_tokens": "InputTokens",
    "embeddings": "Embeddings",
    "rerank": "Ranking",
    "score": "Scores",
    "tokenize": "Tokens",
    "detokenize": "Text",
}
"""Names of the schemas of whole answers, by route."""
EVENTS: Mapping[str, str] = {
    "chat/completions": "ChatChunk",
    "completions": "CompletionChunk",
    "responses": "ResponseEvent",
}
"""Names of the schemas of the events' data, by route; streams of chunks end with ``[DONE]``."""
