"""CORS: which pages may read responses, and what a preflight gets, with and without keys and front processes."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path

import pytest

from remora.protocols.cross_site import SharedOrigins
from support.servers.hosting import Got, ask, running_container, v2_request, write_scale

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

PAGE, OTHER = "https://app.example", "https://evil.example"
KEY = f"page:infer=sha256:{hashlib.sha256(b'key').hexdigest()}"
INFER = "/v2/models/scale/infer"
REQUEST = v2_request([[1.0, 2.0, 3.0, 4.0]])
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,x-api-key"}
FRONTS = pytest.param("2", marks=pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_scale(folder / "scale")
    return folder


serving = partial(running_container, allow_grpc=False)


def shared_with(got: Got) -> str | None:
    return got.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("fronts", ["0", FRONTS])
def test_pages_of_a_named_origin_read_answers_and_errors_and_others_do_not(repository: Path, fronts: str) -> None:
    with serving(repository, cors_origin=(PAGE,), api_key=(KEY,), frontends=fronts) as ports:
        for path, body, key, status in (
            (INFER, REQUEST, {"X-API-Key": "key"}, 200),
            (INFER, REQUEST, {}, 401),
            ("/v2/models/none/infer", REQUEST, {"X-API-Key": "key"}, 404),
            ("/v2/repository/index", {}, {"X-API-Key": "key"}, 403),
        ):
            got = ask(ports.http, "POST", path, body, {**key, "Origin": PAGE})
            assert (got.status, shared_with(got), got.headers["vary"]) == (status, PAGE, "Origin"), path
            assert "access-control-allow-credentials" not in got.headers
            for origin in ({}, {"Origin": OTHER}, {"Origin": "null"}, {"Origin": f"{PAGE}.evil.example"}):
                assert shared_with(ask(ports.http, "POST", path, body, {**key, **origin})) is None
        assert shared_with(ask(ports.metrics, "GET", "/metrics", headers={"Origin": PAGE})) is None


def test_caches_keep_answers_to_named_and_other_origins_apart(repository: Path) -> None:
    with serving(repository, cors_origin=(PAGE,)) as ports:
        for origin in ({}, {"Origin": OTHER}, {"Origin": PAGE}):
            assert ask(ports.http, "GET", "/v2", headers=origin).headers["vary"] == "Origin"
    with serving(repository, cors_origin=("*",)) as ports:
        assert "vary" not in ask(ports.http, "GET", "/v2", headers={"Origin": PAGE}).headers


@pytest.mark.parametrize("fronts", ["0", FRONTS])
def test_a_preflight_is_answered_without_a_key_for_a_named_origin_only(repository: Path, fronts: str) -> None:
    with serving(repository, cors_origin=(PAGE,), api_key=(KEY,), frontends=fronts) as ports:
        got = ask(ports.http, "OPTIONS", INFER, headers={**PREFLIGHT, "Origin": PAGE})
        assert (got.status, got.body, shared_with(got)) == (204, b"", PAGE)
        assert got.headers["access-control-allow-headers"] == "content-type, x-api-key"
        assert "POST" in got.headers["access-control-allow-methods"]
        refused = ask(ports.http, "OPTIONS", INFER, headers={**PREFLIGHT, "Origin": OTHER})
        assert (refused.status, shared_with(refused)) == (401, None)


def test_a_foreign_host_name_is_refused_before_a_preflight(repository: Path) -> None:
    with serving(repository, cors_origin=(PAGE,)) as ports:
        got = ask(ports.http, "OPTIONS", INFER, headers={**PREFLIGHT, "Origin": PAGE, "Host": "evil.example"})
        assert (got.status, shared_with(got)) == (403, None)


@pytest.mark.parametrize("path", ["/", "/v2/docs", "/v2/status", "/v2"])
def test_the_answer_to_a_foreign_host_name_is_inert(repository: Path, path: str) -> None:
    host = '"><script>alert(1)</script>'
    with serving(repository) as ports:
        got = ask(ports.http, "GET", path, headers={"Host": host, "Accept": "text/html"})
    assert got.status == 403
    assert "<" not in got.body.decode()
    assert got.headers["content-security-policy"].startswith("default-src 'none'")
    assert got.headers["x-content-type-options"] == "nosniff"
    assert got.headers["content-type"] == "text/plain"


def test_a_stream_is_shared_too(repository: Path) -> None:
    with serving(repository, cors_origin=("*",)) as ports:
        body = {"x": [1.0, 2.0, 3.0, 4.0]}
        got = ask(ports.http, "POST", "/v2/models/scale/generate_stream", body, {"Origin": OTHER})
        assert (got.status, shared_with(got)) == (200, "*")


def test_a_shared_origin_may_not_change_the_server(repository: Path) -> None:
    with serving(repository, cors_origin=(PAGE,)) as ports:
        got = ask(ports.http, "POST", "/v2/logging", {"log_verbose_level": 1}, {"Origin": PAGE})
        assert (got.status, shared_with(got)) == (403, PAGE)


def test_without_the_option_nothing_is_shared(repository: Path) -> None:
    with serving(repository) as ports:
        assert shared_with(ask(ports.http, "POST", INFER, REQUEST, {"Origin": PAGE})) is None


@pytest.mark.parametrize(
    "origin",
    ["app.example", "https://app.example/", "https://app.example/x", "https://*.example", "", "null"],
)
def test_text_that_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=r"--cors-origin=.*expected an origin"):
        SharedOrigins((origin,))


@pytest.mark.parametrize("origin", ["https://app.example", "HTTP://localhost:3000", "http://[::1]:8080", "*"])
def test_an_origin_is_compared_without_case(origin: str) -> None:
    asked = {b"origin": origin.lower().encode()}
    assert SharedOrigins((origin,)).headers(asked.get)
