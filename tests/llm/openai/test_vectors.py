"""Tests of ``remora_llm.openai.vectors``."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import numpy as np
import pytest

from remora.errors import InvalidArgumentError
from remora_llm.generation.tasks import ParameterError
from remora_llm.openai.replies import Heading
from remora_llm.openai.vectors import (
    VectorQuery,
    decode_vectors,
    encode_embeddings,
    encode_scores,
    similarities,
)

HEADING = Heading("1", 5, "m")


def read(action: str, **fields: Any) -> VectorQuery:
    return decode_vectors(action, json.dumps({"model": "m", **fields}).encode())


def test_one_text_or_a_list_is_embedded() -> None:
    assert read("embeddings", input="a").texts == ("a",)
    assert read("embeddings", input=["a", "b"]).texts == ("a", "b")


def test_tokens_of_one_text_or_several_are_embedded() -> None:
    assert read("embeddings", input=[1, 2, 3]).ids == ((1, 2, 3),)
    assert read("embeddings", input=[[1, 2], [3]]).ids == ((1, 2), (3,))
    assert read("embeddings", input=[1]).texts == ()


def test_a_document_may_be_empty_because_results_of_a_search_may() -> None:
    assert read("rerank", query="q", documents=["", "a"]).texts == ("", "a")


def test_usage_has_the_number_of_tokens() -> None:
    whole = {"prompt_tokens": 7, "total_tokens": 7}
    assert json.loads(encode_embeddings(read("embeddings", input="a"), np.zeros((1, 2)), HEADING, 7))["usage"] == whole
    for query in (read("rerank", query="q", documents=["a"]), read("score", text_1="a", text_2="b")):
        assert json.loads(encode_scores(query, [0.5], HEADING, 7))["usage"] == whole


def test_vectors_are_printed_as_numbers_or_base64() -> None:
    vectors = np.array([[1, 0.5], [2, -1]], np.float64)
    plain = json.loads(encode_embeddings(read("embeddings", input=["a", "b"]), vectors, HEADING))
    assert [(row["index"], row["embedding"]) for row in plain["data"]] == [(0, [1, 0.5]), (1, [2, -1])]
    packed = read("embeddings", input=["a", "b"], encoding_format="base64")
    rows = json.loads(encode_embeddings(packed, vectors, HEADING))["data"]
    assert [struct.unpack("<2f", base64.b64decode(row["embedding"])) for row in rows] == [(1, 0.5), (2, -1)]


def test_another_length_than_the_models_is_refused() -> None:
    query = read("embeddings", input="a", dimensions=3)
    with pytest.raises(ParameterError, match="the model's vectors have 2"):
        encode_embeddings(query, np.zeros((1, 2)), HEADING)


def test_the_best_documents_come_first_and_equal_ones_in_their_order() -> None:
    query = read("rerank", query="q", documents=["a", {"text": "b"}, "c"], top_n=2)
    assert query.pairs == (("q", "q", "q"), ("a", "b", "c"))
    answer = json.loads(encode_scores(query, [0.5, 0.75, 0.5], HEADING))
    assert [(row["index"], row["document"]["text"]) for row in answer["results"]] == [(1, "b"), (0, "a")]
    bare = read("rerank", query="q", documents=["a"], return_documents=False)
    assert "document" not in json.loads(encode_scores(bare, [0.5], HEADING))["results"][0]


def test_texts_are_compared_by_the_angle_of_their_vectors() -> None:
    vectors = np.array([[2.0, 0], [4, 0], [0, 1], [0, 0]])
    assert similarities(vectors, read("rerank", query="q", documents=["a", "b", "c"])) == [1, 0, 0]
    assert similarities(vectors, read("score", text_1=["a", "b"], text_2=["c", "d"])) == [0, 0]


@pytest.mark.parametrize(
    ("action", "fields", "parameter"),
    [
        ("embeddings", {}, "input"),
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": [1, "a"]}, "input"),
        ("embeddings", {"input": [1, True]}, "input"),
        ("embeddings", {"input": [[1], []]}, "input"),
        ("embeddings", {"input": [[1]] * 2049}, "input"),
        ("embeddings", {"input": ""}, "input"),
        ("embeddings", {"input": ["a", ""]}, "input"),
        ("rerank", {"query": "", "documents": ["a"]}, "query"),
        ("score", {"text_1": ["a", ""], "text_2": ["a", "b"]}, "text_1"),
        ("embeddings", {"input": ["a"] * 2049}, "input"),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("rerank", {"documents": ["a"]}, "query"),
        ("rerank", {"query": "q", "documents": []}, "documents"),
        ("rerank", {"query": "q", "documents": [{"image": "x"}]}, "documents"),
        ("score", {"text_1": "a"}, "text_2"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    ],
)
def test_a_wrong_request_is_refused_by_the_name_of_its_parameter(action: str, fields: Any, parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        read(action, **fields)
    assert caught.value.parameter == parameter


def test_a_body_that_is_no_json_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="the body is not JSON"):
        decode_vectors("score", b"{")
