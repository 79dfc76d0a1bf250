"""Paths and methods: Triton's routes, and Triton's refusals for the rest."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.rest import routes as v2_routes
from remora.protocols.rest.answer import Refusal
from remora.protocols.rest.routes import Route, route


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v2", Route("server_metadata")),
        ("GET", "/v2/health/live", Route("live", plain_errors=True)),
        ("GET", "/v2/health/ready", Route("ready", plain_errors=True)),
        ("GET", "/v2/models/m", Route("model_metadata", "m")),
        ("GET", "/v2/models/m/versions/01", Route("model_metadata", "m", 1)),
        ("GET", "/v2/models/m/ready", Route("model_ready", "m", plain_errors=True)),
        ("GET", "/v2/models/m/versions/3/config", Route("model_config", "m", 3)),
        ("GET", "/v2/models/stats", Route("all_stats")),
        ("GET", "/v2/models/stats/stats", Route("model_stats", "stats")),
        ("GET", "/v2/models/m/sequences", Route("model_sequences", "m")),
        ("GET", "/v2/models/m/versions/3/sequences", Route("model_sequences", "m", 3)),
        ("GET", "/v2/models/m/explain", Route("model_explain", "m")),
        ("GET", "/v2/models/m/versions/3/explain/a/b", Route("model_explain", "m", 3, request="a/b")),
        ("POST", "/v2/models/m/infer", Route("infer", "m", plain_errors=True)),
        ("POST", "/v2/models/m/versions/9223372036854775807/infer", Route("infer", "m", 2**63 - 1, plain_errors=True)),
        ("POST", "/v2/models/m/generate", Route("generate", "m")),
        ("POST", "/v2/models/m/generate_stream", Route("generate_stream", "m")),
        ("GET", "/v2/models/versions", Route("model_metadata", "versions")),
        ("GET", "/v2/models/add%73ub", Route("model_metadata", "add%73ub")),
        ("GET", "/v2/models/m/trace/setting", Route("trace", "m", verb="GET")),
        ("POST", "/v2/trace/setting", Route("trace", verb="POST")),
        ("GET", "/v2/logging", Route("logging", verb="GET")),
        ("POST", "/v2/repository/index", Route("index")),
        ("POST", "/v2/repository/models/index", Route("index", repository="models")),
        ("POST", "/v2/repository/models/m/load", Route("load", "m")),
        ("POST", "/v2/repository/r/models/m/unload", Route("unload", "m", repository="r")),
        ("GET", "/v2/systemsharedmemory/status", Route("system_shm", verb="status")),
        ("POST", "/v2/cudasharedmemory/region/r/register", Route("cuda_shm", verb="register", region="r")),
    ],
)
def test_a_path_leads_to_its_action(method: str, path: str, expected: Route) -> None:
    assert route(method, path) == expected
    assert route(method.encode(), path) == expected


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/v2/", "/V2", "/v2/health", "/v2/health/live/", "/v2//health/live", "/metrics"),
        *("/v2/models", "/v2/models/", "/v2/models//infer", "/v2/models/m/", "/v2/models/m/nothing"),
        *("/v2/models/m/versions", "/v2/models/m/versions/x/ready", "/v2/models/m/versions/٣/infer"),
        *("/v2/models/m/versions/1/trace/setting", "/v2/systemsharedmemory/region//status"),
        *("/v2/repository", "/v2/repository//index", "/v2/repository/models//load"),
    ],
)
def test_any_other_path_is_not_found(path: str) -> None:
    with pytest.raises(Refusal) as caught:
        route("GET", path)
    answer = caught.value.answer
    assert (answer.status, answer.headers, answer.body) == (
        404,
        ((b"Content-Type", b"text/plain"),),
        [b'{"error":"Not Found"}'],
    )


@pytest.mark.parametrize(
    ("method", "path", "content_type"),
    [
        ("POST", "/v2/health/live", b"text/plain"),
        ("HEAD", "/v2/health/live", b"text/plain"),
        ("GET", "/v2/models/nope/infer", b"text/plain"),
        ("POST", "/v2/models/m/ready", b"text/plain"),
        ("GET", "/v2/models/m/generate", b"application/json"),
        ("POST", "/v2", b"application/json"),
        ("POST", "/v2/models/m/config", b"application/json"),
        ("POST", "/v2/models/m/stats", b"application/json"),
        ("GET", "/v2/repository/index", b"application/json"),
        ("DELETE", "/v2/logging", b"application/json"),
        ("POST", "/v2/systemsharedmemory/status", b"application/json"),
        ("GET", "/v2/systemsharedmemory/register", b"application/json"),
    ],
)
def test_another_method_is_not_allowed(method: str, path: str, content_type: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        route(method, path)
    answer = caught.value.answer
    assert (answer.status, dict(answer.headers)[b"Content-Type"]) == (405, content_type)
    assert answer.body == [b'{"error":"Method Not Allowed"}']


@pytest.mark.parametrize(
    ("tail", "method", "content_type"), [("", "GET", b"application/json"), ("/infer", "POST", b"text/plain")]
)
def test_a_version_beyond_64_bits_is_refused_with_tritons_text(tail: str, method: str, content_type: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        route(method, f"/v2/models/m/versions/99999999999999999999{tail}")
    answer = caught.value.answer
    assert (answer.status, dict(answer.headers)[b"Content-Type"]) == (400, content_type)
    assert json.loads(bytes(answer.body[0]))["error"] == (
        "failed to get model version from specified version string '99999999999999999999' (details: stol), "
        "version should be an integral value > 0"
    )


@given(st.text() | st.lists(st.sampled_from(["v2", "models", "versions", "1", "9" * 5000, "infer", ""])).map("/".join))
def test_any_path_is_routed_or_refused(path: str) -> None:
    for method in ("GET", "POST"):
        try:
            assert route(method, "/" + path).action
        except Refusal as refusal:
            found = refusal.answer.status
        else:
            found = 200
        assert found in (200, 400, 404, 405)


def routed(find: Callable[[str, str], Route], method: str, path: str) -> Route | tuple[int, bytes]:
    try:
        return find(method, path)
    except Refusal as refusal:
        return refusal.answer.status, bytes(refusal.answer.body[0])


METHODS = st.sampled_from(("GET", "POST", "PUT"))
PARTS = st.sampled_from(
    ("v2", "models", "m", "versions", "1", "01", "infer", "ready", "trace", "setting", "logging", "")
)
PATHS = st.lists(PARTS, max_size=7).map(lambda parts: "/" + "/".join(parts))


@given(st.lists(st.tuples(METHODS, PATHS), max_size=12))
def test_a_cached_route_equals_a_fresh_one(asked: list[tuple[str, str]]) -> None:
    for method, path in asked * 2:
        assert routed(route, method, path) == routed(v2_routes._route, method, path)


def test_long_paths_are_not_remembered() -> None:
    v2_routes._remembered.cache_clear()
    for name in ("m" * 300, "m" * 60_000):
        assert route("GET", f"/v2/models/{name}").model == name
    assert not v2_routes._remembered.cache_info().currsize
    route("GET", "/v2/models/m")
    assert v2_routes._remembered.cache_info().currsize == 1
