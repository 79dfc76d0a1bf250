"""Heads and answers between SageMaker and V2; the routes are Triton's [N02]."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.engine import Engine
from remora.options import EngineOptions
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer, Refusal
from remora_adapters import sagemaker
from remora_adapters.sagemaker import routes
from remora_adapters.sagemaker.routes import NotAskedError, Route
from support.servers.hosting import ask, running

TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


STRANGE = (
    "/",
    "",
    "/ping/",
    "/invocations/x",
    "/models//invoke",
    "/models/a/b",
    "/models/a/invoke/b",
    "//models",
    "/v2",
)


def head(*headers: tuple[bytes, bytes]) -> Head:
    return Head("POST", "/invocations", headers)


@pytest.mark.parametrize(
    ("method", "path", "found"),
    [
        ("GET", "/ping", Route("ping")),
        ("POST", "/invocations", Route("invoke")),
        ("GET", "/execution-parameters", Route("execution-parameters")),
        ("GET", "/models", Route("list")),
        ("POST", "/models", Route("load")),
        ("GET", "/models/abc", Route("get", "abc")),
        ("POST", "/models/abc", Route("load")),
        ("DELETE", "/models/abc", Route("unload", "abc")),
        ("DELETE", "/models", Route("unload")),
        ("POST", "/models/abc/invoke", Route("invoke-model", "abc")),
    ],
)
def test_each_route_of_the_contract_is_found(method: str, path: str, found: Route) -> None:
    assert routes.route(method, path) == found


@pytest.mark.parametrize(("method", "path"), [("POST", "/ping"), ("GET", "/invocations")])
def test_another_method_on_a_path_with_one_is_405(method: str, path: str) -> None:
    with pytest.raises(Refusal) as refused:
        routes.route(method, path)
    assert routes.refusal_of(refused.value).status == 405


@given(
    st.sampled_from(("GET", "POST", "PUT", "DELETE")),
    st.text(max_size=30).map("/nothing".__add__) | st.sampled_from(STRANGE),
)
def test_other_requests_get_400_and_no_body(method: str, path: str) -> None:
    with pytest.raises((NotAskedError, Refusal)) as refused:
        routes.route(method, path)
    answer = routes.refusal_of(refused.value)
    assert answer.status == 405 or answer == HttpAnswer(400, ((b"Content-Type", b"text/plain"),), [])


@pytest.mark.parametrize("value", [b"12", b"0", b"007", b"", b"-1", b"abc", b"\xb2", b"12;charset=x"])
def test_the_content_type_names_the_length_of_the_json_part_as_it_is_written(value: bytes) -> None:
    assert routes.header_length(head((b"Content-Type", routes.BINARY + value))) == value


def test_a_type_that_is_not_the_binary_one_is_a_json_bodys() -> None:
    assert routes.header_length(head((b"Content-Type", routes.BINARY.upper() + b"3"))) is None
    assert routes.header_length(head()) is None


@pytest.mark.parametrize("before", [b"text/plain, ", b"x"])
def test_the_binary_type_must_be_at_the_beginning(before: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        routes.header_length(head((b"Content-Type", before + routes.BINARY + b"3")))
    kind = routes.BINARY.decode()
    text = f"expect MIME type for binary data starts with '{kind}', got: {before.decode()}{kind}3"
    answer = refused.value.answer
    assert (answer.status, answer.headers) == (400, ((b"Content-Type", b"text/plain"),))
    assert json.loads(b"".join(map(bytes, answer.body))) == {"error": text}


def test_the_v2_head_keeps_what_v2_may_want_and_nothing_that_it_would_misread() -> None:
    sent = head(
        (b"Content-Type", b"application/json"),
        (b"Accept-Encoding", b"gzip"),
        (b"Content-Encoding", b"gzip"),
        (b"Inference-Header-Content-Length", b"3"),
        (b"admin-key", b"secret"),
    )
    made = routes.v2_head(sent, "/v2/models/m/infer", b"17", timeout_ms=1500)
    assert (made.method, made.path) == ("POST", "/v2/models/m/infer")
    assert made.headers == (
        (b"admin-key", b"secret"),
        (b"Inference-Header-Content-Length", b"17"),
        (b"X-Request-Timeout-Ms", b"1500"),
    )


@pytest.mark.parametrize("before", [b"", b"tenant=a;", b"tenant=a, "])
def test_the_trace_context_travels_in_the_custom_attributes(before: bytes) -> None:
    sent = head((b"X-Amzn-SageMaker-Custom-Attributes", before + b"traceparent=" + TRACE + b";tracestate=v=1"))
    made = routes.v2_head(sent, "/v2/models/m/infer", None)
    assert made.get(b"traceparent") == TRACE


def test_attributes_that_the_platform_would_refuse_are_not_sent_back() -> None:
    name = routes.ATTRIBUTES
    assert routes.attributes(head((name, b"a=1"))) == b"a=1"
    assert routes.attributes(head((name, b"a" * 1025))) == b""
    assert routes.attributes(head((name, b"caf\xc3\xa9"))) == b""


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"CUDA out of memory. Tried to allocate 2 GiB", 507),
        (b"MemoryError: ", 507),
        (b"Failed to allocate memory for requested buffer of size 1", 507),
        (b"write: No space left on device", 507),
        (b"std::bad_alloc", 507),
        (b"unexpected shape for input", 400),
        (b"ROOM 12", 400),
    ],
)
def test_out_of_memory_is_507_for_every_cause(text: bytes, status: int) -> None:
    assert routes.memory_aware(HttpAnswer(400, (), [text])).status == status


def test_a_good_answer_may_speak_of_memory() -> None:
    assert routes.memory_aware(HttpAnswer(200, (), [b"MemoryError"])).status == 200


@pytest.mark.parametrize(
    ("segment", "name"), [("a%62c", "abc"), ("a%2Fb", ""), ("a%252Fb", "a%2Fb"), ("%ff", ""), ("%00", "")]
)
def test_the_name_of_a_model_is_decoded_once_and_is_never_a_path(segment: str, name: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/invoke")):
        if name:
            assert routes.route(method, f"/models/{segment}{path}").model == name
        else:
            with pytest.raises(NotAskedError):
                routes.route(method, f"/models/{segment}{path}")


def test_the_routes_of_models_refuse_what_v2_refuses(tmp_path: Path) -> None:
    host = sagemaker.host({"SAGEMAKER_BASE_DIR": str(tmp_path), "SAGEMAKER_MULTI_MODEL": "true"})
    page = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}
    options = EngineOptions(model_control_mode="explicit", model_repository=(tmp_path,))
    place = {"model_name": "h1", "url": str(tmp_path / "none")}
    with running(host, Engine(options=options)) as ports:
        for method, path in (("POST", "/models"), ("DELETE", "/models/h1")):
            assert "another site" in ask(ports.http, method, path, place, page).body.decode()
            assert ask(ports.http, method, path, place).status != 403
        assert ask(ports.http, "GET", "/ping", headers={"Host": "evil.example"}).status == 403
