"""Requests to language models in bodies whose shape names the route, as hosting platforms pass them on. Pure.

A platform has one path for all requests: a body with ``messages`` is a chat, one with ``prompt`` a completion, one with
``input`` an embedding, one with ``query`` and ``documents`` a reranking. A body with ``inputs`` as text and
``parameters`` has the schema of SageMaker's LMI containers and of text-generation-inference; it becomes a completion,
and the answer is converted back.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from remora.api.http import LONG_BYTES, loads, release
from remora.messages import Buffer
from remora_llm.generation.tasks import ParameterError
from remora_llm.openai.routes import Route

_SHAPES = (
    ({"messages"}, "chat"),
    ({"prompt"}, "completions"),
    ({"query", "documents"}, "rerank"),
    ({"input"}, "embeddings"),
)
_FORMATS = {"chatCompletions": "chat", "completions": "completions"}
"""Values of Vertex AI's ``@requestFormat``."""
_FORMAT = "@requestFormat"
_DEFAULT_NEW_TOKENS = 30
"""Default of LMI's ``max_new_tokens``."""
_SAME_NAMES = ("temperature", "top_k", "top_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed")
_RENAMED = {"max_new_tokens": "max_tokens", "stop": "stop", "stop_sequences": "stop", "ignore_eos_token": "ignore_eos"}
_SWITCHES = ("do_sample", "details", "return_full_text")
_ONLY_DEFAULT: Mapping[str, tuple[Any, ...]] = {
    "decoder_input_details": (False,),
    "watermark": (False,),
    "typical_p": (None, 1.0),
    "best_of": (None, 1),
    "truncate": (None,),
    "top_n_tokens": (None, 0),
    "num_beams": (1,),
    "length_penalty": (1.0,),
}
_REASONS = {"length": "length", "stop": "eos_token"}


class Texts(NamedTuple):
    """What the answer to a body with ``inputs`` depends on."""

    prompts: tuple[str, ...]
    is_list: bool = False
    details: bool = False
    full_text: bool = False


class Shaped(NamedTuple):
    """A body whose shape names a route of OpenAI's.

    ``body`` is OpenAI's. ``texts`` is set if the answer must be converted back, and ``predictions`` is True if it is
    the value of ``predictions``.
    """

    route: Route
    body: Buffer
    texts: Texts | None = None
    predictions: bool = False
    stream: bool = False


def read_shape(body: Buffer) -> Shaped | None:
    """Return the meaning of a body, None for a body of another shape or without JSON.

    Raises:
        ParameterError: a parameter is wrong or not known.
    """
    try:
        document = loads(body)
    except orjson.JSONDecodeError:
        return None
    try:
        return _shaped(document, body)
    finally:
        if len(body) > LONG_BYTES:
            release(document)


def _shaped(document: Any, body: Buffer) -> Shaped | None:
    if not isinstance(document, dict):
        return None
    for names, action in _SHAPES:
        if names <= document.keys():
            return Shaped(Route(action, "POST"), body, stream=document.get("stream") is True)
    if _is_texts(document.get("inputs")):
        return _shaped_texts(document)
    instances = document.get("instances")
    if isinstance(instances, list) and instances and isinstance(instances[0], dict) and _FORMAT in instances[0]:
        return _shaped_instance(instances)
    return None


def _is_texts(inputs: Any) -> bool:
    """Return True if ``inputs`` are texts, not tensors of a V2 request."""
    return isinstance(inputs, str) or (
        isinstance(inputs, list) and bool(inputs) and all(isinstance(each, str) for each in inputs)
    )


def _shaped_instance(instances: Sequence[Any]) -> Shaped:
    if len(instances) != 1:
        raise ParameterError("instances", f"{len(instances)} instances with {_FORMAT} were sent; send one a request")
    instance = dict(instances[0])
    name = instance.pop(_FORMAT)
    if name not in _FORMATS:
        raise ParameterError(_FORMAT, f"{_FORMAT} is {name!r}; it must be one of {', '.join(_FORMATS)}")
    if instance.get("stream"):
        raise ParameterError("stream", "a predict request cannot stream: send the plain body to streamRawPredict")
    return Shaped(Route(_FORMATS[name], "POST"), orjson.dumps(instance), predictions=True)


