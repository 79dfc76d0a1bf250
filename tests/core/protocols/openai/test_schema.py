"""Tests of ``remora.protocols.openai.schema``: the published schema says what the tables do."""

from __future__ import annotations

from typing import Any

import pytest

from remora.generation.tasks import ParameterError
from remora.protocols.openai.fields import CHAT, COMPLETION, RESPONSE, Field, read_fields
from remora.protocols.openai.routes import find_route
from remora.protocols.openai.schema import openapi_document
from remora.protocols.openai.vectors import EMBEDDINGS

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
        "anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}]
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
