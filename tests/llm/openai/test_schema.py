"""Tests of ``remora_llm.openai.schema``: the published schema says what the tables do."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from remora_llm.generation.tasks import ParameterError
from remora_llm.openai.fields import CHAT, COMPLETION, RESPONSE, Field, read_fields
from remora_llm.openai.replies import Heading
from remora_llm.openai.routes import find_route
from remora_llm.openai.schema import openapi_document
from remora_llm.openai.vectors import EMBEDDINGS, VectorQuery, encode_embeddings, encode_scores
from support.wire.openapi_checks import mismatches

DOCUMENT = openapi_document("1.0")


def properties(name: str) -> dict[str, Any]:
    content = DOCUMENT["paths"][f"/v1/{name}"]["post"]["requestBody"]["content"]
    found: dict[str, Any] = content["application/json"]["schema"]["properties"]
    return found


@pytest.mark.parametrize(
    ("name", "table"),
    [("chat/completions", CHAT), ("completions", COMPLETION), ("responses", RESPONSE), ("embeddings", EMBEDDINGS)],
)
def test_each_field_is_published_with_the_reason_of_its_limits(name: str, table: dict[str, Field]) -> None:
    found = properties(name)
    assert list(found) == list(table)
    assert [key for key, field in table.items() if field.why and not found[key].get("description")] == []


def test_every_published_path_has_a_route() -> None:
    for path, operations in DOCUMENT["paths"].items():
        route = find_route(path.replace("{model}", "m"))
        assert route is not None
        assert list(operations) == [route.method.lower()]


def test_published_values_are_accepted_and_others_are_not() -> None:
    assert properties("chat/completions")["temperature"] == {
        "anyOf": [{"type": "number", "minimum": 0, "maximum": 2}, {"type": "null"}]
    }
    for name, schema in properties("chat/completions").items():
        for value in schema.get("enum", ()):
            read_fields({name: value}, CHAT)
        if schema.get("type") == "null":
            with pytest.raises(ParameterError):
                read_fields({name: "x"}, CHAT)


def test_unknown_fields_are_published_as_allowed_only_where_they_are() -> None:
    def is_open(document: Any) -> Any:
        content = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
        return content["application/json"]["schema"]["additionalProperties"]

    assert (is_open(DOCUMENT), is_open(openapi_document("1", ignore_unknown=True))) == (False, True)


@pytest.mark.parametrize("base64", [False, True])
def test_vectors_have_the_members_that_are_published(base64: bool) -> None:
    query = VectorQuery("embeddings", "m", ("a", "b"), base64=base64)
    answer = encode_embeddings(query, np.ones((2, 3), np.float32), Heading("1", 2, "m"))
    schema = DOCUMENT["components"]["schemas"]["Embeddings"]
    assert list(mismatches(orjson.loads(answer), schema, DOCUMENT)) == []


@pytest.mark.parametrize(("action", "kind"), [("rerank", "Ranking"), ("score", "Scores")])
def test_scores_have_the_members_that_are_published(action: str, kind: str) -> None:
    query = VectorQuery(action, "m", ("a", "b"), ("q", "q"), with_documents=True)
    answer = encode_scores(query, [0.5, 1.0], Heading("1", 2, "m"))
    schema = DOCUMENT["components"]["schemas"][kind]
    assert list(mismatches(orjson.loads(answer), schema, DOCUMENT)) == []


def test_a_member_that_is_missing_unknown_or_of_another_type_is_found() -> None:
    schema = DOCUMENT["components"]["schemas"]["Usage"]
    found = list(mismatches({"prompt_tokens": "1", "other": 1, "completion_tokens": 1}, schema, DOCUMENT))
    assert found == [
        ".total_tokens is missing", ".prompt_tokens_details is missing",
        ".prompt_tokens: '1' is not of the type integer", ".other is not in the schema",
    ]  # fmt: skip