def _shaped_texts(document: Mapping[str, Any]) -> Shaped:
    """Return a completion for a body of the LMI schema."""
    for name in document:
        if name not in ("inputs", "parameters", "stream", "model"):
            raise ParameterError(name, f"the field {name} is not known beside inputs, parameters and stream")
    inputs = document["inputs"]
    parameters = document.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise ParameterError("parameters", "parameters must be an object")
    switches = {name: _switch(parameters, name) for name in _SWITCHES}
    stream = _switch(document, "stream")
    if stream and isinstance(inputs, list) and len(inputs) > 1:
        raise ParameterError("inputs", "a stream has one text: send a request for each")
    made: dict[str, Any] = {"prompt": inputs, "max_tokens": _DEFAULT_NEW_TOKENS, "stream": stream}
    for name, value in parameters.items():
        if name in _ONLY_DEFAULT:
            if value not in _ONLY_DEFAULT[name]:
                raise ParameterError(name, f"{name} is {value!r}, which is not supported")
        elif name in _RENAMED or name in _SAME_NAMES:
            if value is not None:
                made[str(_RENAMED.get(name, name))] = value
        elif name not in _SWITCHES:
            known = (*_SAME_NAMES, *_RENAMED, *_SWITCHES)
            near = difflib.get_close_matches(str(name), known, 1)
            raise ParameterError(
                str(name), f"the parameter {name} is not known{f'; did you mean {near[0]}?' if near else ''}"
            )
    if not switches["do_sample"]:
        made["temperature"] = 0
    if stream or switches["details"]:
        made |= {"logprobs": 0, "return_token_ids": True}
    if "model" in document:
        made["model"] = document["model"]
    texts = Texts(
        (inputs,) if isinstance(inputs, str) else tuple(inputs),
        isinstance(inputs, list),
        switches["details"],
        switches["return_full_text"],
    )
    return Shaped(Route("completions", "POST"), orjson.dumps(made), texts, stream=stream)


def _switch(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise ParameterError(name, f"{name} is {value!r}; it must be true or false")
    return bool(value)


# -- Answers ----------------------------------------------------------------------------------------------------------


def answer_of_texts(body: bytes, texts: Texts) -> bytes:
    """Return the answer in the LMI schema for a completion."""
    choices = sorted(orjson.loads(body)["choices"], key=lambda choice: choice["index"])
    rows = [_row(choice, prompt, texts) for choice, prompt in zip(choices, texts.prompts, strict=True)]
    return orjson.dumps(rows if texts.is_list else rows[0])


def error_of_texts(body: bytes) -> bytes:
    """Return an error in the form of text-generation-inference for OpenAI's error object."""
    try:
        error = orjson.loads(body)["error"]
        return orjson.dumps({"error": error["message"], "error_type": error["type"]})
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body


def predictions_of(body: bytes) -> bytes:
    """Return an answer as the value of Vertex AI's ``predictions``."""
    return b'{"predictions":' + body + b"}"


def _row(choice: Mapping[str, Any], prompt: str, texts: Texts) -> dict[str, Any]:
    row: dict[str, Any] = {"generated_text": (prompt if texts.full_text else "") + choice["text"]}
    if texts.details:
        ids = choice.get("token_ids") or []
        scores = choice.get("logprobs") or {}
        row["details"] = {
            "finish_reason": _reason(choice),
            "generated_tokens": len(ids),
            "inputs": prompt,
            "tokens": [
                {"id": number, "text": text, "log_prob": score}
                for number, text, score in zip(
                    ids, scores.get("tokens", ()), scores.get("token_logprobs", ()), strict=False
                )
            ],
        }
    return row


def _reason(choice: Mapping[str, Any]) -> str:
    if choice.get("stop_reason") is not None:
        return "stop_sequence"
    reason: str = choice["finish_reason"]
    return _REASONS.get(reason, reason)


class TextStream:
    """Conversion of a completion's events to lines or events of the LMI schema.

    Args:
        texts: of the request.
        events: True for server-sent events, False for JSON lines.
    """

    def __init__(self, texts: Texts, *, events: bool) -> None:
        self._texts = texts
        self._events = events
        self._rest = b""
        self._text: list[str] = []
        self._count = 0

    def feed(self, piece: Buffer) -> bytes:
        """Return what the next bytes of the completion become."""
        *whole, self._rest = (self._rest + bytes(piece)).split(b"\n\n")
        made = []
        for event in whole:
            data = event.removeprefix(b"data: ")
            if data != b"[DONE]":
                made += self._lines(orjson.loads(data))
        return b"".join(made)

    def _lines(self, chunk: Mapping[str, Any]) -> list[bytes]:
        if "error" in chunk:
            error = chunk["error"]
            return [self._line({"error": error["message"], "error_type": error["type"]})]
        made = []
        for choice in chunk["choices"]:
            ids, scores = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("token_logprobs") or []
            text, reason = choice["text"], choice["finish_reason"]
            self._text.append(text)
            self._count += len(ids)
            rows: list[dict[str, Any]] = [
                {"token": {"id": number, "text": "", "log_prob": score}}
                for number, score in zip(ids, scores, strict=False)
            ]
            if rows:
                rows[-1]["token"]["text"] = text
            elif text or reason:
                rows = [{"token": {"id": None, "text": text, "log_prob": None}}]
            if reason:
                rows[-1] |= self._end(choice)
            made += [self._line(row) for row in rows]
        return made

    def _end(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        (prompt,) = self._texts.prompts
        end: dict[str, Any] = {"generated_text": (prompt if self._texts.full_text else "") + "".join(self._text)}
        if self._texts.details:
            end["details"] = {
                "finish_reason": _reason(choice),
                "generated_tokens": self._count,
                "inputs": prompt,
            }
        return end

    def _line(self, row: Mapping[str, Any]) -> bytes:
        return b"data:" + orjson.dumps(row) + b"\n\n" if self._events else orjson.dumps(row) + b"\n"
