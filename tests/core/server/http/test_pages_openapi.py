"""The OpenAPI document and its examples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remora.engine import Engine
from remora.options import EngineOptions
from remora.server.http.pages import (
    example_of,
    openapi,
    paths_of,
)
from support.wire.page_requests import Ask, get, through_app

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")


def test_openapi_has_a_path_for_each_model_version_and_operation(engine: Engine) -> None:
    document = json.loads(get(engine, "/v2/openapi.json").body)
    assert document["openapi"].startswith("3.1.")
    assert {"title", "version"} <= document["info"].keys()
    for path in ("/v2/models/rows", "/v2/models/rows/versions/1", "/v2/models/half"):
        assert {path, f"{path}/ready", f"{path}/config", f"{path}/stats", f"{path}/infer"} <= document["paths"].keys()
    assert "/v2/models/rows/versions/2" not in document["paths"], "the newest version needs no number"
    assert not [path for path in document["paths"] if "<" in path or "{" in path]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert path.startswith(("/v2", "/models/"))
            assert method in ("get", "post")
            assert operation["responses"]["200"]["description"]


@pytest.mark.parametrize("mode", ["explicit", "ondemand"])
def test_openapi_offers_loading_where_it_is_allowed(repository: Path, mode: str) -> None:
    options = EngineOptions(model_repository=(repository,), model_control_mode=mode)
    with Engine(options=options) as running:
        document = openapi(running, metrics=False)
    (parameter,) = document["paths"]["/v2/repository/models/{model}/load"]["post"]["parameters"]
    assert parameter == {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    assert "/v2/metrics" not in document["paths"]


def test_openapi_describes_the_tensors(engine: Engine) -> None:
    operation = openapi(engine)["paths"]["/v2/models/rows/infer"]["post"]
    content = operation["requestBody"]["content"]["application/json"]
    (tensor,) = content["schema"]["properties"]["inputs"]["items"]["oneOf"]
    assert tensor["properties"]["name"] == {"const": "x"}
    assert tensor["properties"]["datatype"] == {"const": "FP32"}
    assert tensor["properties"]["shape"]["prefixItems"] == [{"type": "integer", "minimum": 0}, {"const": 4}]
    assert content["example"]["inputs"][0]["shape"] == [1, 4]
    answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer["properties"]["model_version"] == {"const": "2"}
    assert answer["properties"]["outputs"]["items"]["oneOf"][0]["properties"]["name"] == {"const": "y"}


def test_openapi_describes_plain_json(engine: Engine) -> None:
    operation = openapi(engine)["paths"]["/models/rows"]["post"]
    row, columns, rows = operation["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
    value = {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}
    assert row["properties"] == {"x": value}
    assert row["required"] == ["x"]
    assert columns["properties"] == {"x": {"type": "array", "items": value}}
    assert rows == {"type": "array", "items": row}
    assert "y" in operation["responses"]["200"]["content"]["application/json"]["schema"]["anyOf"][0]["properties"]


def references(value: Any) -> Iterator[str]:
    """Every $ref in a document."""
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_every_reference_of_openapi_leads_somewhere(engine: Engine) -> None:
    document = openapi(engine)
    found = set(references(document))
    assert found
    for reference in found:
        place: Any = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


def test_the_examples_of_openapi_are_answered(engine: Engine) -> None:
    paths = openapi(engine)["paths"]
    contents = {
        path: paths[path]["post"]["requestBody"]["content"]["application/json"] for path in paths if "/infer" in path
    }
    examples = {path: content["example"] for path, content in contents.items() if "example" in content}
    assert {"/v2/models/rows/infer", "/v2/models/fixed/infer", "/v2/models/words/infer"} <= examples.keys()
    asks = [Ask("POST", path, json.dumps(example).encode()) for path, example in examples.items()]
    assert [got.status for got in through_app(engine, *asks)] == [200] * len(asks)


def test_every_model_that_http_reaches_answers_its_example_binary_or_not(engine: Engine) -> None:
    asks = []
    for model, path in paths_of(engine):
        example = example_of(model)
        header = json.dumps(example.header).encode()
        told = (("Inference-Header-Content-Length", str(len(header))),) if example.zero_bytes else ()
        asks.append(Ask("POST", f"{path}/infer", header + bytes(example.zero_bytes), told))
    assert sum(bool(ask.headers) for ask in asks) == 2, "half and image are binary"
    for ask, got in zip(asks, through_app(engine, *asks), strict=True):
        assert got.status == 200, (ask.path, got.body)
