"""Paths of other servers: each names a route that this server has, and other paths name none."""

from __future__ import annotations

import re

import pytest

from remora.plugins import HOSTS
from remora.protocols.rest.answer import failure
from remora.protocols.rest.other_routes import nearest_route, with_hint
from remora.protocols.rest.routes import PAGES, route, typed_route
from remora_llm.openai.answer_schema import ANSWERS
from remora_llm.openai.routes import PREFIXES


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/digits:predict",
        "/v1/models/digits/versions/2:predict",
        "/invocations",
        "/predict",
        "/predict/",
        "/score",
        "/generate",
        "/generate_stream",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/models",
        "/v1/models/digits/infer",
        "/2015-03-31/functions/function/invocations",
        "/predictions/digits",
        "/models/digits/infer",
        "/models",
        "/infer?x=1",
        "/docs",
        "/health",
    ],
)
def test_a_path_of_another_server_names_a_route_of_this_one(path: str) -> None:
    hint = nearest_route(path, ["digits"])
    assert "NAME" not in hint
    named = re.findall(r"(?:POST|GET|at|page|and) (/[\w/.]+)", hint)
    assert named, hint
    assert set(re.findall(r"--host-platform (\w+)", hint)) <= set(HOSTS)
    for each in named:
        method = "GET" if f"POST {each}" not in hint else "POST"
        if each not in PAGES and typed_route(each) is None:
            route("POST" if each.endswith(("infer", "index")) else method, each)


@pytest.mark.parametrize("route", ANSWERS)
def test_each_of_openais_routes_names_what_it_needs(route: str) -> None:
    for prefix in PREFIXES:
        assert "OpenAI's routes" in nearest_route(f"{prefix}{route}", ["digits"])


def test_a_model_in_a_path_below_openais_is_the_one_that_is_named() -> None:
    assert "POST /models/c takes plain JSON" in nearest_route("/v1/models/c/infer", ["digits"])


def test_one_of_several_models_is_left_to_the_client() -> None:
    assert "POST /models/NAME takes plain JSON" in nearest_route("/predict", ["a", "b"])
    assert "POST /models/c takes plain JSON" in nearest_route("/v1/models/c:predict", ["a", "b"])


@pytest.mark.parametrize("path", ["/", "/nothing", "/v2x", "/metrics", "/predictors", "/v1"])
def test_a_path_that_no_server_has_names_none(path: str) -> None:
    assert nearest_route(path, ["digits"]) == ""


def test_the_patterns_take_linear_time() -> None:
    assert "listed" in nearest_route("/models/" + "/" * 100_000, [])
    assert "NAME" in nearest_route("/v1/models/" + "a:" * 100_000, [])


def test_a_refusal_names_the_path_and_what_to_use_in_its_place() -> None:
    refusal = failure(404, "Not Found", plain=True)
    answer = with_hint(refusal, "/predict", ["digits"])
    assert (answer.status, b"".join(map(bytes, answer.body))) == (
        404,
        b'{"error":"there is no route /predict: here POST /models/digits takes plain JSON"}',
    )
    assert with_hint(refusal, "/nothing", ["digits"]) is refusal
