"""Codec of embeddings, rerank and score. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from remora.api.http import dumps
from remora.messages import Buffer
from remora_llm.generation.tasks import ParameterError
from remora_llm.openai.fields import Field, describe, is_ids, read_body
from remora_llm.openai.replies import Heading

_MAX_TEXTS = 2048
_MODEL = {"model": Field("text"), "user": Field("text", meaning=False, why="concerns OpenAI's own platform")}
EMBEDDINGS: Mapping[str, Field] = {
    **_MODEL,
    "input": Field("any"),
    "encoding_format": Field("text", only=("float", "base64"), why="vectors have these two forms"),
    "dimensions": Field("integer", 1),
}
RERANK: Mapping[str, Field] = {
    **_MODEL,
    "query": Field("text"),
    "documents": Field("list"),
    "top_n": Field("integer", 0),
    "return_documents": Field("boolean"),
}
SCORE: Mapping[str, Field] = {**_MODEL, "text_1": Field("texts"), "text_2": Field("texts")}
VECTORS = ("embeddings", "rerank", "score")
"""Actions of the routes."""
_TABLES = {"embeddings": EMBEDDINGS, "rerank": RERANK, "score": SCORE}


@dataclass(frozen=True, slots=True)
class VectorQuery:
    """Texts to embed, or pairs of texts to compare.

    Attributes:
        action: of the route.
        model: name of the model, empty if there is none.
        texts: to embed, or the documents that are compared.
        ids: token ids of each text to embed, instead of texts.
        queries: to compare with; one for all documents, or one for each.
        base64: vectors are sent as base64 of little-endian floats.
        dimensions: length that the vectors must have, 0 for any.
        top: number of best documents, 0 for all.
        with_documents: the answer repeats the documents.
        ignored: names of unknown fields.
    """

    action: str
    model: str
    texts: tuple[str, ...]
    queries: tuple[str, ...] = ()
    base64: bool = False
    dimensions: int = 0
    top: int = 0
    with_documents: bool = True
    ignored: Sequence[str] = ()
    ids: tuple[tuple[int, ...], ...] = ()

    @property
    def pairs(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Queries and documents of the same number."""
        count = len(self.texts)
        return (self.queries * count if len(self.queries) == 1 else self.queries), self.texts


def decode_vectors(action: str, body: Buffer, *, ignore_unknown: bool = False) -> VectorQuery:
    """Return the query of a body.

    Raises:
        ParameterError: a parameter is wrong.
        InvalidArgumentError: the body is not JSON.
    """
    fields, ignored = read_body(body, _TABLES[action], ignore_unknown=ignore_unknown)
    model = fields.get("model", "")
    if action == "embeddings":
        ids = _ids(fields.get("input"))
        return VectorQuery(
            action,
            model,
            () if ids else _full_texts(fields, "input"),
            base64=fields.get("encoding_format") == "base64",
            dimensions=int(fields.get("dimensions", 0)),
            ignored=ignored,
            ids=ids,
        )
    if action == "rerank":
        if "query" not in fields:
            raise ParameterError("query", "the parameter query is missing")
        documents = [
            each["text"] if isinstance(each, dict) and isinstance(each.get("text"), str) else each
            for each in fields.get("documents", [])
        ]
        texts = _texts({"documents": documents}, "documents")
        return VectorQuery(
            action,
            model,
            texts,
            _full_texts(fields, "query"),
            top=int(fields.get("top_n", 0)),
            with_documents=fields.get("return_documents", True),
            ignored=ignored,
        )
    first, second = _full_texts(fields, "text_1"), _texts(fields, "text_2")
    if len(first) not in (1, len(second)):
        raise ParameterError("text_1", f"text_1 has {len(first)} texts; it must have one, or {len(second)} as text_2")
    return VectorQuery(action, model, second, first, ignored=ignored)


def _texts(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = fields.get(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise ParameterError(name, f"{name} must be a text or a list of texts that is not empty, not {describe(value)}")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise ParameterError(name, f"{name}[{place}] must be a text, not {describe(text)}")
    if len(texts) > _MAX_TEXTS:
        raise ParameterError(name, f"{name} has {len(texts)} texts; at most {_MAX_TEXTS} are allowed")
    return tuple(texts)


def _full_texts(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return texts, none of which is empty, because an empty one cannot be compared."""
    texts = _texts(fields, name)
    for place, text in enumerate(texts):
        if not text:
            where = name if isinstance(fields[name], str) else f"{name}[{place}]"
            raise ParameterError(name, f"{where} is an empty text: leave it out")
    return texts


def _ids(value: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of texts; () for a value that has none."""
    rows = [value] if is_ids(value) else value
    if not isinstance(rows, list) or not rows or not all(map(is_ids, rows)):
        return ()
    if len(rows) > _MAX_TEXTS:
        raise ParameterError("input", f"input has {len(rows)} texts; at most {_MAX_TEXTS} are allowed")
    return tuple(map(tuple, rows))


def similarities(vectors: npt.NDArray[Any], query: VectorQuery) -> list[float]:
    """Return the cosine of each document with its query.

    Args:
        vectors: of the queries, then of the documents.
        query: the texts.
    """
    rows = vectors.reshape(len(vectors), -1).astype(np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows / np.where(norms == 0, 1, norms)
    count = len(query.queries)
    found: list[float] = (rows[:count] * rows[count:]).sum(axis=1).tolist()
    return found


def encode_embeddings(query: VectorQuery, vectors: npt.NDArray[Any], heading: Heading, tokens: int = 0) -> bytes:
    """Return the answer with the vectors [texts, numbers], for texts with that number of tokens.

    Raises:
        ParameterError: the vectors have another length than the request asks for.
    """
    rows = vectors.reshape(len(vectors), -1).astype("<f4")
    if query.dimensions and query.dimensions != rows.shape[1]:
        raise ParameterError(
            "dimensions", f"dimensions is {query.dimensions}; the model's vectors have {rows.shape[1]}"
        )
    data = [
        {"object": "embedding", "index": place, "embedding": _printed(row, query)} for place, row in enumerate(rows)
    ]
    document = {"object": "list", "data": data, "model": heading.model, "usage": _usage(tokens)}
    return dumps(document)


def _printed(row: npt.NDArray[Any], query: VectorQuery) -> Any:
    return base64.b64encode(row.tobytes()).decode() if query.base64 else np.ascontiguousarray(row)


def encode_scores(query: VectorQuery, scores: Sequence[float], heading: Heading, tokens: int = 0) -> bytes:
    """Return the answer to rerank or score: a score for each document.

    ``tokens`` is the number of tokens of all texts.
    """
    if query.action == "score":
        rows = [{"index": place, "object": "score", "score": score} for place, score in enumerate(scores)]
        document = {"id": f"score-{heading.number}", "object": "list", "created": heading.created, "data": rows}
        return orjson.dumps({**document, "model": heading.model, "usage": _usage(tokens)})
    order = sorted(range(len(scores)), key=lambda place: -scores[place])[: query.top or None]
    results = [
        {
            "index": place,
            **({"document": {"text": query.texts[place]}} if query.with_documents else {}),
            "relevance_score": scores[place],
        }
        for place in order
    ]
    return orjson.dumps(
        {"id": f"rerank-{heading.number}", "model": heading.model, "usage": _usage(tokens), "results": results}
    )


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
